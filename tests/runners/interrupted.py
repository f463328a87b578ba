"""Searches from a formula that are stopped at an event or at a write of the journal, and what they come to."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from optuna.storages.journal import JournalFileBackend

from archspec.speedup import Times
from runners.features.store import FeatureStore
from runners.search.driver import Search
from runners.search.executor import Event, Failure
from runners.search.leaderboard import leaderboard_rows
from runners.search.run_folder import RunFolder
from runners.search.search_file import SearchFile
from runners.training.trial import Measurement, RungTask
from tests.runners.replay import Answer, ReplayExecutor, by_formula, new_folder


class Interrupted(BaseException):
    """What a kill looks like from inside: nothing after it runs."""


class Watching:
    """A watcher that keeps the events, and stops the search at the ``at``-th."""

    def __init__(self, at: int | None = None) -> None:
        self.events: list[Event] = []
        self._at = at

    def began(self, search: Search) -> None:
        """See ``Watcher``."""

    def changed(self, search: Search, event: Event) -> None:
        """See ``Watcher``."""
        self.events.append(event)
        if len(self.events) == self._at:
            raise Interrupted


class Runs:
    """Searches of one file, each in a folder of its own unless it goes on with another's.

    ``trained`` are the folder and rung of everything that was answered, in order.
    """

    def __init__(self, path: Path, store: FeatureStore, file: SearchFile, times: Times | None = None) -> None:
        self._path, self._store, self.file, self._times = path, store, file, times
        self.trained: list[tuple[Path, int]] = []

    def search(
        self,
        name: str = "run",
        *,
        answer: Answer = by_formula,
        stop_at: int | None = None,
        capacity: int = 1,
        file: SearchFile | None = None,
    ) -> Search:
        """A search that is new or goes on in the folder ``name``."""
        path, file = self._path / name, file or self.file
        folder = RunFolder(path) if path.exists() else new_folder(path, file)

        def counted(task: RungTask) -> Measurement | Failure:
            self.trained.append((task.directory, task.rung))
            return answer(task)

        return Search(folder, file, self._store, ReplayExecutor(counted, capacity), Watching(stop_at), self._times)

    def stopped(self, name: str, stop_at: int | None = None, **how: Any) -> bool:
        """Whether a search was stopped before its end, by its ``stop_at``-th event or by ``stopping_at_write``."""
        try:
            self.search(name, stop_at=stop_at, **how).execute()
        except Interrupted:
            return True
        return False

    def ends_like(self, whole: Search, name: str) -> None:
        """Go on in the folder ``name``: to the end of ``whole``, without training anything twice."""
        search = self.search(name)
        search.execute()
        assert len(set(self.trained)) == len(self.trained)
        assert outcome(search) == outcome(whole)
        assert search.study.turned_away == whole.study.turned_away


def submitted(search: Search) -> list[RungTask]:
    """What was sent off, in order."""
    assert isinstance(search.executor, ReplayExecutor)
    return search.executor.submitted


def events(search: Search) -> list[Event]:
    """What the watcher saw, in order."""
    assert isinstance(search._watcher, Watching)
    return search._watcher.events


def outcome(search: Search) -> list[dict[str, Any]]:
    """The leaderboard without trial numbers, which a draw that was killed uses up."""
    return [{name: value for name, value in row.items() if name != "trial"} for row in leaderboard_rows(search)]


@contextmanager
def stopping_at_write(monkeypatch: pytest.MonkeyPatch, at: int) -> Iterator[list[int]]:
    """Stop after the ``at``-th write of a study's journal; yields how often it was written."""
    append, writes = JournalFileBackend.append_logs, [0]

    def stopping(self: JournalFileBackend, logs: list[dict[str, Any]]) -> None:
        append(self, logs)
        writes[0] += 1
        if writes[0] == at:
            raise Interrupted

    with monkeypatch.context() as patched:
        patched.setattr(JournalFileBackend, "append_logs", stopping)
        yield writes
