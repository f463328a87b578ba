"""The config of every format, key by key: all that its engine needs and nothing that contradicts it."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from archspec.checkpoints import export
from archspec.formats import FORMATS, configs
from archspec.resolve import ResolvedSpec
from tests.archspec.drafts import CONCAT, make, make_draft, preset
from tests.archspec.strategies import TOY

AUX = "eagle_aux_hidden_state_layer_ids"


def read_config(folder: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return data


def common(**changed: Any) -> dict[str, Any]:
    """What every config says of the layers."""
    return {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "num_hidden_layers": 1,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "vocab_size": 48,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "use_cache": True,
        **changed,
    }


def plain(ids: list[int], **changed: Any) -> dict[str, Any]:
    """What SpecForge, SGLang and vLLM share."""
    keys: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **common(),
        "draft_vocab_size": 20,
        "num_aux_hidden_states": len(ids),
        AUX: ids,
        "eagle_config": {"use_aux_hidden_state": True, AUX: [i - 1 for i in ids]},
        "fc_norm": False,
        "norm_before_fc": False,
    }
    return keys | changed


def speculators(ids: list[int], sizes: dict[str, Any], **changed: Any) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
            ],
            "verifier": {"name_or_path": None, "architectures": []},
        },
        "transformer_layer_config": {**common(**sizes), "num_aux_hidden_states": len(ids)},
        "draft_vocab_size": 20,
        "target_hidden_size": None,
        AUX: ids,
        "fc_norm": False,
        "norm_before_fc": False,
        "norm_before_residual": False,
        "norm_output": False,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
    }
    return keys | changed


def without(keys: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if key != name}


RICH = make(
    inputs={"aux_layers": [1, 4, 7, 8], "norm": "joint"},
    embedding="trained",
    layers=[
        {**CONCAT, "residual_from": "normed", "attention": {"heads": 6, "kv_heads": 3, "head_dim": 8, "qk_norm": True}},
        {"attention": {"heads": 6, "kv_heads": 3, "head_dim": 8, "qk_norm": True, "window": 5}},
    ],
    feedback="post_norm",
    head={"vocab_size": "full"},
    rope_theta=500.0,
)
RICH_SIZES: dict[str, Any] = {
    "model_type": "qwen3",
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "rope_theta": 500.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "use_sliding_window": True,
    "sliding_window": 5,
    "layer_types": ["full_attention", "sliding_attention"],
}
SCALED = make(
    rope_scaling={
        "type": "llama3",
        "factor": 8,
        "low_freq_factor": 1,
        "high_freq_factor": 4,
        "original_max_positions": 8192,
    }
)
LLAMA31: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SCALED_KEYS = {"rope_parameters": LLAMA31 | {"rope_theta": 10_000.0}, "rope_scaling": LLAMA31}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0}
WIDE = make(hidden_size=12, embedding="trained", inputs={"aux_layers": [2, 4, 5, 7], "norm": "each"})
WIDE_CONFIG = plain([2, 4, 5, 7], hidden_size=12, target_hidden_size=16, fc_norm=True)


@pytest.mark.parametrize(
    ("form", "spec", "expected"),
    [
        ("specforge", make(), without(plain([2, 4, 5]), "norm_before_fc")),
        ("sglang", make(), plain([2, 4, 5])),
        ("vllm", make(), plain([2, 4, 5])),
        ("speculators", make(), speculators([2, 4, 5], {})),
        ("specforge", SCALED, without(plain([2, 4, 5], **SCALED_KEYS), "norm_before_fc")),
        ("sglang", SCALED, plain([2, 4, 5], **SCALED_KEYS)),
        ("vllm", SCALED, plain([2, 4, 5], **SCALED_KEYS)),
        ("speculators", SCALED, speculators([2, 4, 5], SCALED_KEYS)),
        ("specforge", WIDE, without(WIDE_CONFIG, "norm_before_fc")),
        ("sglang", WIDE, WIDE_CONFIG),
        ("vllm", WIDE, WIDE_CONFIG),
        ("sglang", preset("eagle3.1"), plain([2, 4, 5], fc_norm=True, norm_output=True)),
        ("vllm", preset("eagle3.1"), plain([2, 4, 5], fc_norm=True, norm_output=True)),
        ("speculators", preset("eagle3.1"), speculators([2, 4, 5], {}, fc_norm=True, norm_output=True)),
        ("eagle1", preset("eagle1"), {"architectures": ["LlamaForCausalLM"], **common(), "bias": True}),
        (
            "vllm",
            RICH,
            plain(
                [1, 4, 7, 8],
                **RICH_SIZES,
                architectures=["Eagle3Qwen3ForCausalLM"],
                draft_vocab_size=48,
                norm_before_fc=True,
                norm_output=True,
                norm_before_residual=True,
            ),
        ),
        (
            "speculators",
            RICH,
            speculators(
                [1, 4, 7, 8],
                RICH_SIZES,
                draft_vocab_size=48,
                norm_before_fc=True,
                norm_output=True,
                norm_before_residual=True,
                embed_requires_grad=True,
            ),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_config_key_by_key(form: str, spec: ResolvedSpec, expected: dict[str, Any]) -> None:
    assert FORMATS[form].config(spec) == expected


@pytest.mark.parametrize(
    ("more", "written"), [({}, {}), ({"attention_factor": 1.5, "truncate": False},) * 2, ({"beta_fast": 16},) * 2]
)
def test_transformers_reads_one_scaling_from_both_layouts(more: dict[str, Any], written: dict[str, Any]) -> None:
    """vLLM and SGLang read ``rope_parameters`` of the config that transformers makes; the base is in it."""
    spec = make(rope_scaling={"type": "yarn", "factor": 4, "original_max_positions": 64, **more}, rope_theta=500)
    config = FORMATS["vllm"].config(spec)
    for left_out in ("", "rope_parameters", "rope_scaling"):
        theirs = LlamaConfig(**{key: value for key, value in config.items() if key != left_out})
        assert theirs.rope_parameters == YARN | written | {"rope_theta": 500.0}


def test_a_config_names_its_target_where_the_format_tells_it(tmp_path: Path) -> None:
    draft = make_draft(make())
    export(draft, tmp_path / "speculators", "speculators", "org/target")
    assert read_config(tmp_path / "speculators")["speculators_config"]["verifier"]["name_or_path"] == "org/target"
    export(draft, tmp_path / "vllm", "vllm", "org/target")
    assert "org/target" not in (tmp_path / "vllm" / "config.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("form", ["vllm", "sglang", "specforge", "speculators"])
def test_a_config_on_disk_adds_dtype_and_what_only_this_project_knows(form: str, tmp_path: Path) -> None:
    draft = make_draft(make(head={"vocab_size": 20, "weights": "target"}))
    export(draft, tmp_path, form)
    added = {key: value for key, value in read_config(tmp_path).items() if key not in configs(draft.spec)[form]}
    assert added == {
        "torch_dtype": "float32",
        "dtype": "float32",
        "draft_archspec": {
            "name": "draft",
            "format": form,
            "target": TOY.model_dump(),
            "target_fingerprint": None,
            "embedding": "frozen",
            "head_weights": "target",
        },
    }


def test_norm_output_is_written_only_where_it_means_one_thing() -> None:
    """True would be SpecForge's default, but tells engines to feed back the state after the norm."""
    specforge = FORMATS["specforge"]
    assert "norm_output" not in specforge.config(make())
    assert specforge.config(make(head={"norm": "none"}))["norm_output"] is False
