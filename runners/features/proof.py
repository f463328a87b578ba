"""Proof that a dump's states are this target's, of which layers, and on which side of the final norm.

Nothing in a dump says so, and a shift by one layer trains without a complaint. So the target reads the beginnings of a
few documents, and every stored state is held against every layer's. A state is a layer's if that layer is the nearest
and the median row differs by no more than rounding explains, |a - b| / |b|.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from archspec.errors import ArchspecError
from runners.features.dumps import FLOATS, Dumped
from runners.features.target import Target

POSITIONS = 64
STATE_TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 2e-2}
LOW_AGREEMENT = 0.9  # share of greedy own text below which it is not what the target says now
LOGIT_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 2e-2}
_NORMED = -1

LastState = Literal["pre_norm", "post_norm"]


@dataclass(frozen=True)
class Proof:
    """What a dump holds: its aux layers in file order, the side of its last states, and how well logits come back."""

    layer_ids: tuple[int, ...]
    last_state: LastState
    logits_error: float


@torch.no_grad()
def prove(target: Target, samples: Sequence[tuple[Path, Dumped]], layer_ids: Sequence[int]) -> Proof:
    """Find out which layers the samples hold, and hold that against ``layer_ids``, which the user named.

    Raises:
        ArchspecError: a state is no layer's of this target, the layers are others than named (the message says which),
            or logits recomputed from the last state differ from the target's.
    """
    path, first = samples[0]
    errors = torch.cat([_errors(target, dumped) for _, dumped in samples], dim=-1).median(-1).values  # [slots, layers]
    tolerance = STATE_TOLERANCE[_coarser(target, first.last)]
    *aux, last = (_nearest(row, tolerance) for row in errors)
    for slot, (found, error) in enumerate(aux):
        if found is None or found == _NORMED:
            nearest = _name(int(errors[slot].argmin()), target)
            raise ArchspecError(
                f"{path}: aux state {slot + 1} of {len(aux)} is no layer's output of target {target.path}: the "
                f"nearest is {nearest}, off by {error:.1%} (at most {tolerance:.1%}); the dump was made from another "
                "target, or with other tokens"
            )
    found_ids = tuple(found for found, _ in aux if found is not None)
    if set(found_ids) != set(layer_ids):
        ids, named = ", ".join(map(str, found_ids)), ", ".join(map(str, layer_ids))
        way_out = f"use --layers {ids.replace(' ', '')}"
        raise ArchspecError(f"{path}: the aux states are those of layers {ids}, not {named}; {way_out}")
    found, error = last
    if found not in (_NORMED, target.facts.num_layers):
        nearest = _name(int(errors[-1].argmin()), target)
        raise ArchspecError(
            f"{path}: the last state is not that of target {target.path}, neither before nor after its final "
            f"norm: the nearest is {nearest}, off by {error:.1%} (at most {tolerance:.1%})"
        )
    last_state: LastState = "post_norm" if found == _NORMED else "pre_norm"
    return Proof(found_ids, last_state, _logits_error(target, path, first, last_state))


@torch.no_grad()
def greedy_agreement(target: Target, samples: Sequence[tuple[Dumped, Tensor]], last_state: LastState) -> float | None:
    """Share of response tokens that are the target's argmax; the masks [T] beside the samples mark them."""
    weights = replace(target.weights, reads_normed=last_state == "post_norm")
    same = seen = 0
    for dumped, mask in samples:
        positions = mask.nonzero()[:, 0]
        for chunk in torch.split(positions[positions > 0], POSITIONS):  # never a whole document's logits
            argmax = weights.logits(dumped.last[chunk - 1].to(target.device)).argmax(-1).cpu()
            same += int((argmax == dumped.tokens[chunk]).sum())
            seen += len(chunk)
    return same / seen if seen else None


def _errors(target: Target, dumped: Dumped) -> Tensor:
    """[m + 1 states, n + 2 candidates, P rows]: each stored state against layers 0 … n and the normed last state."""
    ids = dumped.tokens[:POSITIONS].to(target.device, torch.int64)
    layers = target.facts.num_layers
    states = target.states(ids[None], range(layers + 1))
    normed = target.weights.normed(states[layers][0])
    real = torch.stack([*(states[layer][0].float() for layer in range(layers + 1)), normed.float()])
    stored = torch.cat((dumped.aux[:POSITIONS], dumped.last[:POSITIONS, None]), dim=1).to(target.device).float()
    rows = [torch.linalg.vector_norm(stored[:, slot] - real, dim=-1) for slot in range(stored.shape[1])]
    off: Tensor = torch.stack(rows) / torch.linalg.vector_norm(real, dim=-1).clamp_min(1e-12)
    return off.cpu()


def _nearest(errors: Tensor, tolerance: float) -> tuple[int | None, float]:
    """The candidate that a state is, if any, and how far the nearest one is off."""
    best, layers = int(errors.argmin()), len(errors) - 2
    error = float(errors[best])
    return (None if not error <= tolerance else _NORMED if best > layers else best), error


def _name(candidate: int, target: Target) -> str:
    after = "the last state after the final norm"
    return after if candidate > target.facts.num_layers else f"layer {candidate}"


def _logits_error(target: Target, path: Path, dumped: Dumped, last_state: LastState) -> float:
    ids = dumped.tokens[None, :POSITIONS].to(target.device, torch.int64)
    own = target.model(input_ids=ids, use_cache=False).logits[0].float()
    weights = replace(target.weights, reads_normed=last_state == "post_norm")
    ours = weights.logits(dumped.last[:POSITIONS].to(target.device)).float()
    error = float((own - ours).abs().max() / own.abs().max().clamp_min(1e-6))
    tolerance = LOGIT_TOLERANCE[_coarser(target, dumped.last)]
    if not error <= tolerance:
        raise ArchspecError(
            f"{path}: logits recomputed from its last states differ from those of target {target.path} by {error:.1e} "
            f"of their size (at most {tolerance:.0e}); the states are not the right ones"
        )
    return error


def _coarser(target: Target, stored: Tensor) -> str:
    return FLOATS[max((target.dtype, stored.dtype), key=lambda dtype: torch.finfo(dtype).eps)]
