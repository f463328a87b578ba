"""The search space: a base spec and named choices, written in YAML, checked as a whole when it is loaded."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, ValidationError, model_validator

from archspec.errors import ArchspecError, nearest
from archspec.presets import load_spec
from archspec.schema import Closed, Document, Location, to_yaml
from archspec.spec import DraftSpec
from search_spaces.checks import greatest_depth, problems
from search_spaces.domains import Domain
from search_spaces.paths import ChoicePath, merge, parse_path, spec_data

_READY = files("search_spaces") / "ready"


def ready_space_names() -> list[str]:
    """Names of the spaces that come with the package, sorted."""
    return sorted(entry.name.removesuffix(".yaml") for entry in _READY.iterdir() if entry.name.endswith(".yaml"))


def _load_base(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return load_spec(value)
    except ArchspecError as error:
        raise ValueError(str(error)) from None


@dataclass(frozen=True)
class Parameter:
    """One thing that Optuna draws. ``places`` are set together; a training setting has none."""

    name: str
    domain: Domain
    path: ChoicePath
    places: tuple[Location, ...]


class Space(Closed):
    """Which drafts are candidates: ``base`` with every choice's path replaced by a value of its domain.

    ``base`` is a preset's name, a path, or the spec written out; ``describe`` says which question the space answers.
    """

    base: Annotated[DraftSpec, BeforeValidator(_load_base, json_schema_input_type=DraftSpec | str)]
    describe: str = ""
    choices: dict[str, Domain]

    @model_validator(mode="after")
    def _choices_fit(self) -> Self:
        found = problems(self.base, self.choices)
        if found:
            raise ValidationError.from_exception_data("Space", found)
        return self

    @classmethod
    def load(cls, name_or_path: str) -> Self:
        """A ready space by name, or a YAML file by path (anything with a folder or a file suffix).

        A relative path for ``base`` is looked up beside the file first, then from the working directory.

        Raises:
            ArchspecError: no such space, or one that breaks a rule; the message names file, line, value and rule.
        """
        path = Path(name_or_path)
        if path.suffix in (".yaml", ".yml", ".json") or len(path.parts) > 1:
            document = Document.load(path)
            base = document.data.get("base") if isinstance(document.data, dict) else None
            if isinstance(base, str) and (path.parent / base).is_file():
                document.data["base"] = str(path.parent / base)
            return document.validate(cls)
        if name_or_path not in ready_space_names():
            raise ArchspecError(f"{name_or_path!r} is no ready space: {nearest(name_or_path, ready_space_names())}")
        text = (_READY / f"{name_or_path}.yaml").read_text(encoding="utf-8")
        return Document.parse(text, f"space {name_or_path}").validate(cls)

    def dump(self) -> str:
        """The space as YAML with the base written out; loading it gives an equal space."""
        return to_yaml(self.model_dump(mode="json"))

    @property
    def hash(self) -> str:
        """Twelve hex digits, equal for spaces that draw the same drafts under the same Optuna parameters.

        The order of a domain's options counts, since Optuna refuses a changed order; that of the choices does not.
        """
        data = {"base": spec_data(self.base) | {"name": ""}, "choices": self.model_dump(mode="json")["choices"]}
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def greatest_depth(self) -> int:
        """Layers of the deepest candidate."""
        return greatest_depth(self.base, self.choices)

    def depths(self) -> tuple[int, ...]:
        """Every number of layers that a candidate can have."""
        domain = self.choices.get("depth")
        return tuple(int(label) for label in domain.labels()) if domain is not None else (self.greatest_depth,)

    def parameters(self, depth: int) -> list[Parameter]:
        """What is drawn for a draft of ``depth`` layers beside the depth itself, in the order drawn."""
        return [
            Parameter(name, domain, path, places)
            for text, domain in self.choices.items()
            if text != "depth"
            for path in [parse_path(text, self.greatest_depth)]
            for name, places in path.groups(depth)
        ]

    def grid_size(self) -> int | None:
        """How many settings of the parameters there are, equal architectures counted apart; None if without end."""
        total = 0
        for depth in self.depths():
            sizes = [parameter.domain.size for parameter in self.parameters(depth)]
            if None in sizes:
                return None
            total += math.prod(size for size in sizes if size is not None)
        return total

    def aux_layer_choices(self, fixed: Mapping[str, Any] | None = None) -> tuple[int | str, ...]:
        """Every aux layer that a candidate may ask for, as written: ids, or words such as ``low``.

        ``fixed`` are the overrides that ``sample`` is given.
        """
        inputs = self.base.inputs.model_dump(mode="json")
        for path, value in (fixed or {}).items():
            if path in ("inputs", "inputs.aux_layers"):
                inputs = merge(inputs, value if path == "inputs" else {"aux_layers": value})
        drawn = [inputs["aux_layers"]]
        for path in ("inputs", "inputs.aux_layers"):
            domain = self.choices.get(path)
            if domain is not None:
                values = [domain.value(label) for label in domain.labels()]
                drawn = [merge(inputs, value)["aux_layers"] if path == "inputs" else value for value in values]
        return tuple(dict.fromkeys(layer for layers in drawn for layer in layers))


def _load_space(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return Space.load(value)
    except ArchspecError as error:
        raise ValueError(str(error)) from None


SpaceReference = Annotated[Space, BeforeValidator(_load_space, json_schema_input_type=Space | str)]
"""A field of another schema that holds a space: a ready space's name, a path, or the space written out."""
