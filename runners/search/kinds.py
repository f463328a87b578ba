"""Files told apart by their keys, and checked as what they are. No torch."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel

from archspec.errors import ArchspecError, nearest
from archspec.facts import TargetFacts
from archspec.profile import Profile
from archspec.resolve import ResolvedSpec, resolve
from archspec.schema import Document, dotted
from archspec.servable import engine as engine_of
from archspec.spec import DraftSpec
from runners.search.checks import check_alone, check_fit
from runners.search.result import BestConfig
from runners.search.search_file import SearchFile
from search_spaces import Constraints, Space, require_feasible

Kind = Literal["spec", "space", "search", "resolved-spec", "best-config", "profile"]
SCHEMAS: dict[Kind, type[BaseModel]] = {
    "spec": DraftSpec,
    "space": Space,
    "search": SearchFile,
    "resolved-spec": ResolvedSpec,
    "best-config": BestConfig,
    "profile": Profile,
}


def kind_of(document: Document) -> Kind:
    """What the document means to be: the kind that knows the most of its keys.

    Raises:
        ArchspecError: no kind knows any of them.
    """
    keys = set(document.data) if isinstance(document.data, dict) else set()
    known: dict[Kind, int] = {kind: len(keys & set(schema.model_fields)) for kind, schema in SCHEMAS.items()}
    kind = max(known, key=lambda name: known[name])
    if not known[kind]:
        found = f"its keys are {', '.join(map(str, keys))}" if keys else "it holds no keys"
        kinds = "spec (which has layers), space (choices) nor search file (target, data, budget)"
        raise ArchspecError(f"{document.source}: neither {kinds}; {found}")
    return kind


def check_file(path: Path, facts: TargetFacts | None = None, engine: str | None = None) -> Kind:
    """Check one file; given a target's dimensions, whether it fits that target; whether ``engine`` can serve it.

    A draft must be servable as it is, a space or a search file must hold some draft that is.

    Raises:
        ArchspecError: it breaks a rule; one line for each, with file, line, value and rule. Or there is no such engine.
    """
    document = Document.load(path)
    kind = kind_of(document)
    if kind == "space":
        loaded: BaseModel = Space.load(str(path) if path.suffix else str(path.absolute()))
    else:
        loaded = document.validate(SCHEMAS[kind])
    try:
        if isinstance(loaded, SearchFile):
            check_alone(loaded)
        if facts is not None:
            _check_fit(loaded, facts, document)
        if engine is not None:
            _check_servable(loaded, facts, engine_of(engine).name, document)
    except ArchspecError as error:
        raise ArchspecError("\n".join(_named(line, str(path)) for line in str(error).splitlines())) from None
    return kind


def schema(kind: str) -> dict[str, Any]:
    """The JSON Schema of a kind of file.

    Raises:
        ArchspecError: there is no such kind.
    """
    for known in get_args(Kind):
        if known == kind:
            return SCHEMAS[known].model_json_schema()
    raise ArchspecError(f"{kind!r} is no kind of file: {nearest(kind, get_args(Kind))}")


def _check_fit(loaded: BaseModel, facts: TargetFacts, document: Document) -> None:
    match loaded:
        case ResolvedSpec():
            if loaded.target != facts:
                where = document.at(("target",))
                raise ArchspecError(f"{where}: target: the spec was resolved for a target of other dimensions")
        case DraftSpec():
            resolve(loaded, facts, document)
        case Space():
            require_feasible(loaded, facts)
        case SearchFile():
            check_fit(loaded, facts)
        case Profile():
            if loaded.target.facts != facts:
                where = document.at(("target", "facts"))
                raise ArchspecError(f"{where}: target.facts: the profile is of a target of other dimensions")


def _check_servable(loaded: BaseModel, facts: TargetFacts | None, engine: str, document: Document) -> None:
    if isinstance(loaded, BestConfig):
        inner = {place[1:]: line for place, line in document.lines.items() if place[:1] == ("spec",)}
        document = Document(loaded.spec, document.source, inner)
        loaded = document.validate(ResolvedSpec)
    if isinstance(loaded, SearchFile) and facts is None:
        from runners.features.target import target_facts  # loads torch

        facts = target_facts(loaded.target.model, loaded.target.trust_remote_code)
    if isinstance(loaded, Profile):
        raise ArchspecError(f"{document.source}: a cost profile is of several drafts; check one's spec with --engine")
    if not isinstance(loaded, ResolvedSpec) and facts is None:
        raise ArchspecError(f"{document.source}: whether {engine} serves it depends on the target; give --target")
    match loaded:
        case ResolvedSpec():
            _require_servable(loaded, list(range(len(loaded.layers))), engine, document)
        case DraftSpec() if facts is not None:
            written = [i for i, layer in enumerate(loaded.layers) for _ in range(layer.repeat)]
            _require_servable(resolve(loaded, facts, document), written, engine, document)
        case Space() if facts is not None:
            require_feasible(loaded, facts, None, Constraints.model_validate({"servable_by": [engine]}))
        case SearchFile() if facts is not None:
            by = tuple(dict.fromkeys((*loaded.constraints.servable_by, engine)))
            constraints = Constraints.model_validate(loaded.constraints.model_dump() | {"servable_by": by})
            require_feasible(loaded.space, facts, loaded.fixed, constraints)


def _require_servable(spec: ResolvedSpec, written: list[int], engine: str, document: Document) -> None:
    """``written`` is the index in the file of every layer, which repeats move."""
    found: dict[str, None] = {}
    for finding in engine_of(engine).verdict(spec).limits:
        place: list[str | int] = [int(part) if part.isdigit() else part for part in finding.limit.field.split(".")]
        if place[0] == "layers" and len(place) > 1:
            place[1] = written[int(place[1])]
        named = replace(finding, limit=replace(finding.limit, field=dotted(place)))
        found[f"{document.at(place)}: {engine} cannot serve {named}"] = None
    if found:
        raise ArchspecError("\n".join(found))


def _named(line: str, source: str) -> str:
    return line if line.startswith(source) else f"{source}: {line}"
