"""The teacher's distribution: the target's own logits, on the draft's tokens, at a temperature."""

import pytest
import torch
from torch import Tensor

from runners.features.frozen import FrozenWeights
from runners.features.store import FeatureStore
from runners.features.target import Target
from runners.training.teacher import Teacher

V, H = 11, 6
IDS = torch.tensor([0, 3, 4, 10])


def head(
    bias: bool = False, scale: float = 1.0, softcap: float | None = None, layer_norm: bool = False
) -> FrozenWeights:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(V, H, generator=generator)
    return FrozenWeights(
        embed_tokens=rows,
        lm_head=rows,
        norm_weight=torch.rand(H, generator=generator) + 0.5,
        norm_eps=1e-6,
        norm_kind="layer" if layer_norm else "rms",
        norm_bias=torch.randn(H, generator=generator) if layer_norm else None,
        lm_head_bias=torch.randn(V, generator=generator) if bias else None,
        logit_scale=scale,
        softcap=softcap,
    )


def last(rows: int = 5) -> Tensor:
    return 3 * torch.randn(rows, H, generator=torch.Generator().manual_seed(1))


HEADS = {
    "plain": head(),
    "bias": head(bias=True),
    "scale": head(scale=0.25),
    "softcap": head(softcap=1.5),
    "all with a LayerNorm": head(bias=True, scale=2.0, softcap=4.0, layer_norm=True),
}


@pytest.mark.parametrize("kind", HEADS)
def test_log_probs_are_the_targets_own_on_the_drafts_tokens_renormalised(kind: str) -> None:
    weights, states = HEADS[kind], last()
    logits = weights.normed(states) @ weights.lm_head.T
    logits = (logits + (0 if weights.lm_head_bias is None else weights.lm_head_bias)) * weights.logit_scale
    if weights.softcap is not None:
        logits = weights.softcap * torch.tanh(logits / weights.softcap)
    for ids in (None, IDS):
        wanted = (logits if ids is None else logits[:, ids]).log_softmax(-1)
        torch.testing.assert_close(Teacher(weights, ids).log_probs(states), wanted)
        torch.testing.assert_close(
            Teacher(weights, ids).log_probs(states, 0.5), (wanted / 0.5).log_softmax(-1), msg="at temperature 0.5"
        )


def test_bfloat16_weights_and_states_are_computed_in_float32() -> None:
    weights = head(bias=True).to("cpu", torch.bfloat16)
    assert Teacher(weights, IDS).log_probs(last().bfloat16()).dtype == torch.float32


def test_autocast_does_not_touch_the_teacher() -> None:
    """A bfloat16 teacher would move probabilities by about a percent, and the training target with them."""
    outside = Teacher(head()).log_probs(last())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = Teacher(head()).log_probs(last())
    assert inside.dtype == torch.float32
    assert torch.equal(inside, outside)


def test_stored_states_give_the_targets_logits(target: Target, tiny_store: FeatureStore) -> None:
    features = tiny_store.read(0, [])
    own = target.model(input_ids=features.tokens[None], use_cache=False).logits[0]
    teacher = Teacher(tiny_store.weights())
    torch.testing.assert_close(teacher.logits(features.last), own, rtol=1e-5, atol=1e-5)
