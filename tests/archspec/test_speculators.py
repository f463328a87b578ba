"""What speculators', SGLang's and EAGLE-1's own keys mean; that the numbers are theirs is checked by the goldens."""

from typing import Any

import pytest
import torch
from torch import Tensor

from archspec.builder import build_draft
from archspec.checkpoints import pack, read
from archspec.errors import ArchspecError
from archspec.formats import FORMATS
from archspec.resolve import ResolvedSpec
from tests.archspec.drafts import CONCAT, make, make_draft, preset
from tests.archspec.strategies import TOY

SIZES = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "num_hidden_layers": 2,
    "vocab_size": 48,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
SPECULATORS, SGLANG, EAGLE1 = FORMATS["speculators"], FORMATS["sglang"], FORMATS["eagle1"]


def tensors_of(**fields: Any) -> dict[str, Tensor]:
    data = {"layers": [CONCAT, {}], "head": {"vocab_size": "full"}, **fields}
    return pack(make_draft(make(**data)), SPECULATORS)


def spec_of(sizes: dict[str, Any], tensors: dict[str, Tensor], **keys: Any) -> ResolvedSpec:
    config = {"speculators_model_type": "eagle3", "transformer_layer_config": {**SIZES, **sizes}, **keys}
    return read(SPECULATORS, config, tensors, TOY, "checkpoint")[0]


def test_norm_before_residual_is_true_where_nothing_is_said() -> None:
    assert spec_of({}, tensors_of()).layers[0].residual_from == "normed"
    assert spec_of({}, tensors_of(), norm_before_residual=None).layers[0].residual_from == "normed"
    assert spec_of({}, tensors_of(), norm_before_residual=False).layers[0].residual_from == "raw"
    assert spec_of({}, tensors_of()).layers[1].residual_from == "raw"


def test_norm_output_feeds_back_the_normed_state() -> None:
    assert spec_of({}, tensors_of()).feedback == "pre_norm"
    assert spec_of({}, tensors_of(), norm_output=True).feedback == "post_norm"


def test_embedding_and_head_are_the_targets_unless_said_otherwise() -> None:
    spec = spec_of({}, tensors_of())
    assert (spec.embedding, spec.head.weights) == ("frozen", "target")
    assert spec_of({}, tensors_of(), embed_requires_grad=True).embedding == "trained"


def test_layer_types_say_which_layers_have_the_window() -> None:
    sizes = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
    windows = [layer.attention and layer.attention.window for layer in spec_of(sizes, tensors_of()).layers]
    assert windows == [5, None]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"sliding_window": 5, "layer_types": ["sliding_attention"]},
            "layer_types must name 2 layers, as num_hidden_layers says, but names 1",
        ),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types names sliding_attention, but sliding_window does not say how wide it is",
        ),
    ],
)
def test_layer_types_that_do_not_fit_are_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArchspecError) as caught:
        spec_of(sizes, tensors_of())
    assert str(caught.value) == f"checkpoint: {message}"


def test_qwen3_layers_norm_queries_and_keys() -> None:
    with pytest.raises(ArchspecError, match=r"checkpoint: layers\.0\.self_attn\.k_norm\.weight: missing from the file"):
        spec_of({"model_type": "qwen3"}, tensors_of())


def test_another_kind_of_draft_is_refused() -> None:
    config = {"speculators_model_type": "dflash", "transformer_layer_config": SIZES}
    with pytest.raises(ArchspecError, match="speculators_model_type = 'dflash': only eagle3 drafts can be read"):
        read(SPECULATORS, config, {}, TOY, "checkpoint")


def test_sglang_reads_no_residual_of_normed_states() -> None:
    draft = make_draft(make())
    config = SGLANG.config(draft.spec) | {"norm_before_residual": True}
    with pytest.raises(ArchspecError) as caught:
        read(SGLANG, config, pack(draft, SGLANG), TOY, "checkpoint")
    rule = "SGLang ignores it and would run another draft; read the checkpoint as vllm"
    assert str(caught.value) == f"checkpoint: norm_before_residual is true, but {rule}"


def test_an_eagle1_checkpoint_lacks_what_is_the_targets() -> None:
    draft = make_draft(preset("eagle1"))
    tensors = pack(draft, EAGLE1)
    assert not {"lm_head.weight", "fc_norm.0.weight"} & set(tensors)
    sizes = SIZES | {"num_hidden_layers": 1}
    spec, state = read(EAGLE1, sizes, tensors, TOY, "checkpoint")
    assert spec.hash == draft.spec.hash
    assert set(build_draft(spec).state_dict()) - set(state) == {"lm_head.weight", "inputs.norms.0.weight"}
    assert torch.equal(state["layers.0.project.weight"], tensors["fc.weight"])
    unbiased = {name: tensor for name, tensor in tensors.items() if name not in ("fc.bias", "embed_tokens.weight")}
    spec, state = read(EAGLE1, sizes, unbiased, TOY, "checkpoint")
    assert not spec.layers[0].fusion_bias
    assert "embed_tokens.weight" not in state
