"""The chunked loss against a plain one that holds every logit, and which rows count against tables written by hand."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from runners.features.frozen import FrozenWeights
from runners.training import loss as loss_module
from runners.training.loss import Targets, unroll_loss
from runners.training.teacher import Teacher

B, T, H, H_T, V, D = 3, 9, 5, 6, 13, 8
STEPS = 3
VOCAB = torch.tensor([0, 1, 2, 5, 7, 9, 11, 12])

# Which (row, step) pairs count in one row of nine tokens, two responses (tokens 1-2 and 5-7) and one token of padding.
# Row t at step s counts when x_{t+2+s} is a response token.
MASK = "011001110"
COUNTED = {
    #  t: 012345678
    0: "100111000",  # x_{t+2}: tokens 2, 5, 6, 7
    1: "001110000",  # x_{t+3}: tokens 5, 6, 7
    2: "011100000",  # x_{t+4}
    3: "111000000",  # x_{t+5}
    4: "110000000",  # x_{t+6}: token 5 would need row -1
}


def bits(text: str) -> Tensor:
    return torch.tensor([[character == "1" for character in text]])


def counted(mask_BT: Tensor, steps: int) -> list[str]:
    """Rows that count at each step, read back through ``gather``: of all rows' numbers, those it picks."""
    targets = Targets.of(mask_BT, steps)
    numbers_BT1 = torch.arange(mask_BT.numel()).view(*mask_BT.shape, 1)
    result = []
    for step in range(steps):
        picked = targets.gather(step, numbers_BT1).squeeze(-1)[targets.valid[step]].tolist()
        result.append("".join("1" if row in picked else "0" for row in range(mask_BT.numel())))
        assert len(set(picked)) == len(picked)
    return result


def test_rows_counted_in_the_table_above() -> None:
    assert counted(bits(MASK), 5) == list(COUNTED.values())


def test_rows_counted_in_a_padded_batch_stay_in_their_own_sequence() -> None:
    first, second = "000011100", "110000011"
    mask = torch.cat((bits(first), bits(second)))
    for step, row in enumerate(counted(mask, 4)):
        assert row == counted(bits(first), 4)[step] + counted(bits(second), 4)[step]


def test_the_first_two_tokens_are_predicted_by_no_row() -> None:
    assert counted(bits("110"), 1) == ["000"]
    assert counted(bits("111"), 2) == ["100", "000"]


def test_counting_leaves_the_mask_as_it_was() -> None:
    mask = bits(MASK)
    Targets.of(mask, 3)
    assert torch.equal(mask, bits(MASK))


def head(kind: str) -> FrozenWeights:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(V, H_T, generator=generator)
    plain = kind == "plain"
    return FrozenWeights(
        embed_tokens=rows,
        lm_head=rows,
        norm_weight=torch.rand(H_T, generator=generator),
        norm_eps=1e-5,
        lm_head_bias=None if plain else torch.randn(V, generator=generator),
        logit_scale=1.0 if plain else 0.5,
        softcap=None if plain else 2.0,
    )


def inputs(seed: int) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Head inputs of every step, head weight, last states and a random mask."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(B, T, H, generator=generator, requires_grad=True) for _ in range(STEPS)]
    weight = torch.randn(D, H, generator=generator, requires_grad=True)
    mask = torch.rand(B, T, generator=generator) < 0.5
    return rows, weight, torch.randn(B, T, H_T, generator=generator), mask


def plain_loss(
    rows: list[Tensor], weight: Tensor, weights: FrozenWeights, last: Tensor, mask: Tensor, decay: float
) -> tuple[Tensor, Tensor]:
    """The definition, row by row."""
    p = weights.logits(last, VOCAB).softmax(-1)
    step_kl = []
    for step in range(STEPS):
        q = (rows[step] @ weight.T).log_softmax(-1)
        kls = [
            (p[b, t + 1 + step] * (p[b, t + 1 + step].log() - q[b, t])).sum()
            for b in range(B)
            for t in range(T - 2 - step)
            if mask[b, t + 2 + step]
        ]
        step_kl.append(torch.stack(kls).mean() if kls else torch.zeros(()))
    return sum((decay**step * kl for step, kl in enumerate(step_kl)), torch.zeros(())), torch.stack(step_kl)


@pytest.fixture(params=[1, STEPS * D * 3, 10**6], ids=["one position", "three positions", "all at once"])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", request.param)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("kind", ["plain", "bias, scale and softcap"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("decay", [1.0, 0.6])
def test_value_step_kl_and_gradients_equal_the_plain_loss(kind: str, seed: int, decay: float) -> None:
    rows, weight, last, mask = inputs(seed)
    teacher = Teacher(head(kind), VOCAB)
    loss, step_kl = unroll_loss(rows, weight, teacher, last, Targets.of(mask, STEPS), decay)
    wanted, wanted_kl = plain_loss(rows, weight, head(kind), last, mask, decay)
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(step_kl, wanted_kl)
    scale = 1.7  # the gradient that comes from above must reach the parameters
    ours = torch.autograd.grad(loss * scale, [*rows, weight])
    theirs = torch.autograd.grad(wanted * scale, [*rows, weight])
    torch.testing.assert_close(ours, theirs)
    assert all(gradient.abs().sum() > 0 for gradient in ours)


@pytest.mark.usefixtures("chunk")
def test_a_frozen_head_gets_no_gradient_and_its_rows_the_same_ones() -> None:
    rows, weight, last, mask = inputs(0)
    teacher, targets = Teacher(head("plain"), VOCAB), Targets.of(mask, STEPS)
    trained, _ = unroll_loss(rows, weight, teacher, last, targets, 0.8)
    frozen, _ = unroll_loss(rows, weight.detach(), teacher, last, targets, 0.8)
    assert torch.equal(frozen, trained)
    torch.testing.assert_close(torch.autograd.grad(frozen, rows), torch.autograd.grad(trained, rows))
    trained, _ = unroll_loss([row.detach() for row in rows], weight, teacher, last, targets, 0.8)
    wanted, _ = plain_loss(rows, weight, head("plain"), last, mask, 0.8)
    torch.testing.assert_close(torch.autograd.grad(trained, weight), torch.autograd.grad(wanted, weight))


def test_without_gradients_there_is_a_value_all_the_same() -> None:
    rows, weight, last, mask = inputs(1)
    teacher, targets = Teacher(head("plain"), VOCAB), Targets.of(mask, STEPS)
    with torch.no_grad():
        value, _ = unroll_loss(rows, weight, teacher, last, targets, 0.8)
    torch.testing.assert_close(value, plain_loss(rows, weight, head("plain"), last, mask, 0.8)[0])


def test_a_batch_without_counted_rows_has_loss_zero_and_no_nan() -> None:
    rows, weight, last, _ = inputs(0)
    teacher = Teacher(head("plain"), VOCAB)
    loss, step_kl = unroll_loss(
        rows, weight, teacher, last, Targets.of(torch.zeros(B, T, dtype=torch.bool), STEPS), 0.8
    )
    assert loss.item() == 0
    assert step_kl.tolist() == [0.0] * STEPS
    assert all(gradient.abs().sum() == 0 for gradient in torch.autograd.grad(loss, [*rows, weight]))


def test_a_draft_that_equals_the_teacher_has_loss_zero() -> None:
    weights = head("plain")
    _, _, last, mask = inputs(0)
    rows = [torch.nn.functional.pad(weights.normed(last)[:, 1 + step :], (0, 0, 0, 1 + step)) for step in range(STEPS)]
    loss, _ = unroll_loss(rows, weights.lm_head[VOCAB], Teacher(weights, VOCAB), last, Targets.of(mask, STEPS), 1.0)
    assert abs(loss.item()) < 1e-6


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most elements that any tensor made inside had, and which operators made them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements, self.operators = 0, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operators.add(str(func))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.elements = max(self.elements, leaf.numel())
        return out


@pytest.mark.parametrize("trained", [True, False])
def test_no_tensor_of_tokens_times_vocabulary_is_ever_made(monkeypatch: pytest.MonkeyPatch, trained: bool) -> None:
    """400 tokens and 3,000 entries: the logits of one step alone would be 1.2 million elements."""
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", 60_000)
    tokens, vocabulary, hidden = 400, 3000, 8
    generator = torch.Generator().manual_seed(0)
    weights = FrozenWeights(
        torch.randn(vocabulary, hidden, generator=generator),
        torch.randn(vocabulary, hidden, generator=generator),
        torch.ones(hidden),
        1e-5,
    )
    rows = [torch.randn(2, tokens // 2, hidden, generator=generator, requires_grad=True) for _ in range(STEPS)]
    weight = torch.randn(vocabulary, hidden, generator=generator, requires_grad=trained)
    last, mask = torch.randn(2, tokens // 2, hidden, generator=generator), torch.ones(2, tokens // 2, dtype=torch.bool)
    teacher = Teacher(weights)
    with Largest() as largest:
        loss, _ = unroll_loss(rows, weight, teacher, last, Targets.of(mask, STEPS), 0.8)
        loss.backward()  # type: ignore[no-untyped-call]
    assert 0 < largest.elements <= 60_000
    assert "aten.mm.default" in largest.operators
    assert "aten.bmm.default" not in largest.operators  # a batched product copies the head for every step


def test_under_autocast_products_are_rounded_and_the_sums_of_the_loss_are_not() -> None:
    """Of whole numbers up to 2 every logit is exact in bf16, so the KL must be too."""
    rows, weight, last, mask = inputs(0)
    rows, weight = [row.detach().round().clamp(-2, 2) for row in rows], weight.detach().round().clamp(-2, 2)
    teacher, targets = Teacher(head("plain"), VOCAB), Targets.of(mask, STEPS)
    with torch.autocast("cpu", torch.bfloat16):
        _, step_kl = unroll_loss(rows, weight, teacher, last, targets, 1.0)
        log_p_PV = teacher.log_probs(last.flatten(0, 1).index_select(0, targets.positions)).double()
    for step, counts in enumerate(targets.valid):
        log_q_PV = (targets.gather(step, rows[step]) @ weight.T).double().log_softmax(-1)
        kl_P = (log_p_PV.exp() * (log_p_PV - log_q_PV)).sum(-1)
        torch.testing.assert_close(step_kl[step].double(), kl_P[counts].mean(), rtol=1e-5, atol=1e-6)
