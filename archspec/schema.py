"""What every schema of the project shares: closed models, numbers as people write them, errors that name the line."""

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from archspec.errors import ArchspecError, nearest

Location = tuple[str | int, ...]
Model = TypeVar("Model", bound=BaseModel)


class Closed(BaseModel):
    """Frozen and closed: a misspelt key is an error with a suggestion, never a silent default."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _know_every_key(cls, data: Any) -> Any:
        if isinstance(data, dict):
            unknown = [str(key) for key in data if key not in cls.model_fields]
            if unknown:
                others = f"; also unknown: {', '.join(unknown[1:])}" if unknown[1:] else ""
                rule = f"{_belongs(unknown[0], cls) or nearest(unknown[0], cls.model_fields)}{others}"
                raise PydanticCustomError("unknown_key", "unknown key; {rule}", {"key": unknown[0], "rule": rule})
        elif not isinstance(data, BaseModel):
            keys = ", ".join(cls.model_fields)
            raise PydanticCustomError("not_a_mapping", f"must be a mapping with keys from {keys}")
        return data


def _belongs(key: str, model: type[BaseModel]) -> str | None:
    """Where a misplaced key belongs, if a part of ``model`` has it: ``it is a key of attention``."""
    for name, field_info in model.model_fields.items():
        for part in (field_info.annotation, *get_args(field_info.annotation)):
            if isinstance(part, type) and issubclass(part, BaseModel) and key in part.model_fields:
                return f"it is a key of {name}: {name}.{key}"
    return None


def field_error(path: str, rule: str) -> PydanticCustomError:
    """An error of a rule between fields, told at the line of ``path`` (dotted) rather than of the whole model."""
    location = tuple(int(part) if part.isdigit() else part for part in path.split("."))
    return PydanticCustomError("field_rule", "{rule}", {"rule": rule, "path": location})


@dataclass(frozen=True)
class Document:
    """Plain data together with where it was written, so that errors can name file and line."""

    data: Any
    source: str
    lines: dict[Location, int] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read one YAML (or JSON) document.

        Raises:
            ArchspecError: the file is missing, is not UTF-8 text, is not YAML, or repeats a key.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ArchspecError(f"{path}: no such file") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ArchspecError(f"{path}: cannot be read: {error}") from None
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, source: str) -> Self:
        """As ``load``, from a string; ``source`` stands for the file in messages."""
        kind = "JSON" if source.endswith(".json") else "YAML"
        try:
            loader = _Loader(text)
            node = loader.get_single_node()
            if node is None:
                raise ArchspecError(f"{source}: the file is empty")
            lines: dict[Location, int] = {}
            _record_lines(node, (), lines, source)
            return cls(loader.construct_document(node), source, lines)
        except yaml.MarkedYAMLError as error:
            line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
            raise ArchspecError(f"{source}{line}: not valid {kind}: {error.problem}") from None
        except yaml.YAMLError as error:
            raise ArchspecError(f"{source}: not valid {kind}: {error}") from None
        except RecursionError:
            raise ArchspecError(f"{source}: nested too deep, or a value holds itself through an alias") from None

    def at(self, location: Sequence[str | int]) -> str:
        """``file:line`` of ``location``, or of the nearest enclosing place that was written down."""
        for end in range(len(location), -1, -1):
            line = self.lines.get(tuple(location[:end]))
            if line is not None:
                return f"{self.source}:{line}"
        return self.source

    def validate(self, model: type[Model]) -> Model:
        """Check the data against ``model``.

        Raises:
            ArchspecError: one line for each broken rule: file, line, dotted path, value, rule.
        """
        try:
            return model.model_validate(self.data)
        except ValidationError as error:
            raise ArchspecError("\n".join(self._explain(details) for details in error.errors())) from None

    def _explain(self, details: ErrorDetails) -> str:
        location: Location = tuple(details["loc"])
        context = details.get("ctx", {})
        if details["type"] == "unknown_key":
            location = (*location, context["key"])
            return f"{self.at(location)}: {dotted(location)}: {details['msg']}"
        if details["type"] == "field_rule":
            location = (*location, *context["path"])
            return f"{self.at(location)}: {dotted(location)}: {details['msg']}"
        rule = details["msg"].removeprefix("Value error, ").replace("valid tuple", "valid list")
        if details["type"] == "literal_error":
            rule = nearest(details["input"], re.findall(r"'([^']*)'", context["expected"]))
        elif details["type"] == "missing":
            return f"{self.at(location)}: {dotted(location)}: this key is required"
        where = f"{dotted(location)} = " if location else ""
        value = details["input"]
        shown = (
            f"{where}{value!r}: "
            if not isinstance(value, dict | list | BaseModel)
            else f"{dotted(location)}: " * bool(location)
        )
        return f"{self.at(location)}: {shown}{rule[:1].lower()}{rule[1:]}"


def dotted(location: Sequence[str | int]) -> str:
    """``layers.0.fusion`` for ``("layers", 0, "fusion")``."""
    return ".".join(str(part) for part in location)


class ClosedFile(Closed):
    """A closed model that is a file of its own."""

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read one from YAML or JSON.

        Raises:
            ArchspecError: the file cannot be read or breaks a rule; the message names file, line, value and rule.
        """
        return Document.load(path).validate(cls)

    def dump(self) -> str:
        """As YAML with every default written out; loading it gives an equal one."""
        return to_yaml(self.model_dump(mode="json"))


class _Loader(yaml.SafeLoader):
    """YAML 1.2's idea of plain scalars: ``1e-3`` and ``60e3`` are numbers, ``no`` and ``on`` are words."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":bool", ":float", ":int", ":timestamp"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_FLOAT = r"[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][-+]?\d+)?"
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][\d_]*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(rf"^{_FLOAT}$"), list("-+.0123456789"))


def _construct_float(_loader: _Loader, node: yaml.ScalarNode) -> float | int:
    value = float(node.value.replace("_", ""))
    return int(value) if "." not in node.value and value.is_integer() else value


_Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)


_MOST_LOCATIONS = 100_000


def _record_lines(node: yaml.Node, location: Location, lines: dict[Location, int], source: str) -> None:
    lines.setdefault(location, node.start_mark.line + 1)
    if len(lines) > _MOST_LOCATIONS:
        raise ArchspecError(f"{source}: more than {_MOST_LOCATIONS:,} values; aliases that repeat each other, perhaps")
    if isinstance(node, yaml.MappingNode):
        seen: set[Hashable] = set()
        for key_node, value_node in node.value:
            key = str(key_node.value)
            if key in seen:
                raise ArchspecError(f"{source}:{key_node.start_mark.line + 1}: {key}: the key is written twice")
            seen.add(key)
            lines[*location, key] = key_node.start_mark.line + 1
            _record_lines(value_node, (*location, key), lines, source)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _record_lines(item, (*location, index), lines, source)


def to_yaml(data: Any) -> str:
    """Plain data as block YAML in the given key order, short lists of plain values on one line."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Dumper(yaml.SafeDumper):
    """Writes ``aux_layers: [2, 15, 27]`` rather than three lines; quotes words that ``_Loader`` takes for numbers."""


def _represent_list(dumper: yaml.SafeDumper, data: list[Any]) -> yaml.Node:
    flat = all(not isinstance(item, dict | list) for item in data)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=flat)


_Dumper.add_representer(list, _represent_list)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(rf"^{_FLOAT}$"), list("-+.0123456789"))
