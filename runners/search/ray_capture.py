"""The target on a Ray cluster: workers that load it once and carry out orders, such as the parts of a capture.

Every worker is an actor on a node that has room for it, and has one order at a time. The death of a worker or of its
node costs what it had done of that order. Workers tell how far they are by a file in the folder of the results.
"""

import json
import math
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from ray import exceptions

from archspec.errors import ArchspecError
from archspec.files import write_json, write_text
from runners.features.target import Target, load_target
from runners.features.work import Order, Tell
from runners.search.ray_nodes import START_SECONDS, alive_nodes, here, on_node
from runners.search.ray_runner import connect
from runners.search.resources import Node, Request
from runners.search.search_file import TargetSettings
from runners.search.worker import Place, hide_gpus

ATTEMPTS = 4  # at one order, and at loading the target on one node
POLL_SECONDS = 0.5
TELL_SECONDS = 1.0
LIBRARY_BYTES = 1 << 30  # of a process that has imported torch and transformers, with room for a batch
MARK_FILE = ".mark"


@dataclass(frozen=True)
class Start:
    """What a worker is told once: the target's settings and fingerprint, and where it will see ``mark``."""

    target: TargetSettings
    fingerprint: str
    folder: Path
    mark: str
    threads: int
    node_name: str


def target_of(start: Start, place: Place) -> Target:
    """The target, loaded onto the GPU that this process was given, if it was given one.

    Raises:
        ArchspecError: the folder or the target is another one here, or not there.
    """
    try:
        mark = (start.folder / MARK_FILE).read_text(encoding="utf-8")
    except OSError as error:
        raise ArchspecError(f"does not see {start.folder} ({error}), which must be on a shared path") from None
    if mark != start.mark:
        raise ArchspecError(f"sees another folder as {start.folder}, which must be on a shared path")
    told = start.target
    target = load_target(told.model, told.dtype, "cuda" if place.gpus else "cpu", told.trust_remote_code)
    if target.fingerprint != start.fingerprint:
        other = f"as {target.fingerprint}, but the driver as {start.fingerprint}"
        raise ArchspecError(f"sees the target {told.model} {other}; all nodes must see one target")
    return target


def carry_out(order: Order, attempt: str, target: Target) -> None:
    """Carry an order out, telling now and then how far it is.

    Raises:
        ArchspecError: it cannot be done, or the GPU's memory is too small for a batch.
    """
    last = -math.inf

    def tell(done: int) -> None:
        nonlocal last
        if time.monotonic() - last > TELL_SECONDS:
            last = time.monotonic()
            write_json(_sign(order, attempt), {"done": done})

    try:
        order.run(target, tell)
    except torch.OutOfMemoryError as error:
        rule = "smaller batches need less (features.batch_tokens, --batch-tokens, --batch-size)"
        raise ArchspecError(f"out of memory: {error}; {rule}") from None


class _Worker:
    """One process of the cluster with a target of its own."""

    def alive(self) -> None:
        """Return once the process is there."""

    def prepare(self, start: Start) -> None:
        """Load the target; raises as :func:`target_of`."""
        place = here(start.node_name)
        hide_gpus(place)
        torch.set_num_threads(start.threads)
        self._target = target_of(start, place)

    def carry_out(self, order: Order, attempt: str) -> None:
        """Carry one order out; raises as ``Order.run``, or what else goes wrong."""
        carry_out(order, attempt, self._target)


_RayWorker: Any = ray.remote(max_restarts=0, max_task_retries=0)(_Worker)


@dataclass
class _Hand:
    """A worker as the driver knows it: ``answer`` is what it was asked last, ``order`` None while it starts."""

    actor: Any
    node: Node
    answer: "ray.ObjectRef[None]"
    attempt: str
    alive: bool = False
    order: Order | None = None

    def __str__(self) -> str:
        return f"the worker on node {self.node.name}"


class RayWorkers:
    """Up to ``count`` workers on the cluster at ``address``; Ray is started on this machine if that is None.

    ``target`` is loaded by every worker from where the search file says. ``report`` gets lines for the user.
    """

    def __init__(
        self, address: str | None, target: TargetSettings, count: int, report: Callable[[str], None] = lambda _: None
    ) -> None:
        self.count = count
        self._address, self._report = address, report
        at = Path(target.model).expanduser()
        self._target = target.model_copy(update={"model": str(at.absolute())}) if at.exists() else target

    def carry_out(self, target: Target, orders: Sequence[Order], tell: Tell) -> None:
        """See ``Workers``.

        Raises:
            ArchspecError: the cluster cannot be reached or has no room, a node is named on which the target cannot be
                loaded or an order not be done, or an order or a node has ended too many workers.
        """
        todo = [order.absolute() for order in orders if not order.done]
        done = sum(order.size for order in orders) - sum(order.size for order in todo)
        if not todo:
            return tell(done)
        was_joined = ray.is_initialized()
        connect(self._address)
        try:
            with_target = sum(tensor.nbytes for tensor in (*target.model.parameters(), *target.model.buffers()))
            memory = LIBRARY_BYTES + with_target + max(order.memory(target) for order in todo)
            _Crew(self, target.fingerprint, memory, todo).work(done, tell)
        finally:
            if not was_joined:  # so that a search begins as it would without us
                ray.shutdown()

    def request(self, memory: int, nodes: Sequence[Node]) -> Request:
        """What one worker asks for: one GPU and a core, or the most cores with which ``count`` workers still fit.

        There is no GPU for it where the cluster has none, or ``target.device`` is the CPU.
        """
        device = self._target.device
        if device.startswith("cuda") or (device == "auto" and any(node.gpus for node in nodes)):
            return Request(1.0, 1.0, memory)
        cores = int(max((node.cpus for node in nodes), default=1.0))
        while cores > 1 and sum(_places(node, Request(0.0, cores, memory)) for node in nodes) < self.count:
            cores //= 2
        return Request(0.0, float(cores), memory)

    def start(self, fingerprint: str, folder: Path, mark: str, request: Request, node: Node) -> Start:
        """What a worker on ``node`` is told."""
        return Start(self._target, fingerprint, folder, mark, int(request.cpus), node.name)

    def report(self, line: str) -> None:
        """Tell the user."""
        self._report(f"cluster: {line}")


class _Crew:
    """The workers of one call, and the orders that are left."""

    def __init__(self, told: RayWorkers, fingerprint: str, memory: int, todo: list[Order]) -> None:
        self._told, self._fingerprint = told, fingerprint
        self._request = told.request(memory, list(alive_nodes().values()))
        self._todo = list(reversed(todo))
        self._folder, self._mark = todo[0].folder, uuid.uuid4().hex
        self._hands: list[_Hand] = []
        self._deaths: Counter[str] = Counter()
        self._total, self._left = sum(order.size for order in todo), len(todo)

    def work(self, before: int, tell: Tell) -> None:
        """Carry the orders out; ``before`` is what was done of others."""
        write_text(self._folder / MARK_FILE, self._mark)
        try:
            self._hire(self._told.count)
            self._told.report(self._who())
            alive = time.monotonic()
            while self._hands:
                ready, _ = ray.wait([hand.answer for hand in self._hands], timeout=POLL_SECONDS)
                for hand in [hand for hand in self._hands if hand.answer in ready]:
                    self._answered(hand)
                tell(before + self._done())
                alive = time.monotonic() if any(hand.alive for hand in self._hands) else alive
                if time.monotonic() - alive > START_SECONDS:
                    rule = "is the cluster so busy that no process can start?"
                    raise ArchspecError(f"no worker has started within {START_SECONDS:.0f} s; {rule}")
        finally:
            for hand in self._hands:
                ray.kill(hand.actor)
        if self._left:
            raise ArchspecError("no node of the Ray cluster is left; mend the cluster, and the same command goes on")

    def _who(self) -> str:
        names = Counter(hand.node.name for hand in self._hands)
        where = ", ".join(f"{count} on {name}" for name, count in sorted(names.items()))
        fewer = f"; {self._told.count} were asked for, but no more fit or are needed"
        return f"workers: {where}" + (fewer if len(self._hands) < self._told.count else "")

    def _done(self) -> int:
        waiting = sum(order.size for order in self._todo)
        held = sum(
            hand.order.size - told_of(hand.order, hand.attempt) for hand in self._hands if hand.order is not None
        )
        return self._total - waiting - held

    def _answered(self, hand: _Hand) -> None:
        try:
            ray.get(hand.answer)
        except exceptions.RayTaskError as error:
            cause = error.cause
            what = str(cause) if isinstance(cause, ArchspecError) else f"{type(cause).__name__}: {cause}"
            doing = f" {hand.order.name}:" if hand.order is not None else ""
            raise ArchspecError(f"node {hand.node.name}:{doing} {what}") from error
        except exceptions.RayError as error:
            return self._died(hand, error)
        if not hand.alive:
            hand.alive = True
            start = self._told.start(self._fingerprint, self._folder, self._mark, self._request, hand.node)
            hand.answer = hand.actor.prepare.remote(start)
            return None
        if hand.order is not None:
            _sign(hand.order, hand.attempt).unlink(missing_ok=True)
            self._left -= 1
        return self._give(hand)

    def _give(self, hand: _Hand) -> None:
        """Hand out the next order; a worker for whom there is none may go."""
        hand.order, hand.attempt = (self._todo.pop() if self._todo else None), uuid.uuid4().hex
        if hand.order is None:
            self._hands.remove(hand)
            ray.kill(hand.actor)
        else:
            hand.answer = hand.actor.carry_out.remote(hand.order, hand.attempt)

    def _died(self, hand: _Hand, error: Exception) -> None:
        """Put back the order of a worker that is no more, and hire another one in its place."""
        self._hands.remove(hand)
        what = f"loading the target on node {hand.node.name}" if hand.order is None else hand.order.name
        self._deaths[what] += 1
        first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        if self._deaths[what] == ATTEMPTS:
            hint = "perhaps for want of memory"
            raise ArchspecError(f"{what} has ended {ATTEMPTS} workers, the last {hand}, {hint}: {first_line}")
        self._told.report(f"{hand} died ({first_line}); {what} begins again")
        if hand.order is not None:
            _sign(hand.order, hand.attempt).unlink(missing_ok=True)
            self._todo.append(hand.order)
        self._hire(1)

    def _hire(self, count: int) -> None:
        """Start as many workers as there are places and orders for, at most ``count``.

        Raises:
            ArchspecError: there is no worker, and not even an empty cluster has a place for one.
        """
        nodes, request = alive_nodes().values(), self._request
        waiting = len(self._todo) - sum(hand.order is None for hand in self._hands)
        for _ in range(min(count, waiting)):
            taken = Counter(hand.node.id for hand in self._hands)
            room = [(_places(node, request) - taken[node.id], node.name, node) for node in nodes]
            most, _, node = max(room, key=lambda place: place[:2], default=(0, "", None))
            if node is None or most < 1:
                break
            options = on_node(node.id, num_gpus=request.gpus, num_cpus=request.cpus, memory=request.memory)
            actor = _RayWorker.options(**options).remote()
            self._hands.append(_Hand(actor, node, actor.alive.remote(), uuid.uuid4().hex))
        if not self._hands and not self._deaths:
            has = "; ".join(sorted(map(str, nodes)))
            raise ArchspecError(f"a worker with the target asks for {request}, but no node has so much ({has})")


def _places(node: Node, request: Request) -> int:
    """How many workers the empty ``node`` holds."""
    gpus = int(node.gpus / request.gpus) if request.gpus else math.inf
    return int(min(gpus, node.cpus // request.cpus, node.memory // request.memory))


def _sign(order: Order, attempt: str) -> Path:
    return order.folder / f"sign-{attempt}.json"


def told_of(order: Order, attempt: str) -> int:
    """How much of an order its attempt says it has done."""
    try:
        return int(json.loads(_sign(order, attempt).read_text(encoding="utf-8"))["done"])
    except (OSError, ValueError):  # not there yet, or a file system that shows it half renamed
        return 0
