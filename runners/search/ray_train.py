"""Several workers for one trial, through Ray Train. Its import fails where Ray is installed without Ray Train.

Ray Train starts the workers on their nodes, sets up their process group, and ends all when one is gone. What else it
has (checkpoints, retries, reports) is left unused: the trial's folder and the search do that, as for one worker.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import TextIOBase
from typing import Any, TextIO

import ray
import torch
import torch.distributed as dist
from ray import exceptions
from ray._private.state import state as cluster_state
from ray.core.generated.gcs_pb2 import PlacementGroupTableData  # type: ignore[attr-defined]  # has no stubs
from ray.train.torch import TorchConfig
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError
from ray.train.v2.api.config import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.api.exceptions import ControllerError, TrainingFailedError, WorkerGroupError
from ray.train.v2.torch.torch_trainer import TorchTrainer
from ray.util.placement_group import PlacementGroup, remove_placement_group
from torch import Tensor

from runners.search.executor import Failure
from runners.search.outcome import OnStep, now_and_then, outcome_of
from runners.search.ray_nodes import here
from runners.search.resources import Request
from runners.search.worker import PROGRESS_SECONDS, Place, Shared, UnfitNodeError, problem_of, sign_writer
from runners.training.parallel import Item, ProcessGroup
from runners.training.trial import LOG_FILE, Measurement, RungTask, run_rung

STORAGE_FOLDER = "ray_train"  # in the trial's folder while it runs, and empty but for a mark: Ray Train insists on one
PLACED_SECONDS = 60.0  # for workers to be given room that the driver has counted
PENDING_SECONDS = 3600.0  # for nodes to come
PATIENCE_SECONDS = 10.0
SETTINGS = {
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # how soon the others are ended when one is gone
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}


@dataclass(frozen=True)
class Team:
    """The workers of one attempt at a task, each with ``request``.

    ``nodes`` are the ids of the nodes that the driver chose, one a worker; where there are none, Ray chooses, and every
    worker does the ``check`` first.
    """

    attempt: str
    workers: int
    request: Request
    threads: int
    nodes: tuple[str, ...] = ()
    check: Shared | None = None


class WorkerFailedError(Exception):
    """What a worker says of its own end."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure


def run_team(task: RungTask, team: Team) -> Measurement | Failure:
    """Run a task on several workers, which write the trial's log and tell how far they are.

    Raises:
        UnfitNodeError: a worker came to a node that is not fit.
    """
    limit = PLACED_SECONDS if team.nodes else PENDING_SECONDS
    os.environ.update(SETTINGS | {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(limit)})
    storage = task.directory / STORAGE_FOLDER
    shutil.rmtree(storage, ignore_errors=True)  # of an attempt that was killed
    try:
        fitted: Any = _trainer(task, team).fit()  # ray.train.Result is typed as Ray Train's older one
        result: Measurement | Failure = fitted.return_value
    except WorkerGroupError as error:
        result = failure_of(error.worker_failures, team.workers)
    except TrainingFailedError as error:
        result = not_begun(error, team, limit)
    finally:
        shutil.rmtree(storage, ignore_errors=True)
    with (task.directory / LOG_FILE).open("a", encoding="utf-8") as log:
        print(f"{team.workers} workers ended with {result}", file=log)
    return result


def sweep() -> int:
    """Remove what teams that were killed have left; how many teams of this driver there still are.

    A team's workers die with its task, but the room reserved for them does not: in Ray 2.60 a placement group outlives
    the actor that made it until the whole job ends, and what Ray Train does about it needs Ray's dashboard.
    """
    left, job = 0, ray.get_runtime_context().get_job_id()
    for told in cluster_state._connect_and_get_accessor().get_placement_group_table():
        group = PlacementGroupTableData.FromString(told)
        maker = group.creator_actor_id.hex()
        if group.creator_job_id.hex() != job or not maker.strip("f") or group.state == PlacementGroupTableData.REMOVED:
            continue
        if group.creator_actor_dead:
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(group.placement_group_id)))
        else:
            left += 1
    return left


class _Trainer(TorchTrainer):
    """Without a process that stays for ever if the trial's task is killed where Ray has no dashboard; see ``sweep``."""

    def _create_default_callbacks(self) -> list[Any]:
        callbacks = super()._create_default_callbacks()
        return [callback for callback in callbacks if not isinstance(callback, PlacementGroupCleanerCallback)]


def _trainer(task: RungTask, team: Team) -> _Trainer:
    request = team.request
    on_gpu = request.gpus > 0 and task.train.device != "cpu"
    amounts = {"GPU": request.gpus, "CPU": request.cpus, "memory": float(request.memory)}
    return _Trainer(
        lambda: _work(task, team),
        torch_config=TorchConfig(backend="nccl" if on_gpu else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=team.workers,
            use_gpu=request.gpus > 0,
            resources_per_worker={name: amount for name, amount in amounts.items() if amount},
            label_selector=[{"ray.io/node-id": node} for node in team.nodes] or None,
        ),
        run_config=RunConfig(
            name="run",
            storage_path=str(task.directory / STORAGE_FOLDER),
            failure_config=FailureConfig(max_failures=0, controller_failure_limit=0, max_preemption_failures=0),
            # Where no GPU was asked for, see none: Ray leaves all visible, and CUDA looks before the work begins.
            worker_runtime_env={"env_vars": {} if request.gpus else {"CUDA_VISIBLE_DEVICES": ""}},
        ),
    )


# In the workers


class _Peers(ProcessGroup):
    """The process group, which tells a fault of one's own from the end of another, whose sums will not come."""

    lost: str | None = None

    def add(self, *tensors: Tensor) -> None:
        """See ``ProcessGroup``."""
        with self._listening():
            super().add(*tensors)

    def copy_first(self, tensors: Sequence[Tensor]) -> None:
        """See ``ProcessGroup``."""
        with self._listening():
            super().copy_first(tensors)

    def gather(self, items: Sequence[Item]) -> list[Item]:
        """See ``ProcessGroup``."""
        with self._listening():
            return super().gather(items)

    def require_same(self, facts: dict[str, object]) -> None:
        """See ``ProcessGroup``."""
        with self._listening():
            super().require_same(facts)

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.lost = _first_line(error)
            raise


class Named(TextIOBase):
    """A stream into a log that others write too: every line begins with a name, and is written whole."""

    def __init__(self, log: TextIO, name: str) -> None:
        self._log, self._name, self._rest = log, name, ""

    def write(self, text: str) -> int:
        """Write the lines that are whole; keep the rest for the next call."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._log.write(f"{self._name}: {line}\n")
        return len(text)


def _work(task: RungTask, team: Team) -> Measurement | None:
    """What every worker does; the first returns the measurement.

    Raises:
        WorkerFailedError: there is none.
        UnfitNodeError: this node is not fit.
    """
    place = here(None)
    problem = None if team.check is None else problem_of(team.check, place.name)
    if problem is not None:
        raise UnfitNodeError(place.node, problem)
    torch.set_num_threads(team.threads)
    peers, rank = _Peers(), dist.get_rank()

    def train(task: RungTask, _: OnStep) -> Measurement:
        return run_rung(task, _teller(task, team.attempt, peers.gather([place])), peers)

    with (task.directory / LOG_FILE).open("a", encoding="utf-8", buffering=1) as log:
        named = Named(log, f"worker {rank}")
        with contextlib.redirect_stdout(named), contextlib.redirect_stderr(named):
            rung = f"rung {task.rung} of {len(task.rungs)}, seed {task.seed} on {place}"
            print(f"{rung}, process {os.getpid()}, {team.threads} threads")
            result = outcome_of(task, lambda _: None, train)
            if peers.lost is not None:
                result = Failure("crashed", f"worker {rank} lost the others: {peers.lost}", retry=True)
            print(f"ended with {result}")
    if isinstance(result, Measurement):
        return result if peers.first else None
    if peers.lost is not None:
        time.sleep(PATIENCE_SECONDS)  # till Ray has seen whose fault it is, and ends this worker too
    raise WorkerFailedError(result)


def _teller(task: RungTask, attempt: str, places: Sequence[Place]) -> OnStep:
    """The first worker's sign, as ``runners.search.worker`` writes it for one; it tells at once that they began."""
    tell = sign_writer(task.directory, attempt, places, where(places))
    if dist.get_rank() == 0:
        tell(None)
    return now_and_then(tell, PROGRESS_SECONDS)


def where(places: Sequence[Place]) -> str:
    """``3 workers: node-a gpu 0,1 + node-b gpu 0``."""
    gpus: dict[tuple[str, str], tuple[str, ...]] = {}
    for place in places:
        gpus[place.node, place.name] = gpus.get((place.node, place.name), ()) + place.gpus
    return f"{len(places)} workers: {' + '.join(str(Place(*node, tuple(sorted(gpus[node])))) for node in gpus)}"


# What became of them


def failure_of(errors: dict[int, Exception], workers: int) -> Failure:
    """The cause among the errors by rank of the workers that have ended; what else there is follows from it.

    Raises:
        UnfitNodeError: it was that.
    """
    told: list[Failure] = []
    gone: list[Failure] = []
    for rank, error in sorted(errors.items()):
        if isinstance(error, UnfitNodeError):
            raise error
        if isinstance(error, WorkerFailedError):
            told.append(error.failure)
        else:
            gone.append(_gone(f"worker {rank} of {workers}", getattr(error, "health_check_failure", error)))
    kinds = ("diverged", "out_of_memory")
    return min(
        [*gone, *told], key=lambda failure: (failure.kind not in kinds, failure not in gone, failure.kind != "error")
    )


def _gone(worker: str, error: Exception) -> Failure:
    if isinstance(error, exceptions.OutOfMemoryError):
        return Failure("out_of_memory", f"Ray ended {worker} for want of memory: {_first_line(error)}")
    if isinstance(error, exceptions.RayActorError):
        hint = "it was killed (SIGKILL, perhaps by the kernel for want of memory), it exited, or its node died"
        return Failure("crashed", f"{worker} ended without a result: {hint}", retry=True)
    return Failure("crashed", f"{worker} ended without a result: {_first_line(error)}", retry=True)


def not_begun(error: TrainingFailedError, team: Team, limit: float) -> Failure:
    """Why there were no workers; ``limit`` is for how many seconds room was waited for."""
    cause = error.controller_failure if isinstance(error, ControllerError) else error
    if isinstance(cause, WorkerGroupStartupTimeoutError):
        asked = f"{team.workers} workers with {team.request} each"
        rule = "does something else use the cluster?" if team.nodes else "no node that was large enough has come"
        return Failure("crashed", f"Ray found no room within {limit:.0f} s for {asked}; {rule}", retry=True)
    why = f"{type(cause).__name__}: {_first_line(cause)}"
    return Failure("crashed", f"the workers could not be started: {why}", retry=True)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
