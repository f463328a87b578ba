"""Files told apart by their keys, and checked as what they are. No torch."""

from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel

from archspec.errors import ArchspecError, nearest
from archspec.facts import TargetFacts
from archspec.resolve import ResolvedSpec, resolve
from archspec.schema import Document
from archspec.spec import DraftSpec
from runners.search.checks import check_alone, check_fit
from runners.search.result import BestConfig
from runners.search.search_file import SearchFile
from search_spaces import Space, require_feasible

Kind = Literal["spec", "space", "search", "resolved-spec", "best-config"]
SCHEMAS: dict[Kind, type[BaseModel]] = {
    "spec": DraftSpec,
    "space": Space,
    "search": SearchFile,
    "resolved-spec": ResolvedSpec,
    "best-config": BestConfig,
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


def check_file(path: Path, facts: TargetFacts | None = None) -> Kind:
    """Check one file, and, given a target's dimensions, whether it fits that target.

    Raises:
        ArchspecError: it breaks a rule; one line for each, with file, line, value and rule.
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


def _named(line: str, source: str) -> str:
    return line if line.startswith(source) else f"{source}: {line}"
