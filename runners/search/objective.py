"""What a search is for: its objectives, which of them it follows, and where times come from. Settings only."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt, model_validator

from archspec.errors import nearest
from archspec.schema import Closed, field_error
from runners.training.settings import EvalSettings, TreeSettings

ObjectiveName = Literal["speedup", "draft_ms", "params", "acceptance_length", "acceptance_rate"]
Direction = Literal["maximize", "minimize"]
NEED_TIMES = frozenset({"speedup", "draft_ms"})


def _one_or_several(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Names = Annotated[
    tuple[ObjectiveName, ...],
    BeforeValidator(_one_or_several, json_schema_input_type=list[ObjectiveName] | ObjectiveName),
]


class Objective(EvalSettings):
    """The objectives, and how acceptance is measured.

    The search follows one of them, by default ``speedup`` if it is there and else the first; the others are recorded,
    and the Pareto set is taken over all. ``mode: multi`` follows all at once. ``within`` caps what may be recommended:
    at most that much of what is minimised, at least that much of what is maximised.
    """

    maximize: Names = ()
    minimize: Names = ()
    follow: ObjectiveName | None = None
    mode: Literal["scalar", "multi"] = "scalar"
    within: dict[ObjectiveName, PositiveFloat] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _names_fit(self) -> Self:
        names = (*self.maximize, *self.minimize)
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise field_error("minimize" if twice in self.minimize else "maximize", f"{twice} stands twice; keep one")
        for name in filter(None, (self.follow, *self.within)):
            if names and name not in names:
                place = "follow" if name == self.follow else f"within.{name}"
                raise field_error(place, f"{name} is no objective of this search; {nearest(name, names)}")
        if self.mode == "multi" and len(names) < 2:
            raise field_error("mode", "multi needs two objectives or more, as in maximize: speedup, minimize: params")
        if self.mode == "multi" and self.follow is not None:
            raise field_error("follow", "multi follows all objectives; leave follow out or use mode: scalar")
        return self

    @property
    def directions(self) -> dict[ObjectiveName, Direction]:
        """Every objective with its direction, those that are maximised first."""
        up: dict[ObjectiveName, Direction] = dict.fromkeys(self.maximize, "maximize")
        return up | dict.fromkeys(self.minimize, "minimize")

    @property
    def followed(self) -> ObjectiveName:
        """The one scalar by which candidates are ranked, and in ``scalar`` mode drawn and stopped."""
        if self.follow is not None:
            return self.follow
        names = tuple(self.directions)
        return "speedup" if "speedup" in names else names[0]


class SpeedSettings(Closed):
    """Where times come from: a cost profile, or the roofline of a named accelerator; and at which use.

    A profile that is not there yet is measured on this machine before the search. ``batch`` sequences are decoded
    together with ``context`` tokens each; ``draft_lengths`` are the least and the greatest k that serving may use.
    ``dtype`` is the accelerator's; a profile has its own. ``threads`` are the CPU threads that a profile is measured
    with here, and that finalists are decoded with.
    """

    profile: Path | None = None
    accelerator: str | None = None
    dtype: Literal["float32", "bfloat16", "float16", "float8"] = "bfloat16"
    batch: PositiveInt = 1
    context: PositiveInt = 512
    draft_lengths: tuple[PositiveInt, PositiveInt] = (1, 8)
    threads: PositiveInt | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.profile is None) == (self.accelerator is None):
            rule = "times come from one place: give profile (a file of archspec profile) or accelerator (a name)"
            raise ValueError(rule)
        if self.profile is not None and self.dtype != type(self).model_fields["dtype"].default:
            raise field_error("dtype", f"{self.dtype} is for an accelerator; a profile has its own, so leave dtype out")
        low, high = self.draft_lengths
        if low > high:
            raise field_error("draft_lengths", f"the range is empty: {low} is above {high}; use [{high}, {low}]")
        return self

    @property
    def range(self) -> range:
        """Every k that serving may use."""
        return range(self.draft_lengths[0], self.draft_lengths[1] + 1)


class DecodeSettings(Closed):
    """Real decoding after a search: finalists answer held-out prompts, and what is predicted stands beside it.

    ``tree`` also decodes with a draft tree. ``max_new_tokens`` ends an answer that is longer.
    """

    conversations: PositiveInt = 8
    max_new_tokens: PositiveInt = 128
    tree: TreeSettings | None = None


def default_objective(data: Any) -> Any:
    """A search file's plain data in which an objective is named: speed-up where there are times, else acceptance."""
    if not isinstance(data, Mapping):
        return data
    objective = data.get("objective", {})
    if not isinstance(objective, Mapping) or objective.get("maximize") or objective.get("minimize"):
        return data
    usual = "acceptance_length" if data.get("speed") is None else "speedup"
    return {**data, "objective": {**objective, "maximize": usual}}
