"""What the search asks of a runner: take rung tasks and say how they went. Runners differ in nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from runners.training.trainer import StepReport
from runners.training.trial import Measurement, RungTask

FailureKind = Literal["diverged", "out_of_memory", "timed_out", "crashed", "error", "cancelled"]


@dataclass(frozen=True)
class Failure:
    """Why a task has no measurement. ``retry`` says whether its checkpoint is sound and running it again may help."""

    kind: FailureKind
    reason: str
    retry: bool = False


@dataclass(frozen=True)
class Started:
    """A task's process is up; ``where`` names its node and device, None on this machine."""

    task: RungTask
    where: str | None = None


@dataclass(frozen=True)
class Progress:
    """A task trained another while."""

    task: RungTask
    report: StepReport


@dataclass(frozen=True)
class Finished:
    """A task is over, one way or the other."""

    task: RungTask
    result: Measurement | Failure


Event = Started | Progress | Finished


class Executor(Protocol):
    """Runs rung tasks. The search submits only what ``fits``, so that no submitted task waits for another.

    Tasks may need different amounts: one may fit where another does not.
    """

    @property
    def full(self) -> bool:
        """Whether no room is left now, so that drawing another candidate can wait."""
        ...

    def fits(self, task: RungTask) -> bool:
        """Whether ``task`` could begin now."""
        ...

    def refusal(self, task: RungTask) -> Failure | None:
        """Why ``task`` can never begin, however long one waits; None if it can."""
        ...

    def submit(self, task: RungTask) -> None:
        """Begin a task that ``fits``; one ``Started`` and one ``Finished`` event will follow."""
        ...

    def wait(self, timeout: float) -> Sequence[Event]:
        """Events since the last call, waiting up to ``timeout`` seconds for the first."""
        ...

    def shutdown(self) -> None:
        """Stop whatever runs; its checkpoints stay."""
        ...
