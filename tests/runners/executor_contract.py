"""What every executor promises the search. A test module runs it by naming a class with ``make``."""

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from runners.features.store import FeatureStore
from runners.search.executor import Event, Executor, Failure, Finished, Progress, Started
from runners.training.trial import Measurement, RungTask, read_metrics
from tests.runners.tasks import Exits, Hangs, IsKilled, Raises, RunsOutOfMemory, rung_task

LONG = (10**9,)  # rungs that a test never sees the end of


def events_until_finished(executor: Executor, count: int = 1, seconds: float = 60) -> list[Event]:
    """Events until ``count`` tasks are over."""
    events: list[Event] = []
    limit = time.monotonic() + seconds
    while sum(isinstance(event, Finished) for event in events) < count:
        assert time.monotonic() < limit, f"only {events} in {seconds} s"
        events += executor.wait(5)
    return events


def outcome(executor: Executor, task: RungTask) -> Measurement | Failure:
    """Submit a task and wait for its end, which must come once, after its start."""
    executor.submit(task)
    events = events_until_finished(executor)
    assert [type(event) for event in events if not isinstance(event, Progress)] == [Started, Finished]
    assert all(event.task == task for event in events)
    assert isinstance(events[-1], Finished)
    return events[-1].result


def failure(executor: Executor, task: RungTask) -> Failure:
    result = outcome(executor, task)
    assert isinstance(result, Failure)
    return result


class ExecutorContract:
    """Subclass with ``make``; one executor serves the failures, so that each shows that it goes on after the last."""

    def make(self, concurrent: int = 1, task_seconds: float | None = None) -> Executor:
        """A new executor of this kind."""
        raise NotImplementedError

    @pytest.fixture
    def executor(self) -> Iterator[Executor]:
        executor = self.make()
        yield executor
        executor.shutdown()

    def test_a_task_is_measured_and_leaves_its_files(
        self, executor: Executor, tiny_store: FeatureStore, tmp_path: Path
    ) -> None:
        task = rung_task(tiny_store, tmp_path / "0007")
        result = outcome(executor, task)
        assert isinstance(result, Measurement)
        assert read_metrics(task.directory) == [result]
        assert "seed 0" in (task.directory / "log.txt").read_text(encoding="utf-8")
        assert list(executor.wait(0)) == []

    def test_the_kinds_of_failure_and_life_after_them(
        self, executor: Executor, tiny_store: FeatureStore, tmp_path: Path
    ) -> None:
        unforeseen = failure(executor, rung_task(tiny_store, tmp_path / "a", features=Raises("x")))
        assert (unforeseen.kind, unforeseen.retry) == ("error", False)
        assert unforeseen.reason == "RuntimeError: the disk is on fire"
        assert "Traceback" in (tmp_path / "a" / "log.txt").read_text(encoding="utf-8")

        told = failure(executor, rung_task(tiny_store, tmp_path / "b", features=tmp_path / "nowhere"))
        assert (told.kind, told.retry) == ("error", False)
        assert told.reason.startswith(f"{tmp_path / 'nowhere'}: holds no feature store")

        diverged = failure(
            executor, rung_task(tiny_store, tmp_path / "c", train={"learning_rate": 1e30, "warmup": 0.0})
        )
        assert (diverged.kind, diverged.retry) == ("diverged", False)
        assert "gradient norm" in diverged.reason

        memory = failure(executor, rung_task(tiny_store, tmp_path / "d", features=RunsOutOfMemory("x")))
        assert (memory.kind, memory.retry, memory.reason) == ("out_of_memory", False, "out of memory")

        killed = failure(executor, rung_task(tiny_store, tmp_path / "e", features=IsKilled("x")))
        assert (killed.kind, killed.retry) == ("crashed", True)
        assert "SIGKILL" in killed.reason

        gone = failure(executor, rung_task(tiny_store, tmp_path / "f", features=Exits("x")))
        assert (gone.kind, gone.retry) == ("crashed", True)
        assert "without a result" in gone.reason

        assert isinstance(outcome(executor, rung_task(tiny_store, tmp_path / "g")), Measurement)

    @pytest.mark.parametrize("busy", [True, False], ids=["training", "hanging"])
    def test_a_task_past_its_time_is_stopped(self, tiny_store: FeatureStore, tmp_path: Path, busy: bool) -> None:
        """However long one waits for events, and however often the task itself reports."""
        executor = self.make(task_seconds=2)
        features = tiny_store.path if busy else Hangs("x")
        try:
            start = time.monotonic()
            executor.submit(rung_task(tiny_store, tmp_path / "long", features=features, rungs=LONG))
            events: list[Event] = []
            while not any(isinstance(event, Finished) for event in events):
                assert time.monotonic() - start < 20
                events += executor.wait(30)
            assert any(isinstance(event, Progress) for event in events) == busy
            assert isinstance(events[-1], Finished)
            assert events[-1].result == Failure("timed_out", "took longer than 2 s")
            short = rung_task(tiny_store, tmp_path / "short", number=1, rungs=(1,))
            assert isinstance(outcome(executor, short), Measurement)
        finally:
            executor.shutdown()

    def test_tasks_run_at_once_up_to_the_capacity_and_end_on_their_own(
        self, tiny_store: FeatureStore, tmp_path: Path
    ) -> None:
        executor = self.make(concurrent=2)
        try:
            slow = rung_task(tiny_store, tmp_path / "0", number=0, rungs=LONG)
            assert executor.refusal(slow) is None
            executor.submit(slow)
            for number, features in enumerate((tiny_store.path, Raises("x"), tiny_store.path), 1):
                task = rung_task(tiny_store, tmp_path / str(number), number=number, features=features, rungs=(1,))
                assert not executor.full
                assert executor.fits(task)
                executor.submit(task)
                assert executor.full
                assert not executor.fits(task)
                (end,) = [event for event in events_until_finished(executor) if isinstance(event, Finished)]
                assert end.task == task
                assert isinstance(end.result, Failure) == isinstance(features, Raises)
        finally:
            executor.shutdown()

    def test_progress_is_told_while_a_task_trains(
        self, executor: Executor, tiny_store: FeatureStore, tmp_path: Path
    ) -> None:
        executor.submit(rung_task(tiny_store, tmp_path / "0", rungs=LONG))
        seen: list[Progress] = []
        limit = time.monotonic() + 30
        while len(seen) < 2:
            assert time.monotonic() < limit
            seen += [event for event in executor.wait(5) if isinstance(event, Progress)]
        first, second = seen[0].report, seen[1].report
        assert 0 < first.step < second.step
        assert first.tokens < second.tokens

    def test_a_wait_without_events_ends_in_time(
        self, executor: Executor, tiny_store: FeatureStore, tmp_path: Path
    ) -> None:
        start = time.monotonic()
        assert list(executor.wait(0.2)) == []
        assert time.monotonic() - start < 2
        executor.submit(rung_task(tiny_store, tmp_path / "0", features=Hangs("x")))
        assert [type(event) for event in executor.wait(30)] == [Started]
        start = time.monotonic()
        assert list(executor.wait(0.2)) == []
        assert time.monotonic() - start < 2

    def test_shutdown_stops_what_runs_and_leaves_its_checkpoint_folder(
        self, tiny_store: FeatureStore, tmp_path: Path
    ) -> None:
        executor = self.make(concurrent=2)
        for number, features in enumerate((Hangs("x"), tiny_store.path)):
            task = rung_task(tiny_store, tmp_path / str(number), number=number, features=features, rungs=LONG)
            executor.submit(task)
        pids = [process_of(tmp_path / str(number)) for number in range(2)]
        executor.shutdown()
        limit = time.monotonic() + 5  # what runs on other machines ends a moment after one has told it to
        while any(map(alive, pids)):
            assert time.monotonic() < limit
            time.sleep(0.02)
        assert list(executor.wait(0)) == []
        executor.shutdown()  # a second time is nothing


def alive(pid: int) -> bool:
    """Whether a process runs; one that is dead but not yet buried by its parent does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_for_end(pid: int, seconds: float = 5.0) -> None:
    """Wait until a process is gone, which must be soon."""
    limit = time.monotonic() + seconds
    while alive(pid):
        assert time.monotonic() < limit, f"process {pid} goes on"
        time.sleep(0.05)


def process_of(directory: Path) -> int:
    """The process that runs a task, from the first line of its log."""
    limit = time.monotonic() + 30
    log = directory / "log.txt"
    while time.monotonic() < limit:
        words = log.read_text(encoding="utf-8").split() if log.exists() else []
        if "process" in words and words[-1] == "threads":
            return int(words[words.index("process") + 1].rstrip(","))
        time.sleep(0.05)
    raise AssertionError(f"{log} names no process")
