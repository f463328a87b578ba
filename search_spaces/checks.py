"""The rules of a space that no single choice can see, and whether the spec's schema takes every option.

Problems are returned as pydantic's error details, so that they carry the place they were written at.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from archspec.schema import Location
from archspec.spec import DraftSpec
from search_spaces.domains import Domain, Labelled, Listed, Range
from search_spaces.paths import ChoicePath, merge_in, parse_path, spec_data


def greatest_depth(base: DraftSpec, choices: Mapping[str, Domain]) -> int:
    """Layers of the deepest candidate."""
    domain = choices.get("depth")
    if domain is None:
        return sum(layer.repeat for layer in base.layers)
    return int(domain.high) if isinstance(domain, Range) else max(int(label) for label in domain.labels())


def problems(base: DraftSpec, choices: Mapping[str, Domain]) -> list[InitErrorDetails]:
    """Everything that is wrong with ``choices`` on ``base``; empty if they are a space."""
    if not choices:
        rule = "the space is empty; name at least one choice, for example depth: [1, 2]"
        return [_problem(("choices",), {}, rule)]
    found = list(_depth_problems(choices))
    if found:
        return found
    depth, paths = greatest_depth(base, choices), []
    for text, domain in choices.items():
        try:
            paths.append(parse_path(text, depth))
        except ValueError as error:
            found.append(_problem(("choices", text), domain, str(error)))
    found += _overlaps(paths, depth)
    if found:
        return found
    return [problem for path in paths for problem in _refused(base, path, choices[path.text], depth)]


def _problem(place: Location, value: Any, rule: str) -> InitErrorDetails:
    return InitErrorDetails(type=PydanticCustomError("space_rule", rule), loc=place, input=value)


def _options(domain: Domain) -> Iterator[tuple[Location, Any]]:
    """Where each option is written, below its path, and its value; the two ends stand for a range."""
    match domain:
        case Listed():
            yield from (((index,), value) for index, value in enumerate(domain.root))
        case Labelled():
            yield from ((("options", label), value) for label, value in domain.options.items())
        case Range():
            yield from ((("low",), domain.low), (("high",), domain.high))


def _depth_problems(choices: Mapping[str, Domain]) -> Iterator[InitErrorDetails]:
    domain = choices.get("depth")
    for below, value in _options(domain) if domain is not None else ():
        place = ("choices", "depth", *below)
        whole = isinstance(value, int) and not isinstance(value, bool) and value > 0
        if not whole or isinstance(domain, Labelled) or (isinstance(domain, Range) and not domain.whole):
            yield _problem(place, value, "depth is a number of layers; list whole numbers from 1, or give low and high")


def _overlaps(paths: list[ChoicePath], depth: int) -> Iterator[InitErrorDetails]:
    for index, path in enumerate(paths):
        for earlier in paths[:index]:
            if path.overlaps(earlier, depth):
                rule = f"sets what choices.{earlier.text} sets too; keep one of the two"
                yield _problem(("choices", path.text), {}, rule)


def _refused(base: DraftSpec, path: ChoicePath, domain: Domain, depth: int) -> Iterator[InitErrorDetails]:
    """Options that the spec's schema refuses whatever else is chosen, each tried alone on the base.

    Rules between fields report a place above ``path``; another choice may satisfy them, so they are left to the draw.
    """
    for below, value in _options(domain):
        place = ("choices", path.text, *below)
        if path.kind == "train" and isinstance(value, list | dict | None):
            yield _problem(place, value, "a training setting is a single number or word")
        if path.kind != "spec":
            continue
        if path.selector is not None and not path.field and isinstance(value, dict) and "repeat" in value:
            yield _problem(place, {}, "repeat is not set by a choice; use depth for the number of layers")
        data, (_, targets) = spec_data(base, depth), next(path.groups(depth))
        try:
            merge_in(data, targets[0], value)
            DraftSpec.model_validate(data)
        except ValidationError as error:
            yield from _at(error.errors(), targets[0], place)
        except ValueError as error:
            yield _problem(place, {}, str(error))


def _at(errors: list[ErrorDetails], target: Location, place: Location) -> Iterator[InitErrorDetails]:
    for details in errors:
        found, context = tuple(details["loc"]), details.get("ctx", {})
        if found[: len(target)] != target:
            continue
        kind: str | PydanticCustomError = details["type"]
        if kind == "unknown_key":
            kind = PydanticCustomError("unknown_key", details["msg"], context)
        yield InitErrorDetails(type=kind, loc=(*place, *found[len(target) :]), input=details["input"], ctx=context)
