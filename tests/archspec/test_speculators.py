"""What speculators' keys mean; that the numbers are theirs is checked by the goldens."""

from typing import Any

import pytest
import torch
from torch import Tensor

from archspec import eagle1, speculators
from archspec.builder import build_draft
from archspec.errors import ArchspecError
from archspec.facts import TargetFacts
from archspec.layouts import pack
from archspec.resolve import ResolvedSpec, resolve
from archspec.spec import DraftSpec

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
SIZES = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "num_hidden_layers": 2,
    "vocab_size": 50,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def tensors_of(**fields: Any) -> dict[str, Tensor]:
    data = {"name": "draft", "layers": [{"fusion": "concat"}, {}], **fields}
    return pack(build_draft(resolve(DraftSpec.model_validate(data), TARGET)), speculators.LAYOUT)


def spec_of(sizes: dict[str, Any], tensors: dict[str, Tensor], **keys: Any) -> ResolvedSpec:
    config = {"speculators_model_type": "eagle3", "transformer_layer_config": {**SIZES, **sizes}, **keys}
    return speculators.read(config, tensors, TARGET, "checkpoint")[0]


def test_norm_before_residual_is_true_where_nothing_is_said() -> None:
    assert spec_of({}, tensors_of()).layers[0].residual_from == "normed"
    assert spec_of({}, tensors_of(), norm_before_residual=False).layers[0].residual_from == "raw"
    assert spec_of({}, tensors_of()).layers[1].residual_from == "raw"


def test_norm_output_feeds_back_the_normed_state() -> None:
    assert spec_of({}, tensors_of()).feedback == "pre_norm"
    assert spec_of({}, tensors_of(), norm_output=True).feedback == "post_norm"


def test_layer_types_say_which_layers_have_the_window() -> None:
    sizes = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
    windows = [layer.attention and layer.attention.window for layer in spec_of(sizes, tensors_of()).layers]
    assert windows == [5, None]


def test_qwen3_layers_norm_queries_and_keys() -> None:
    with pytest.raises(ArchspecError, match=r"checkpoint: layers\.0\.self_attn\.k_norm\.weight: missing from the file"):
        spec_of({"model_type": "qwen3"}, tensors_of())


def test_another_kind_of_draft_is_refused() -> None:
    with pytest.raises(ArchspecError, match="speculators_model_type = 'dflash': only eagle3 drafts can be read"):
        speculators.read({"speculators_model_type": "dflash"}, {}, TARGET, "checkpoint")


def test_an_eagle1_checkpoint_lacks_what_is_the_targets() -> None:
    layers = [{"fusion": "project", "fusion_bias": True, "attention": {"norm": "none"}}, {}]
    tensors = tensors_of(
        inputs={"aux_layers": ["last"], "norm": "target", "projection": "none"},
        layers=layers,
        head={"weights": "target", "norm": "none"},
    )
    own = {name: tensor for name, tensor in tensors.items() if name not in ("lm_head.weight", "fc_norm.0.weight")}
    spec, state = eagle1.read(SIZES, own, TARGET, "checkpoint")
    assert spec.layers[0].fusion_bias
    draft = build_draft(spec)
    assert set(draft.state_dict()) - set(state) == set(eagle1.FROM_TARGET)
    assert torch.equal(state["layers.0.project.weight"], tensors["fc.weight"])
