"""The references' losses and accuracies, each in its own normalisation, from logits that this project computed.

Shapes as elsewhere; D draft vocabulary, V target vocabulary. A figure is a scalar tensor under the name that the golden
gives it, one list entry for each draft step; ``total_loss`` and EAGLE-1's parts stand alone.
"""

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.archspec.golden import Golden

Figures = dict[str, list[Tensor]]


def figures(golden: Golden, run_name: str) -> tuple[Tensor, Figures]:
    """Total loss of one of the golden's runs, and the figures of its steps."""
    return _KINDS[golden.kind](golden, run_name, golden.data["runs"][run_name])


def _shift(x_BT: Tensor, step: int, fill: float = 0.0) -> Tensor:
    """Row t gets row t + step; rows that run off the end get ``fill``."""
    return torch.cat((x_BT[:, step:], torch.full_like(x_BT[:, :step], fill)), dim=1) if step else x_BT


def _specforge(golden: Golden, run_name: str, run: dict[str, Any]) -> tuple[Tensor, Figures]:
    """Mean over all B*T rows; rows whose best target token the draft lacks do not count."""
    given, draft, spec = golden.tensors, golden.draft, golden.spec
    full_BTV = given.get("input.forward.target_logits", given.get("input.forward.target"))
    assert full_BTV is not None
    loss_mask_BT = given["input.forward.loss_mask"][..., 0].float()
    vocab_ids = draft.vocab_ids
    p_BTD, on_draft_BTD = full_BTV[..., vocab_ids].softmax(-1), full_BTV.softmax(-1)[..., vocab_ids]
    best_BT = full_BTV.argmax(-1)
    in_draft_V = draft.t2d if draft.t2d is not None else torch.ones(spec.target.vocab_size, dtype=torch.bool)
    counted_BT = loss_mask_BT * in_draft_V[best_BT]
    out: Figures = {"loss": [], "accuracy": [], "acceptance_rate": [], "correct": [], "denom": []}
    for step, states in enumerate(golden.run.steps):
        logits_BTD = states["logits"]
        mask_BT, rows_BT = _shift(counted_BT, step), _shift(loss_mask_BT, step)
        overlap_BT = torch.minimum(_shift(on_draft_BTD, step), logits_BTD.softmax(-1)).sum(-1)
        acceptance = (mask_BT * overlap_BT).sum() / mask_BT.sum().clamp(min=1e-6)
        cross_BT = -(_shift(p_BTD, step) * logits_BTD.log_softmax(-1)).sum(-1)
        out["loss"].append(_specforge_loss(run.get("model_kwargs", {}), mask_BT, cross_BT, overlap_BT, acceptance))
        hits_BT = (draft.target_ids(logits_BTD.argmax(-1)) == _shift(best_BT, step)).float()
        out["correct"].append((rows_BT * hits_BT).sum())
        out["denom"].append(loss_mask_BT.sum())
        out["accuracy"].append(out["correct"][-1] / rows_BT.sum().clamp(min=1e-6))
        out["acceptance_rate"].append(acceptance)
    decay = run.get("ploss_decay", 0.8)
    return torch.stack([decay**step * loss for step, loss in enumerate(out["loss"])]).sum(), out


def _specforge_loss(
    options: dict[str, Any], mask_BT: Tensor, cross_BT: Tensor, overlap_BT: Tensor, acceptance: Tensor
) -> Tensor:
    kl = (mask_BT * cross_BT).mean()
    if options.get("lk_loss_type") == "alpha":
        return -overlap_BT.where(mask_BT > 0, 1).log().sum() / mask_BT.sum().clamp(min=1e-6)
    if options.get("lk_loss_type") == "lambda":
        weight: Tensor = options["kl_scale"] * torch.exp(-options["kl_decay"] * acceptance.detach())
        return weight * kl + (1 - weight) * (1 - acceptance)
    return kl


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p.log() - q.log())).sum(-1)


def _overlap(p: Tensor, q: Tensor) -> Tensor:
    return torch.minimum(p, q).sum(-1)


def _lk_hybrid(p: Tensor, q: Tensor) -> Tensor:
    weight = torch.exp(-3 * _overlap(p, q).detach())
    return weight * _kl(p, q) + (1 - weight) * (1 - _overlap(p, q))


_DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl_div": _kl,
    "rkl": lambda p, q: _kl(q, p),
    "jsd": lambda p, q: (_kl(p, (p + q) / 2) + _kl(q, (p + q) / 2)) / 2,
    "ce": lambda p, q: -q.gather(-1, p.argmax(-1, keepdim=True))[..., 0].log(),
    "tv": lambda p, q: 1 - _overlap(p, q),
    "nla": lambda p, q: -_overlap(p, q).log(),
    "lk_hybrid": _lk_hybrid,
}


def _speculators(golden: Golden, run_name: str, run: dict[str, Any]) -> tuple[Tensor, Figures]:
    """Sum over masked rows by their number, the target's softmax over the draft vocabulary.

    Hits accumulate over the steps, and only the first step's mask stays with a row: what the mask of a later step
    leaves out still counts among the hits that the next step is conditioned on.
    """
    config = run["loss_config"]
    weights = json.loads(config) if config.startswith("{") else {config: 1.0}
    mask_BT, targets_BTD = golden.tensors["input.batch.loss_mask"].float(), golden.tensors["input.targets"]
    out: Figures = {name: [] for name in ("loss", "full_acc_sum", "full_acc_total", "cond_acc_sum", "cond_acc_total")}
    right_T = mask_BT[0].bool()
    for step, states in enumerate(golden.run.steps):
        logits_TD, target_TD, mask_T = states["logits"], targets_BTD[0, step:], mask_BT[0, step:]
        logits_TD, right_T = logits_TD[: len(mask_T)], right_T[: len(mask_T)]
        p, q = target_TD.softmax(-1), logits_TD.softmax(-1)
        row_T = torch.stack([weight * _DIVERGENCES[name](p, q) for name, weight in weights.items()]).sum(0)
        decay = run["ttt_step_loss_decay"] ** step
        out["loss"].append((row_T * mask_T).sum() * decay / (mask_T.sum() + 1e-5))
        out["full_acc_total"].append(mask_T.sum())
        out["cond_acc_total"].append(right_T.sum())
        right_T = right_T & (logits_TD.argmax(-1) == target_TD.argmax(-1))
        out["full_acc_sum"].append((right_T * mask_T).sum())
        out["cond_acc_sum"].append((right_T * mask_T).sum())
    return torch.stack(out["loss"]).sum(), out


def _eagle1(golden: Golden, run_name: str, run: dict[str, Any]) -> tuple[Tensor, Figures]:
    """Smooth L1 on the state, a tenth of the cross entropy on the full vocabulary."""
    given, states = golden.tensors, golden.run.steps[0]
    mask_BT = given["input.loss_mask"]
    rows = mask_BT.sum() + 1e-5
    apart_BT = F.smooth_l1_loss(states["hidden"], given["input.target"], reduction="none").mean(-1)
    teacher_BTV = (given["input.target"] @ given["input.target_lm_head.weight"].T).softmax(-1)
    cross_BT = -(teacher_BTV * states["logits"].log_softmax(-1)).sum(-1)
    vloss, ploss = (mask_BT * apart_BT).sum() / rows, (mask_BT * cross_BT).sum() / rows
    return vloss + 0.1 * ploss, {"vloss": [vloss], "ploss": [ploss]}


_KINDS = {"specforge": _specforge, "speculators": _speculators, "eagle1": _eagle1}
