"""SpecForge's layout: what is written, what is refused, and that reading gives back what was written."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from archspec.builder import build_draft, set_vocabulary
from archspec.errors import ArchspecError
from archspec.facts import TargetFacts
from archspec.layouts import Layout, assemble, pack
from archspec.modules import Draft
from archspec.presets import load_preset
from archspec.resolve import ResolvedSpec, resolve
from archspec.spec import DraftSpec
from archspec.specforge import LAYOUT, draft_model_config, export, load, read, unsupported
from archspec.unroll import unroll

TARGET = TargetFacts(
    model_type="llama",
    hidden_size=16,
    num_layers=8,
    vocab_size=50,
    heads=4,
    kv_heads=2,
    head_dim=4,
    intermediate_size=24,
)

CONCAT: dict[str, Any] = {"fusion": "concat"}
HELD: dict[str, dict[str, Any]] = {
    "full vocabulary": {"head": {"vocab_size": "full"}},
    "joint norm": {"inputs": {"norm": "joint"}},
    "norm for each": {"inputs": {"norm": "each"}},
    "five aux layers": {"inputs": {"aux_layers": [1, 2, 4, 7, 8]}},
    "every target layer": {"inputs": {"aux_layers": [1, 2, 3, 4, 5, 6, 7, 8], "norm": "each"}},
    "no final norm": {"head": {"vocab_size": 20, "norm": "none"}},
    "another hidden size": {"hidden_size": 12, "embedding": "trained"},
    "frozen head": {"head": {"vocab_size": 20, "weights": "target"}},
    "own sizes": {
        "layers": [
            {**CONCAT, "attention": {"heads": 6, "kv_heads": 3, "head_dim": 8}, "mlp": {"intermediate_size": 10}}
        ],
        "rope_theta": 500.0,
        "norm_eps": 1e-6,
    },
}


def make(**fields: Any) -> ResolvedSpec:
    data = {"name": "draft", "layers": [CONCAT], "head": {"vocab_size": 20}, **fields}
    return resolve(DraftSpec.model_validate(data), TARGET)


def preset(name: str) -> ResolvedSpec:
    spec = load_preset(name)
    size = "full" if spec.head.vocab_size == "full" else 20
    return resolve(spec.model_copy(update={"head": spec.head.model_copy(update={"vocab_size": size})}), TARGET)


def make_draft(spec: ResolvedSpec) -> Draft:
    torch.manual_seed(0)
    draft = build_draft(spec)
    for parameter in draft.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    if spec.reduced_vocab:
        set_vocabulary(draft, torch.randperm(TARGET.vocab_size)[: spec.head.vocab_size].sort().values)
    return draft


def logits(draft: Draft) -> list[Tensor]:
    torch.manual_seed(1)
    tokens = torch.randint(TARGET.vocab_size, (2, 7))
    aux = torch.randn(2, 7, len(draft.spec.inputs.aux_layers), TARGET.hidden_size)
    with torch.no_grad():
        return [draft.logits(state) for state in unroll(draft, tokens, aux, 3)]


def assert_round_trip(spec: ResolvedSpec, folder: Path) -> None:
    draft = make_draft(spec)
    export(draft, folder)
    again = load(folder)
    assert again.spec == spec
    assert {name: p.requires_grad for name, p in again.named_parameters()} == {
        name: p.requires_grad for name, p in draft.named_parameters()
    }
    assert again.state_dict().keys() == draft.state_dict().keys()
    for name, tensor in draft.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    for ours, theirs in zip(logits(draft), logits(again), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["eagle3", "eagle3-deep-fused-once"])
def test_a_preset_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    assert_round_trip(preset(name), tmp_path)


@pytest.mark.parametrize("fields", HELD.values(), ids=HELD.keys())
def test_every_field_that_the_layout_holds_comes_back(fields: dict[str, Any], tmp_path: Path) -> None:
    assert_round_trip(make(**fields), tmp_path)


def test_weights_keep_their_dtype(tmp_path: Path) -> None:
    export(make_draft(make()).to(torch.bfloat16), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert load(tmp_path).lm_head.weight.dtype == torch.bfloat16


def test_config_has_the_keys_that_trainers_and_engines_read() -> None:
    spec = make(hidden_size=12, embedding="trained", inputs={"aux_layers": [2, 4, 5, 7], "norm": "each"})
    assert draft_model_config(spec) == {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 12,
        "target_hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "num_hidden_layers": 1,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "vocab_size": 50,
        "draft_vocab_size": 20,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "use_cache": True,
        "fc_norm": True,
        "norm_before_fc": False,
        "num_aux_hidden_states": 4,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5, 7],
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 4, 6]},
    }


def test_norm_output_is_written_only_where_it_means_one_thing() -> None:
    # true would be SpecForge's default, but tells engines to feed back the state after the norm
    assert "norm_output" not in draft_model_config(make())
    assert draft_model_config(make(head={"norm": "none"}))["norm_output"] is False


def test_tensor_names_are_specforges(tmp_path: Path) -> None:
    export(make_draft(preset("eagle3-deep-fused-once")), tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    first = {name.removeprefix("midlayer.") for name in names if name.startswith("midlayer.")}
    second = {name.removeprefix("layers.1.") for name in names if name.startswith("layers.1.")}
    attention = {f"self_attn.{name}_proj.weight" for name in "qkvo"}
    mlp = {f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    norms = {"input_layernorm.weight", "post_attention_layernorm.weight"}
    assert first == attention | mlp | norms | {"hidden_norm.weight"}
    assert second == attention | mlp | norms
    others = {name for name in names if not name.startswith(("midlayer.", "layers."))}
    assert others == {"embed_tokens.weight", "fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}


def test_a_full_vocabulary_has_no_map(tmp_path: Path) -> None:
    export(make_draft(make(head={"vocab_size": "full"})), tmp_path)
    assert not {"d2t", "t2d"} & set(load_file(tmp_path / "model.safetensors"))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"inputs": {"aux_layers": [0, 4, 5]}}, "inputs.aux_layers = [0, 4, 5]: use layers from 1"),
    (
        {"inputs": {"aux_layers": ["last"], "norm": "target"}},
        "inputs.norm = target: use none, each or joint",
    ),
    ({"inputs": {"aux_layers": [4], "projection": "none"}}, "inputs.projection = none: use linear"),
    ({"inputs": {"bias": True}}, "inputs.bias = true: use false"),
    ({"feedback": "post_norm"}, "feedback = post_norm: SpecForge feeds back pre_norm"),
    (
        {"layers": [{"fusion": "project"}]},
        "layers.0.fusion = project: use concat; only the first layer reads the embedding",
    ),
    (
        {"layers": [CONCAT, CONCAT]},
        "layers.1.fusion = concat: use none; only the first layer reads the embedding",
    ),
    ({"layers": [{**CONCAT, "stream": "2h"}]}, "layers.0.stream = 2h: use h"),
    ({"layers": [{**CONCAT, "residual_from": "normed"}]}, "layers.0.residual_from = normed: use raw"),
    ({"layers": [CONCAT, {"attention": "none"}]}, "layers.1.attention = none: every layer has attention"),
    ({"layers": [{**CONCAT, "mlp": {"depth": 2}}]}, "layers.0.mlp.depth = 2: use 1"),
    (
        {"layers": [CONCAT, {"mlp": {"intermediate_size": 10}}]},
        "layers.1.mlp.intermediate_size = 10: all layers have the same; use 24",
    ),
    ({"layers": [{**CONCAT, "attention": {"norm": "none"}}]}, "layers.0.attention.norm = none: use own"),
    ({"layers": [{**CONCAT, "attention": {"qk_norm": True}}]}, "layers.0.attention.qk_norm = true: use false"),
    ({"layers": [{**CONCAT, "attention": {"bias": True}}]}, "layers.0.attention.bias = true: use false"),
    ({"layers": [{**CONCAT, "attention": {"window": 9}}]}, "layers.0.attention.window = 9: use null"),
    (
        {"layers": [CONCAT, {"attention": {"heads": 2}}]},
        "layers.1.attention.heads = 2: all layers have the same; use 4",
    ),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[message.split(":")[0] for _, message in REFUSED])
def test_a_field_that_the_layout_lacks_is_named(fields: dict[str, Any], message: str) -> None:
    spec = make(**fields)
    assert unsupported(spec) == [message]
    assert draft_model_config(spec)["architectures"] == ["LlamaForCausalLMEagle3"]


def test_export_refuses_with_every_field_at_once_and_writes_nothing(tmp_path: Path) -> None:
    draft = make_draft(make(layers=[CONCAT, CONCAT], feedback="post_norm"))
    with pytest.raises(ArchspecError) as caught:
        export(draft, tmp_path / "out")
    assert str(caught.value) == (
        "draft: SpecForge's layout cannot hold this draft:\n"
        "  feedback = post_norm: SpecForge feeds back pre_norm\n"
        "  layers.1.fusion = concat: use none; only the first layer reads the embedding"
    )
    assert not (tmp_path / "out").exists()


def _without(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


def _with(name: str, make_tensor: Callable[[Mapping[str, Tensor]], Tensor]) -> Callable[..., dict[str, Tensor]]:
    return lambda tensors: {**tensors, name: make_tensor(tensors)}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without("fc.weight"), "fc.weight: missing from the file"),
        (_without("d2t"), "d2t: missing from the file"),
        (_without("midlayer.self_attn.q_proj.weight"), "midlayer.self_attn.q_proj.weight: missing from the file"),
        (
            _with("midlayer.self_attn.q_proj.bias", lambda _: torch.zeros(16)),
            "midlayer.self_attn.q_proj.bias: extra; a SpecForge draft of this config has no such tensor",
        ),
        (
            _with("layers.1.mlp.up_proj.weight", lambda _: torch.zeros(24, 16)),
            "layers.1.mlp.up_proj.weight: extra; a SpecForge draft of this config has no such tensor",
        ),
        (
            _with("fc.weight", lambda tensors: tensors["fc.weight"][:, :32].contiguous()),
            "fc.weight: has shape [16, 32], but the config asks for [16, 48]",
        ),
        (
            _with("d2t", lambda tensors: tensors["d2t"].flip(0).contiguous()),
            "d2t: draft id + d2t must be rising ids below 50; the offsets in this file are not",
        ),
        (
            _with("d2t", lambda tensors: tensors["d2t"].float()),
            "d2t: draft id + d2t must be rising ids below 50; the offsets in this file are not",
        ),
        (
            _with("t2d", lambda tensors: torch.arange(50) < 20),
            "t2d: marks other target tokens than d2t leads to",
        ),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_tensor(
    damage: Callable[[dict[str, Tensor]], dict[str, Tensor]], message: str, tmp_path: Path
) -> None:
    export(make_draft(make()), tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(damage(load_file(path)), path)
    with pytest.raises(ArchspecError) as caught:
        load(tmp_path)
    assert str(caught.value) == f"{tmp_path}: {message}"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_hidden_layers": 2}, "layers.1.self_attn.q_proj.weight: missing from the file"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu': must be silu, the only activation that drafts have here"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings = True: must be false: the head of a draft is a tensor"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.rope_type = 'linear': only plain rotary positions"),
        ({"rope_theta": 5.0}, "rope_theta and rope_parameters.rope_theta must agree, but are [5.0, 10000.0]"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": 60}, "vocab_size = 60, but the target has 50; name the draft's target"),
        ({"target_hidden_size": 32}, "target_hidden_size = 32, but the target has 16; name the draft's target"),
        (
            {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
            "eagle_config.eagle_aux_hidden_state_layer_ids must be one less than eagle_aux_hidden_state_layer_ids",
        ),
        ({"eagle_config": [1]}, "eagle_config = [1]: must be a mapping"),
        (
            {"eagle_aux_hidden_state_layer_ids": ["low"]},
            "eagle_aux_hidden_state_layer_ids = ['low']: must be a list of layer ids",
        ),
        ({"draft_archspec": {}}, "does not say which target the draft is for; name the target"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_config_that_does_not_fit_is_refused_by_key(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    export(make_draft(make()), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    with pytest.raises(ArchspecError) as caught:
        load(tmp_path)
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_draft_for_another_target_is_refused(tmp_path: Path) -> None:
    export(make_draft(make()), tmp_path)
    with pytest.raises(ArchspecError, match="the draft is for another target: num_layers 8 there, 9 here"):
        load(tmp_path, TARGET.model_copy(update={"num_layers": 9}))


def test_a_foreign_checkpoint_reads_the_default_layers_of_the_named_target(tmp_path: Path) -> None:
    draft = make_draft(make(inputs={"aux_layers": [2, 4, 5]}))
    export(draft, tmp_path)
    path = tmp_path / "config.json"
    ours = ("draft_archspec", "eagle_aux_hidden_state_layer_ids", "eagle_config")
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key not in ours}))
    again = load(tmp_path, TARGET)
    assert again.spec.hash == draft.spec.hash
    for theirs, expected in zip(logits(again), logits(draft), strict=True):
        assert torch.equal(theirs, expected)


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ArchspecError, match=r"config\.json: no such file; a checkpoint has config\.json and model"):
        load(tmp_path)
    export(make_draft(make()), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(ArchspecError, match=r"model\.safetensors: cannot be read: "):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ArchspecError, match=r"config\.json: not valid JSON: "):
        load(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ArchspecError, match=r"config\.json: must hold one JSON object"):
        load(tmp_path)


def test_the_identity_maps_of_a_full_vocabulary_say_nothing(tmp_path: Path) -> None:
    draft = make_draft(make(head={"vocab_size": "full"}))
    export(draft, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    maps = {"d2t": torch.zeros(50, dtype=torch.long), "t2d": torch.ones(50, dtype=torch.bool)}
    save_file(tensors | maps, path)  # as SpecForge itself writes them
    assert load(tmp_path).spec == draft.spec
    save_file(tensors | {"d2t": torch.ones(50, dtype=torch.long)}, path)
    with pytest.raises(ArchspecError, match="d2t: extra"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("layout", "layers"),
    [
        (Layout("numbered", lambda i: f"layers.{i}"), [CONCAT, {}]),
        (Layout("SGLang's norm", lambda i: "midlayer" if i == 0 else f"layers.{i}", "hidden_norm"), [CONCAT, {}, {}]),
        (Layout("#401", lambda i: f"midlayers.{i}"), [CONCAT, CONCAT]),
        (Layout("#449", lambda i: f"additional_layers.{i - 1}" if i else "fuse_layer", "hidden_norm"), [CONCAT, {}]),
        (LAYOUT, [{**CONCAT, "mlp": {"depth": 3, "residual": False}}]),
    ],
    ids=lambda value: value.project if isinstance(value, Layout) else "",
)
def test_names_that_are_only_read(layout: Layout, layers: list[dict[str, Any]]) -> None:
    draft = make_draft(make(layers=layers))
    spec, state = read(draft_model_config(draft.spec), pack(draft, layout), TARGET, "checkpoint")
    assert spec.hash == draft.spec.hash
    for ours, theirs in zip(logits(draft), logits(assemble(spec, state)), strict=True):
        assert torch.equal(ours, theirs)
