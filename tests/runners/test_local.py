"""The local runner keeps the executors' contract, and is one process for each task."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from runners.features.store import FeatureStore
from runners.search.executor import Executor, Finished
from runners.search.local import LocalExecutor
from runners.training.trial import Measurement
from tests.runners.executor_contract import ExecutorContract, events_until_finished, process_of
from tests.runners.tasks import Hangs, rung_task


class TestLocalExecutor(ExecutorContract):
    def make(self, concurrent: int = 1, task_seconds: float | None = None) -> Executor:
        return LocalExecutor(concurrent, task_seconds)

    def test_each_task_has_a_process_of_its_own(self, tiny_store: FeatureStore, tmp_path: Path) -> None:
        executor = self.make(concurrent=2)
        try:
            for number in range(2):
                features = Hangs("x")
                executor.submit(rung_task(tiny_store, tmp_path / str(number), number=number, features=features))
            pids = {process_of(tmp_path / str(number)) for number in range(2)}
            assert len(pids) == 2
            assert os.getpid() not in pids
            psutil.Process(min(pids)).kill()
            (end,) = [event for event in events_until_finished(executor) if isinstance(event, Finished)]
            assert end.task.directory == next(
                tmp_path / str(number) for number in range(2) if process_of(tmp_path / str(number)) == min(pids)
            )
        finally:
            executor.shutdown()

    def test_cores_are_shared_unless_the_task_says_otherwise(self, tiny_store: FeatureStore, tmp_path: Path) -> None:
        executor = self.make(concurrent=2)
        share = max(1, (os.cpu_count() or 1) // 2)
        try:
            for number, threads in enumerate((None, 3)):
                executor.submit(
                    rung_task(tiny_store, tmp_path / str(number), number=number, rungs=(1,), train={"threads": threads})
                )
                (end,) = [event for event in events_until_finished(executor) if isinstance(event, Finished)]
                assert isinstance(end.result, Measurement)
                log = (tmp_path / str(number) / "log.txt").read_text(encoding="utf-8")
                assert f"{threads or share} threads" in log
        finally:
            executor.shutdown()

    def test_a_search_that_is_killed_takes_its_trials_with_it(self, tiny_store: FeatureStore, tmp_path: Path) -> None:
        """Else a resumed search would train beside what is left of the first, in the same folder."""
        arguments = [sys.executable, "-c", SEARCH_SCRIPT, str(tiny_store.path), str(tmp_path / "0")]
        search = subprocess.Popen(arguments, start_new_session=True)
        try:
            trial = psutil.Process(process_of(tmp_path / "0"))
            time.sleep(0.2)
            assert trial.is_running()
            search.kill()
            search.wait()
            trial.wait(timeout=10)
        finally:
            search.kill()


SEARCH_SCRIPT = """
import sys, time
from pathlib import Path
from runners.search.local import LocalExecutor
from runners.features.store import FeatureStore
from tests.runners.tasks import rung_task

if __name__ == "__main__":
    executor = LocalExecutor()
    executor.submit(rung_task(FeatureStore.open(Path(sys.argv[1])), Path(sys.argv[2]), rungs=(10**9,)))
    while True:
        executor.wait(1)
"""
