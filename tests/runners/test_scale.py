"""What a rung costs the driver does not grow with the number of trials; counted in calls, which no load disturbs."""

import csv
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from rich.console import Console

from runners.display import live
from runners.display.live import LiveTable, PlainLines, Watching
from runners.features.store import FeatureStore
from runners.search.driver import Search
from runners.search.executor import Event, Finished, Progress, Started
from runners.training.trainer import StepReport
from tests.runners.replay import ReplayExecutor, by_formula, new_folder, search_file

TRIALS, WINDOW = 40, 10
LARGE_SPACE = {
    "base": "eagle3",
    "choices": {"depth": {"low": 1, "high": 3}, "train.learning_rate": {"low": 1e-4, "high": 1e-2}},
}
BY_SPEC = {"canonical": 10, "verdicts": 1}  # slow, and follows from the spec alone: the most calls for each trial


class Counting:
    """Counts this thread's calls of Python functions; ``at`` is the count when each rung had ended, with its trials."""

    def __init__(self, inner: Watching) -> None:
        self.calls = 0
        self.named: Counter[str] = Counter()
        self.at: list[tuple[int, int]] = []
        self._inner = inner

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call":
            self.calls += 1
            self.named[frame.f_code.co_name] += frame.f_code.co_name in BY_SPEC

    def began(self, search: Search) -> None:
        """See ``Watcher``."""
        self._inner.began(search)

    def changed(self, search: Search, event: Event) -> None:
        """See ``Watcher``."""
        self._inner.changed(search, event)
        if isinstance(event, Finished):
            self.at.append((len(search.study.records), self.calls))

    def each(self, low: int, high: int) -> float:
        """Calls for each rung that ended while there were ``low`` to ``high`` trials."""
        counts = [calls for trials, calls in self.at if low <= trials <= high]
        return (counts[-1] - counts[0]) / (len(counts) - 1)


def test_a_rung_costs_the_driver_no_more_after_many_trials(
    tiny_store: FeatureStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Optuna's samplers, which look at all trials, are not asked here."""
    monkeypatch.setattr(live, "FEW", 5)
    file = search_file(tiny_store, {"trials": TRIALS}, space=LARGE_SPACE, sampler={"kind": "random"})
    counting = Counting(LiveTable(Console(quiet=True)))
    search = Search(new_folder(tmp_path / "run", file), file, tiny_store, ReplayExecutor(by_formula), counting)
    sys.setprofile(counting)
    try:
        search.execute()
    finally:
        sys.setprofile(None)
    assert len(search.study.records) == TRIALS
    early, late = counting.each(WINDOW, 2 * WINDOW), counting.each(TRIALS - WINDOW, TRIALS)
    assert late < 1.3 * early
    each = {name: counting.named[name] / TRIALS for name in BY_SPEC}
    assert all(0 < each[name] <= most for name, most in BY_SPEC.items()), each


def test_many_architectures_are_written_now_and_then_and_none_is_forgotten(
    tiny_store: FeatureStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("runners.display.live.time.monotonic", lambda: now[0])
    monkeypatch.setattr(live, "FEW", 1)
    file = search_file(tiny_store)
    watcher = PlainLines(Console(quiet=True))
    search = Search(new_folder(tmp_path / "run", file), file, tiny_store, ReplayExecutor(by_formula), watcher)

    def rungs() -> list[str]:
        with search.folder.leaderboard.open(encoding="utf-8") as lines:
            return [row["rungs"] for row in csv.DictReader(lines)]

    def end_a_rung(number: int) -> None:
        task = search._task(search.study.records[number], 0)
        watcher.changed(search, Started(task))
        measurement = by_formula(task)
        search.study.report(search.study.records[number], measurement)
        watcher.changed(search, Finished(task, measurement))

    search.study.draw()
    end_a_rung(0)
    assert rungs() == ["1"]  # one is few: at once
    search.study.draw()
    end_a_rung(1)
    assert rungs() == ["1"]
    now[0] += live.PROGRESS_SECONDS + 1
    report = StepReport(1, 50, 1e-3, 2.0, (0.1,), 1.0)
    watcher.changed(search, Progress(search._task(search.study.records[0], 1), report))
    assert rungs() == ["1", "1"]
