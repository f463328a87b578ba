"""Several workers for one trial through Ray Train, on a real cluster of two nodes: results, failures, nothing left."""

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path, PosixPath
from typing import Any, NoReturn

import pytest
import torch

pytest.importorskip("ray")
pytest.importorskip("ray.train.torch", exc_type=ImportError)

from ray import exceptions
from ray.train.v2._internal.exceptions import (
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
    WorkerHealthCheckFailedError,
)
from ray.train.v2.api.exceptions import ControllerError
from ray.util.placement_group import placement_group_table

from archspec.errors import ArchspecError
from runners.features.store import FeatureStore
from runners.search.executor import Event, Executor, Failure, Finished, Progress, Started
from runners.search.ray_train import STORAGE_FOLDER, Named, Team, WorkerFailedError, failure_of, not_begun, where
from runners.search.resources import Request
from runners.search.worker import WORKER_FILE, Place, UnfitNodeError
from runners.training.batches import Batch
from runners.training.trainer import Trainer
from runners.training.trial import Measurement, read_metrics, run_rung
from tests.runners.drafts import single_thread
from tests.runners.executor_contract import LONG, alive, events_until_finished
from tests.runners.ray_cluster import GIB, make_executor
from tests.runners.tasks import Hangs, rung_task

RESOURCES = {"gpus": 0, "cpus": 2, "memory": GIB // 8, "workers": 2}  # a worker fills a node


@pytest.fixture
def executor(ray_cluster: Any) -> Iterator[Executor]:
    executor = make_executor(ray_cluster.address, concurrent=1, resources=RESOURCES)
    yield executor
    executor.shutdown()
    assert rooms() == []


def rooms() -> list[Any]:
    """What is still reserved for workers."""
    return [group for group in placement_group_table().values() if group["state"] != "REMOVED"]


def workers_of(directory: Path, count: int = 2) -> dict[int, int]:
    """The processes of a trial's workers by rank, from its log, once there are so many."""
    limit = time.monotonic() + 60
    log = directory / "log.txt"
    while time.monotonic() < limit:
        lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        begun = [line.split() for line in lines if line.startswith("worker ") and ", process " in line]
        if len(begun) == count:
            return {int(words[1][:-1]): int(words[words.index("process") + 1][:-1]) for words in begun}
        time.sleep(0.05)
    raise AssertionError(f"{log} names no {count} workers")


def assert_nothing_left(pids: dict[int, int], wait: Callable[[], object] = lambda: time.sleep(0.05)) -> None:
    """No process and no reservation, a moment after one was told of the end."""
    limit = time.monotonic() + 10
    while any(map(alive, pids.values())) or rooms():
        assert time.monotonic() < limit
        wait()


def ended(events: list[Any]) -> Measurement | Failure:
    assert [type(event) for event in events if not isinstance(event, Progress)] == [Started, Finished]
    result = events[-1].result
    assert isinstance(result, Measurement | Failure)
    return result


def same_up_to_rounding(ours: Measurement, theirs: Measurement) -> None:
    """All but the time and the memory that it took."""
    kept = ("draft", "dtype", "rung", "tokens", "seed")
    assert [getattr(ours, name) for name in kept] == [getattr(theirs, name) for name in kept]
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)
    told, wanted = flat(ours.acceptance), flat(theirs.acceptance)
    assert len(wanted) > 10
    figures = {name for name, value in wanted.items() if isinstance(value, float)}
    assert {name: told[name] for name in figures} == pytest.approx({name: wanted[name] for name in figures}, rel=1e-5)
    assert {name: told[name] for name in told.keys() - figures} == {
        name: wanted[name] for name in wanted.keys() - figures
    }


def flat(figures: Any, name: str = "") -> dict[str, Any]:
    """Nested figures by their path."""
    if isinstance(figures, list | tuple):
        figures = dict(enumerate(figures))
    if not isinstance(figures, dict):
        return {name: figures}
    return {path: value for key, inner in figures.items() for path, value in flat(inner, f"{name}.{key}").items()}


# On the cluster


@pytest.mark.slow
def test_two_workers_measure_what_one_does_and_go_on_from_its_checkpoint(
    executor: Executor, tiny_store: FeatureStore, tmp_path: Path
) -> None:
    """The second rung: the first was trained and measured by one worker, in this process."""
    single_thread()
    alone = rung_task(tiny_store, tmp_path / "alone", train={"batch_tokens": 400})
    first = run_rung(alone)
    together = replace(alone, directory=tmp_path / "together", rung=1)
    shutil.copytree(alone.directory, together.directory)
    executor.submit(together)
    events = events_until_finished(executor)
    result = ended(events)
    assert isinstance(result, Measurement), result
    same_up_to_rounding(result, run_rung(alone.at(1)))
    assert read_metrics(together.directory) == [first, result]
    started, *progress, _ = events
    assert isinstance(started, Started)
    assert started.where == "2 workers: node-a + node-b"
    assert all(isinstance(event, Progress) and event.report.tokens > first.tokens for event in progress)
    assert progress
    log = (together.directory / "log.txt").read_text(encoding="utf-8").splitlines()
    for rank in range(2):
        assert any(line.startswith(f"worker {rank}: rung 1 of 2, seed 0 on node-") for line in log)
        assert any(line.startswith(f"worker {rank}: ended with Measurement") for line in log)
    assert {path.name for path in together.directory.iterdir()} - {path.name for path in alone.directory.iterdir()} == {
        "log.txt",
        WORKER_FILE,
    }


@pytest.mark.slow
def test_a_killed_worker_ends_all_at_once_and_is_told(
    executor: Executor, tiny_store: FeatureStore, tmp_path: Path
) -> None:
    executor.submit(rung_task(tiny_store, tmp_path / "0", rungs=LONG))
    events: list[Event] = []
    while not any(isinstance(event, Progress) for event in events):
        events += executor.wait(60)
    pids = workers_of(tmp_path / "0")
    start = time.monotonic()
    os.kill(pids[1], signal.SIGKILL)
    result = ended(events + events_until_finished(executor))
    assert isinstance(result, Failure)
    assert (result.kind, result.retry) == ("crashed", True)
    assert result.reason.startswith("worker 1 of 2 ended without a result: it was killed (SIGKILL")
    assert time.monotonic() - start < 10
    assert_nothing_left(pids)
    assert not (tmp_path / "0" / STORAGE_FOLDER).exists()
    assert "2 workers ended with Failure" in (tmp_path / "0" / "log.txt").read_text(encoding="utf-8")


class ShortOnSecond(PosixPath):
    """A store; the worker that opens it as the second has no memory left for its first step."""

    def __truediv__(self, name: Any) -> Any:
        if os.environ["RANK"] == "1":
            Trainer.loss = no_memory  # type: ignore[method-assign,assignment]
        return Path(self) / name


def no_memory(_trainer: Trainer, _batch: Batch) -> NoReturn:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.slow
def test_a_worker_that_runs_out_of_memory_ends_those_who_wait_for_it(
    executor: Executor, tiny_store: FeatureStore, tmp_path: Path
) -> None:
    executor.submit(rung_task(tiny_store, tmp_path / "0", features=ShortOnSecond(tiny_store.path)))
    result = ended(events_until_finished(executor))
    assert result == Failure("out_of_memory", "CUDA out of memory")
    log = (tmp_path / "0" / "log.txt").read_text(encoding="utf-8")
    assert "worker 1: torch.OutOfMemoryError: CUDA out of memory" in log
    assert_nothing_left(workers_of(tmp_path / "0"))


@pytest.mark.slow
def test_what_all_workers_come_to_keeps_its_kind(executor: Executor, tiny_store: FeatureStore, tmp_path: Path) -> None:
    executor.submit(rung_task(tiny_store, tmp_path / "0", train={"learning_rate": 1e30, "warmup": 0.0}))
    result = ended(events_until_finished(executor))
    assert isinstance(result, Failure)
    assert (result.kind, result.retry) == ("diverged", False)
    assert "gradient norm" in result.reason


@pytest.mark.slow
def test_a_team_past_its_time_leaves_nothing(ray_cluster: Any, tiny_store: FeatureStore, tmp_path: Path) -> None:
    """Its task is killed, and with it whatever would clean up after it; then the room is free for the next."""
    executor = make_executor(ray_cluster.address, seconds=1, concurrent=1, resources=RESOURCES)
    try:
        executor.submit(rung_task(tiny_store, tmp_path / "0", features=Hangs("x")))
        result = ended(events_until_finished(executor))
        assert result == Failure("timed_out", "took longer than 1 s")
        assert_nothing_left(workers_of(tmp_path / "0"), lambda: executor.wait(0.2))
    finally:
        executor.shutdown()


@pytest.mark.slow
def test_shutdown_leaves_no_worker_and_no_room(ray_cluster: Any, tiny_store: FeatureStore, tmp_path: Path) -> None:
    executor = make_executor(ray_cluster.address, concurrent=1, resources=RESOURCES)
    executor.submit(rung_task(tiny_store, tmp_path / "0", features=Hangs("x")))
    pids = workers_of(tmp_path / "0")
    assert len(rooms()) == 1
    executor.shutdown()
    assert_nothing_left(pids)


# By themselves


def test_without_ray_train_one_message_says_what_to_install(ray_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("runners.search.ray_train")
    monkeypatch.setitem(sys.modules, "runners.search.ray_train", None)
    rule = r"runner.resources.workers: needs Ray Train, .* pip install 'draft-archspec\[ray\]' \("
    with pytest.raises(ArchspecError, match=rule):
        make_executor(ray_cluster.address, resources=RESOURCES)
    make_executor(ray_cluster.address, resources=RESOURCES | {"workers": 1}).shutdown()


def died() -> Exception:
    return WorkerHealthCheckFailedError("a check failed", exceptions.ActorDiedError())


def memory_error(message: str) -> Exception:
    return exceptions.OutOfMemoryError(message)  # type: ignore[no-untyped-call]


DIVERGED = Failure("diverged", "loss nan")
NO_MEMORY = Failure("out_of_memory", "CUDA out of memory")
LOST = Failure("crashed", "worker 0 lost the others: Connection closed by peer", retry=True)
ERROR = Failure("error", "RuntimeError: the disk is on fire")


@pytest.mark.parametrize(
    ("errors", "kind", "words"),
    [
        ({0: WorkerFailedError(DIVERGED), 1: WorkerFailedError(DIVERGED)}, "diverged", "loss nan"),
        ({0: WorkerFailedError(LOST), 1: died()}, "crashed", "worker 1 of 2 ended without a result: it was killed"),
        ({0: died(), 1: WorkerFailedError(NO_MEMORY)}, "out_of_memory", "CUDA out of memory"),
        ({0: WorkerFailedError(LOST), 1: WorkerFailedError(ERROR)}, "error", "RuntimeError: the disk is on fire"),
        ({0: WorkerFailedError(ERROR), 1: died()}, "crashed", "worker 1 of 2 ended without a result"),
        ({0: WorkerFailedError(LOST)}, "crashed", "lost the others: Connection closed by peer"),
        (
            {1: WorkerHealthCheckFailedError("a check failed", memory_error("node-b is full"))},
            "out_of_memory",
            "Ray ended worker 1 of 2 for want of memory: node-b is full",
        ),
    ],
)
def test_the_cause_is_told_and_not_what_follows_from_it(errors: dict[int, Exception], kind: str, words: str) -> None:
    failure = failure_of(errors, 2)
    assert failure.kind == kind
    assert words in failure.reason
    assert failure.retry == (kind == "crashed")


@pytest.mark.parametrize(
    ("nodes", "rule"),
    [(("a", "b"), "does something else use the cluster?"), ((), "no node that was large enough has come")],
)
def test_room_that_is_not_given_is_told_with_what_was_asked(nodes: tuple[str, ...], rule: str) -> None:
    team = Team("attempt", 2, Request(1, 4, GIB), 4, nodes)
    failure = not_begun(ControllerError(WorkerGroupStartupTimeoutError(2)), team, 60.0)
    asked = "2 workers with 1 GPU, 4 CPU and 1.1 GB of memory each"
    assert failure == Failure("crashed", f"Ray found no room within 60 s for {asked}; {rule}", retry=True)


def test_workers_that_could_not_be_started_say_why() -> None:
    cause = WorkerGroupStartupFailedError("At least one of the worker actors failed to initialize.")
    failure = not_begun(ControllerError(cause), Team("attempt", 2, Request(0, 1, 0), 1), 60.0)
    assert failure.retry
    assert failure.reason.startswith("the workers could not be started: WorkerGroupStartupFailedError: At least one")


def test_every_line_of_a_worker_is_named_and_written_whole(tmp_path: Path) -> None:
    with (tmp_path / "log").open("a", buffering=1) as log:
        stream = Named(log, "worker 1")
        print("two\nlines", file=stream)
        print("in ", end="", file=stream)
        assert (tmp_path / "log").read_text() == "worker 1: two\nworker 1: lines\n"
        print("pieces", file=stream)
    assert (tmp_path / "log").read_text() == "worker 1: two\nworker 1: lines\nworker 1: in pieces\n"


def test_an_unfit_node_is_told_as_such() -> None:
    with pytest.raises(UnfitNodeError, match="sees another folder"):
        failure_of({0: WorkerFailedError(LOST), 1: UnfitNodeError("id", "node-b sees another folder")}, 2)


def test_where_names_each_node_once_with_its_gpus() -> None:
    places = [Place("a", "node-a", ("1",)), Place("b", "node-b", ("0",)), Place("a", "node-a", ("0",))]
    assert where(places) == "3 workers: node-a gpu 0,1 + node-b gpu 0"
    assert where([Place("a", "node-a", ()), Place("a", "node-a", ())]) == "2 workers: node-a"
