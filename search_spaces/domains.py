"""The three kinds of domain that a choice can draw from, and the labels that stand for their values in Optuna.

A label is a string or a number and nothing else, so that a storage written today can be read by tomorrow's Optuna.
"""

import json
import math
from collections.abc import Sequence
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, ConfigDict, Field, RootModel, model_validator
from pydantic_core import PydanticCustomError

from archspec.errors import nearest
from archspec.schema import Closed

Label = str | int | float


def _number(value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return value
    raise ValueError("must be a number")


def _scalar(value: Any) -> Any:
    if isinstance(value, list | tuple | dict):
        raise ValueError("a list or a mapping needs a label; write {options: {label: value}}")
    return value


def label_of(value: Any) -> Label:
    """The label of a plain value: itself for strings and numbers, a word for true, false and null."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        return value
    raise TypeError(f"{value!r} is no plain value")


class Listed(RootModel[tuple[Annotated[str | int | float | bool | None, BeforeValidator(_scalar)], ...]]):
    """``[a, b, c]``: one of several plain values, without an order."""

    model_config = ConfigDict(frozen=True)

    @model_validator(mode="after")
    def _options_differ(self) -> Self:
        if not self.root:
            raise ValueError("the list is empty; name at least one option")
        labels = [label_of(value) for value in self.root]
        for index, label in enumerate(labels):
            if label in labels[:index]:
                raise ValueError(f"the option {label!r} is listed twice")
        return self

    @property
    def size(self) -> int:
        """How many values there are."""
        return len(self.root)

    def labels(self) -> Sequence[Label]:
        """Every label, in the order written."""
        return [label_of(value) for value in self.root]

    def value(self, label: Label) -> Any:
        """The value that ``label`` stands for."""
        return self.root[self.labels().index(label)]

    def find(self, value: Any) -> Label | None:
        """The label of ``value``; None if it is no option."""
        return next((label for label in self.labels() if _same(self.value(label), value)), None)


class Labelled(Closed):
    """``{options: {label: value}}``: one of several values of any shape; a mapping is merged into what stands there."""

    options: dict[str, Any]

    @model_validator(mode="after")
    def _options_differ(self) -> Self:
        if not self.options:
            raise ValueError("options is empty; name at least one option")
        seen: dict[str, str] = {}
        for label, value in self.options.items():
            first = seen.setdefault(json.dumps(value, sort_keys=True), label)
            if first != label:
                raise ValueError(f"the options {first!r} and {label!r} stand for the same value")
        return self

    @property
    def size(self) -> int:
        """How many values there are."""
        return len(self.options)

    def labels(self) -> Sequence[Label]:
        """Every label, in the order written."""
        return list(self.options)

    def value(self, label: Label) -> Any:
        """The value that ``label`` stands for."""
        return self.options[str(label)]

    def find(self, value: Any) -> Label | None:
        """The label of ``value``; None if it is no option."""
        return next((label for label in self.labels() if _same(self.value(label), value)), None)


class Range(Closed):
    """``{low, high, step, log}``: numbers from ``low`` to ``high``, both included; whole numbers if all given are."""

    low: Annotated[int | float, BeforeValidator(_number)]
    high: Annotated[int | float, BeforeValidator(_number)]
    step: Annotated[int | float, BeforeValidator(_number), Field(gt=0)] | None = None
    log: bool = False

    @model_validator(mode="after")
    def _bounds_fit(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low <= high must hold, but got (low={self.low}, high={self.high})")
        if self.log and self.step is not None:
            raise ValueError(f"step and log exclude each other; drop step={self.step} or log")
        if self.log and self.low <= 0:
            raise ValueError(f"a log range needs low > 0, but got low={self.low}")
        if self.step is not None:
            steps = (self.high - self.low) / self.step
            if not math.isclose(steps, round(steps), abs_tol=1e-9):
                below, above = (self.low + count * self.step for count in (math.floor(steps), math.ceil(steps)))
                rule = f"high={self.high} is no whole number of steps of {self.step} above low={self.low}"
                raise ValueError(f"{rule}; use {below} or {above}")
        return self

    @property
    def whole(self) -> bool:
        """Whether the range holds whole numbers only."""
        return all(isinstance(number, int) for number in (self.low, self.high, self.step or 1))

    @property
    def size(self) -> int | None:
        """How many values there are; None for a continuous range."""
        if self.whole or self.step is not None:
            return round((self.high - self.low) / (self.step or 1)) + 1
        return 1 if self.low == self.high else None

    def labels(self) -> Sequence[Label]:
        """Every value of a discrete range.

        Raises:
            ValueError: the range is continuous.
        """
        if self.size is None:
            raise ValueError("a continuous range cannot be listed")
        return [self.low + index * (self.step or 1) for index in range(self.size)]

    def value(self, label: Label) -> Any:
        """The number itself."""
        return label

    def find(self, value: Any) -> Label | None:
        """``value`` itself if it is a number that the range can yield, otherwise None."""
        if not isinstance(value, int | float) or isinstance(value, bool) or not self.low <= value <= self.high:
            return None
        if self.whole or self.step is not None:
            steps = (value - self.low) / (self.step or 1)
            if not math.isclose(steps, round(steps), abs_tol=1e-9):
                return None
        return int(value) if self.whole else float(value)


def _same(one: Any, other: Any) -> bool:
    """Equality that tells true from 1."""
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def _domain(value: Any) -> Any:
    if isinstance(value, Listed | Labelled | Range):
        return value
    if isinstance(value, list | tuple):
        return Listed.model_validate(value)
    if not isinstance(value, dict) or not value:
        raise ValueError("must be a list [a, b], a range {low: a, high: b} or labels {options: {label: value}}")
    if "options" in value:
        return Labelled.model_validate(value | {"options": _text_keys(value["options"])})
    if value.keys() & Range.model_fields.keys():
        return Range.model_validate(value)
    key = str(next(iter(value)))
    rule = nearest(key, [*Range.model_fields, *Labelled.model_fields])
    raise PydanticCustomError("unknown_key", f"unknown key; {rule}", {"key": key})


def _text_keys(options: Any) -> Any:
    return {str(key): value for key, value in options.items()} if isinstance(options, dict) else options


Domain = Annotated[Listed | Labelled | Range, BeforeValidator(_domain)]
