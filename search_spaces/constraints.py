"""Predicates on a candidate: cheap ones, checked before anything is trained, and those on what was measured."""

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from archspec.cost import draft_params, flops_per_token, trainable_params, weight_bytes
from archspec.resolve import ResolvedSpec
from archspec.schema import Closed
from archspec.servable import ENGINES, EngineName
from archspec.speedup import Times

Positive = Annotated[float, Field(gt=0)]
MEASURED = ("speedup", "acceptance_length", "acceptance_rate")


class Bound(Closed):
    """A least and a greatest value, either of which may be left out."""

    min: Positive | None = None
    max: Positive | None = None

    @model_validator(mode="after")
    def _bounds_fit(self) -> Self:
        if self.min is None and self.max is None:
            raise ValueError("the bound is empty; give min, max or both")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min <= max must hold, but got (min={self.min:g}, max={self.max:g})")
        return self


class ByteBound(Closed):
    """The most that the weights which the draft adds beside the target may take, in bytes at ``dtype``."""

    max: Positive
    dtype: Literal["float32", "bfloat16", "float16", "float8"] = "bfloat16"


class Constraints(Closed):
    """Bounds on what ``archspec.cost`` counts, on the time of a draft step, on engines, and on what was measured.

    ``params`` are those that the draft adds beside the target; ``draft_ms`` comes from the search's times. The bounds
    named in ``MEASURED`` are checked whenever a candidate was measured, all others before it is trained.
    """

    params: Bound | None = None
    trainable_params: Bound | None = None
    flops_per_token: Bound | None = None
    bytes: ByteBound | None = None
    draft_ms: Bound | None = None
    servable_by: tuple[EngineName, ...] = ()
    speedup: Bound | None = None
    acceptance_length: Bound | None = None
    acceptance_rate: Bound | None = None

    def margins(self, spec: ResolvedSpec, times: Times | None = None) -> dict[str, float]:
        """How far ``spec`` is beyond each constraint, relative to its bound; 0 or less is feasible.

        Beyond an engine is how many fields it cannot serve. The values suit ``optuna.Trial.set_constraint``.
        """
        return {name: max(over for over, _ in sides) for name, sides in self._sides(spec, times)}

    def violations(self, spec: ResolvedSpec, times: Times | None = None) -> dict[str, float]:
        """The margins of the constraints that ``spec`` breaks."""
        return {name: over for name, over in self.margins(spec, times).items() if over > 0}

    def reason(self, spec: ResolvedSpec, times: Times | None = None) -> str | None:
        """Which constraints ``spec`` breaks, for people; None if it breaks none."""
        broken = [rule for _, sides in self._sides(spec, times) for over, rule in sides if over > 0]
        return "; ".join(broken) or None

    def measured_margins(self, values: Mapping[str, float]) -> dict[str, float]:
        """As ``margins``, of the bounds on what was measured; ``values`` by the names in ``MEASURED``."""
        bounds = {name: getattr(self, name) for name in MEASURED}
        return {
            name: max(over for over, _ in _beyond(name, values[name], bound))
            for name, bound in bounds.items()
            if bound is not None
        }

    def _sides(self, spec: ResolvedSpec, times: Times | None) -> Iterator[tuple[str, list[tuple[float, str]]]]:
        """Each constraint's name, and for each of its bounds how far beyond it ``spec`` is, and in words."""
        counts: dict[str, tuple[Bound | None, Callable[[ResolvedSpec], float]]] = {
            "params": (self.params, draft_params),
            "trainable_params": (self.trainable_params, trainable_params),
            "flops_per_token": (self.flops_per_token, flops_per_token),
        }
        if times is not None:
            counts["draft_ms"] = (self.draft_ms, times.draft_ms)
        for name, (bound, count) in counts.items():
            if bound is not None:
                yield name, _beyond(name, count(spec), bound)
        if self.bytes is not None:
            size = weight_bytes(spec, self.bytes.dtype)
            yield "bytes", _beyond(f"bytes in {self.bytes.dtype}", size, Bound(max=self.bytes.max))
        for name in self.servable_by:
            limits = ENGINES[name].verdict(spec).limits
            yield f"servable_by.{name}", [(float(len(limits)), f"{name} cannot serve {'; '.join(map(str, limits))}")]


def _beyond(what: str, value: float, bound: Bound) -> list[tuple[float, str]]:
    sides = []
    if bound.max is not None:
        rule = f"{what}: {_figure(value)} is above the greatest allowed, {_figure(bound.max)}"
        sides.append(((value - bound.max) / bound.max, rule))
    if bound.min is not None:
        rule = f"{what}: {_figure(value)} is below the least allowed, {_figure(bound.min)}"
        sides.append(((bound.min - value) / bound.min, rule))
    return sides


def _figure(value: float) -> str:
    """``40,000,000`` or ``1.84``."""
    return f"{value:,.0f}" if value == round(value) or value >= 1000 else f"{value:.4g}"
