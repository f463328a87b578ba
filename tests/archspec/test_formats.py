"""One contract over every format: tensor names, which format a checkpoint is in, and that reading undoes writing.

Configs are held key by key in test_format_configs.py, refusals in test_limits.py; that real checkpoints are read as
their projects compute is checked by the goldens.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import equal

from archspec.checkpoints import export, load, pack
from archspec.errors import ArchspecError
from archspec.formats import FORMATS, configs, format_named, format_of, unheld
from archspec.presets import preset_names
from archspec.resolve import ResolvedSpec, resolve
from tests.archspec.drafts import CONCAT, assert_same, make, make_draft, preset, target_of
from tests.archspec.strategies import TOY, eagle1_specs, eagle3_specs

HELD = {  # presets that a format holds; the others it refuses
    "specforge": {"eagle3"},
    "sglang": {"eagle3", "eagle3.1", "eagle3-deep-fused-once"},
    "vllm": {"eagle3", "eagle3.1", "eagle3-deep-fused-once", "eagle3-qwen3"},
    "speculators": {"eagle3", "eagle3.1", "eagle3-deep-fused-once", "eagle3-qwen3"},
    "eagle1": {"eagle1"},
}
EAGLE3 = [form for form in HELD if form != "eagle1"]


def read_config(folder: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return data


def test_every_format_is_under_the_contract() -> None:
    assert FORMATS.keys() == HELD.keys()
    assert all(name == form.name for name, form in FORMATS.items())


def test_an_unknown_format_is_named_with_the_nearest() -> None:
    with pytest.raises(ArchspecError) as caught:
        format_named("vlm")
    choices = "choose from vllm, sglang, specforge, speculators, eagle1"
    assert str(caught.value) == f"format 'vlm': did you mean 'vllm'? {choices}"


# Reading undoes writing


@pytest.mark.parametrize("form", HELD)
@pytest.mark.parametrize("name", preset_names())
def test_a_preset_comes_back_or_is_refused(name: str, form: str, tmp_path: Path) -> None:
    spec = preset(name)
    draft, out = make_draft(spec), tmp_path / "out"
    if name in HELD[form]:
        export(draft, out, form)
        again = load(out, target=target_of(draft))
        assert again.spec == spec
        assert_same(draft, again)
        assert configs(spec)[form].items() <= read_config(out).items()
        assert form not in unheld(spec)
    else:
        with pytest.raises(ArchspecError, match="format cannot hold this draft"):
            export(draft, out, form)
        assert not out.exists()
        assert form not in configs(spec)
        assert unheld(spec)[form] == [str(limit) for limit in FORMATS[form].limits(spec)]


@pytest.mark.parametrize("form", HELD)
@settings(max_examples=15)
@given(data=st.data())
def test_a_random_draft_that_a_format_holds_comes_back(form: str, data: st.DataObject) -> None:
    held = eagle1_specs() if form == "eagle1" else eagle3_specs(FORMATS[form].holds)
    spec = resolve(data.draw(held), TOY)
    assert FORMATS[form].limits(spec) == []
    draft = make_draft(spec)
    with TemporaryDirectory() as folder:
        export(draft, Path(folder), form)
        assert_same(draft, load(Path(folder), target=target_of(draft)))
        assert_same(draft, load(Path(folder), form, TOY, target_of(draft)))


@pytest.mark.parametrize("form", EAGLE3)
def test_a_single_mlp_has_one_meaning(form: str, tmp_path: Path) -> None:
    """Around one MLP, ``residual: false`` and a shared norm say nothing, and no format has a word for them."""
    draft = make_draft(make(layers=[{**CONCAT, "mlp": {"residual": False, "norm": "shared"}}]))
    export(draft, tmp_path, form)
    assert_same(draft, load(tmp_path))


# Tensors


ATTENTION = {f"self_attn.{name}_proj.weight" for name in "qkvo"}
MLP = {f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
DEEPER = ATTENTION | MLP | {"input_layernorm.weight", "post_attention_layernorm.weight"}
FIRST = DEEPER | {"hidden_norm.weight"}
WHOLE = {"embed_tokens.weight", "fc.weight", "norm.weight", "lm_head.weight"}


def under(prefix: str, names: set[str]) -> set[str]:
    return {f"{prefix}.{name}" for name in names}


def tensor_names_of(spec: ResolvedSpec, form: str) -> set[str]:
    return set(pack(make_draft(spec), FORMATS[form]))


@pytest.mark.parametrize("form", EAGLE3)
def test_tensor_names_of_one_layer(form: str) -> None:
    first = "layers.0" if form == "speculators" else "midlayer"
    assert tensor_names_of(make(), form) == WHOLE | under(first, FIRST) | {"d2t", "t2d"}


@pytest.mark.parametrize("form", EAGLE3)
def test_a_full_vocabulary_has_no_map(form: str) -> None:
    assert not {"d2t", "t2d"} & tensor_names_of(make(head={"vocab_size": "full"}), form)


@pytest.mark.parametrize("form", EAGLE3)
def test_the_maps_are_offsets_and_a_mask(form: str, tmp_path: Path) -> None:
    draft = make_draft(make())
    export(draft, tmp_path, form)
    tensors = load_file(tmp_path / "model.safetensors")
    ids = [i + int(offset) for i, offset in enumerate(tensors["d2t"])]
    assert ids == draft.vocab_ids.tolist()
    assert [i for i in range(TOY.vocab_size) if tensors["t2d"][i]] == ids
    assert (str(tensors["d2t"].dtype), str(tensors["t2d"].dtype)) == ("torch.int64", "torch.bool")


@pytest.mark.parametrize(
    ("form", "prefix", "deeper"),
    [
        ("sglang", "midlayer", FIRST),
        ("vllm", "midlayer", FIRST),
        ("speculators", "layers.0", DEEPER),
    ],
)
def test_deeper_layers_have_the_norm_names_that_engines_read(form: str, prefix: str, deeper: set[str]) -> None:
    spec = preset("eagle3-deep-fused-once")
    names = under(prefix, FIRST) | under("layers.1", deeper) | under("layers.2", deeper)
    assert tensor_names_of(spec, form) == WHOLE | names | {"d2t", "t2d"}


@pytest.mark.parametrize("form", ["sglang", "vllm"])
def test_the_second_name_of_a_norm_holds_the_same_numbers(form: str) -> None:
    draft = make_draft(preset("eagle3-deep-fused-once"))
    tensors = pack(draft, FORMATS[form])
    for i in (1, 2):
        norm = draft.state_dict()[f"layers.{i}.state_norm.weight"]
        assert equal(tensors[f"layers.{i}.hidden_norm.weight"], norm)
        assert equal(tensors[f"layers.{i}.input_layernorm.weight"], norm)


@pytest.mark.parametrize(
    ("norm", "names"),
    [("each", {"fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight"}), ("joint", {"input_norm.weight"})],
)
@pytest.mark.parametrize("form", EAGLE3)
def test_norms_before_fc(form: str, norm: str, names: set[str]) -> None:
    spec = make(inputs={"norm": norm})
    if (form, norm) == ("specforge", "joint"):
        assert unheld(spec)[form] == ["inputs.norm = joint: use none or each"]
    else:
        assert tensor_names_of(spec, form) - tensor_names_of(make(), form) == names


@pytest.mark.parametrize("name", ["eagle3", "eagle3.1", "eagle3-deep-fused-once"])
def test_one_checkpoint_serves_vllm_and_sglang(name: str, tmp_path: Path) -> None:
    draft = make_draft(preset(name))
    for form in ("vllm", "sglang"):
        export(draft, tmp_path / form, form)
    one, other = tmp_path / "vllm", tmp_path / "sglang"
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    text = (one / "config.json").read_text(encoding="utf-8")
    assert text.replace('"format": "vllm"', '"format": "sglang"') == (other / "config.json").read_text(encoding="utf-8")


def test_tensor_names_of_eagle1() -> None:
    whole = {"embed_tokens.weight", "fc.weight", "fc.bias"}
    first = under("layers.0", DEEPER - {"input_layernorm.weight"})
    assert tensor_names_of(preset("eagle1"), "eagle1") == whole | first


# Which format a checkpoint is in


SHALLOW, DEEP = make(), make(layers=[CONCAT, {}])


@pytest.mark.parametrize(
    ("config", "names", "expected"),
    [
        ({"draft_archspec": {"format": "sglang"}}, tensor_names_of(SHALLOW, "vllm"), "sglang"),
        ({"speculators_model_type": "eagle3"}, tensor_names_of(SHALLOW, "speculators"), "speculators"),
        ({}, tensor_names_of(SHALLOW, "specforge"), "vllm"),
        ({}, tensor_names_of(SHALLOW, "speculators"), "vllm"),
        ({}, tensor_names_of(DEEP, "vllm"), "vllm"),
        ({}, tensor_names_of(DEEP, "sglang") - {"layers.1.input_layernorm.weight"}, "sglang"),
        ({}, tensor_names_of(DEEP, "vllm") - {"layers.1.hidden_norm.weight"}, "vllm"),
        ({}, under("midlayers.0", FIRST), "specforge"),
        ({"norm_output": True}, under("fuse_layer", FIRST), "specforge"),
        ({"norm_output": None}, under("midlayer", FIRST), "vllm"),
        ({}, under("layers.0", DEEPER) | {"fc.weight"}, "eagle1"),
    ],
)
def test_the_format_is_found(config: dict[str, Any], names: set[str], expected: str) -> None:
    assert format_of(config, names, "checkpoint").name == expected


@pytest.mark.parametrize("value", [True, False])
def test_norm_output_means_two_things(value: bool) -> None:
    with pytest.raises(ArchspecError) as caught:
        format_of({"norm_output": value}, tensor_names_of(SHALLOW, "vllm"), "checkpoint")
    assert str(caught.value) == (
        "checkpoint: norm_output is set, and projects read it differently: SpecForge means the norm before the head, "
        "engines the state that is fed back; say which by --format specforge, vllm or sglang"
    )


@pytest.mark.parametrize(("value", "told"), [("vlm", "'vlm': did you mean 'vllm'?"), (["vllm"], r"\['vllm'\]: ")])
def test_a_block_with_an_unknown_format_is_refused(value: Any, told: str) -> None:
    with pytest.raises(ArchspecError, match=rf"^checkpoint: draft_archspec\.format = {told}"):
        format_of({"draft_archspec": {"format": value}}, (), "checkpoint")
