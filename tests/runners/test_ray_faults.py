"""What goes wrong on a real cluster: workers, nodes and drivers that die, and trials that fail in every way."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

pytest.importorskip("ray")

import ray

from archspec.errors import ArchspecError
from archspec.files import write_text
from runners.features.conversations import Conversation
from runners.features.store import FeatureStore
from runners.search.driver import Search
from runners.search.executor import Event, Failure, Finished, Progress, Started
from runners.search.leaderboard import leaderboard_rows
from runners.search.ray_nodes import NODES_FILE
from runners.search.record import Record
from runners.search.run_folder import RunFolder
from runners.search.runner_settings import RunnerSettings
from runners.search.search_file import SearchFile
from runners.search.session import Prepared, execute
from runners.search.study import Study
from runners.search.worker import Shared
from runners.training.trial import RungTask
from tests.runners.driver_process import Drivers, driver_server, real_files
from tests.runners.executor_contract import alive, events_until_finished, process_of, wait_for_end
from tests.runners.ray_cluster import make_executor
from tests.runners.replay import new_folder, search_file
from tests.runners.tasks import Hangs, IsKilled, Raises, _Trap, rung_task
from tests.runners.test_killed import rows
from tests.runners.watched import Watched, attempts, hold, release, require_no_step_twice

NOT_COMPARED = ("tokens_per_second", "train_seconds")  # of the clock


@pytest.fixture
def address(ray_cluster: Any) -> str:
    return str(ray_cluster.address)


class Watcher:
    """Keeps events and does what a test wants at them."""

    def __init__(self, at: Callable[[Search, Event], None] = lambda *_: None) -> None:
        self.events: list[Event] = []
        self._at = at

    def began(self, search: Search) -> None:
        pass

    def changed(self, search: Search, event: Event) -> None:
        self.events.append(event)
        self._at(search, event)

    @property
    def failures(self) -> list[Failure]:
        ends = [event.result for event in self.events if isinstance(event, Finished)]
        return [result for result in ends if isinstance(result, Failure)]


class TrapSearch(Search):
    """A search some of whose trials have their tasks changed, by number."""

    changes: dict[int, Callable[[RungTask], RungTask]]

    def _task(self, record: Record, rung: int) -> RungTask:
        task = super()._task(record, rung)
        change = self.changes.get(record.number)
        return task if change is None else change(task)


def process(folder: Path, number: int) -> int:
    """The process of a trial's last attempt."""
    return attempts(folder / "trials" / f"{number:04d}")[-1].process


def small_search(store: FeatureStore, **changes: Any) -> SearchFile:
    """Two rungs of about five and ten steps."""
    budget = {"trials": 3, "rungs": [1200, 2400]} | changes.pop("budget", {})
    settled = {"baselines": ["eagle3"], "objective": {"draft_length": 3, "bootstrap": 50}, "seed": 1}
    return search_file(store, budget, **settled | changes)


# Workers and nodes


@pytest.mark.slow
def test_a_killed_worker_and_a_lost_node_cost_no_step(
    ray_cluster: Any, address: str, tiny_store: FeatureStore, tmp_path: Path
) -> None:
    """Killed on node-c, begun again there, held until that node goes, and ended on node-d, which joins meanwhile."""
    file = small_search(tiny_store, budget={"trials": 1, "retries": 2})
    folder, control = new_folder(tmp_path / "run", file), tmp_path / "hold"
    trial = folder.trial(0)
    nodes: dict[str, Any] = {}
    killed: list[int] = []

    def at(search: Search, event: Event) -> None:
        pid = process(folder.path, 0) if isinstance(event, Progress) else 0
        if not isinstance(event, Progress) or pid in killed or len(killed) == 3:
            return None
        killed.append(pid)
        if len(killed) == 1:
            os.kill(pid, signal.SIGKILL)
        elif len(killed) == 2:
            nodes["d"] = ray_cluster.add_node(num_cpus=3, node_name="node-d")
            ray_cluster.remove_node(nodes.pop("c"))
        else:
            return release(control, "0000")
        return hold(control, "0000", event.report.tokens + 1)  # the next attempt, after its first step

    hold(control, "0000", 1)
    nodes["c"] = ray_cluster.add_node(num_cpus=3, node_name="node-c")
    shared = Shared.of(tiny_store.path, tiny_store.fingerprint, folder.path)
    executor = make_executor(address, shared=shared, concurrent=1, resources={"cpus": 3, "gpus": 0})
    watcher = Watcher(at)
    search = TrapSearch(folder, file, tiny_store, executor, watcher)
    search.changes = {0: lambda task: replace(task, features=Watched(task.features).held_by(control))}
    try:
        search.execute()
    finally:
        for node in nodes.values():
            ray_cluster.remove_node(node)
    told = attempts(trial)
    assert [one.where for one in told] == ["node-c", "node-c", "node-d", "node-d"]
    assert [one.where for one in watcher.events if isinstance(one, Started)] == [one.where for one in told]
    require_no_step_twice(told)
    first, second = watcher.failures
    assert (first.kind, second.kind) == ("crashed", "crashed")
    assert first.reason.startswith("the trial's process on node node-c ended without a result: it was killed (SIGKILL")
    assert second.reason.startswith("node node-c died or left the cluster: ")
    assert search.study.records[0].state == "complete"
    assert '"node-c"' not in (folder.path / NODES_FILE).read_text(encoding="utf-8")
    wait_for_end(killed[1])


# Every way to fail


class DeviceRunsOutOfMemory(_Trap):
    def spring(self) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


@pytest.mark.slow
def test_every_failure_ends_its_trial_and_the_search_goes_on(
    address: str, tiny_store: FeatureStore, tmp_path: Path
) -> None:
    file = small_search(tiny_store, budget={"trials": 8, "rungs": [600], "max_failures_in_a_row": 8, "retries": 1})
    folder = new_folder(tmp_path / "run", file)

    def trap(kind: type[_Trap]) -> Callable[[RungTask], RungTask]:
        return lambda task: replace(task, features=kind(task.features))

    def diverging(task: RungTask) -> RungTask:
        return replace(task, train=task.train.model_copy(update={"learning_rate": 1e30, "warmup": 0.0}))

    order = [trap(IsKilled), trap(DeviceRunsOutOfMemory), diverging, trap(Raises), trap(Hangs), trap(Hangs)]
    hanging: list[int] = []

    def at(search: Search, event: Event) -> None:
        """Of those that hang, the first is cancelled; the other is to run out of time."""
        number = event.task.number
        if isinstance(event, Started) and isinstance(event.task.features, Hangs) and number not in hanging:
            hanging.append(number)
            if len(hanging) == 1:
                (one,) = [one for one in executor._running.values() if one.task.number == number]
                ray.cancel(one.answer, force=True)  # a sleep does not hear of less

    class Trapped(TrapSearch):
        def _task(self, record: Record, rung: int) -> RungTask:
            if record.number not in self.changes and record.baseline is None and order:
                self.changes[record.number] = order.pop(0)
            return super()._task(record, rung)

    executor = make_executor(address, concurrent=3, seconds=15, resources={"gpus": 0.25, "cpus": 0.5})
    search = Trapped(folder, file, tiny_store, executor, Watcher(at))
    search.changes = {}
    ranked = search.execute()
    assert order == []
    assert len(ranked) == 2  # the baseline and the one after the failures
    failures = {record.number: record.failure for record in search.study.records.values() if record.failure}
    told = {failure.kind: failure for failure in failures.values()}
    assert len(told) == len(failures) == 6
    assert "SIGKILL" in told["crashed"].reason
    assert told["out_of_memory"].reason == "CUDA out of memory. Tried to allocate 20.00 GiB"
    assert "gradient norm" in told["diverged"].reason
    assert told["error"].reason == "RuntimeError: the disk is on fire"
    assert told["cancelled"].reason.endswith("was cancelled from outside the search")
    assert told["timed_out"].reason == "took longer than 15 s"
    for number, failure in failures.items():
        log = (folder.trial(number) / "log.txt").read_text(encoding="utf-8")
        assert ("Traceback" in log) == (failure.kind in ("out_of_memory", "error"))
    lines = {row["failure_kind"]: row["failure"] for row in leaderboard_rows(search) if row["failure_kind"]}
    assert lines == {kind: failure.reason for kind, failure in told.items()}


def test_a_search_in_which_all_fails_stops_says_why_and_goes_on_when_that_is_mended(
    address: str, tiny_store: FeatureStore, tmp_path: Path
) -> None:
    file = small_search(tiny_store, budget={"trials": 4, "rungs": [600], "max_failures_in_a_row": 2, "retries": 0})
    folder = new_folder(tmp_path / "run", file)

    def search(bad: bool) -> Search:
        executor = make_executor(address, concurrent=2, resources={"gpus": 0.5})
        one = TrapSearch(folder, file, tiny_store, executor, Watcher())
        one.changes = {n: lambda task: replace(task, features=tmp_path / "gone") for n in range(99 if bad else 0)}
        return one

    with pytest.raises(ArchspecError) as caught:
        search(bad=True).execute()
    why = f"{tmp_path / 'gone'}: holds no feature store"
    assert str(caught.value).startswith(f"{folder.path}: 2 trials failed one after another, the last as error: {why}")
    assert str(caught.value).endswith("mend the cause and go on with --resume")
    mended = search(bad=False)
    assert len(mended.execute()) >= 1
    states = [record.state for record in mended.study.records.values()]
    assert (states.count("failed"), len(states)) == (2, 4)


@pytest.mark.slow
def test_the_real_memory_monitor_ends_a_trial_as_out_of_memory(
    drivers: Drivers, own_text: list[Conversation], tiny_store: FeatureStore, tmp_path: Path
) -> None:
    """On a cluster of its own, which thinks that the machine is full at a twentieth of its memory."""
    file = driven_search(tiny_store, own_text, tmp_path, None, budget={"trials": 1, "rungs": [10**6]})
    low = {"RAY_memory_usage_threshold": "0.05", "RAY_memory_monitor_refresh_ms": "100"}
    ended = drivers.run(tmp_path / "run", file=str(file), look=False, environment=low)
    assert ended.code == 1, ended.said
    assert "rung 1 of 1 out_of_memory: Ray ended the trial's process on node" in ended.said
    assert "no trial reached the last rung; failures: Ray ended the trial's process on node" in ended.said


@pytest.mark.parametrize("force", [False, True], ids=["plain", "forced"])
def test_a_task_that_is_cancelled_from_outside_ends_as_cancelled(
    address: str, tiny_store: FeatureStore, tmp_path: Path, force: bool
) -> None:
    if not force and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        pytest.skip("begun where interrupts are ignored, which Ray's plain cancel is")
    executor = make_executor(address, resources={"gpus": 0.5})
    try:
        executor.submit(rung_task(tiny_store, tmp_path / "0000", rungs=(10**9,)))
        assert isinstance(executor.wait(60)[0], Started)
        (one,) = executor._running.values()
        ray.cancel(one.answer, force=force)
        ended = events_until_finished(executor)[-1]
    finally:
        executor.shutdown()
    assert isinstance(ended, Finished)
    assert isinstance(ended.result, Failure)
    assert (ended.result.kind, ended.result.retry) == ("cancelled", False), ended.result
    assert ended.result.reason.endswith("was cancelled from outside the search")
    wait_for_end(process_of(tmp_path / "0000"))


# The driver


@pytest.fixture(scope="module")
def drivers() -> Iterator[Drivers]:
    with driver_server() as drivers:
        yield drivers


def driven_search(
    store: FeatureStore, text: list[Conversation], folder: Path, address: str | None, **changes: Any
) -> Path:
    """A search file for drivers. One trial at a time, so that TPE's draws do not depend on the order of results."""
    runner = {"kind": "ray", "address": address, "concurrent": 1}
    resources = {"gpus": 0, "cpus": 0.5, "memory": 1 << 24}
    file = small_search(store, **real_files(folder, text), runner=runner | {"resources": resources}, **changes)
    write_text(folder / "search.yaml", file.dump())
    return folder / "search.yaml"


def resume(run: Path, runner: dict[str, Any] | None = None) -> Search:
    """Go on in this process, which is on the cluster already."""
    folder, file = RunFolder.resume(run, None)
    if runner:
        file = file.model_copy(update={"runner": RunnerSettings.model_validate(runner)})
    return execute(Prepared(folder, file, FeatureStore.open(file.features.path)), Watcher())[1]


def undisturbed(file: Path, run: Path) -> list[dict[str, str]]:
    """The same search on this machine, from end to end; the runner does not change the figures."""
    search = SearchFile.load(file).model_copy(update={"runner": RunnerSettings()})
    execute(Prepared(RunFolder.begin(run, search), search, FeatureStore.open(search.features.path)), Watcher())
    return rows(run, *NOT_COMPARED)


def require_each_once(run: Path) -> None:
    """Every (trial, rung, seed) was trained and measured once, over all attempts."""
    for trial in sorted((run / "trials").iterdir()):
        for folder in (trial, *trial.glob("seed-*")):
            require_no_step_twice(attempts(folder))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kills",
    [
        [("training", 1), ("told", 1), ("written", 1), ("measured", 1)],
        [("half written", 2), ("submitted to Ray", 1), ("reported", 1), ("leaderboard", 2), ("seed measured", 1)],
    ],
    ids=["training, told, written, measured", "half written, submitted, reported, leaderboard, seed"],
)
def test_a_driver_killed_again_and_again_loses_no_trial_and_trains_none_twice(
    address: str,
    drivers: Drivers,
    own_text: list[Conversation],
    tiny_store: FeatureStore,
    tmp_path: Path,
    kills: list[tuple[str, int]],
) -> None:
    budget = {"seeds": 2} if kills[-1][0] == "seed measured" else {}
    file = driven_search(tiny_store, own_text, tmp_path, address, budget=budget)
    run, control = tmp_path / "run", tmp_path / "hold"
    hold(control, "0000", 1)
    known: dict[int, str] = {}
    for index, (point, count) in enumerate(kills):
        if point != "training" and (control / "0000").exists():
            release(control, "0000")
        order = {"watched": str(control), "point": point, "count": count}
        ended = drivers.run(run, **order, file=None if index else str(file))
        assert ended.killed, ended.said
        for one in attempts(run / "trials" / "0000")[-1:]:
            wait_for_end(one.process)
        facts = FeatureStore.open(tmp_path / "features").facts
        records = Study(RunFolder(run), SearchFile.load(run / "search.yaml"), facts).records
        assert known.items() <= {number: record.candidate.hash for number, record in records.items()}.items()
        known = {number: record.candidate.hash for number, record in records.items()}
    search = resume(run)
    assert known.items() <= {number: record.candidate.hash for number, record in search.study.records.items()}.items()
    require_each_once(run)
    burnt = ("trial",) if "half written" in dict(kills) else ()  # the number of a draw that no candidate ever had
    expected = [{name: row[name] for name in row if name not in burnt} for row in undisturbed(file, tmp_path / "local")]
    assert rows(run, *NOT_COMPARED, *burnt) == expected


@pytest.mark.slow
def test_a_driver_that_started_ray_itself_takes_it_along_when_it_is_killed(
    drivers: Drivers, own_text: list[Conversation], tiny_store: FeatureStore, tmp_path: Path
) -> None:
    file = driven_search(tiny_store, own_text, tmp_path, None, budget={"trials": 1})
    run, control = tmp_path / "run", tmp_path / "hold"
    hold(control, "0000", 1)
    ended = drivers.run(run, file=str(file), watched=str(control), point="training")
    assert ended.killed, ended.said
    wait_for_end(process(run, 0))
    limit = time.monotonic() + 30
    while left := processes_of_ray(ended.pid):
        assert time.monotonic() < limit, left
        time.sleep(0.2)
    release(control, "0000")
    ended = drivers.run(run, watched=str(control))
    assert ended.code == 0, ended.said
    require_each_once(run)
    assert rows(run, *NOT_COMPARED) == undisturbed(file, tmp_path / "local")


def processes_of_ray(driver: int) -> list[str]:
    """Ray's servers that a driver started: its session is named after its process."""
    named = f"_{driver}/"
    found = []
    for one in psutil.process_iter(["pid", "cmdline"]):
        words = " ".join(one.info["cmdline"] or [])
        found += [words[:80]] if named in words and "session_" in words and alive(one.info["pid"]) else []
    return found
