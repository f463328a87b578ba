"""The spec: its rules and what they say, placeholders and their numbers, the hash, the presets."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from archspec.errors import ArchspecError
from archspec.facts import TargetFacts
from archspec.presets import load_preset, load_spec, preset_names, preset_text
from archspec.resolve import ResolvedSpec, resolve
from archspec.schema import Document
from archspec.spec import DraftSpec
from tests.archspec.strategies import TOY, draft_specs

SMOLLM2 = TargetFacts(
    model_type="llama",
    hidden_size=576,
    num_layers=30,
    vocab_size=49152,
    heads=9,
    kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    rope_theta=100_000,
    norm_eps=1e-5,
)

PRESETS = [
    "eagle1",
    "eagle3",
    "eagle3-deep-fused-every-layer",
    "eagle3-deep-fused-once",
    "eagle3-mlp-residual",
    "eagle3-mlp-stack",
    "eagle3-qwen3",
    "eagle3-wide-stream",
    "eagle3.1",
]


def spec(layer: dict[str, Any] | None = None, **fields: Any) -> DraftSpec:
    """One fused layer, with what a test wants to differ."""
    return DraftSpec.model_validate({"name": "test", "layers": [{"fusion": "concat"} | (layer or {})]} | fields)


def resolved(layer: dict[str, Any] | None = None, target: TargetFacts = TOY, **fields: Any) -> ResolvedSpec:
    return resolve(spec(layer, **fields), target)


AUX_RULE = "must be a target layer id (0 = embeddings, i = output of layer i) or one of low, middle, high, last"
AUX = "inputs.aux_layers"
LAYER_KEYS = "repeat, fusion, fusion_bias, stream, residual_from, attention, mlp"

# Rules of the spec alone. Each document breaks one; the message names its line.


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hidden_size: 0", "hidden_size = 0: must be a positive whole number or 'target'"),
        ("hidden_size: tarket", "hidden_size = 'tarket': must be a positive whole number or 'target'"),
        ("hidden_size: 1.5", "hidden_size = 1.5: must be a positive whole number or 'target'"),
        ("hidden_size: true", "hidden_size = True: must be a positive whole number or 'target'"),
        ("norm_eps: 0", "norm_eps = 0: must be a positive number or 'target'"),
        ("rope_theta: [1]", "rope_theta: must be a positive number or 'target'"),
        (
            "inputs: {aux_layers: [lwo]}",
            f"inputs.aux_layers.0 = 'lwo': {AUX_RULE}",
        ),
        (
            "inputs: {aux_layers: [2, -1]}",
            f"inputs.aux_layers.1 = -1: {AUX_RULE}",
        ),
        (
            "inputs: {aux_layers: []}",
            "inputs: aux_layers must name at least one target layer, for example [low, middle, high]",
        ),
        (
            "inputs: {projection: none}",
            "inputs: projection: none needs exactly one aux layer, but aux_layers names 3",
        ),
        ("inputs: {norm: target}", "inputs: norm: target is the target's final norm and needs aux_layers: [last]"),
        ("head: {vocab_size: -5}", "head.vocab_size = -5: must be a positive whole number or 'full'"),
        ("head: {vocab_size: all}", "head.vocab_size = 'all': must be a positive whole number or 'full'"),
        (
            "feedback: post_norm\nhead: {norm: none}",
            "feedback: post_norm needs head.norm: own; use pre_norm",
        ),
    ],
)
def test_rule_of_the_draft(text: str, said: str) -> None:
    with pytest.raises(ArchspecError) as caught:
        Document.parse(f"layers: [{{}}]\nname: x\n{text}", "f.yaml").validate(DraftSpec)
    line = 1 if "needs head.norm" in said else 3
    assert str(caught.value) == f"f.yaml:{line}: {said}"


def test_a_draft_needs_a_layer() -> None:
    with pytest.raises(ArchspecError, match=r"^f\.yaml:1: layers must hold at least one layer$"):
        Document.parse("{name: x, layers: []}", "f.yaml").validate(DraftSpec)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "attention: {heads: 32, kv_heads: 6}",
            "layers.1.attention: kv_heads=6 must divide heads=32; use one of [1, 2, 4, 8, 16, 32]",
        ),
        (
            "attention: {head_dim: 63}",
            "layers.1.attention: head_dim=63 must be even for rotary positions; use 64",
        ),
        ("attention: {window: 1}", "layers.1.attention.window = 1: input should be greater than or equal to 2"),
        (
            "{attention: none, fusion: concat}",
            "layers.1: fusion: concat feeds the embedding to attention, but attention is none; use none or project",
        ),
        (
            "{attention: none, fusion: add}",
            "layers.1: fusion: add feeds the embedding to attention, but attention is none; use none or project",
        ),
        (
            "{attention: none, mlp: {depth: 0}}",
            "layers.1: a layer needs attention or mlp.depth >= 1; it has neither",
        ),
        (
            "{attention: none, residual_from: normed}",
            "layers.1: residual_from: normed needs attention with norm: own; use raw",
        ),
        (
            "{attention: {norm: none}, residual_from: normed}",
            "layers.1: residual_from: normed needs attention with norm: own; use raw",
        ),
        (
            "{fusion: concat, fusion_bias: true}",
            "layers.1: fusion_bias needs fusion: project or add, but fusion is concat",
        ),
        ("mlp: {depth: -1}", "layers.1.mlp.depth = -1: input should be greater than or equal to 0"),
        ("repeat: 0", "layers.1.repeat = 0: input should be greater than 0"),
        (
            "fusion: concatenate",
            "layers.1.fusion = 'concatenate': did you mean 'concat'? choose from none, concat, project, add",
        ),
        (
            "atention: none",
            f"layers.1.atention: unknown key; did you mean 'attention'? choose from {LAYER_KEYS}",
        ),
    ],
)
def test_rule_of_a_layer(text: str, said: str) -> None:
    with pytest.raises(ArchspecError) as caught:
        Document.parse(f"name: x\nlayers:\n- fusion: concat\n- {text}", "f.yaml").validate(DraftSpec)
    assert str(caught.value) == f"f.yaml:4: {said}"


def test_load_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: x\nlayers: [{fusion: none}]\nembeding: trained\n")
    with pytest.raises(ArchspecError) as caught:
        DraftSpec.load(path)
    assert str(caught.value).startswith(f"{path}:3: embeding: unknown key; did you mean 'embedding'?")


# Rules that involve the target.


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"inputs": {"aux_layers": [2, 9]}},
            f"{AUX}: layer 9 is beyond the target, whose layers are 1 to 8 (0 is its embedding); use at most 8",
        ),
        (
            {"inputs": {"aux_layers": ["high", "low"]}},
            f"{AUX}: ids must rise without repeats, but are [5, 2] for a target of 8 layers; write the ids out",
        ),
        (
            {"inputs": {"aux_layers": [2, "low"]}},
            f"{AUX}: ids must rise without repeats, but are [2, 2] for a target of 8 layers; write the ids out",
        ),
        (
            {"inputs": {"aux_layers": [7], "norm": "target"}},
            "inputs.norm: target is the norm after layer 8; use aux_layers: [last]",
        ),
        (
            {"head": {"vocab_size": 49}},
            "head.vocab_size: 49 is larger than the target's vocabulary of 48; use full or less",
        ),
        (
            {"hidden_size": 8},
            "embedding: frozen is a copy of the target's, but hidden_size is 8, not the target's 16; use trained",
        ),
        (
            {"hidden_size": 8, "embedding": "trained", "head": {"weights": "target"}},
            "head.weights: target is a copy of the target's, but hidden_size is 8, not the target's 16; use own",
        ),
        (
            {"hidden_size": 8, "embedding": "trained", "inputs": {"aux_layers": ["last"], "projection": "none"}},
            "inputs.projection: none keeps the target's width, but hidden_size is 8, not the target's 16; use linear",
        ),
        (
            {"layers": [{}, {"attention": {"heads": 9}}]},
            "layers.1.attention: kv_heads=2 must divide heads=9; use one of [1, 3, 9]",
        ),
    ],
)
def test_rule_of_the_target(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ArchspecError) as caught:
        resolve(spec(**fields), TOY, source="f.yaml")
    assert str(caught.value) == f"f.yaml: {said}"


def test_without_a_file_the_spec_is_named() -> None:
    with pytest.raises(ArchspecError, match=r"^spec 'test': head\.vocab_size: 100 is larger than"):
        resolved(head={"vocab_size": 100})


def test_small_targets_have_no_default_aux_layers() -> None:
    with pytest.raises(ArchspecError, match=r"\[2, 2, 1\] for a target of 4 layers; write the ids out"):
        resolved(target=TOY.model_copy(update={"num_layers": 4}))


# Placeholders and numbers.


def test_placeholders_become_the_targets_numbers() -> None:
    draft = resolve(load_preset("eagle3"), SMOLLM2)
    attention = draft.layers[0].attention
    assert attention is not None
    assert (attention.heads, attention.kv_heads, attention.head_dim) == (9, 3, 64)
    assert draft.inputs.aux_layers == (2, 15, 27)
    assert (draft.hidden_size, draft.layers[0].mlp.intermediate_size) == (576, 1536)
    assert (draft.rope_theta, draft.norm_eps, draft.head.vocab_size) == (100_000, 1e-5, 32_000)
    assert draft.reduced_vocab
    assert draft.target == SMOLLM2


def test_written_numbers_stay() -> None:
    draft = resolved(
        {"attention": {"heads": 6, "kv_heads": 3, "head_dim": 10}, "mlp": {"intermediate_size": 5}},
        inputs={"aux_layers": [0, 1, "last"]},
        rope_theta=50,
        norm_eps=1e-3,
        head={"vocab_size": 48},
    )
    attention = draft.layers[0].attention
    assert attention is not None
    assert (attention.heads, attention.kv_heads, attention.head_dim) == (6, 3, 10)
    assert draft.inputs.aux_layers == (0, 1, 8)
    assert (draft.layers[0].mlp.intermediate_size, draft.rope_theta, draft.norm_eps) == (5, 50, 1e-3)
    assert not draft.reduced_vocab


def test_full_vocabulary() -> None:
    draft = resolved(head={"vocab_size": "full"})
    assert draft.head.vocab_size == 48
    assert not draft.reduced_vocab


def test_repeats_are_written_out() -> None:
    draft = resolve(spec(layers=[{"fusion": "concat"}, {"repeat": 3}]), TOY)
    assert [layer.fusion for layer in draft.layers] == ["concat", "none", "none", "none"]
    assert {layer.repeat for layer in draft.layers} == {1}


def test_widths_follow_the_streams() -> None:
    draft = resolve(spec(layers=[{"stream": s} for s in ("h", "2h", "2h", "h")]), TOY)
    assert draft.widths == ((16, 16), (16, 32), (32, 32), (32, 16))


def test_layers_without_attention_stay_without() -> None:
    for word in ("none", None):
        assert resolved({"fusion": "project", "attention": word}).layers[0].attention is None


@given(draft_specs())
def test_load_dump_load_is_the_identity(drawn: DraftSpec) -> None:
    text = drawn.dump()
    again = Document.parse(text, "dumped").validate(DraftSpec)
    assert again == drawn
    assert again.dump() == text


@given(draft_specs())
def test_resolved_specs_are_written_and_read_too(drawn: DraftSpec) -> None:
    whole = resolve(drawn, TOY)
    again = Document.parse(whole.dump(), "dumped").validate(ResolvedSpec)
    assert again == whole
    assert again.hash == whole.hash


def test_load_and_dump_through_files(tmp_path: Path) -> None:
    path = tmp_path / "eagle3.yaml"
    path.write_text(load_preset("eagle3").dump())
    assert DraftSpec.load(path) == load_preset("eagle3") == load_spec(str(path))


def test_dump_writes_every_default() -> None:
    lines = spec().dump().splitlines()
    assert "  aux_layers: [low, middle, high]" in lines
    for field in ("embedding: frozen", "    window: null", "  residual_from: raw", "norm_eps: target"):
        assert field in lines


# The hash: equal for one architecture, whatever it is called and however it is written.

SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "the name": ({}, {"name": "other"}),
    "placeholders and numbers": (
        {},
        {
            "hidden_size": 16,
            "inputs": {"aux_layers": [2, 4, 5]},
            "rope_theta": 10_000,
            "norm_eps": 1e-5,
            "head": {"vocab_size": 48},
            "layers": [
                {
                    "fusion": "concat",
                    "attention": {"heads": 4, "kv_heads": 2, "head_dim": 4},
                    "mlp": {"intermediate_size": 24},
                }
            ],
        },
    ),
    "a repeat written out": ({"layers": [{"repeat": 2}]}, {"layers": [{}, {}]}),
    "joint and each norm of one aux layer": (
        {"inputs": {"aux_layers": ["last"], "norm": "joint"}},
        {"inputs": {"aux_layers": ["last"], "norm": "each"}},
    ),
    "the bias of no projection": (
        {"inputs": {"aux_layers": ["last"], "projection": "none", "bias": True}},
        {"inputs": {"aux_layers": ["last"], "projection": "none"}},
    ),
    "one MLP with or without residual": (
        {"layers": [{"mlp": {"residual": False}}]},
        {"layers": [{"mlp": {"residual": True}}]},
    ),
    "one MLP's own or shared norm": (
        {"layers": [{"mlp": {"norm": "shared"}}]},
        {"layers": [{"mlp": {"norm": "own"}}]},
    ),
    "the norm of a bare stack": (
        {"layers": [{"mlp": {"depth": 3, "residual": False, "norm": "shared"}}]},
        {"layers": [{"mlp": {"depth": 3, "residual": False, "norm": "own"}}]},
    ),
    "the size of no MLP": (
        {"layers": [{"mlp": {"depth": 0, "intermediate_size": 7, "residual": False}}]},
        {"layers": [{"mlp": {"depth": 0}}]},
    ),
}


@pytest.mark.parametrize("case", SAME)
def test_one_architecture_has_one_hash(case: str) -> None:
    one, other = SAME[case]
    assert resolved(**one).hash == resolved(**other).hash


LAYER_CHANGES: list[dict[str, Any]] = [
    {"fusion": "none"},
    {"fusion": "add"},
    {"fusion": "add", "fusion_bias": True},
    {"fusion": "project"},
    {"fusion": "project", "fusion_bias": True},
    {"fusion": "project", "attention": "none"},
    {"stream": "2h"},
    {"residual_from": "normed"},
    {"attention": {"heads": 2}},
    {"attention": {"kv_heads": 1}},
    {"attention": {"head_dim": 8}},
    {"attention": {"qk_norm": True}},
    {"attention": {"bias": True}},
    {"attention": {"window": 2}},
    {"attention": {"norm": "none"}},
    {"mlp": {"depth": 0}},
    {"mlp": {"depth": 2}},
    {"mlp": {"depth": 2, "norm": "shared"}},
    {"mlp": {"depth": 2, "residual": False}},
    {"mlp": {"intermediate_size": 25}},
    {"repeat": 2},
]
DRAFT_CHANGES: list[dict[str, Any]] = [
    {},
    {"inputs": {"aux_layers": [2, 4]}},
    {"inputs": {"norm": "each"}},
    {"inputs": {"norm": "joint"}},
    {"inputs": {"bias": True}},
    {"inputs": {"aux_layers": ["last"]}},
    {"inputs": {"aux_layers": ["last"], "norm": "target"}},
    {"inputs": {"aux_layers": ["last"], "projection": "none"}},
    {"hidden_size": 8, "embedding": "trained"},
    {"embedding": "trained"},
    {"feedback": "post_norm"},
    {"head": {"vocab_size": 47}},
    {"head": {"weights": "target"}},
    {"head": {"norm": "none"}},
    {"rope_theta": 7},
    {"norm_eps": 1e-3},
]


def test_other_architectures_have_other_hashes() -> None:
    hashes = [resolved(change).hash for change in LAYER_CHANGES]
    hashes += [resolved(**change).hash for change in DRAFT_CHANGES]
    assert len(set(hashes)) == len(hashes)
    assert all(len(digest) == 12 and int(digest, 16) >= 0 for digest in hashes)


def test_the_hash_belongs_to_a_target() -> None:
    assert resolve(spec(), TOY).hash != resolve(spec(), SMOLLM2).hash


# Presets.


def test_all_presets_exist() -> None:
    assert preset_names() == PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_valid_for_any_target(name: str) -> None:
    preset = load_preset(name)
    assert preset.name == name
    assert preset == load_spec(name)
    assert preset == Document.parse(preset.dump(), name).validate(DraftSpec)
    assert preset_text(name).startswith("# "), "every preset says where it comes from"
    resolve(preset, SMOLLM2)


def test_presets_are_different_architectures() -> None:
    assert len({resolve(load_preset(name), SMOLLM2).hash for name in PRESETS}) == len(PRESETS)


def test_unknown_preset() -> None:
    with pytest.raises(ArchspecError) as caught:
        load_spec("eagle-3")
    assert str(caught.value) == f"'eagle-3' is no preset: did you mean 'eagle3'? choose from {', '.join(PRESETS)}"


def test_a_preset_with_a_dot_is_no_file() -> None:
    assert load_spec("eagle3.1").name == "eagle3.1"


def test_a_path_is_no_preset() -> None:
    with pytest.raises(ArchspecError, match=r"^nowhere/eagle3: no such file$"):
        load_spec("nowhere/eagle3")


def test_specs_need_no_torch() -> None:
    """A command that only reads specs answers within a second; importing torch alone takes longer."""
    names = ("spec", "resolve", "presets", "cost", "facts", "files", "schema", "errors")
    program = f"import sys\nfor name in {names!r}: __import__('archspec.' + name)\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
