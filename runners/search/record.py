"""One architecture of a search: what it is, how far it came, what was measured."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from archspec.cost import draft_params, flops_per_token, trainable_params
from archspec.resolve import ResolvedSpec
from archspec.servable import servable_by
from runners.search.executor import Failure
from runners.training.trial import Measurement
from search_spaces import Candidate

State = Literal["running", "complete", "pruned", "failed"]


@dataclass
class Record:
    """One architecture that is or was trained.

    ``measurements`` are its rungs, ``repeats`` its other seeds at the full budget, ``failed_repeats`` those without a
    result, by seed. A record that waits for its stage to end is ``running``.
    """

    number: int
    candidate: Candidate
    baseline: str | None
    state: State = "running"
    failure: Failure | None = None
    measurements: list[Measurement] = field(default_factory=list)
    repeats: list[Measurement] = field(default_factory=list)
    failed_repeats: dict[int, Failure] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What tables call it: the baseline's name, or one made of the chosen values."""
        return self.baseline or self.candidate.written.name

    @property
    def spec(self) -> ResolvedSpec:
        """The resolved architecture."""
        return self.candidate.spec

    @property
    def final(self) -> list[Measurement]:
        """The last measurement of the search's own seed, then those of other seeds; empty before the first."""
        return [*self.measurements[-1:], *self.repeats]

    @cached_property
    def hash(self) -> str:
        """The candidate's hash; computed once, since every draw compares it with its own."""
        return self.candidate.hash

    @cached_property
    def columns(self) -> dict[str, Any]:
        """What a leaderboard says of the architecture itself; computed once, since leaderboards are written often."""
        return {
            "params": draft_params(self.spec),
            "trainable_params": trainable_params(self.spec),
            "flops_per_token": flops_per_token(self.spec),
            "servable_by": " ".join(servable_by(self.spec)),
        }
