"""Whole cycles of the real decoding loop, timed from outside: what they cost beside forwards and draft steps."""

import itertools
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from archspec.modules import Draft
from runners.clock import now
from runners.features.target import Target
from runners.training.decoding import decode_speculative

CYCLES = 6


@dataclass(frozen=True)
class Mark:
    """Something that began or ended, and when, in seconds."""

    what: str
    when: float


class WatchedTarget(Target):
    """A target that marks when its forwards begin and its logits are there, and that never ends a text."""

    def __init__(self, target: Target, marks: list[Mark]) -> None:
        self.__dict__.update(target.__dict__)
        self.__dict__["eos_token_ids"] = frozenset()
        self.marks = marks

    def states(
        self,
        input_ids_BT: Tensor,
        layer_ids: Sequence[int],
        attention_mask_BT: Tensor | None = None,
        past_key_values: Any = None,
        position_ids: Tensor | None = None,
    ) -> dict[int, Tensor]:
        """See ``Target.states``."""
        self.marks.append(Mark("verify", now()))
        return super().states(input_ids_BT, layer_ids, attention_mask_BT, past_key_values, position_ids)

    def logits(self, last_BTH: Tensor) -> Tensor:
        """See ``Target.logits``."""
        logits = super().logits(last_BTH)
        self.marks.append(Mark("verified", now()))
        return logits


@contextmanager
def watched(draft: Draft, marks: list[Mark]) -> Iterator[None]:
    """Mark when each draft step begins, and when its logits are there."""

    def begins(*_: object) -> None:
        marks.append(Mark("step", now()))

    def ends(*_: object) -> None:
        marks.append(Mark("stepped", now()))

    hooks = [draft.register_forward_pre_hook(begins), draft.lm_head.register_forward_hook(ends)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def fixed_cost(target: Target, draft: Draft, prompt: Sequence[int], draft_length: int) -> list[float]:
    """Milliseconds that some cycles of ``decode_speculative`` after ``prompt`` cost beside forwards and draft steps.

    A cycle goes from one verification to the next. It costs more than its verification and its chain of draft steps, by
    the choice of what is accepted and the projection of the aux states; and its first draft step more than the others,
    since the target has driven the draft's weights from the processor's caches. The first cycle, whose draft reads the
    whole prompt, is not among them. ``draft_length`` must be at least 2.
    """
    marks: list[Mark] = []
    with watched(draft, marks):
        decode_speculative(WatchedTarget(target, marks), draft, prompt, 1 + CYCLES, draft_length)
    starts = [i for i, mark in enumerate(marks) if mark.what == "verify"][1:]
    return [_beside(marks[start : end + 1]) for start, end in itertools.pairwise(starts)]


def _beside(cycle: Sequence[Mark]) -> float:
    """One cycle's: verify, verified, then step and stepped by turns, then the next verify."""
    verified = next(mark.when for mark in cycle if mark.what == "verified")
    begins, ends = ([mark.when for mark in cycle if mark.what == what] for what in ("step", "stepped"))
    steps = [end - begin for begin, end in zip(begins, ends, strict=True)]
    outside = (cycle[-1].when - ends[-1]) + (begins[0] - verified)
    return (outside + steps[0] - statistics.median(steps[1:])) * 1e3
