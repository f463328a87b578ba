"""How much faster a target is with a draft than without: acceptance and times brought together. No torch.

``speedup(k) = L(k) * T(1) / (T(k + 1) + k * T_draft + T_0)``, with L(k) the acceptance length at k drafted tokens a
cycle, T(m) the target's time for m tokens a sequence, T_draft one draft step with its head, and T_0 what a cycle costs
beside (Leviathan et al., arXiv 2211.17192, theorem 3.8, with measured times in place of a cost ratio, and a fixed
cost).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from archspec.errors import ArchspecError
from archspec.resolve import ResolvedSpec


class Times(Protocol):
    """Milliseconds of the parts of a cycle, at one batch size and context length, for all its sequences together."""

    @property
    def source(self) -> str:
        """Where the figures come from, for tables: a measured profile or a roofline, with hardware, batch, context."""
        ...

    def target_ms(self, rows: int) -> float:
        """T(m): the target's forward and head for ``rows`` = m tokens of every sequence.

        Raises:
            ArchspecError: nothing is known for so many rows.
        """
        ...

    def draft_ms(self, spec: ResolvedSpec) -> float:
        """T_draft: one draft step with the head and the choice of a token."""
        ...

    def cycle_ms(self, spec: ResolvedSpec) -> float:
        """T_0: what a cycle costs beside target and draft steps, such as the projection of the aux states."""
        ...

    def draft_source(self, spec: ResolvedSpec) -> str:
        """How ``draft_ms`` of this draft was found: ``measured``, ``fitted``, ``scaled`` or ``roofline``."""
        ...


@dataclass(frozen=True)
class Speedup:
    """A draft's predicted speed-up at its best k, and at every other k of the range, with what it rests on.

    ``by_k`` maps k to the speed-up there; ``draft_ms`` is one draft step in milliseconds.
    """

    value: float
    k: int
    by_k: dict[int, float]
    draft_ms: float
    draft_source: str


def speedup(length_by_k: Sequence[float], spec: ResolvedSpec, times: Times, draft_lengths: range) -> Speedup:
    """The speed-up of ``spec`` with acceptance lengths ``length_by_k`` (entry k - 1 for k drafted tokens).

    Of equally fast k the smallest is taken.

    Raises:
        ArchspecError: the range is empty, or reaches beyond what was measured.
    """
    if not draft_lengths or draft_lengths[0] < 1:
        raise ArchspecError(f"draft_lengths: {draft_lengths} holds no number of draft tokens; use for example [1, 8]")
    if draft_lengths[-1] > len(length_by_k):
        rule = f"acceptance was measured for 1 to {len(length_by_k)} draft tokens"
        raise ArchspecError(f"draft_lengths: {draft_lengths[-1]} is beyond what is known: {rule}")
    step, fixed = times.draft_ms(spec), times.cycle_ms(spec)
    alone = times.target_ms(1)
    by_k = {k: length_by_k[k - 1] * alone / (times.target_ms(k + 1) + k * step + fixed) for k in draft_lengths}
    best = max(by_k, key=lambda k: (by_k[k], -k))
    return Speedup(by_k[best], best, by_k, step, times.draft_source(spec))
