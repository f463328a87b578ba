"""The spec against a target: rules, placeholders and their numbers, and the hash that tells architectures apart."""

from typing import Any

import pytest
from hypothesis import given

from archspec.errors import ArchspecError
from archspec.facts import TargetFacts
from archspec.presets import load_preset
from archspec.resolve import ResolvedSpec, resolve
from archspec.schema import Document
from archspec.spec import DraftSpec
from tests.archspec.strategies import TOY, draft_specs
from tests.smollm2 import SMOLLM2

AUX = "inputs.aux_layers"


def spec(layer: dict[str, Any] | None = None, **fields: Any) -> DraftSpec:
    """One fused layer, with what a test wants to differ."""
    return DraftSpec.model_validate({"name": "test", "layers": [{"fusion": "concat"} | (layer or {})]} | fields)


def resolved(layer: dict[str, Any] | None = None, target: TargetFacts = TOY, **fields: Any) -> ResolvedSpec:
    return resolve(spec(layer, **fields), target)


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
            f"{AUX}: ids must rise without repeats, but are [5, 2] for a target of 8 layers; use [2, 5]",
        ),
        (
            {"inputs": {"aux_layers": [2, "low"]}},
            f"{AUX}: ids must rise without repeats, but are [2, 2] for a target of 8 layers; use [2]",
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
            {"layers": [{"fusion": "concat"}, {"attention": {"heads": 9}}]},
            "layers.1.attention: kv_heads=2 must divide heads=9; use one of [1, 3, 9]",
        ),
    ],
)
def test_rule_of_the_target(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ArchspecError) as caught:
        resolve(spec(**fields), TOY, source="f.yaml")
    assert str(caught.value) == f"f.yaml: {said}"


WRITTEN = """\
name: test
layers:
- fusion: concat
  repeat: 2
- repeat: 3
  attention:
    heads: 9
head: {vocab_size: 100}
"""


def test_a_document_tells_the_lines() -> None:
    """The layer's error is told once however often it is repeated, at the index that was written."""
    document = Document.parse(WRITTEN, "f.yaml")
    with pytest.raises(ArchspecError) as caught:
        resolve(document.validate(DraftSpec), TOY, document)
    assert str(caught.value) == "f.yaml:6: layers.1.attention: kv_heads=2 must divide heads=9; use one of [1, 3, 9]"
    mended = Document.parse(WRITTEN.replace("heads: 9", "heads: 8"), "f.yaml")
    with pytest.raises(ArchspecError) as caught:
        resolve(mended.validate(DraftSpec), TOY, mended)
    said = "head.vocab_size: 100 is larger than the target's vocabulary of 48; use full or less"
    assert str(caught.value) == f"f.yaml:8: {said}"


def test_a_document_without_the_field_tells_the_nearest_line() -> None:
    """The aux layers of the default are written nowhere; the message names where the spec starts."""
    document = Document.parse("\nname: test\nlayers: [fusion: concat]", "f.yaml")
    with pytest.raises(ArchspecError, match=r"^f\.yaml:2: inputs\.aux_layers: ids must rise"):
        resolve(document.validate(DraftSpec), TOY.model_copy(update={"num_layers": 4}), document)


def test_without_a_file_the_spec_is_named() -> None:
    with pytest.raises(ArchspecError, match=r"^spec 'test': head\.vocab_size: 100 is larger than"):
        resolved(head={"vocab_size": 100})


def test_small_targets_have_no_default_aux_layers() -> None:
    with pytest.raises(ArchspecError, match=r"\[2, 2, 1\] for a target of 4 layers; use \[1, 2\]"):
        resolved(target=TOY.model_copy(update={"num_layers": 4}))


@pytest.mark.parametrize("layers", [1, 3])
def test_tiny_targets_have_no_high_layer(layers: int) -> None:
    document = Document.parse("name: x\nlayers: [fusion: add]\ninputs:\n  aux_layers: [0, high]", "f.yaml")
    with pytest.raises(ArchspecError) as caught:
        resolve(document.validate(DraftSpec), TOY.model_copy(update={"num_layers": layers}), document)
    rule = f"high is layer n-3, but the target has {layers} layers; write ids from 0 to {layers}"
    assert str(caught.value) == f"f.yaml:4: inputs.aux_layers: {rule}"


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
    draft = resolve(spec(layers=[{"fusion": "concat", "stream": s} for s in ("h", "2h", "2h", "h")]), TOY)
    assert draft.widths == ((16, 16), (16, 32), (32, 32), (32, 16))


def test_layers_without_attention_stay_without() -> None:
    for word in ("none", None):
        assert resolved({"fusion": "project", "attention": word}).layers[0].attention is None


@given(draft_specs())
def test_resolved_specs_are_written_and_read_too(drawn: DraftSpec) -> None:
    whole = resolve(drawn, TOY)
    again = Document.parse(whole.dump(), "dumped").validate(ResolvedSpec)
    assert again == whole
    assert again.hash == whole.hash


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
    "a repeat written out": ({"layer": {"repeat": 2}}, {"layers": [{"fusion": "concat"}, {"fusion": "concat"}]}),
    "joint and each norm of one aux layer": (
        {"inputs": {"aux_layers": ["last"], "norm": "joint"}},
        {"inputs": {"aux_layers": ["last"], "norm": "each"}},
    ),
    "the bias of no projection": (
        {"inputs": {"aux_layers": ["last"], "projection": "none", "bias": True}},
        {"inputs": {"aux_layers": ["last"], "projection": "none"}},
    ),
    "one MLP with or without residual": (
        {"layer": {"mlp": {"residual": False}}},
        {"layer": {"mlp": {"residual": True}}},
    ),
    "one MLP's own or shared norm": (
        {"layer": {"mlp": {"norm": "shared"}}},
        {"layer": {"mlp": {"norm": "own"}}},
    ),
    "the norm of a bare stack": (
        {"layer": {"mlp": {"depth": 3, "residual": False, "norm": "shared"}}},
        {"layer": {"mlp": {"depth": 3, "residual": False, "norm": "own"}}},
    ),
    "the size of no MLP": (
        {"layer": {"mlp": {"depth": 0, "intermediate_size": 7, "residual": False}}},
        {"layer": {"mlp": {"depth": 0}}},
    ),
}


@pytest.mark.parametrize("case", SAME)
def test_one_architecture_has_one_hash(case: str) -> None:
    one, other = SAME[case]
    assert resolved(**one).hash == resolved(**other).hash


LAYER_CHANGES: list[dict[str, Any]] = [
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
    {"layers": [{"fusion": "concat"}, {}]},
    {"layers": [{}, {"fusion": "concat"}]},
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
