"""An executor that answers from a formula, so that a whole search takes less than a second; and small search files.

It is an ``Executor`` like any other: it writes the trial's metrics where a real trial does, answers a rung that was
measured from its record, and ends tasks in the order in which they were submitted.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from archspec.cost import draft_params
from archspec.resolve import ResolvedSpec
from runners.features.store import FeatureStore
from runners.search.executor import Event, Failure, Finished, Started
from runners.search.run_folder import RunFolder
from runners.search.search_file import SearchFile
from runners.training.acceptance import Acceptance
from runners.training.trial import Measurement, RungTask, read_metrics, write_metrics
from tests.runners.drafts import SETTINGS

K = 3
Answer = Callable[[RungTask], Measurement | Failure]


class ReplayExecutor:
    """Runs ``answer`` on a task; ``submitted`` are the tasks in order, ``most_at_once`` the most that ran together."""

    def __init__(self, answer: Answer, capacity: int = 1) -> None:
        self._answer, self._capacity = answer, capacity
        self._queue: list[RungTask] = []
        self._started: list[RungTask] = []
        self.submitted: list[RungTask] = []
        self.most_at_once = 0
        self.shutdowns = 0

    @property
    def full(self) -> bool:
        """See ``Executor``."""
        return len(self._queue) >= self._capacity

    def fits(self, task: RungTask) -> bool:
        """See ``Executor``."""
        return not self.full

    def refusal(self, task: RungTask) -> Failure | None:
        """See ``Executor``."""
        return None

    def submit(self, task: RungTask) -> None:
        """See ``Executor``."""
        self._queue.append(task)
        self._started.append(task)
        self.submitted.append(task)
        self.most_at_once = max(self.most_at_once, len(self._queue))

    def wait(self, timeout: float) -> Sequence[Event]:
        """See ``Executor``."""
        events: list[Event] = [Started(task) for task in self._started]
        self._started = []
        if not events and self._queue:
            task = self._queue.pop(0)
            events.append(Finished(task, self._run(task)))
        return events

    def shutdown(self) -> None:
        """See ``Executor``."""
        self._queue.clear()
        self._started.clear()
        self.shutdowns += 1

    def _run(self, task: RungTask) -> Measurement | Failure:
        done = read_metrics(task.directory)
        for measurement in done:
            if measurement.rung == task.rung:
                return measurement
        result = self._answer(task)
        if isinstance(result, Measurement):
            write_metrics(task.directory, [*done, result])
        return result


def measured(task: RungTask, length: float, width: float = 0.02) -> Measurement:
    """A measurement of this acceptance length whose figures fit together."""
    alpha = _rate(length - 1)
    per_position = [alpha ** (step + 1) for step in range(K)]
    acceptance = Acceptance(
        length=length,
        low=length - width,
        high=length + width,
        rate=(length - 1) / K,
        conditional=(alpha,) * K,
        per_position=tuple(per_position),
        length_by_k=tuple(1 + sum(per_position[: k + 1]) for k in range(K)),
        cycles=100.0,
        conversations=10,
        response_tokens=1000,
        draft="greedy",
        temperature=0.0,
        top_p=1.0,
        own_text=True,
        proxy="",
        by_category={"chat": {"length": length, "cycles": 100.0, "conversations": 10}},
    )
    return Measurement(
        draft=task.spec.hash,
        dtype="float32",
        rung=task.rung,
        tokens=task.rungs[task.rung],
        seed=task.seed,
        loss=4.0 - length,
        acceptance=acceptance.as_dict(),
        seconds=2.0,
        tokens_per_second=task.rungs[task.rung] / 2,
        peak_memory=1 << 20,
    )


def _rate(accepted: float) -> float:
    """The alpha for which alpha + alpha² + … + alpha^K is ``accepted``, by halving."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle ** (s + 1) for s in range(K)) < accepted else (low, middle)
    return low


def by_formula(task: RungTask) -> Measurement:
    """More layers and fused embeddings accept more; training helps, a seed moves a hundredth."""
    spec = task.spec
    worth = 0.1 * len(spec.layers) + 0.03 * sum(layer.fusion == "concat" for layer in spec.layers)
    trained = 1 - 0.5 ** (1 + task.rung if len(task.rungs) > 1 else 3)
    return measured(task, 1.2 + worth * trained + 0.01 * (task.seed % 3) + draft_params(spec) * 1e-9)


SPACE: dict[str, Any] = {
    "base": "eagle3",
    "choices": {
        "depth": {"low": 1, "high": 3},
        "layers.0.fusion": ["concat", "project", "add"],
        "layers.rest.fusion": ["none", "concat"],
    },
}  # 3 + 6 + 6 drafts


class ToyTimes:
    """Times by formulas: a draft step takes a millisecond for every 100,000 parameters, a target step about 10."""

    source = "toy times"

    def target_ms(self, rows: int) -> float:
        """See ``Times``."""
        return 10 + 0.1 * rows

    def draft_ms(self, spec: ResolvedSpec) -> float:
        """See ``Times``."""
        return draft_params(spec) / 100e3

    def cycle_ms(self, spec: ResolvedSpec) -> float:
        """See ``Times``."""
        return 0.5

    def draft_source(self, spec: ResolvedSpec) -> str:
        """See ``Times``."""
        return "measured"


def search_file(store: FeatureStore, budget: dict[str, Any] | None = None, **changes: Any) -> SearchFile:
    """A search on the tiny target with three rungs, unless there are stages; the baselines are in the space."""
    spent = {} if "stages" in changes else {"trials": 8, "rungs": [100, 200, 400]}
    return SearchFile.model_validate(
        {
            "target": {"model": "tiny"},
            "data": {"conversations": ["own.jsonl"], "holdout": 0.3},
            "features": str(store.path),
            "space": SPACE,
            "fixed": {"inputs.aux_layers": [1, 2, 3], "head.vocab_size": "full"},
            "baselines": ["eagle3", "eagle3-deep-fused-once"],
            "train": SETTINGS.model_dump(),
            "objective": {"draft_length": K},
            "budget": {**spent, **(budget or {})},
            "sampler": {"startup_trials": 3},
            **changes,
        }
    )


def new_folder(path: Path, file: SearchFile) -> RunFolder:
    """A run folder that a search may begin in."""
    return RunFolder.begin(path, file)
