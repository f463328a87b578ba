"""The spec before it meets a target: its rules and what they say, writing and reading, the presets."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given

from archspec.errors import ArchspecError
from archspec.presets import load_document, load_preset, load_spec, preset_names, preset_text
from archspec.resolve import resolve
from archspec.schema import Document
from archspec.spec import DraftSpec
from tests.archspec.strategies import draft_specs
from tests.smollm2 import SMOLLM2

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


FORMAT_MODULES = (
    *("layouts", "limits", "foreign_config", "format", "formats", "servable"),
    *("vllm", "sglang", "specforge", "speculators", "eagle1"),
)

AUX_RULE = "must be a target layer id (0 = embeddings, i = output of layer i) or one of low, middle, high, last"
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
        ("norm_eps: 1e999", "norm_eps = inf: must be a positive number or 'target'"),
        ("norm_eps: true", "norm_eps = True: must be a positive number or 'target'"),
        ("rope_theta: 1e999", "rope_theta = inf: must be a positive number or 'target'"),
        ("rope_theta: .inf", "rope_theta = '.inf': must be a positive number or 'target'"),
        ("rope_theta: '1e4'", "rope_theta = '1e4': must be a positive number or 'target'"),
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
        Document.parse(f"layers: [fusion: add]\nname: x\n{text}", "f.yaml").validate(DraftSpec)
    line = 1 if "needs head.norm" in said else 3
    assert str(caught.value) == f"f.yaml:{line}: {said}"


def test_a_draft_needs_a_layer() -> None:
    with pytest.raises(ArchspecError, match=r"^f\.yaml:1: layers must hold at least one layer$"):
        Document.parse("{name: x, layers: []}", "f.yaml").validate(DraftSpec)


@pytest.mark.parametrize("layers", ["[{}]", "[{repeat: 2}, {attention: none}]"])
def test_a_draft_reads_the_embedding(layers: str) -> None:
    """Without the token it could not tell one continuation from another."""
    with pytest.raises(ArchspecError) as caught:
        Document.parse(f"name: x\nlayers: {layers}", "f.yaml").validate(DraftSpec)
    rule = "no layer reads the token embedding; give one fusion: concat, project or add"
    assert str(caught.value) == f"f.yaml:2: layers: {rule}"


@pytest.mark.parametrize("name", ["", "  ", "two\nlines", "tab\there", "bell\a", "\u2028", "no\xa0break"])
def test_a_name_is_one_printable_line(name: str) -> None:
    with pytest.raises(ArchspecError) as caught:
        Document({"name": name, "layers": [{"fusion": "add"}]}, "f.yaml").validate(DraftSpec)
    assert str(caught.value) == f"f.yaml: name = {name!r}: must be one line of printable characters"


def test_a_name_may_hold_spaces_and_any_script() -> None:
    for name in ("two words", "черновик", "草稿 1"):
        assert DraftSpec.model_validate({"name": name, "layers": [{"fusion": "add"}]}).name == name


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
            "layers.1: fusion: concat feeds attention, but attention is none; use fusion: none or project",
        ),
        (
            "{attention: none, fusion: add}",
            "layers.1: fusion: add feeds attention, but attention is none; use fusion: none or project",
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
        ("mlp: {depth: true}", "layers.1.mlp.depth = True: input should be a valid integer"),
        ("mlp: {depth: '2'}", "layers.1.mlp.depth = '2': input should be a valid integer"),
        ("attention: {window: true}", "layers.1.attention.window = True: input should be a valid integer"),
        ("attention: {window: '64'}", "layers.1.attention.window = '64': input should be a valid integer"),
        ("repeat: true", "layers.1.repeat = True: input should be a valid integer"),
        ("repeat: '3'", "layers.1.repeat = '3': input should be a valid integer"),
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


@given(draft_specs())
def test_load_dump_load_is_the_identity(drawn: DraftSpec) -> None:
    text = drawn.dump()
    again = Document.parse(text, "dumped").validate(DraftSpec)
    assert again == drawn
    assert again.dump() == text


def test_load_and_dump_through_files(tmp_path: Path) -> None:
    path = tmp_path / "eagle3.yaml"
    path.write_text(load_preset("eagle3").dump())
    assert DraftSpec.load(path) == load_preset("eagle3") == load_spec(str(path))


def test_dump_writes_every_default() -> None:
    lines = DraftSpec.model_validate({"name": "x", "layers": [{"fusion": "add"}]}).dump().splitlines()
    assert "  aux_layers: [low, middle, high]" in lines
    for field in ("embedding: frozen", "    window: null", "  residual_from: raw", "norm_eps: target"):
        assert field in lines


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


def test_documents_of_presets_and_files_tell_the_lines(tmp_path: Path) -> None:
    """With them ``resolve`` names the line of a rule that only the target breaks."""
    path = tmp_path / "mine.yaml"
    path.write_text(preset_text("eagle3"))
    line = preset_text("eagle3").splitlines().index("head: {vocab_size: 32000}") + 1
    small = SMOLLM2.model_copy(update={"vocab_size": 1000})
    for name, source in (("eagle3", "preset eagle3"), (str(path), str(path))):
        document = load_document(name)
        assert document.validate(DraftSpec) == load_spec(name)
        with pytest.raises(ArchspecError) as caught:
            resolve(document.validate(DraftSpec), small, document)
        assert str(caught.value).startswith(f"{source}:{line}: head.vocab_size: 32000 is larger than")


def test_specs_need_no_torch() -> None:
    """A command that only reads specs answers within a second; importing torch alone takes longer."""
    names = ("spec", "resolve", "presets", "cost", "facts", "files", "schema", "errors", *FORMAT_MODULES)
    program = f"import sys\nfor name in {names!r}: __import__('archspec.' + name)\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
