"""Where trials run: the ``runner`` part of a search file, which may change on a resume."""

import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, PositiveInt, WithJsonSchema, model_validator

from archspec.schema import Closed, field_error


def _share(value: Any) -> Any:
    if value == "auto" or (_is_number(value) and 0 <= value <= 1):
        return value
    raise ValueError("must be auto or between 0 and 1, since a worker trains on one GPU; for more of them set workers")


def _cores(value: Any) -> Any:
    if value == "auto" or (_is_number(value) and 0 < value < math.inf):
        return value
    raise ValueError("must be auto or a positive number of cores")


def _bytes(value: Any) -> Any:
    if value == "auto" or (_is_number(value) and value > 0 and value == int(value)):
        return value if value == "auto" else int(value)
    raise ValueError("must be auto or a positive number of bytes")


def _nodes_to_come(value: Any) -> Any:
    if value is False or (_is_number(value) and value > 0 and value == int(value)):
        return value
    raise ValueError("must be false or a positive number of trials that may wait for nodes to come")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _or_const(kind: str, const: str | bool) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [{"type": kind, "minimum": 0}, {"const": const}]})


class ResourceSettings(Closed):
    """What one trial may use on a cluster. ``auto`` follows from the candidate; see ``runners.search.resources``.

    ``gpus`` is a share of one GPU; ``memory`` and ``gpu_memory`` are bytes. ``workers`` train one trial together, each
    with these amounts. ``gpu_memory`` is what a GPU has where the nodes cannot be asked.
    """

    gpus: Annotated[float | Literal["auto"], BeforeValidator(_share), _or_const("number", "auto")] = "auto"
    cpus: Annotated[float | Literal["auto"], BeforeValidator(_cores), _or_const("number", "auto")] = "auto"
    memory: Annotated[int | Literal["auto"], BeforeValidator(_bytes), _or_const("integer", "auto")] = "auto"
    workers: PositiveInt = 1
    gpu_memory: PositiveInt | None = None

    @model_validator(mode="after")
    def _workers_share_no_gpu(self) -> Self:
        if self.workers > 1 and self.gpus != "auto" and 0 < self.gpus < 1:
            rule = f"{self.gpus:g} with {self.workers} workers: workers of one trial share no GPU; use 0, 1 or auto"
            raise field_error("gpus", rule)
        return self


class RunnerSettings(Closed):
    """Where trials run: processes of this machine, or tasks of a Ray cluster.

    ``concurrent`` bounds the trials at a time; None is one on this machine, and as many as fit on a cluster. Without an
    ``address`` Ray is started on this machine. ``autoscale`` is how many trials may wait for nodes that are not there.
    """

    kind: Literal["local", "ray"] = "local"
    concurrent: PositiveInt | None = None
    address: str | None = None
    resources: ResourceSettings = ResourceSettings()
    stage_to: Path | None = None
    autoscale: Annotated[PositiveInt | Literal[False], BeforeValidator(_nodes_to_come), _or_const("integer", False)] = (
        False
    )

    @model_validator(mode="after")
    def _what_a_cluster_alone_has(self) -> Self:
        if self.kind == "local":
            for name in ("address", "resources", "stage_to", "autoscale"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise field_error(name, "the local runner has no such setting; use kind: ray, or leave it out")
        return self

    @model_validator(mode="after")
    def _an_address_that_a_driver_can_use(self) -> Self:
        if self.address is not None and (self.address == "local" or "://" in self.address):
            rule = f"{self.address!r} is no cluster to join; use HOST:PORT, auto for the cluster of this machine"
            raise field_error("address", f"{rule}, or leave it out to start Ray here")
        return self

    @model_validator(mode="after")
    def _a_place_on_every_node(self) -> Self:
        if self.stage_to is not None and not self.stage_to.is_absolute():
            raise field_error("stage_to", f"{str(self.stage_to)!r} must be an absolute path, since nodes differ")
        return self
