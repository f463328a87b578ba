"""A small Ray cluster for tests: two nodes of one machine with GPUs that are numbers alone. Imported with Ray only."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.cluster_utils import Cluster

from runners.search.executor import Failure
from runners.search.ray_runner import ENVIRONMENT, RayExecutor
from runners.search.resources import Need
from runners.search.runner_settings import RunnerSettings
from runners.search.worker import Shared
from runners.training.trial import RungTask

GIB = 1 << 30
NODES: tuple[dict[str, Any], ...] = (
    {"node_name": "node-a", "num_cpus": 2, "num_gpus": 2, "memory": 4 * GIB},
    {"node_name": "node-b", "num_cpus": 2, "num_gpus": 1, "memory": 2 * GIB},
)
# What a task imports, so that a worker that waits for work has done it; a cluster that stays up may be started so too.
PRELOADED = {"RAY_preload_python_modules": "runners.training.trial,torch._dynamo", "RAY_enable_worker_prestart": "1"}


@contextmanager
def running_cluster(*nodes: dict[str, Any]) -> Iterator[Cluster]:
    """A cluster of such nodes, which this process has joined."""
    os.environ.update(ENVIRONMENT)
    cluster = Cluster(initialize_head=True, head_node_args=nodes[0] | {"include_dashboard": False})
    try:
        for node in nodes[1:]:
            cluster.add_node(**node)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()  # type: ignore[no-untyped-call]
        for name in PRELOADED:
            os.environ.pop(name, None)


class Fixed:
    """An estimate that is the same on every device."""

    def __init__(self, count: int) -> None:
        self.device = self.host = count


def small(task: RungTask, device: str, workers: int) -> Need:
    """Every task fits many times."""
    return Fixed(GIB // 8)


def make_executor(
    address: str, *, estimate: Any = small, seconds: float | None = None, shared: Shared | None = None, **runner: Any
) -> RayExecutor:
    """An executor on a running cluster; ``runner`` are fields of the search file's ``runner``."""
    settings = RunnerSettings.model_validate({"kind": "ray", "address": address, **runner})
    return RayExecutor(settings, estimate, seconds, shared)


def reason(failure: Failure | None) -> str:
    """The reason of what must be a failure."""
    assert failure is not None
    return failure.reason
