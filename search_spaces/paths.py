"""Dotted paths inside a spec, with selectors for layers, and how values are put where they point.

``layers.1.fusion`` is one layer, ``layers.*.fusion`` every layer independently, ``layers.all.fusion`` all layers tied,
``layers.rest.fusion`` all but the first, tied. ``depth`` is the number of layers; ``train.NAME`` a training setting.
"""

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pydantic import BaseModel

from archspec.errors import nearest
from archspec.schema import Location, dotted
from archspec.spec import DraftSpec, LayerSpec

SELECTORS = ("*", "all", "rest")


@dataclass(frozen=True)
class ChoicePath:
    """A checked path. ``field`` is relative to the layer where ``selector`` is set, otherwise to the spec."""

    text: str
    kind: Literal["depth", "train", "spec"]
    selector: int | str | None = None
    field: tuple[str, ...] = ()

    def layers(self, depth: int) -> tuple[int, ...]:
        """The layers that the path points at in a draft of ``depth`` layers."""
        if isinstance(self.selector, int):
            return (self.selector,) if self.selector < depth else ()
        return tuple(range(1 if self.selector == "rest" else 0, depth)) if self.selector else ()

    def groups(self, depth: int) -> Iterator[tuple[str, tuple[Location, ...]]]:
        """Concrete parameter names at ``depth`` layers, each with the places in the spec that it sets together."""
        if self.selector is None:
            yield self.text, ((self.field,) if self.kind == "spec" else ())
            return
        places: list[Location] = [("layers", layer, *self.field) for layer in self.layers(depth)]
        if self.selector in ("all", "rest"):
            if places:
                yield self.text, tuple(places)
        else:
            for place in places:
                yield dotted(place), (place,)

    def overlaps(self, other: "ChoicePath", depth: int) -> bool:
        """Whether both would set one place in a draft of ``depth`` layers."""
        if self.kind != other.kind or (self.selector is None) != (other.selector is None):
            return False
        if self.selector is not None and not set(self.layers(depth)) & set(other.layers(depth)):
            return False
        shared = min(len(self.field), len(other.field))
        return self.field[:shared] == other.field[:shared]


def parse_path(text: str, greatest_depth: int) -> ChoicePath:
    """Check that ``text`` points into a spec of up to ``greatest_depth`` layers.

    Raises:
        ValueError: it does not; the message states the rule and the nearest valid choice.
    """
    if text == "depth":
        return ChoicePath(text, "depth")
    head, *rest = text.split(".")
    if head == "train":
        if not all(re.fullmatch(r"[a-z]\w*", part) for part in rest) or not rest:
            raise ValueError("a training setting is written train.NAME, for example train.learning_rate")
        return ChoicePath(text, "train", field=tuple(rest))
    if head == "name":
        raise ValueError("a candidate's name is made from its choices and cannot be set")
    if head != "layers":
        _walk(DraftSpec, (head, *rest), extra=("depth", "train"))
        return ChoicePath(text, "spec", field=(head, *rest))
    if not rest:
        raise ValueError("layers is set by depth, layers.0, layers.*, layers.all and layers.rest; choose from these")
    selector = _selector(rest[0], greatest_depth)
    if rest[1:2] == ["repeat"]:
        raise ValueError("repeat is not set by a path; use depth for the number of layers")
    _walk(LayerSpec, tuple(rest[1:]))
    return ChoicePath(text, "spec", selector, tuple(rest[1:]))


def _selector(word: str, greatest_depth: int) -> int | str:
    if re.fullmatch(r"[0-9]+", word):
        if int(word) >= greatest_depth:
            rule = f"layer {word} is beyond the greatest depth of {greatest_depth}"
            raise ValueError(f"{rule}; the last layer is {greatest_depth - 1}, use that or raise depth")
        return int(word)
    if word not in SELECTORS:
        raise ValueError(f"{word!r} selects no layer; {nearest(word, [*range(greatest_depth), *SELECTORS])}")
    if word == "rest" and greatest_depth < 2:
        raise ValueError("rest is every layer but the first, and there is only one; use 0 or raise depth")
    return word


def _walk(model: type[BaseModel], parts: tuple[str, ...], extra: tuple[str, ...] = ()) -> None:
    for index, part in enumerate(parts):
        field = model.model_fields.get(part)
        if field is None:
            known = [name for name in model.model_fields if name not in ("name", "repeat")] + [*extra] * (index == 0)
            raise ValueError(f"{part!r} does not exist in a spec here; {nearest(part, known)}")
        kinds = (field.annotation, *get_args(field.annotation))
        models = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not models and parts[index + 1 :]:
            raise ValueError(f"{dotted(parts[: index + 1])} has no parts; drop {dotted(parts[index + 1 :])!r}")
        model = models[0] if models else model


def spec_data(spec: DraftSpec, depth: int | None = None) -> dict[str, Any]:
    """``spec`` as plain data with repeats written out and, if ``depth`` is given, cut or filled to that many layers.

    Missing layers are copies of the last one.
    """
    data = spec.model_dump(mode="json")
    layers = [layer | {"repeat": 1} for layer in data["layers"] for _ in range(layer["repeat"])]
    depth = len(layers) if depth is None else depth
    layers += [layers[-1]] * (depth - len(layers))
    data["layers"] = [copy.deepcopy(layer) for layer in layers[:depth]]
    return data


def get_in(data: Any, place: Location) -> Any:
    """What stands at ``place``.

    Raises:
        ValueError: ``place`` is inside a part that is ``none``.
    """
    for index, part in enumerate(place):
        if isinstance(part, str) and not isinstance(data, dict):
            raise ValueError(f"{dotted(place[:index])} is {data} here, so it has no {dotted(place[index:])}")
        data = data[part]
    return data


def put_in(data: Any, place: Location, value: Any) -> None:
    """Let ``value`` stand at ``place``, in place.

    Raises:
        ValueError: as ``get_in``.
    """
    get_in(data, place)
    get_in(data, place[:-1])[place[-1]] = value


def merge(old: Any, new: Any) -> Any:
    """``new``, or, where both are mappings, ``old`` with ``new``'s keys put in, at every level."""
    if isinstance(old, dict) and isinstance(new, dict):
        return old | {key: merge(old.get(key), value) for key, value in new.items()}
    return copy.deepcopy(new)


def merge_in(data: Any, place: Location, value: Any) -> None:
    """Put ``value`` at ``place``, in place; a mapping is merged into the mapping that stands there.

    Raises:
        ValueError: as ``get_in``.
    """
    put_in(data, place, merge(get_in(data, place), value))
