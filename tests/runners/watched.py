"""Trials that write down every step and every evaluation, and may be held in the middle of a rung.

A ``Watched`` path to the store changes the process that opens it: it saves its checkpoint after every step, as it would
after a minute, and says in the trial's log what it does.
"""

import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path, PosixPath
from typing import Any, Self

from runners.training import acceptance, trial
from runners.training.batches import Batch
from runners.training.trainer import StepReport, Trainer
from runners.training.trial import LOG_FILE


class Watched(PosixPath):
    """A store whose trials are watched; one named by a file in ``control`` stops once it has that many tokens."""

    control: Path | None = None

    def held_by(self, control: Path) -> Self:
        """This path, with a folder of holds."""
        self.control = control
        return self

    def __reduce__(self) -> Any:
        return _watch_here, (str(self), str(self.control))


def hold(control: Path, trial_folder: str, tokens: int) -> None:
    """Let a trial stop before the step that follows so many tokens, until ``release``."""
    control.mkdir(exist_ok=True)
    (control / trial_folder).write_text(str(tokens), encoding="utf-8")


def release(control: Path, trial_folder: str) -> None:
    """Let it go on."""
    (control / trial_folder).unlink()


def _watch_here(path: str, control: str) -> Path:
    trial.CHECKPOINT_SECONDS = -1.0
    step, measure = Trainer.train_step, acceptance.measure_acceptance

    def train_step(self: Trainer, batch: Batch) -> StepReport:
        held = Path(control) / Path(sys.stdout.name).parent.name
        while held.exists() and self.progress.tokens >= int(held.read_text(encoding="utf-8")):
            time.sleep(0.05)
        report = step(self, batch)
        print(f"step {report.step}, {report.tokens} tokens")
        return report

    def measure_acceptance(*args: Any, **kwargs: Any) -> Any:
        print("measures")
        return measure(*args, **kwargs)

    Trainer.train_step = train_step  # type: ignore[method-assign]
    vars(trial)["measure_acceptance"] = measure_acceptance
    return Path(path)


@dataclass
class Attempt:
    """One process's work on a (trial, rung): what its part of the log says."""

    rung: int
    seed: int
    where: str
    process: int
    steps: list[int] = field(default_factory=list)
    measured: bool = False
    end: str = ""


_HEAD = re.compile(r"rung (\d+) of \d+, seed (\d+)(?: on (.*))?, process (\d+), \d+ threads")


def attempts(directory: Path) -> list[Attempt]:
    """What was done in a trial's folder, from its log."""
    told: list[Attempt] = []
    log = directory / LOG_FILE
    for line in log.read_text(encoding="utf-8").splitlines() if log.exists() else []:
        if head := _HEAD.fullmatch(line):
            told.append(Attempt(int(head[1]), int(head[2]), head[3] or "", int(head[4])))
        elif line.startswith("step "):
            told[-1].steps.append(int(line.removeprefix("step ").partition(",")[0]))
        elif line == "measures":
            told[-1].measured = True
        elif line.startswith("ended with "):
            told[-1].end = line.removeprefix("ended with ")
    return told


def require_no_step_twice(told: list[Attempt]) -> None:
    """Training went on where its checkpoint was, which is written after every step here; nothing was measured twice."""
    measured = [(one.rung, one.seed) for one in told if one.measured]
    assert len(measured) == len(set(measured))
    for seed in {one.seed for one in told}:
        steps = [step for one in told if one.seed == seed for step in one.steps]
        assert steps == list(range(1, len(steps) + 1))
