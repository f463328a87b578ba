"""What other projects' configs may say: keys that contradict each other or the target are refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config

from archspec.checkpoints import export, load, pack, read
from archspec.errors import ArchspecError
from archspec.foreign_config import LlamaKeys
from archspec.formats import FORMATS, format_of
from archspec.modules import Draft
from archspec.resolve import ResolvedSpec
from tests.archspec.drafts import logits, make, make_draft, preset
from tests.archspec.strategies import TOY

FULL, SLIDING = "full_attention", "sliding_attention"
AUX = "eagle_aux_hidden_state_layer_ids"
VLLM = FORMATS["vllm"]
KNOWN_ROPES = "must be default, linear, llama3 or yarn, the rotary positions that drafts have here"
LLAMA31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
WRITTEN = {
    "type": "llama3",
    "factor": 8,
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_positions": 8192,
}
ORIGINAL = "original_max_position_embeddings"
TO_BOTH = "put the ids into eagle_config too, counted from 0"
OURS = ("draft_archspec", AUX, "eagle_config", "num_aux_hidden_states")


@pytest.fixture(scope="module")
def draft() -> Draft:
    return make_draft(make())


@pytest.fixture(scope="module")
def tensors(draft: Draft) -> dict[str, Tensor]:
    return pack(draft, VLLM)


def spec_of(draft: Draft, tensors: dict[str, Tensor], changed: dict[str, Any], form: str = "vllm") -> ResolvedSpec:
    """Read with some keys of the config changed; None leaves a key out."""
    config = VLLM.config(draft.spec) | changed
    known = {key: value for key, value in config.items() if value is not None}
    return read(FORMATS[form], known, tensors, TOY, "checkpoint")[0]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_hidden_layers": 2}, "layers.1.input_layernorm.weight: missing from the file"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu': must be silu, the only activation that drafts have here"),
        (
            {"tie_word_embeddings": True},
            "tie_word_embeddings = True: must be false: the head of a draft is a tensor of its own",
        ),
        ({"model_type": "gpt2"}, "model_type = 'gpt2': choose from llama, qwen3"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_scaling.rope_type: 'dynamic': " + KNOWN_ROPES),
        ({"rope_parameters": {"rope_type": "mrope"}}, "rope_parameters.rope_type: 'mrope': " + KNOWN_ROPES),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor: this key is required"),
        ({"rope_parameters": LLAMA31 | {"factor": 0.5}}, "rope_parameters.factor = 0.5: must be 1 or more"),
        (
            {"rope_parameters": LLAMA31 | {ORIGINAL: "8k"}},
            f"rope_parameters.{ORIGINAL}: must be a positive whole number for llama3, but is 8k",
        ),
        (
            {"rope_parameters": LLAMA31, ORIGINAL: 4096},
            f"rope_parameters.{ORIGINAL}: must be as at the top of the config, where it is 4096",
        ),
        (
            {"rope_scaling": {"factor": 8.0}},
            "rope_scaling.rope_type: this key is required beside factor; choose from linear, llama3, yarn",
        ),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}},
            "rope_scaling.rope_type: rope_type and type must agree, but are yarn and linear",
        ),
        ({"rope_scaling": LLAMA31}, "rope_parameters and rope_scaling must describe the same positions, but differ"),
        ({"rope_theta": 5.0}, "rope_theta and rope_parameters.rope_theta must agree, but are [5.0, 10000.0]"),
        ({"hidden_size": None}, "hidden_size: this key is required"),
        ({"vocab_size": 60}, "vocab_size = 60, but the target has 48; name the draft's target"),
        ({"target_hidden_size": 32}, "target_hidden_size = 32, but the target has 16; name the draft's target"),
        ({"hidden_size": 32}, "target_hidden_size = 32, but the target has 16; name the draft's target"),
        (
            {AUX: [1, 3, 4]},
            f"eagle_config.{AUX} must be one less than {AUX} at every place, but they are [1, 3, 4] and [1, 3, 4]",
        ),
        ({"eagle_config": [1]}, "eagle_config = [1]: must be a mapping"),
        ({AUX: ["low"]}, f"{AUX} = ['low']: must be a list of layer ids"),
        ({AUX: []}, f"{AUX} = []: must be a list of layer ids"),
        ({"eagle_config": {AUX: [True]}}, f"eagle_config.{AUX} = [True]: must be a list of layer ids"),
        (
            {"num_aux_hidden_states": 5},
            f"num_aux_hidden_states = 5, but {AUX} names 3 layers: [2, 4, 5]",
        ),
        (
            {"num_aux_hidden_states": 5, AUX: None, "eagle_config": None},
            f"num_aux_hidden_states = 5, but without {AUX} a draft reads 3 layers: [2, 4, 5]",
        ),
        ({"norm_output": 1}, "norm_output = 1: must be true or false"),
        ({"fc_norm": "yes"}, "fc_norm = 'yes': must be true or false"),
        (
            {"fc_norm": True, "norm_before_fc": True},
            "fc_norm and norm_before_fc are both true; a draft has one of them",
        ),
        ({AUX: [2, 4, 9], "eagle_config": {AUX: [1, 3, 8]}}, "inputs.aux_layers: layer 9 is beyond the target"),
        ({"draft_archspec": 3}, "draft_archspec = 3: must be a mapping"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config: quantised drafts are not read; ask for the unquantised checkpoint",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5: must be 1: drafts rotate the whole head"),
        ({"rotary_pct": 0.25}, "rotary_pct = 0.25: must be 1: drafts rotate the whole head"),
        (
            {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "rope_scaling.partial_rotary_factor = 0.5: must be 1: drafts rotate the whole head",
        ),
        (
            {"rope_parameters": {FULL: {"rope_type": "default", "rope_theta": 5.0}}},
            f"rope_parameters.{FULL}: positions of a kind of layer alone; all layers of a draft have the same",
        ),
        (
            {"rotary_emb_base": 5.0},
            "rope_theta and rope_parameters.rope_theta and rotary_emb_base must agree, but are [10000.0, 10000.0, 5.0]",
        ),
        ({"mlp_bias": True}, "mlp_bias is true: the MLPs of drafts have no biases here"),
        (
            {"eagle_config": {"use_aux_hidden_state": False}},
            "eagle_config.use_aux_hidden_state is false: such a draft reads the target's last state alone",
        ),
        ({"parallel_drafting": True}, "parallel_drafting is true: such a draft proposes all tokens at once"),
        (
            {"architectures": ["Qwen3DFlashForCausalLM"]},
            (
                "architectures names 'Qwen3DFlashForCausalLM'; only EAGLE drafts can be read: names that say eagle "
                "(not peagle), LlamaForCausalLM and Qwen3ForCausalLM"
            ),
        ),
        ({"architectures": ["PEagleDraftModel"]}, "architectures names 'PEagleDraftModel'; only EAGLE drafts"),
        ({"architectures": "Eagle"}, "architectures = 'Eagle': must be a list of names"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps = inf: input should be a finite number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan: input should be"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_config_that_does_not_fit_is_refused_by_key(
    draft: Draft, tensors: dict[str, Tensor], changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArchspecError) as caught:
        spec_of(draft, tensors, changed)
    assert str(caught.value).splitlines()[0].startswith(f"checkpoint: {message}")


def test_what_is_left_out_has_a_default(draft: Draft, tensors: dict[str, Tensor]) -> None:
    """Rotary base of either layout, EAGLE-3's aux layers, kv heads as heads, head_dim by division."""
    assert (
        spec_of(draft, tensors, dict.fromkeys((AUX, "eagle_config", "num_aux_hidden_states"))).hash == draft.spec.hash
    )
    for changed in ({"rope_theta": None}, {"rope_parameters": None}):
        assert spec_of(draft, tensors, changed).rope_theta == 10_000.0
    older = {"rope_theta": None, "rope_parameters": None, "rope_scaling": {"type": "default", "rope_theta": 7.0}}
    assert spec_of(draft, tensors, older).rope_theta == 7.0
    vllms = {"rope_theta": None, "rope_parameters": None, "rotary_emb_base": 7.0}
    assert spec_of(draft, tensors, vllms).rope_theta == 7.0
    assert spec_of(draft, tensors, {"head_dim": None}).hash == draft.spec.hash
    wide = make_draft(make(layers=[{"fusion": "concat", "attention": {"kv_heads": 4}}]))
    assert spec_of(wide, pack(wide, VLLM), {"num_key_value_heads": None}).hash == wide.spec.hash


def test_scaled_positions_are_read_from_either_layout(draft: Draft, tensors: dict[str, Tensor]) -> None:
    """As the published EAGLE-3 draft of Llama 3.1 has them, in transformers 5's keys, and with the older ``type``."""
    older = LLAMA31 | {"type": "llama3"}
    del older["rope_type"]
    theta = {"rope_theta": 500_000.0}
    expected = make(rope_scaling=WRITTEN, **theta).hash
    for changed in (
        {"rope_parameters": LLAMA31 | theta, "rope_theta": None},
        {"rope_parameters": LLAMA31 | theta, "rope_scaling": LLAMA31, **theta},
        {"rope_parameters": None, "rope_scaling": LLAMA31, **theta},
        {"rope_parameters": None, "rope_scaling": older, **theta},
        {"rope_parameters": None, "rope_scaling": older | {ORIGINAL: None}, ORIGINAL: 8192, **theta},
        {"rope_parameters": None, "rope_scaling": older | {ORIGINAL: None}, "max_position_embeddings": 8192, **theta},
    ):
        assert spec_of(draft, tensors, changed).hash == expected
    for more in ({"max_position_embeddings": 100}, {"max_position_embeddings": None}):
        assert spec_of(draft, tensors, {"rope_parameters": LLAMA31 | theta, **theta, **more}).hash == expected


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_a_draft_that_specforge_would_train_with_other_positions_is_not_read_as_its(
    draft: Draft, tensors: dict[str, Tensor], kind: str
) -> None:
    keys = {"rope_parameters": None, "rope_scaling": {"type": kind, "factor": 4.0}}
    with pytest.raises(ArchspecError) as caught:
        spec_of(draft, tensors, keys, "specforge")
    assert str(caught.value) == (
        f"checkpoint: rope_scaling.type = {kind}: use llama3 or none; "
        "SpecForge trains such a draft with other positions; read the checkpoint as vllm"
    )
    assert (
        spec_of(draft, tensors, {"rope_parameters": None, "rope_scaling": LLAMA31}, "specforge").rope_scaling != "none"
    )


@pytest.mark.parametrize(
    ("form", "config", "expected"),
    [
        ("vllm", {AUX: [1, 2, 3]}, (1, 2, 3)),
        ("vllm", {"eagle_config": {AUX: [1, 2, 3]}}, (1, 2, 3)),  # vLLM takes a lone list as one of its own
        ("sglang", {"eagle_config": {AUX: [1, 2, 3]}}, (2, 3, 4)),
        ("specforge", {"eagle_config": {AUX: [1, 2, 3]}}, (2, 3, 4)),
        ("vllm", {AUX: [2, 3, 4], "eagle_config": {AUX: [1, 2, 3]}}, (2, 3, 4)),
        ("vllm", {AUX: [1, 2, 3], "eagle_config": {"use_aux_hidden_state": True}}, (1, 2, 3)),
        ("vllm", {}, (2, 4, 5)),
    ],
)
def test_layer_ids_count_as_each_place_counts(
    draft: Draft, tensors: dict[str, Tensor], form: str, config: dict[str, Any], expected: tuple[int, ...]
) -> None:
    spec = spec_of(draft, tensors, {AUX: None, "eagle_config": None, **config}, form)
    assert spec.inputs.aux_layers == expected


def test_ids_that_stand_in_eagle_config_alone_need_the_format(draft: Draft, tensors: dict[str, Tensor]) -> None:
    config = VLLM.config(draft.spec)
    del config[AUX]
    with pytest.raises(ArchspecError) as caught:
        format_of(config, tensors, "checkpoint")
    assert str(caught.value) == (
        f"checkpoint: {AUX} stands in eagle_config alone, and projects read it differently: SpecForge and SGLang count "
        "such ids from 0, vLLM from 1; say which by --format specforge, sglang or vllm"
    )


WINDOWS: list[tuple[dict[str, Any], tuple[int | None, int | None]]] = [
    ({"sliding_window": 4}, (None, None)),
    ({"sliding_window": 4, "use_sliding_window": True}, (None, None)),
    ({"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1}, (None, 4)),
    ({"sliding_window": 4, "use_sliding_window": True, "layer_types": [SLIDING, FULL]}, (4, None)),
    ({"sliding_window": 4, "layer_types": [SLIDING, FULL]}, (None, None)),
    ({"sliding_window": 4, "layer_types": [SLIDING, FULL], "model_type": "llama"}, (4, None)),
    ({"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 0, "model_type": "llama"}, (None, None)),
]


@pytest.mark.parametrize(("keys", "expected"), WINDOWS)
def test_windows_are_what_transformers_makes_of_the_keys(
    keys: dict[str, Any], expected: tuple[int | None, int | None]
) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 9}
    read_keys = LlamaKeys.model_validate({**sizes, "num_hidden_layers": 2, "model_type": "qwen3", **keys})
    assert (read_keys.window(0), read_keys.window(1)) == expected
    if read_keys.model_type == "qwen3":
        theirs = Qwen3Config(**{**sizes, "num_hidden_layers": 2, **keys})
        slides = [kind == SLIDING and theirs.sliding_window is not None for kind in theirs.layer_types]
        assert [window is not None for window in expected] == slides


def test_a_draft_that_sglang_would_run_in_another_way_is_not_read_as_its(draft: Draft) -> None:
    biased = make_draft(make(layers=[{"fusion": "concat", "attention": {"bias": True}}]))
    with pytest.raises(ArchspecError) as caught:
        spec_of(biased, pack(biased, VLLM), {}, "sglang")
    assert str(caught.value).splitlines() == [
        "checkpoint: layers.0.attention.bias = true: use false",
        "checkpoint: SGLang would not run this draft as it is; read it as vllm",
    ]


def test_what_sglang_refuses_is_not_sent_to_vllm_where_vllm_lacks_a_norm() -> None:
    windowed = make_draft(make(layers=[{"fusion": "concat", "attention": {"window": 4}}, {"attention": {"window": 4}}]))
    alone = {
        name: tensor for name, tensor in pack(windowed, VLLM).items() if not name.endswith("1.input_layernorm.weight")
    }
    config = VLLM.config(windowed.spec)
    assert format_of(config, alone, "checkpoint").name == "sglang"
    for changed, last in (
        ({}, "SGLang would not run this draft as it is"),
        (
            {"norm_before_residual": True},
            "norm_before_residual is true, but SGLang ignores it and would run another draft",
        ),
        (
            {"eagle_config": None},
            f"{AUX} stands at the top alone, where SGLang does not look; {TO_BOTH}",
        ),
    ):
        with pytest.raises(ArchspecError) as caught:
            spec_of(windowed, alone, changed, "sglang")
        assert str(caught.value).splitlines()[-1] == f"checkpoint: {last}"


def test_a_window_is_not_read_as_specforges(draft: Draft, tensors: dict[str, Tensor]) -> None:
    with pytest.raises(ArchspecError) as caught:
        spec_of(draft, tensors, {"sliding_window": 4, "layer_types": [SLIDING]}, "specforge")
    assert str(caught.value) == (
        "checkpoint: layers.0.attention.window = 4: SpecForge's Llama draft has no windows; read the checkpoint as vllm"
    )


@pytest.mark.parametrize(("form", "project"), [("sglang", "SGLang"), ("specforge", "SpecForge")])
def test_ids_at_the_top_alone_are_vllms(draft: Draft, tensors: dict[str, Tensor], form: str, project: str) -> None:
    config = VLLM.config(draft.spec) | {AUX: [1, 2, 3], "eagle_config": {"use_aux_hidden_state": True}}
    with pytest.raises(ArchspecError) as caught:
        read(FORMATS[form], config, tensors, TOY, "checkpoint")
    told = f"{AUX} stands at the top alone, where {project} does not look; read it as vllm"
    assert str(caught.value) == f"checkpoint: {told}"
    assert format_of(config, tensors, "checkpoint").name == "vllm"


def test_default_layers_that_a_target_does_not_have_are_told_to_be_the_default(
    draft: Draft, tensors: dict[str, Tensor]
) -> None:
    config = {key: value for key, value in VLLM.config(draft.spec).items() if key not in OURS}
    with pytest.raises(ArchspecError) as caught:
        read(VLLM, config, tensors, TOY.model_copy(update={"num_layers": 4}), "checkpoint")
    assert str(caught.value) == (
        f"checkpoint: without {AUX} a draft reads EAGLE-3's default layers, [2, 2, 1], which a target of 4 layers does "
        "not have; name them"
    )


def test_speculators_sizes_and_eagle1s_are_held_against_the_same_rules(draft: Draft) -> None:
    speculators, eagle1 = FORMATS["speculators"], FORMATS["eagle1"]
    config = speculators.config(draft.spec)
    config["transformer_layer_config"] |= {"partial_rotary_factor": 0.5}
    with pytest.raises(ArchspecError, match=r"^checkpoint: partial_rotary_factor = 0\.5: must be 1"):
        read(speculators, config, {}, TOY, "checkpoint")
    older = make_draft(preset("eagle1"))
    for changed, message in (
        ({"architectures": ["MedusaModel"]}, "architectures names 'MedusaModel'"),
        ({"vocab_size": 60}, "vocab_size = 60, but the target has 48; name the draft's target"),
        ({"hidden_size": 32}, "target_hidden_size = 32, but the target has 16; name the draft's target"),
    ):
        with pytest.raises(ArchspecError) as caught:
            read(eagle1, eagle1.config(older.spec) | changed, pack(older, eagle1), TOY, "checkpoint")
        assert str(caught.value).startswith(f"checkpoint: {message}")


def test_a_count_of_layers_beyond_reason_is_refused_before_any_list_is_made(
    draft: Draft, tensors: dict[str, Tensor]
) -> None:
    with pytest.raises(
        ArchspecError, match="num_hidden_layers = 1000000000: input should be less than or equal to 256"
    ):
        spec_of(draft, tensors, {"num_hidden_layers": 10**9})


def test_eagle_config_goes_before_the_top_for_the_norm_before_fc(draft: Draft) -> None:
    joint = make_draft(make(inputs={"norm": "joint"}))
    nested = {"norm_before_fc": False, "eagle_config": {AUX: [1, 3, 4], "norm_before_fc": True}}
    assert spec_of(joint, pack(joint, VLLM), nested).hash == joint.spec.hash
    nested = {"norm_before_fc": True, "eagle_config": {AUX: [1, 3, 4], "norm_before_fc": False}}
    assert spec_of(draft, pack(draft, VLLM), nested).hash == draft.spec.hash


def test_a_draft_of_an_unknown_or_another_target_is_refused(draft: Draft, tmp_path: Path) -> None:
    export(draft, tmp_path, "vllm")
    with pytest.raises(ArchspecError, match="the draft is for another target: num_layers 8 there, 9 here"):
        load(tmp_path, facts=TOY.model_copy(update={"num_layers": 9}))
    path = tmp_path / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | {"draft_archspec": {"target": {"hidden_size": 0}}}), encoding="utf-8")
    with pytest.raises(ArchspecError) as caught:
        load(tmp_path)
    assert f"{tmp_path}: draft_archspec.target: model_type: this key is required" in str(caught.value)
    path.write_text(json.dumps(config | {"draft_archspec": {}}), encoding="utf-8")
    with pytest.raises(ArchspecError) as caught:
        load(tmp_path)
    assert str(caught.value) == f"{tmp_path}: does not say which target the draft is for; name the target"


def test_a_foreign_checkpoint_reads_the_default_layers_of_the_named_target(draft: Draft, tmp_path: Path) -> None:
    export(draft, tmp_path, "vllm")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({key: value for key, value in config.items() if key not in OURS}), encoding="utf-8")
    again = load(tmp_path, facts=TOY)
    assert again.spec.hash == draft.spec.hash
    assert again.spec.name == "vLLM"
    for theirs, expected in zip(logits(again), logits(draft), strict=True):
        torch.testing.assert_close(theirs, expected, rtol=1e-5, atol=1e-5)
