"""The Ray runner: a stateless task for every (trial, rung), each in a process of its own on a node that was looked at.

The driver places every task itself, on a node that has room for it by its own count, so that no task waits in Ray's
queue, where it could not be told from one that runs. Tasks tell how far they are by a file in the trial's folder.
"""

import contextlib
import logging
import os
import socket
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import ray
from ray import exceptions

from archspec.errors import ArchspecError
from runners.search.executor import Event, Failure, Finished, Progress, Started
from runners.search.ray_nodes import Nodes, here, on_node
from runners.search.resources import Estimate, Ledger, Request, Sizer
from runners.search.runner_settings import RunnerSettings
from runners.search.worker import Shared, Sign, UnfitNodeError, absolute, read_sign, run_task
from runners.training.trainer import StepReport
from runners.training.trial import Measurement, RungTask

POLL_SECONDS = 0.5
SWEEP_SECONDS = 10.0  # within which what a failed task has left behind is seen to be dead
LOST_SECONDS = 600.0
OBJECT_STORE_BYTES = 256 << 20  # specs and figures alone go through it
# Ray's OOM killer retries a task of its own accord unless told not to; usage statistics are not ours to send.
ENVIRONMENT = {"RAY_task_oom_retries": "0", "RAY_USAGE_STATS_ENABLED": "0"}


@dataclass(frozen=True)
class _Order:
    """How a task is to be run: ``check`` if its node may be one that was not looked at.

    ``nodes`` are where its workers go, empty if Ray is to choose; ``node_name`` is that of the first.
    """

    attempt: str
    request: Request
    workers: int
    nodes: tuple[str, ...]
    node_name: str | None
    check: Shared | None


@ray.remote(max_retries=0, max_calls=1)
def _run(task: RungTask, order: _Order) -> Measurement | Failure:
    threads = task.train.threads or max(1, int(order.request.cpus))
    if order.workers == 1:
        return run_task(task, order.attempt, threads, here(order.node_name), order.check)
    train = ray_train()
    team = train.Team(order.attempt, order.workers, order.request, threads, order.nodes, order.check)
    result: Measurement | Failure = train.run_team(task, team)
    return result


@dataclass
class _Running:
    task: RungTask
    order: _Order
    answer: "ray.ObjectRef[Any]"
    node: str | None
    sign: Sign | None = None
    reported: StepReport | None = None
    deadline: float | None = None


class RayExecutor:
    """Runs tasks on a Ray cluster: one that it starts on this machine, or a standing one at ``settings.address``.

    ``shared`` is what every node must see; None leaves the check out. ``device`` is ``train.device`` of the search.
    A task that takes longer than ``task_seconds``, its time in a queue left out, ends as ``timed_out``. ``function`` is
    what a task runs.

    Raises:
        ArchspecError: the cluster cannot be reached, or a node of it does not see what is shared.
    """

    function: Any = _run

    def __init__(
        self,
        settings: RunnerSettings,
        estimate: Estimate,
        task_seconds: float | None = None,
        shared: Shared | None = None,
        device: str = "auto",
    ) -> None:
        self._settings, self._task_seconds, self._shared = settings, task_seconds, shared
        self._train, self._sweeping = ray_train() if settings.resources.workers > 1 else None, 0.0
        self._owner, self.dashboard = connect(settings.address)
        self._ledger = Ledger(Sizer(settings.resources, estimate))
        self._nodes = Nodes(self._ledger, shared, settings.stage_to, device)
        self._running: dict[str, _Running] = {}
        self._least: RungTask | None = None
        self._required = False
        self._crashed: dict[tuple[int, int], str] = {}
        self._alive, self._looked = time.monotonic(), 0.0
        try:
            self._nodes.start(wait_for_more=bool(settings.autoscale))
        except BaseException:
            self.shutdown()
            raise

    @property
    def dtypes(self) -> set[str]:
        """What ``train.dtype: auto`` is on the nodes."""
        return set(self._nodes.dtypes.values())

    @property
    def full(self) -> bool:
        """See ``Executor``; there is room if the smallest task so far would fit."""
        return not (self._may_more() if self._least is None else self.fits(self._least))

    def fits(self, task: RungTask) -> bool:
        """See ``Executor``; while tasks wait for nodes to come, what is free is theirs."""
        if not self._may_more():
            return False
        waiting = self._waiting()
        return waiting < self._settings.autoscale or (not waiting and self._ledger.place(task) is not None)

    def refusal(self, task: RungTask) -> Failure | None:
        """See ``Executor``.

        Raises:
            ArchspecError: no node has what the search file asks for every trial.
        """
        more_to_come = bool(self._settings.autoscale) or self._nodes.pending
        if not self._required and self._ledger.seen and not more_to_come:
            self._ledger.require(task)
            self._required = True
        return self._ledger.refusal(task, more_to_come)

    def submit(self, task: RungTask) -> None:
        """See ``Executor``."""
        task.directory.mkdir(parents=True, exist_ok=True)
        avoid = self._crashed.pop((task.number, task.seed), None)
        taken = None if self._waiting() else self._ledger.place(task, avoid)
        request = taken[0].request if taken else self._ledger.anywhere(task)
        node = taken[0].node if taken else None
        workers = self._settings.resources.workers
        check = None if node else self._shared
        nodes = tuple(one.node.id for one in taken or ())
        order = _Order(uuid.uuid4().hex, request, workers, nodes, node.name if node else None, check)
        options = _amounts(request) if workers == 1 else {"num_cpus": 0}
        options |= on_node(node.id) if node else {}
        there = absolute(task, node.features if node and self._is_shared(task) else None)
        answer = self.function.options(name=f"trial {task.number} rung {task.rung}", **options).remote(there, order)
        self._running[order.attempt] = _Running(task, order, answer, node.id if node else None)
        self._ledger.take(order.attempt, taken or [])
        self._least = min(
            self._least or task, task, key=lambda one: self._ledger.sizer.need(one, request.gpus > 0).device
        )

    def wait(self, timeout: float) -> Sequence[Event]:
        """See ``Executor``."""
        end = time.monotonic() + timeout
        while True:
            self._nodes.refresh()
            self._require_life()
            events = self._news()
            now = time.monotonic()
            if self._train and now < self._sweeping:
                self._train.sweep()
            if events or now >= end:
                return events
            deadlines = [running.deadline for running in self._running.values() if running.deadline]
            pause = max(0.0, min([POLL_SECONDS, end - now, *(deadline - now for deadline in deadlines)]))
            answers = [running.answer for running in self._running.values()]
            if answers:
                ray.wait(answers, timeout=pause)
            else:
                time.sleep(pause)

    def shutdown(self) -> None:
        """See ``Executor``; Ray itself is ended only where this executor started it."""
        answers = [running.answer for running in self._running.values()]
        for answer in answers:
            ray.cancel(answer, force=True)
        if answers:
            ray.wait(answers, num_returns=len(answers), timeout=10)
        limit = time.monotonic() + (SWEEP_SECONDS if answers else 0)
        while self._train and time.monotonic() < limit and self._train.sweep():
            time.sleep(0.1)
        for attempt in self._running:
            self._ledger.free(attempt)
        self._running.clear()
        if self._owner:
            self._owner = False
            ray.shutdown()

    def _may_more(self) -> bool:
        return self._settings.concurrent is None or len(self._running) < self._settings.concurrent

    def _waiting(self) -> int:
        """Tasks that were submitted to no node in particular and have not begun."""
        return sum(running.node is None for running in self._running.values())

    def _is_shared(self, task: RungTask) -> bool:
        return self._shared is not None and task.features.absolute() == self._shared.features

    def _news(self) -> list[Event]:
        """What is new about all tasks; files are read now and then only, since there may be many on a slow disk."""
        running = list(self._running.values())
        answers = [one.answer for one in running]
        ready = set(ray.wait(answers, num_returns=len(answers), timeout=0)[0]) if answers else set()
        now = time.monotonic()
        look = now - self._looked >= POLL_SECONDS
        self._looked = now if look else self._looked
        events: list[Event] = []
        for one in running:
            over = one.answer in ready
            events += self._signs(one) if look or over else []
            if over:
                events += [Started(one.task)] if one.sign is None else []
                events.append(self._end(one, self._result(one)))
            elif one.deadline and now >= one.deadline:
                ray.cancel(one.answer, force=True)
                events.append(self._end(one, Failure("timed_out", f"took longer than {self._task_seconds:g} s")))
        return events

    def _signs(self, running: _Running) -> list[Event]:
        sign = read_sign(running.task.directory, running.order.attempt)
        if sign is None:
            return []
        events: list[Event] = []
        if running.sign is None:
            events.append(Started(running.task, sign.where))
            running.node = sign.node
            if self._task_seconds:
                running.deadline = time.monotonic() + self._task_seconds
        self._ledger.moved(running.order.attempt, sign.places, running.order.request)
        if sign.report is not None and sign.report != running.reported:
            running.reported = sign.report
            events.append(Progress(running.task, sign.report))
        running.sign = sign
        return events

    def _end(self, running: _Running, result: Measurement | Failure) -> Finished:
        del self._running[running.order.attempt]
        self._ledger.free(running.order.attempt)
        if isinstance(result, Failure):
            self._sweeping = time.monotonic() + SWEEP_SECONDS
        if isinstance(result, Failure) and result.retry and running.node:
            self._crashed[running.task.number, running.task.seed] = running.node
        return Finished(running.task, result)

    def _result(self, running: _Running) -> Measurement | Failure:
        """What a task that is over came to; what Ray says of it, sorted into the kinds of failure."""
        name = self._nodes.name(running.node) if running.node else None
        node = f"node {name or running.order.node_name or 'unknown'}"
        cancelled = Failure("cancelled", f"the task on {node} was cancelled from outside the search")
        try:
            result: Measurement | Failure = ray.get(running.answer)
        except exceptions.RayTaskError as error:
            if isinstance(error.cause, exceptions.TaskCancelledError):  # while it ran; else it comes as it is
                return cancelled
            if isinstance(error.cause, UnfitNodeError):
                self._nodes.refuse(error.cause.node, str(error.cause))
                return Failure("crashed", str(error.cause), retry=True)
            return Failure("error", f"{type(error.cause).__name__}: {error.cause}")
        except exceptions.TaskCancelledError:
            return cancelled
        except exceptions.OutOfMemoryError as error:
            told = f"Ray ended the trial's process on {node} for want of memory: {_first_line(error)}"
            return Failure("out_of_memory", told)
        except (exceptions.NodeDiedError, exceptions.TaskUnschedulableError, exceptions.OwnerDiedError) as error:
            if running.node:  # else the next try may be sent to it again, and the trial be out of tries
                self._nodes.lost(running.node)
            return Failure("crashed", f"{node} died or left the cluster: {_first_line(error)}", retry=True)
        except exceptions.RayError as error:
            self._nodes.refresh(at_once=True)
            if running.node and self._nodes.name(running.node) is None:
                return Failure("crashed", f"{node} died or left the cluster: {_first_line(error)}", retry=True)
            hint = "it was killed (SIGKILL, perhaps by the kernel for want of memory) or it exited"
            return Failure("crashed", f"the trial's process on {node} ended without a result: {hint}", retry=True)
        return result

    def _require_life(self) -> None:
        """End the search rather than wait for ever for a cluster that has no node left."""
        if self._ledger.nodes or self._running or self._nodes.pending or self._settings.autoscale:
            self._alive = time.monotonic()
        if time.monotonic() - self._alive > LOST_SECONDS:
            why = "; ".join(self._nodes.refused.values()) or "all have died or left"
            rule = f"no node of the Ray cluster can run trials since {LOST_SECONDS:.0f} s ({why})"
            raise ArchspecError(f"{rule}; mend the cluster and go on with --resume")


def ray_train() -> ModuleType:
    """What several workers need, which is not part of every Ray.

    Raises:
        ArchspecError: this machine has it not.
    """
    try:
        from runners.search import ray_train
    except ImportError as error:
        rule = f"pip install 'draft-archspec[ray]' ({_first_line(error)})"
        raise ArchspecError(f"runner.resources.workers: needs Ray Train, which is not installed here: {rule}") from None
    return ray_train


def connect(address: str | None) -> tuple[bool, str | None]:
    """Join the cluster at ``address``, or start Ray on this machine; whether it was started, and the dashboard's link.

    A process that is on that cluster already stays on it. Without an address no cluster is ever joined, whatever the
    environment says.

    Raises:
        ArchspecError: there is no cluster, or this process is on another one.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if ray.is_initialized():
        joined = ray.get_runtime_context().gcs_address
        if address not in ("auto", joined):
            other = f"not on {address}" if address else "so none can be started; name it in runner.address"
            raise ArchspecError(f"runner.address: this process is on the Ray cluster {joined} already, {other}")
        return False, None
    if address not in (None, "auto"):
        _require_answer(address)
    store = None if address else OBJECT_STORE_BYTES
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        context = ray.init(address=address or "local", object_store_memory=store, **quiet)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        where = f"runner.address: {address}: no Ray cluster answers" if address else "Ray cannot be started here"
        raise ArchspecError(f"{where}: {_first_line(error)}") from None
    return address is None, f"http://{context.dashboard_url}" if context.dashboard_url else None


def _require_answer(address: str) -> None:
    """Ray itself would try for many minutes."""
    host, _, port = address.rpartition(":")
    try:
        with contextlib.closing(socket.create_connection((host, int(port)), timeout=5)):
            return
    except (OSError, ValueError) as error:
        rule = "give HOST:PORT of the head node, port 6379 unless it was started with another"
        raise ArchspecError(f"runner.address: {address}: no Ray cluster answers ({error}); {rule}") from None


def _amounts(request: Request) -> dict[str, Any]:
    return {"num_gpus": request.gpus, "num_cpus": request.cpus, "memory": request.memory or None}


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
