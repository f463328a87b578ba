"""What happens on a node of a cluster: it is looked at once, and runs tasks. Ray is not imported here.

A task that runs tells so by a small file in its trial's folder, which every node sees. It holds the attempt that wrote
it, so that what an earlier one left is not taken for news.
"""

import json
import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from archspec.errors import ArchspecError
from archspec.files import write_json, write_text
from runners.features.store import FeatureStore
from runners.search.executor import Failure
from runners.search.outcome import RunRung, now_and_then, run_in_log
from runners.training.device import compute_dtype, pick_device
from runners.training.trainer import StepReport
from runners.training.trial import Measurement, RungTask, run_rung

PROGRESS_SECONDS = 1.0
WORKER_FILE = "worker.json"
MARK_FILE = ".shared"


@dataclass(frozen=True)
class Place:
    """Where a process runs: its node by id and name, and its GPUs as the node calls them."""

    node: str
    name: str
    gpus: tuple[str, ...]

    def __str__(self) -> str:
        """``node-3 gpu 1``, or the node alone."""
        return f"{self.name} gpu {','.join(self.gpus)}" if self.gpus else self.name


@dataclass(frozen=True)
class Shared:
    """What every node must see alike: the store by path and fingerprint, and the run folder by the mark in it."""

    features: Path
    fingerprint: str
    folder: Path
    mark: str

    @classmethod
    def of(cls, features: Path, fingerprint: str, folder: Path) -> "Shared":
        """Leave a mark in the folder, so that a node can tell it from another folder of the same name."""
        mark = uuid.uuid4().hex
        write_text(folder / MARK_FILE, mark)
        return cls(features.absolute(), fingerprint, folder.absolute(), mark)


@dataclass(frozen=True)
class Look:
    """What a node was found to be: ``problem`` is why no trial can run there. ``dtype`` is what ``auto`` is there."""

    problem: str | None
    gpu_memory: int | None
    dtype: str


class UnfitNodeError(Exception):
    """A task came to a node, known by its id, on which it cannot run."""

    def __init__(self, node: str, problem: str) -> None:
        super().__init__(node, problem)
        self.node, self.problem = node, problem

    def __str__(self) -> str:
        return self.problem


def look_at(shared: Shared | None, place: Place) -> Look:
    """Look at the node that this process runs on; it sees one GPU if the node has any."""
    hide_gpus(place)
    cuda = torch.cuda.is_available()
    memory = int(torch.cuda.mem_get_info()[1]) if cuda else None
    problem = None if shared is None else problem_of(shared, place.name)
    return Look(problem, memory, compute_dtype("auto", pick_device("auto")))


def problem_of(shared: Shared, name: str) -> str | None:
    """Why trials cannot run on the node ``name``, which is this one: another store, another folder, no right to write.

    None if they can.
    """
    try:
        fingerprint = FeatureStore.open(shared.features).fingerprint
    except ArchspecError as error:
        return f"node {name} cannot read the feature store {shared.fingerprint}: {error}"
    if fingerprint != shared.fingerprint:
        rule = f"as {fingerprint}, but the search uses {shared.fingerprint}; all nodes must see one store"
        return f"node {name} sees the feature store {shared.features} {rule}"
    try:
        mark = (shared.folder / MARK_FILE).read_text(encoding="utf-8")
    except OSError as error:
        return f"node {name} does not see the run folder {shared.folder}: {error}; it must be on a shared path"
    if mark != shared.mark:
        return f"node {name} sees another folder as {shared.folder}; the run folder must be on a shared path"
    probe = shared.folder / f".probe-{uuid.uuid4().hex}"
    try:
        write_text(probe, name)
        probe.unlink()
    except OSError as error:
        return f"node {name} cannot write into the run folder {shared.folder}: {error}"
    return None


def run_task(
    task: RungTask, attempt: str, threads: int, place: Place, check: Shared | None, run: RunRung = run_rung
) -> Measurement | Failure:
    """Run a task in this process, telling that it began, where, and how far it is.

    Raises:
        UnfitNodeError: ``check`` was to be done first, and the node is not fit.
    """
    hide_gpus(place)
    problem = None if check is None else problem_of(check, place.name)
    if problem is not None:
        raise UnfitNodeError(place.node, problem)
    tell = sign_writer(task.directory, attempt, [place], str(place))
    tell(None)
    return run_in_log(task, threads, now_and_then(tell, PROGRESS_SECONDS), str(place), run)


@dataclass(frozen=True)
class Sign:
    """What a running task's file says; ``places`` are the node and the GPUs of every worker, the first one's first."""

    places: tuple[tuple[str, tuple[str, ...]], ...]
    where: str
    report: StepReport | None

    @property
    def node(self) -> str:
        """The first worker's node."""
        return self.places[0][0]


def sign_writer(
    directory: Path, attempt: str, places: Sequence[Place], where: str
) -> Callable[[StepReport | None], None]:
    """What writes the file that ``read_sign`` reads; a report of None says that the task has begun."""
    told = {"attempt": attempt, "places": [[place.node, list(place.gpus)] for place in places], "where": where}

    def tell(report: StepReport | None) -> None:
        write_json(directory / WORKER_FILE, told | {"report": report and asdict(report)})

    return tell


def read_sign(directory: Path, attempt: str) -> Sign | None:
    """What the given attempt of the trial in ``directory`` last told; None if it has not begun."""
    try:
        told: dict[str, Any] = json.loads((directory / WORKER_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not there yet, or a file system that shows it half renamed
        return None
    if told["attempt"] != attempt:
        return None
    report = told["report"] and StepReport(**told["report"] | {"step_kl": tuple(told["report"]["step_kl"])})
    return Sign(tuple((node, tuple(gpus)) for node, gpus in told["places"]), told["where"], report)


def hide_gpus(place: Place) -> None:
    """Where no GPU was asked for, see none: Ray leaves all of a node's visible then."""
    if not place.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def absolute(task: RungTask, features: Path | None) -> RungTask:
    """``task`` as a process with another working directory needs it, with its store at ``features`` if given."""
    return replace(task, directory=task.directory.absolute(), features=(features or task.features).absolute())
