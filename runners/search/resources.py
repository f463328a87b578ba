"""What a trial needs on a cluster, what the nodes have, and what is taken there. Ray is not imported here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from archspec.errors import ArchspecError
from runners.search.executor import Failure
from runners.search.runner_settings import ResourceSettings
from runners.training.memory import training_memory
from runners.training.trial import RungTask

_WHOLE = 10_000  # Ray counts shares of a GPU in units of 1/10,000
_MOST_NAMED = 5


class Need(Protocol):
    """Bytes that a worker needs on its device and in its host's memory, with head room."""

    @property
    def device(self) -> int:
        """Of the GPU, or of the host where there is none."""
        ...

    @property
    def host(self) -> int:
        """Of the host."""
        ...


Estimate = Callable[[RungTask, str, int], Need]  # task, device (cpu or cuda), workers


def by_training_memory(longest: int) -> Estimate:
    """The estimate of ``runners.training.memory`` for a store whose longest conversation has so many tokens."""

    def estimate(task: RungTask, device: str, workers: int) -> Need:
        train, evaluate = task.train, task.evaluate
        return training_memory(
            task.spec, train, train.dtype, longest, evaluate=evaluate, device=device, workers=workers
        )

    return estimate


@dataclass(frozen=True)
class Node:
    """What one node has. ``gpu_memory`` is of each of its GPUs, None if it has none or cannot say.

    ``features`` is where its trials read the store; None is where the search has it.
    """

    id: str
    name: str
    cpus: float
    memory: int
    gpus: int
    gpu_memory: int | None = None
    features: Path | None = None

    def __str__(self) -> str:
        """What it has, for messages."""
        each = f" of {gigabytes(self.gpu_memory)}" if self.gpu_memory else ""
        return f"{self.name}: {self.gpus} GPU{each}, {self.cpus:g} CPU, {gigabytes(self.memory)} of memory"


@dataclass(frozen=True)
class Request:
    """What one worker of a trial asks of its node; ``memory`` in bytes."""

    gpus: float
    cpus: float
    memory: int

    def __str__(self) -> str:
        """For messages."""
        memory = f" and {gigabytes(self.memory)} of memory" if self.memory else ""
        return f"{self.gpus:g} GPU, {self.cpus:g} CPU{memory}"


@dataclass(frozen=True)
class Taken:
    """A worker's part of a node; ``gpus`` are the devices, counted from 0, that it has or has a share of."""

    node: Node
    request: Request
    gpus: tuple[int, ...]


@dataclass(frozen=True)
class _Nothing:
    device: int = 0
    host: int = 0


class Sizer:
    """Turns tasks into requests: what the search file says, and estimates where it says ``auto``."""

    def __init__(self, settings: ResourceSettings, estimate: Estimate) -> None:
        self.settings = settings
        self._estimate = estimate
        self._known: dict[tuple[str, str, str], Need] = {}

    def request(self, task: RungTask, node: Node, any_gpu: bool) -> Request:
        """What a worker of ``task`` asks of ``node``; ``any_gpu`` says whether the cluster has any.

        More than one GPU, or more memory than the node has, means that it does not fit there.
        """
        on_gpu = self.on_gpu(task.train.device, any_gpu)
        gpus, cpus, memory = self.settings.gpus, self.settings.cpus, self.settings.memory
        if gpus == "auto":
            gpus = self._share(task, node) if on_gpu else 0.0
        if memory == "auto":
            memory = self.need(task, on_gpu).host
        return Request(gpus, float(task.train.threads or 1) if cpus == "auto" else cpus, memory)

    def on_gpu(self, device: str, any_gpu: bool) -> bool:
        """Whether trials with ``train.device`` so train on a GPU: as told, else where there are any or will be."""
        if self.settings.gpus != "auto":
            return self.settings.gpus > 0
        there = any_gpu or self.settings.gpu_memory is not None
        return device == "cuda" or (device == "auto" and there)

    def need(self, task: RungTask, on_gpu: bool) -> Need:
        """The estimate for a worker of ``task``."""
        device = "cuda" if on_gpu else "cpu"
        key = task.spec.hash, task.train.model_dump_json(), device
        if key not in self._known:
            self._known[key] = self._estimate(task, device, self.settings.workers)
        return self._known[key]

    def _share(self, task: RungTask, node: Node) -> float:
        gpu_memory = self.settings.gpu_memory if node.gpu_memory is None else node.gpu_memory
        if gpu_memory is None:
            return 1.0
        share = -(-100 * self.need(task, True).device // gpu_memory) / 100
        return 1.0 if self.settings.workers > 1 else share


def gigabytes(count: int | None) -> str:
    """``12.3 GB`` (10^9 bytes)."""
    return "unknown memory" if count is None else f"{count / 1e9:.1f} GB"


class Ledger:
    """Which nodes there are and what of them is taken, so that no more is in flight than fits."""

    def __init__(self, sizer: Sizer) -> None:
        self.sizer = sizer
        self.nodes: dict[str, Node] = {}
        self.seen: dict[str, Node] = {}
        self._taken: dict[str, Sequence[Taken]] = {}

    def add(self, node: Node) -> None:
        """Let trials begin on ``node`` from now on."""
        self.know(node)
        self.nodes[node.id] = node

    def know(self, node: Node) -> None:
        """Count ``node`` for what may fit one day, though no trial may begin there yet."""
        self.seen[node.id] = node

    def lose(self, node: str) -> None:
        """Let none begin there any more; what it had still counts for what may fit one day."""
        self.nodes.pop(node, None)

    @property
    def any_gpu(self) -> bool:
        """Whether any node has or had a GPU."""
        return any(node.gpus for node in self.seen.values())

    def place(self, task: RungTask, avoid: str | None = None) -> list[Taken] | None:
        """Where the workers of ``task`` could begin now, those of one trial close together; None if they could not.

        Of several nodes the one with the most room is taken, and ``avoid`` last of all.
        """
        placed: list[Taken] = []
        for node in sorted(self.nodes.values(), key=lambda node: (node.id == avoid, *self._busy(node))):
            request = self.sizer.request(task, node, self.any_gpu)
            while len(placed) < self.sizer.settings.workers:
                gpus = self._devices(node, request, placed)
                if gpus is None:
                    break
                placed.append(Taken(node, request, gpus))
        return placed if len(placed) == self.sizer.settings.workers else None

    def take(self, key: str, taken: Sequence[Taken]) -> None:
        """Count ``taken`` as in use under ``key``."""
        self._taken[key] = taken

    def moved(self, key: str, places: Sequence[tuple[str, Sequence[str]]], request: Request) -> None:
        """Take note of where the workers under ``key`` really are, each by node and GPUs.

        Ray chooses the device, and the node of what was placed on none. A team that was placed stays where it was.
        """
        taken = self._taken.get(key, ())
        if len(taken) > 1 or any(node not in self.nodes for node, _ in places):
            return
        devices = [
            tuple(int(gpu) for gpu in gpus if gpu.isdigit() and int(gpu) < self.nodes[node].gpus)
            for node, gpus in places
        ]
        if not taken or all(devices):
            self._taken[key] = [
                Taken(self.nodes[node], request, own) for (node, _), own in zip(places, devices, strict=True)
            ]

    def anywhere(self, task: RungTask) -> Request:
        """What a worker of ``task`` asks of a node that is still to come: the largest share of those that fit one."""
        to_come = Node("", "", 0.0, 0, 0)
        requests = [self.sizer.request(task, node, self.any_gpu) for node in (to_come, *self.seen.values())]
        return max((request for request in requests if request.gpus <= 1), key=lambda request: request.gpus)

    def free(self, key: str) -> None:
        """Give back what is in use under ``key``, if anything is."""
        self._taken.pop(key, None)

    def refusal(self, task: RungTask, more_to_come: bool = False) -> Failure | None:
        """Why ``task`` would not even fit into the empty cluster, with both numbers; None if it would.

        Nodes that were lost count, since they may come back. With ``more_to_come`` only GPUs' memory is asked, which
        nodes of the same kind will not have either.
        """
        settings, on_gpu = self.sizer.settings, self.sizer.on_gpu(task.train.device, self.any_gpu)
        if on_gpu and settings.gpus == "auto":
            known = [(node.gpu_memory, node.name) for node in self.seen.values() if node.gpu_memory is not None]
            if settings.gpu_memory is not None:
                known.append((settings.gpu_memory, "runner.resources.gpu_memory"))
            most, whose = max(known, default=(None, ""))
            if most is not None and self.sizer.need(task, True).device > most:
                need = f"{gigabytes(self.sizer.need(task, True).device)} of GPU memory"
                each = "each worker" if settings.workers > 1 else "training"
                rule = f"the largest GPU has {gigabytes(most)} ({whose})"
                hint = "smaller batch_tokens or more runner.resources.workers lower the part that batches take"
                return Failure("out_of_memory", f"not begun: {each} is estimated to need {need}, but {rule}; {hint}")
        if more_to_come or not self.seen or self._empty(self.sizer).place(task) is not None:
            return None
        asked = self._asked(self.sizer, task)
        return Failure("out_of_memory", f"not begun: training is estimated to need {asked}, but {self._has()}")

    def require(self, task: RungTask) -> None:
        """Check that the cluster has what the search file asks for every trial, whatever the candidate.

        Raises:
            ArchspecError: it has not; the message tells both.
        """
        least = Sizer(self.sizer.settings, lambda *_: _Nothing())
        if self._empty(least).place(task) is None:
            raise ArchspecError(f"runner.resources: a trial asks for {self._asked(least, task)}, but {self._has()}")

    def _empty(self, sizer: Sizer) -> "Ledger":
        ledger = Ledger(sizer)
        ledger.nodes = ledger.seen = self.seen
        return ledger

    def _asked(self, sizer: Sizer, task: RungTask) -> str:
        """What a trial asks of the node that has the most GPUs, or memory where it asks for none."""
        largest = max(self.seen.values(), key=lambda node: (node.gpu_memory or 0, node.gpus, node.memory))
        request, workers = sizer.request(task, largest, self.any_gpu), sizer.settings.workers
        return f"{workers} workers with {request} each" if workers > 1 else str(request)

    def _has(self) -> str:
        nodes = sorted(str(node) for node in self.seen.values())
        more = f"; and {len(nodes) - _MOST_NAMED} more" if len(nodes) > _MOST_NAMED else ""
        return f"no room in the cluster is so large ({'; '.join(nodes[:_MOST_NAMED])}{more})"

    def _busy(self, node: Node) -> tuple[float, float]:
        cpus, _, gpus = self._room(node, ())
        return -sum(gpus), -cpus

    def _room(self, node: Node, more: Sequence[Taken]) -> tuple[float, int, list[int]]:
        """CPUs, bytes and the units of each GPU that are left on ``node`` when ``more`` is taken too."""
        cpus, memory, gpus = node.cpus, node.memory, [_WHOLE] * node.gpus
        for taken in (*(taken for group in self._taken.values() for taken in group), *more):
            if taken.node.id == node.id:
                cpus, memory = cpus - taken.request.cpus, memory - taken.request.memory
                for device in taken.gpus:
                    gpus[device] -= round(taken.request.gpus * _WHOLE)
        return cpus, memory, gpus

    def _devices(self, node: Node, request: Request, more: Sequence[Taken]) -> tuple[int, ...] | None:
        """Which GPU of ``node`` a request would get, as Ray chooses: the fullest that has room; None if none has."""
        cpus, memory, gpus = self._room(node, more)
        if request.cpus > cpus + 1e-9 or request.memory > memory:
            return None
        units = round(request.gpus * _WHOLE)
        if units == 0:
            return ()
        fitting = [(left, device) for device, left in enumerate(gpus) if left >= units]
        return (min(fitting)[1],) if fitting else None
