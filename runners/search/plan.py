"""How much a search may spend, and on whom: asynchronous rungs, or a funnel of stages; and what both come to."""

import itertools
from dataclasses import dataclass
from typing import Annotated, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from archspec.schema import Closed, field_error


class Budget(Closed):
    """How much may be spent. ``trials`` counts architectures that are trained, baselines included.

    ``rungs`` are tokens per trial; after each the weaker ones stop, baselines never. The ``finalists`` best are trained
    with ``seeds`` seeds in all. No new trial begins after ``hours``; one rung may take ``rung_minutes``. A search with
    ``stages`` says there what ``trials``, ``rungs``, ``finalists`` and ``seeds`` say here.
    """

    trials: PositiveInt | None = None
    rungs: tuple[PositiveInt, ...] = ()
    reduction: Annotated[int, Field(ge=2)] = 3
    seeds: PositiveInt = 1
    finalists: PositiveInt = 1
    hours: PositiveFloat | None = None
    rung_minutes: PositiveFloat | None = None
    retries: NonNegativeInt = 1
    max_failures_in_a_row: PositiveInt = 5

    @model_validator(mode="after")
    def _rungs_rise(self) -> Self:
        if list(self.rungs) != sorted(set(self.rungs)):
            raise ValueError(
                f"rungs must be rising token counts, for example [20e3, 60e3, 180e3], but are {list(self.rungs)}"
            )
        return self


class Stage(Closed):
    """One stage of a funnel: so many ``candidates`` train on to ``tokens``; the last may use several ``seeds``."""

    candidates: PositiveInt
    tokens: PositiveInt
    seeds: PositiveInt = 1


@dataclass(frozen=True)
class Plan:
    """What rungs and stages come to.

    ``rungs`` are tokens. ``keep[r]`` is how many candidates a funnel trains to rung r; None where weak ones are stopped
    one by one, without waiting for others.
    """

    trials: int
    rungs: tuple[int, ...]
    seeds: int
    finalists: int
    keep: tuple[int, ...] | None

    @property
    def stage_tokens(self) -> int:
        """Tokens that a funnel trains in all with the search's own seed, were nothing to fail."""
        steps = zip(self.keep or (), self.rungs, (0, *self.rungs), strict=False)
        return sum(candidates * (tokens - before) for candidates, tokens, before in steps)

    @classmethod
    def of(cls, budget: Budget, stages: tuple[Stage, ...]) -> Self:
        """From a search file's settings, which ``check_plan`` has seen."""
        if not stages:
            assert budget.trials is not None
            return cls(budget.trials, budget.rungs, budget.seeds, budget.finalists, None)
        keep = tuple(stage.candidates for stage in stages)
        return cls(keep[0], tuple(stage.tokens for stage in stages), stages[-1].seeds, keep[-1], keep)


def check_plan(budget: Budget, stages: tuple[Stage, ...]) -> None:
    """Make sure that exactly one of ``budget`` and ``stages`` says how many candidates train for how long.

    Raises:
        PydanticCustomError: both or neither do, or the stages do not narrow while their tokens rise.
    """
    told = {"trials", "rungs", "finalists", "seeds", "reduction"} & budget.model_fields_set
    if not stages:
        missing = [name for name in ("trials", "rungs") if not getattr(budget, name)]
        if missing:
            rule = f"{missing[0]} is missing; give trials and rungs here, or stages beside budget"
            raise field_error(f"budget.{missing[0]}", rule)
        return
    doubled = {name for name in told if getattr(budget, name) != Budget.model_fields[name].default}
    if doubled:
        name = min(doubled)
        raise field_error(f"budget.{name}", f"stages say that already; leave {name} out")
    for index, (before, stage) in enumerate(itertools.pairwise(stages), 1):
        if stage.candidates > before.candidates:
            rule = f"{stage.candidates} is more than the {before.candidates} of the stage before; a funnel narrows"
            raise field_error(f"stages.{index}.candidates", rule)
        if stage.tokens <= before.tokens:
            rule = f"{stage.tokens:,} is not above the {before.tokens:,} of the stage before; a candidate trains on"
            raise field_error(f"stages.{index}.tokens", rule)
    for index, stage in enumerate(stages[:-1]):
        if stage.seeds > 1:
            rule = "only the last stage repeats its candidates with other seeds; leave seeds out here"
            raise field_error(f"stages.{index}.seeds", rule)
