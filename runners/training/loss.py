"""The training loss of an unrolled draft, without ever holding a row of logits for every token.

Shapes: S draft steps, P counted positions, H hidden size, V draft vocabulary, C positions of a chunk.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from runners.training.sizes import CHUNK_ELEMENTS, round_up
from runners.training.teacher import Teacher


@dataclass(frozen=True)
class Targets:
    """Which (row, step) pairs count, seen from the position i whose teacher predicts token x_{i+1}.

    Row t at step s predicts x_{t+2+s}, so position i is the target of row i - 1 - s at step s. ``positions`` [P] are
    flat indices b * T + i of every position that at least step 0 reaches; ``valid`` [S, P] says which steps reach it.
    P is rounded up by positions that no step reaches, so that products come in few shapes.
    """

    positions: Tensor
    valid: Tensor

    @classmethod
    def of(cls, response_mask_BT: Tensor, steps: int) -> "Targets":
        """Positions i whose predicted token x_{i+1} is a response token, in sequences that are padded on the right."""
        predicted_BT = F.pad(response_mask_BT[:, 1:], (0, 1))
        predicted_BT[:, 0] = False  # no row lies before position 0
        counted = predicted_BT.flatten().nonzero().squeeze(-1)
        positions = F.pad(
            counted, (0, round_up(len(counted)) - len(counted))
        )  # position 0 is out of every step's reach
        i = positions % response_mask_BT.shape[1]
        return cls(positions, torch.stack([i >= step + 1 for step in range(steps)]))

    def gather(self, step: int, rows_BTH: Tensor) -> Tensor:
        """Pick, of a step's rows [B, T, H], those that predict the counted positions, [P, H]; invalid are arbitrary."""
        return rows_BTH.flatten(0, 1).index_select(0, (self.positions - 1 - step).clamp_min(0))


def unroll_loss(
    head_inputs: list[Tensor],
    weight_VH: Tensor,
    teacher: Teacher,
    last_BTH: Tensor,
    targets: Targets,
    step_decay: float,
    counts_S: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """KL(teacher || draft) over the draft vocabulary: sum over steps s of step_decay**s * mean over counted rows.

    ``head_inputs`` are, per step, the head's input of every row [B, T, H] (after the final norm); ``last`` the target's
    last states before its final norm, [B, T, h_t]. Returns the loss and the mean KL of each step [S] (detached).
    ``counts`` is what the sums over rows are divided by where these rows are a part of a batch: those of all of it.
    """
    steps, valid = len(head_inputs), targets.valid
    counts_S = (valid.sum(-1) if counts_S is None else counts_S).clamp_min(1)
    decay_S = step_decay ** torch.arange(steps, device=valid.device, dtype=torch.float32)
    weights_SP = valid * (decay_S / counts_S)[:, None]
    rows_SPH = torch.stack([targets.gather(step, rows) for step, rows in enumerate(head_inputs)])
    last_PH = last_BTH.flatten(0, 1).index_select(0, targets.positions)
    loss, kl_SP = _ChunkedKl.apply(rows_SPH, weight_VH, weights_SP, last_PH, teacher)  # type: ignore[no-untyped-call]
    return loss, (kl_SP * valid).sum(-1) / counts_S


class _ChunkedKl(torch.autograd.Function):
    """sum of weights * KL, chunk by chunk over positions; gradients are made in the forward pass, where the logits are.

    A chunk's teacher distribution is computed once and serves all S steps. With q = softmax(logits):
    KL = sum p (log p - log q), and d(weight * KL)/d(logits) = weight * (q - p).
    """

    @staticmethod
    def forward(
        ctx: Any, rows_SPH: Tensor, weight_VH: Tensor, weights_SP: Tensor, last_PH: Tensor, teacher: Teacher
    ) -> tuple[Tensor, Tensor]:
        steps, positions, _ = rows_SPH.shape
        need_rows, need_weight = ctx.needs_input_grad[:2]
        compute = (
            torch.get_autocast_dtype(rows_SPH.device.type)
            if torch.is_autocast_enabled(rows_SPH.device.type)
            else rows_SPH.dtype
        )
        weight = weight_VH.to(compute)
        kl_SP = torch.zeros(steps, positions, device=rows_SPH.device)
        d_rows = torch.empty_like(rows_SPH) if need_rows else None
        d_weight = torch.zeros_like(weight_VH) if need_weight else None
        chunk = max(1, CHUNK_ELEMENTS // (steps * weight_VH.shape[0]))
        for start in range(0, positions, chunk):
            at = slice(start, start + chunk)
            # Else linear becomes a batched product, for which the weight is copied for every step.
            rows_SCH = rows_SPH[:, at].to(compute).contiguous()
            log_p_CV = teacher.log_probs(last_PH[at])
            log_q_SCV = F.linear(rows_SCH, weight).float()
            log_q_SCV.sub_(log_q_SCV.logsumexp(-1, keepdim=True))
            p_CV = log_p_CV.exp()
            with torch.autocast(rows_SPH.device.type, enabled=False):  # else these sums are rounded to bf16
                negative_entropy_C = torch.linalg.vecdot(p_CV, log_p_CV)
                kl_SP[:, at] = negative_entropy_C - torch.linalg.vecdot(p_CV, log_q_SCV)
            if d_rows is None and d_weight is None:
                continue
            d_logits_SCV = log_q_SCV.exp_().sub_(p_CV).mul_(weights_SP[:, at, None]).to(compute)
            if d_rows is not None:
                d_rows[:, at] = d_logits_SCV @ weight
            if d_weight is not None:
                d_logits, rows = d_logits_SCV.flatten(0, 1), rows_SCH.flatten(0, 1)
                if compute == d_weight.dtype:
                    d_weight.addmm_(d_logits.T, rows)
                else:
                    d_weight += d_logits.T @ rows
        ctx.save_for_backward(*(gradient for gradient in (d_rows, d_weight) if gradient is not None))
        ctx.needs = (need_rows, need_weight)
        ctx.mark_non_differentiable(kl_SP)
        return (weights_SP * kl_SP).sum(), kl_SP

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = list(ctx.saved_tensors)
        need_rows, need_weight = ctx.needs
        d_rows = saved.pop(0).mul_(grads[0]) if need_rows else None  # in place: for a large head a copy is gigabytes
        d_weight = saved.pop(0).mul_(grads[0]) if need_weight else None
        return d_rows, d_weight, None, None, None
