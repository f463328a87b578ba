"""The nodes of a Ray cluster as the search sees them: each is looked at once, before any trial may run there."""

import contextlib
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray import exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from archspec.errors import ArchspecError
from archspec.files import write_json
from runners.search.resources import Ledger, Node
from runners.search.staging import stage
from runners.search.worker import Look, Place, Shared, look_at

REFRESH_SECONDS = 3.0
START_SECONDS = 60.0
SLIVER = 0.01  # of a GPU, so that a look sees one
NODES_FILE = "nodes.json"


def here(name: str | None) -> Place:
    """The place of the Ray task that asks; ``name`` is the node's if the driver knew it."""
    context = ray.get_runtime_context()
    node, gpus = context.get_node_id(), context.get_accelerator_ids().get("GPU", [])
    return Place(node, name or alive_nodes()[node].name, tuple(map(str, gpus)))


def alive_nodes() -> dict[str, Node]:
    """The nodes of the cluster that are alive, by id, as Ray tells them; a name is the host's unless one was given."""
    nodes: dict[str, Node] = {}
    for told in ray.nodes():  # type: ignore[no-untyped-call]
        if told["Alive"]:
            has, given = told["Resources"], told["NodeName"] != told["NodeManagerAddress"]
            name = told["NodeName"] if given else told["NodeManagerHostname"]
            gpus, memory = int(has.get("GPU", 0)), int(has.get("memory", 0))
            nodes[told["NodeID"]] = Node(told["NodeID"], name, has.get("CPU", 0.0), memory, gpus)
    return nodes


@ray.remote(num_cpus=0, max_retries=0, max_calls=1)
def _look(shared: Shared | None, name: str) -> Look:
    return look_at(shared, here(name))


@ray.remote(num_cpus=0, max_retries=0, max_calls=1)
def _stage(features: Path, into: Path) -> Path:
    return stage(features, into)


def on_node(node: str, **amounts: Any) -> dict[str, Any]:
    """Options that pin a task to a node; it fails rather than run elsewhere."""
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False), **amounts}


@dataclass
class _Asked:
    """A node that was asked something and has not answered; ``staging`` when it was looked at and copies the store."""

    node: Node
    answer: "ray.ObjectRef[Any]"
    staging: bool = False


class Nodes:
    """Keeps a ledger's nodes up to date: fit ones are added, dead ones lost, the others refused with a reason."""

    def __init__(self, ledger: Ledger, shared: Shared | None, stage_to: Path | None, device: str) -> None:
        self.refused: dict[str, str] = {}
        self.dtypes: dict[str, str] = {}
        self._ledger, self._shared, self._stage_to, self._device = ledger, shared, stage_to, device
        self._names: dict[str, str] = {}
        self._asked: dict[str, _Asked] = {}
        self._refreshed = 0.0
        self._told: Any = None

    def start(self, wait_for_more: bool) -> None:
        """Look at every node there is; without ``wait_for_more`` there must be a fit one.

        Raises:
            ArchspecError: a node is not fit, which the message names with the reason, or none answered.
        """
        self.refresh(at_once=True)
        limit = time.monotonic() + START_SECONDS
        while self._looking() and time.monotonic() < limit:
            ray.wait(self._looking(), timeout=1.0)
            self._take_answers()
        self._tell()
        if self.refused:
            raise ArchspecError("\n".join(self.refused.values()))
        if not self._ledger.nodes and not self._asked and not wait_for_more:
            raise ArchspecError("the Ray cluster has no node that a trial could run on; add one, or set autoscale")
        if not self._ledger.nodes and self._looking():
            names = ", ".join(asked.node.name for asked in self._asked.values())
            rule = "is the cluster so busy that no process can start?"
            raise ArchspecError(f"no node of the Ray cluster answered within {START_SECONDS:.0f} s: {names}; {rule}")

    def refresh(self, at_once: bool = False) -> None:
        """Take note of nodes that came and went, and of what those that were asked have answered."""
        if at_once or time.monotonic() - self._refreshed > REFRESH_SECONDS:
            self._refreshed = time.monotonic()
            alive = alive_nodes()
            for gone in self._names.keys() - alive.keys():
                self._lose(gone)
            self._come([alive[new] for new in alive.keys() - self._names.keys()])
        self._take_answers()
        self._tell()

    def name(self, node: str) -> str | None:
        """The name of a node that is alive."""
        return self._names.get(node)

    def lost(self, node: str) -> None:
        """Take note that a node is gone, before Ray counts it among the dead; should it live, it is asked again."""
        if node in self._names:
            self._lose(node)

    def refuse(self, node: str, reason: str) -> None:
        """Let no more trials begin on a node."""
        self._ledger.lose(node)
        self.refused[node] = reason
        self._tell()

    @property
    def pending(self) -> bool:
        """Whether a node may still become fit."""
        return bool(self._asked)

    def _looking(self) -> "list[ray.ObjectRef[Any]]":
        return [asked.answer for asked in self._asked.values() if not asked.staging]

    def _come(self, nodes: list[Node]) -> None:
        """Ask those that a trial could run on: with a GPU if trials want one, else with a core or a GPU."""
        any_gpu = self._ledger.any_gpu or any(node.gpus for node in nodes)
        on_gpu = self._ledger.sizer.on_gpu(self._device, any_gpu)
        for node in nodes:
            self._names[node.id] = node.name
            if not node.gpus and (on_gpu or not node.cpus):
                continue
            if self._shared is None and self._ledger.sizer.settings.gpus != "auto":
                self._ledger.add(node)  # there is nothing to be asked
            else:
                self._ask(node)

    def _ask(self, node: Node) -> None:
        options = on_node(node.id, num_gpus=SLIVER if node.gpus else 0)
        self._asked[node.id] = _Asked(node, _look.options(**options).remote(self._shared, node.name))

    def _lose(self, node: str) -> None:
        self._ledger.lose(node)
        self._asked.pop(node, None)
        self.refused.pop(node, None)
        self.dtypes.pop(node, None)
        del self._names[node]

    def _take_answers(self) -> None:
        waiting = {asked.answer: key for key, asked in self._asked.items()}
        if not waiting:
            return
        ready, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=0)
        for answer in ready:
            key = waiting[answer]
            asked = self._asked.pop(key)
            try:
                self._answered(asked, ray.get(answer))
            except exceptions.RayTaskError as error:
                told = isinstance(error.cause, ArchspecError)
                why = f": {error.cause}" if told else f" cannot run this package: {error.cause!r}"
                self.refuse(key, f"node {asked.node.name}{why}")
            except exceptions.RayError as error:
                self.refuse(key, f"node {asked.node.name} did not answer: {error}")

    def _answered(self, asked: _Asked, answer: Look | Path) -> None:
        if isinstance(answer, Path):
            return self._ledger.add(replace(asked.node, features=answer))
        if answer.problem is not None:
            return self.refuse(asked.node.id, answer.problem)
        self.dtypes[asked.node.id] = answer.dtype
        node = replace(asked.node, gpu_memory=answer.gpu_memory)
        self._ledger.know(node)
        if self._stage_to is None or self._shared is None:
            return self._ledger.add(node)
        ref = _stage.options(**on_node(node.id)).remote(self._shared.features, self._stage_to)
        self._asked[node.id] = _Asked(node, ref, staging=True)
        return None

    def _tell(self) -> None:
        """Write the nodes into the run folder when they changed, for ``status`` and for people."""
        if self._shared is None:
            return
        path = self._shared.features
        fit = [asdict(node) | {"features": str(node.features or path)} for node in self._ledger.nodes.values()]
        told = {"fit": fit, "asked": [asked.node.name for asked in self._asked.values()], "refused": dict(self.refused)}
        if told != self._told:
            with contextlib.suppress(OSError):
                write_json(self._shared.folder / NODES_FILE, told)
            self._told = told
