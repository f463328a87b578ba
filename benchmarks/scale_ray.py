"""The Ray side of ``driver_scale.py``: a cluster on this machine whose GPUs are numbers, tasks that do not train."""

import json
import logging
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray import cloudpickle
from ray.cluster_utils import Cluster

from runners.search.executor import Failure
from runners.search.ray_runner import ENVIRONMENT, RayExecutor
from runners.search.resources import by_training_memory
from runners.search.runner_settings import RunnerSettings
from runners.search.worker import WORKER_FILE
from runners.training.trial import METRICS_FILE, Measurement, RungTask

STORE_BYTES = 80 << 20
Curve = Callable[..., dict[str, Any]]


def _synthetic(told: dict[str, Any], _pickled: bytes) -> dict[str, Any]:
    """What a worker does; sent by value, so that a worker imports nothing of this package."""
    context = ray.get_runtime_context()
    node, gpus = context.get_node_id(), [str(gpu) for gpu in context.get_accelerator_ids().get("GPU", [])]
    where = f"{node[:6]} gpu {','.join(gpus)}"
    sign = {"attempt": told["attempt"], "places": [[node, gpus]], "where": where, "report": None}
    part = told["directory"] / f"{told['worker_file']}.part"
    part.write_text(json.dumps(sign), encoding="utf-8")
    part.replace(part.with_suffix(""))
    if "torch" in sys.modules:
        raise RuntimeError("a worker has loaded torch, so that 64 of them would need most of the machine's memory")
    time.sleep(told["seconds"])
    measurement: dict[str, Any] = cloudpickle.loads(told["curve"])(*told["arguments"])
    with (told["directory"] / told["metrics_file"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(measurement) + "\n")
    return measurement


class _Instead:
    """Stands where the remote function of the Ray runner stands; ``task`` and ``order`` travel as bytes."""

    def __init__(self, seconds: float, curve: Curve) -> None:
        self._told: dict[str, Any] = {"worker_file": WORKER_FILE, "metrics_file": METRICS_FILE, "seconds": seconds}
        self._told["curve"] = cloudpickle.dumps(curve)  # type: ignore[no-untyped-call]
        cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]
        self._function: Any = ray.remote(max_retries=0, max_calls=0)(_synthetic)
        self._options: dict[str, Any] = {}

    def options(self, **options: Any) -> "_Instead":
        """As of a remote function, for the call that follows."""
        self._options = options
        return self

    def remote(self, task: RungTask, order: Any) -> Any:
        """As of a remote function."""
        arguments = task.spec.hash, task.number, task.rungs, task.rung
        told = self._told | {"attempt": order.attempt, "directory": task.directory, "arguments": arguments}
        return self._function.options(**self._options).remote(told, pickle.dumps((task, order)))


class SyntheticExecutor(RayExecutor):
    """The Ray runner with other tasks; what they answer is made a measurement here."""

    def _result(self, running: Any) -> Measurement | Failure:
        answer: Any = super()._result(running)
        return answer if isinstance(answer, Failure) else Measurement(**answer)


@contextmanager
def cluster_executor(settings: RunnerSettings, gpus: int, nodes: int, seconds: float, curve: Curve) -> Iterator[Any]:
    """The executor on a cluster of so many nodes, which share the GPUs out evenly."""
    os.environ.update(ENVIRONMENT)
    share = -(-gpus // nodes)
    node: dict[str, Any] = {"num_cpus": share, "num_gpus": share, "memory": 1 << 40, "object_store_memory": STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False, "node_name": "node-0"})
    try:
        for number in range(1, nodes):
            cluster.add_node(**node, node_name=f"node-{number}")
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        executor = SyntheticExecutor(settings.model_copy(update={"address": cluster.address}), by_training_memory(1024))
        executor.function = _Instead(seconds, curve)
        yield executor
    finally:
        ray.shutdown()
        cluster.shutdown()  # type: ignore[no-untyped-call]
