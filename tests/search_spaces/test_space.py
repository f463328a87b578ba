"""The schema of a space: what it refuses, in which words and at which line, and what it says of itself."""

import subprocess
import sys
from pathlib import Path

import pytest

from archspec.errors import ArchspecError
from archspec.presets import load_preset
from archspec.schema import Closed, Document
from search_spaces.space import Space, SpaceReference, ready_space_names


def parse(choices: str, base: str = "eagle3") -> Space:
    """A space whose first choice stands on line 3."""
    return Document.parse(f"base: {base}\nchoices:\n  {choices}\n", "s.yaml").validate(Space)


def message_of(choices: str, base: str = "eagle3") -> str:
    with pytest.raises(ArchspecError) as caught:
        parse(choices, base)
    return str(caught.value)


CHOICE_ERRORS = {
    # domains
    "layers.0.fusion: []": "choices.layers.0.fusion: the list is empty; name at least one option",
    "layers.0.fusion: [none, concat, none]": "choices.layers.0.fusion: the option 'none' is listed twice",
    "layers.0.mlp.residual: [true, 'true']": "choices.layers.0.mlp.residual: the option 'true' is listed twice",
    "depth: {low: 3, high: 1}": "choices.depth: low <= high must hold, but got (low=3, high=1)",
    "train.a: {low: 1, high: 3, step: 1, log: true}": "choices.train.a: step and log exclude each other; drop step=1",
    "train.a: {low: 0, high: 1, log: true}": "choices.train.a: a log range needs low > 0, but got low=0",
    "train.a: {low: 768, high: 3000, step: 256}": "high=3000 is no whole number of steps of 256 above low=768; use",
    "train.a: {low: '1', high: 3}": "choices.train.a.low = '1': must be a number",
    "train.a: {low: true, high: 3}": "choices.train.a.low = True: must be a number",
    "depth: {low: 1, hihg: 3}": "choices.depth.hihg: unknown key; did you mean 'high'? choose from low, high",
    "depth: {optoins: {a: 1}}": "choices.depth.optoins: unknown key; did you mean 'options'?",
    "depth: {options: {a: 1}, low: 1}": "choices.depth.low: unknown key; choose from options",
    "depth: 3": "choices.depth = 3: must be a list [a, b], a range {low: a, high: b} or labels {options:",
    "inputs.aux_layers: [[low]]": "choices.inputs.aux_layers.0: a list or a mapping needs a label; write {options:",
    "inputs.aux_layers: {options: {}}": "choices.inputs.aux_layers: options is empty; name at least one option",
    "inputs.aux_layers: {options: {a: [low], b: [low]}}": "the options 'a' and 'b' stand for the same value",
    # depth
    "depth: [0, 1]": "choices.depth.0 = 0: depth is a number of layers; list whole numbers from 1, or give low",
    "depth: [1, 1.5]": "choices.depth.1 = 1.5: depth is a number of layers",
    "depth: {low: 1, high: 2.5}": "choices.depth.low = 1: depth is a number of layers",
    "depth: {options: {deep: 3}}": "choices.depth.options.deep = 3: depth is a number of layers",
    # paths
    "layers.0.fusoin: [none]": "choices.layers.0.fusoin: 'fusoin' does not exist in a spec here; did you mean 'fusion'",
    "layer.0.fusion: [none]": "choices.layer.0.fusion: 'layer' does not exist in a spec here; did you mean 'layers'?",
    "head.vocab: [full]": "did you mean 'vocab_size'? choose from vocab_size, weights, norm",
    "inputs.aux_layers.0: [low]": "choices.inputs.aux_layers.0: inputs.aux_layers has no parts; drop '0'",
    "layers: [1]": "choices.layers: layers is set by depth, layers.0, layers.*, layers.all and layers.rest",
    "layers.0.repeat: [2]": "choices.layers.0.repeat: repeat is not set by a path; use depth",
    "layers.0: {options: {a: {repeat: 2}}}": "choices.layers.0.options.a: repeat is not set by a choice; use depth",
    "name: [a]": "choices.name: a candidate's name is made from its choices and cannot be set",
    "train: [1]": "choices.train: a training setting is written train.NAME, for example train.learning_rate",
    "train.a: {options: {b: [1]}}": "choices.train.a.options.b: a training setting is a single number or word",
    # selectors
    "layers.1.fusion: [none]": "layer 1 is beyond the greatest depth of 1; the last layer is 0, use that or raise",
    "layers.frist.fusion: [none]": "'frist' selects no layer; did you mean 'rest'? choose from 0, *, all, rest",
    "layers.rest.fusion: [none]": "rest is every layer but the first, and there is only one; use 0 or raise depth",
    # options that the spec's schema refuses
    "layers.0.fusion: [none, concta]": "choices.layers.0.fusion.1 = 'concta': did you mean 'concat'? choose from none",
    "layers.0.mlp.depth: {low: -1, high: 2}": "choices.layers.0.mlp.depth.low = -1: input should be greater than or",
    "inputs.aux_layers: {options: {a: [low, hihg]}}": "choices.inputs.aux_layers.options.a.1 = 'hihg': must be a",
    "layers.0.attention: {options: {gqa: {heads: 8, kv_heads: 3}}}": "options.gqa: kv_heads=3 must divide heads=8; use",
    "layers.0.attention: {options: {gqa: {haeds: 8}}}": "options.gqa.haeds: unknown key; did you mean 'heads'?",
}


@pytest.mark.parametrize("choices", CHOICE_ERRORS)
def test_error_names_line_value_and_rule(choices: str) -> None:
    message = message_of(choices)
    assert message.startswith("s.yaml:3: ")
    assert CHOICE_ERRORS[choices] in message


def test_empty_space() -> None:
    with pytest.raises(ArchspecError, match=r"^s\.yaml:2: choices: the space is empty; name at least one choice"):
        Document.parse("base: eagle3\nchoices: {}", "s.yaml").validate(Space)
    with pytest.raises(ArchspecError, match=r"^s\.yaml:1: choices: this key is required"):
        Document.parse("base: eagle3", "s.yaml").validate(Space)


def test_option_is_refused_at_its_own_line() -> None:
    message = message_of("layers.0.fusion:\n    - concat\n    - prject")
    assert message.startswith("s.yaml:5: choices.layers.0.fusion.1 = 'prject': did you mean 'project'?")


def test_option_inside_a_part_that_the_base_does_not_have() -> None:
    message = message_of(
        "layers.0.attention.heads: [4]", base="{name: x, layers: [{fusion: project, attention: none}]}"
    )
    assert "layers.0.attention is none here, so it has no heads" in message


def test_bad_base_names_the_nearest_preset() -> None:
    message = message_of("depth: [1]", base="eagel3")
    assert message.startswith("s.yaml:1: base = 'eagel3': 'eagel3' is no preset: did you mean 'eagle3'?")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("layers.0.fusion", "layers.*.fusion"),
        ("layers.all.fusion", "layers.rest.fusion"),
        ("layers.1.fusion", "layers.rest.fusion"),
        ("layers.*.fusion", "layers.all.fusion"),
    ],
)
def test_selectors_of_one_field_may_not_overlap(first: str, second: str) -> None:
    message = message_of(f"depth: [1, 2]\n  {first}: [none]\n  {second}: [concat]")
    assert message == f"s.yaml:5: choices.{second}: sets what choices.{first} sets too; keep one of the two"


def test_a_part_may_not_be_set_beside_its_field() -> None:
    message = message_of("head: {options: {a: {norm: none}}}\n  head.norm: [own]")
    assert message == "s.yaml:4: choices.head.norm: sets what choices.head sets too; keep one of the two"


def test_choices_of_different_layers_or_fields_do_not_overlap() -> None:
    parse("depth: [2]\n  layers.0.fusion: [concat]\n  layers.rest.fusion: [none]\n  layers.*.stream: [h, 2h]")


def test_a_rule_between_fields_is_left_to_the_draw() -> None:
    """Projection none needs one aux layer; another choice of the space may name just one."""
    parse(
        "inputs.projection: [linear, none]\n  inputs.aux_layers: {options: {three: [low, middle, high], one: [last]}}"
    )


def test_load_suggests_the_nearest_ready_space() -> None:
    with pytest.raises(ArchspecError, match=r"'depth-and-fuson' is no ready space: did you mean 'depth-and-fusion'\?"):
        Space.load("depth-and-fuson")
    with pytest.raises(ArchspecError, match=r"nowhere\.yaml: no such file"):
        Space.load("nowhere.yaml")


def test_base_is_found_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(load_preset("eagle3-mlp-stack").dump())
    (tmp_path / "space.yaml").write_text("base: base.yaml\nchoices: {depth: [1, 2]}\n")
    assert Space.load(str(tmp_path / "space.yaml")).base == load_preset("eagle3-mlp-stack")


class SearchFile(Closed):
    space: SpaceReference


def test_a_space_inside_another_file_keeps_its_lines() -> None:
    text = "space:\n  base: eagle3\n  choices:\n    layers.0.fusion: [conact]\n"
    with pytest.raises(ArchspecError, match=r"^search\.yaml:4: space\.choices\.layers\.0\.fusion\.0 = 'conact'"):
        Document.parse(text, "search.yaml").validate(SearchFile)
    with pytest.raises(
        ArchspecError, match=r"^search\.yaml:1: space = 'mpl': 'mpl' is no ready space: did you mean 'mlp'"
    ):
        Document.parse("space: mpl", "search.yaml").validate(SearchFile)
    assert Document.parse("space: mlp", "search.yaml").validate(SearchFile).space == Space.load("mlp")


@pytest.mark.parametrize("name", ready_space_names())
def test_dump_and_load_is_the_identity(name: str) -> None:
    space = Space.load(name)
    again = Document.parse(space.dump(), "dumped").validate(Space)
    assert again == space
    assert again.hash == space.hash


def test_hash_is_of_what_is_drawn() -> None:
    one = parse("depth: [1, 2]\n  layers.0.fusion: [none, concat]")
    assert one.hash == parse("layers.0.fusion: [none, concat]\n  depth: [1, 2]").hash
    assert one.hash == one.model_copy(update={"describe": "something"}).hash
    assert one.hash != parse("depth: [1, 2]\n  layers.0.fusion: [concat, none]").hash, "Optuna refuses a changed order"
    assert one.hash != parse("depth: [1, 2]\n  layers.0.fusion: [none, concat]", base="eagle3.1").hash


def test_grid_size_counts_what_each_depth_has() -> None:
    assert parse("depth: {low: 1, high: 3}\n  layers.*.stream: [h, 2h]").grid_size() == 2 + 4 + 8
    assert parse("depth: [1, 3]\n  layers.rest.stream: [h, 2h]").grid_size() == 1 + 2
    assert parse("layers.all.mlp.intermediate_size: {low: 256, high: 1024, step: 256}").grid_size() == 4
    assert parse("train.learning_rate: {low: 3e-4, high: 3e-3, log: true}").grid_size() is None


def test_aux_layer_choices() -> None:
    options = "{options: {spread: [low, middle, high], late: [24, 27]}}"
    assert parse("depth: [1]").aux_layer_choices() == ("low", "middle", "high")
    assert parse("depth: [1]").aux_layer_choices({"inputs.aux_layers": ["last"]}) == ("last",)
    assert parse(f"inputs.aux_layers: {options}").aux_layer_choices() == ("low", "middle", "high", 24, 27)
    assert parse("inputs: {options: {a: {norm: each}, b: {aux_layers: [last]}}}").aux_layer_choices() == (
        "low",
        "middle",
        "high",
        "last",
    )


def test_json_schema_of_a_space_exists() -> None:
    assert set(Space.model_json_schema()["properties"]) == {"base", "describe", "choices"}


def test_import_is_light() -> None:
    code = "import search_spaces, sys; print([m for m in ('torch', 'optuna', 'transformers') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
