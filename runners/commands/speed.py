"""The command on speed: profile."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from archspec.errors import ArchspecError
from runners.display.console import hint, make_console, print_json, show_all
from runners.display.options import DeviceOption, JsonOption, TargetOption, TrustOption, count, setting

if TYPE_CHECKING:
    from archspec.facts import TargetFacts
    from archspec.resolve import ResolvedSpec
    from runners.search.search_file import SearchFile
    from runners.speed.measure import MeasureSettings

app = typer.Typer()


@app.command(
    epilog="Example:  archspec profile --search examples/quickstart.yaml --threads 1 --out profiles/this-machine.json"
)
def profile(
    out: Annotated[Path, typer.Option("--out", "-o", help="The profile to write, a JSON file.")],
    target: TargetOption = None,
    draft: Annotated[
        list[str] | None, typer.Option("--draft", "-d", help="A draft to measure: preset, spec file or folder.")
    ] = None,
    search: Annotated[
        Path | None, typer.Option(help="Search file: its target, its baselines, and drafts from all over its space.")
    ] = None,
    drafts: Annotated[int, typer.Option(min=1, help="Drafts in all, those of the space included.")] = 10,
    fixed: Annotated[list[str] | None, typer.Option("--set", help="A value of every draft, PATH=VALUE.")] = None,
    batch: Annotated[
        str | None, typer.Option(help="Sequences decoded together: 1 or 1,8; the search's, or 1, if left out.")
    ] = None,
    context: Annotated[
        str | None, typer.Option(help="Tokens in the cache: 256 or 64,256; the search's, or 512, if left out.")
    ] = None,
    draft_length: Annotated[
        int | None,
        typer.Option("--draft-length", "-k", min=1, help="Most tokens drafted a cycle; the search's, or 8."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of everything.")] = 12,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; the search's, or torch's own.")] = None,
    dtype: Annotated[str | None, typer.Option(help="That the target runs in; float32 if nothing says so.")] = None,
    device: DeviceOption = "auto",
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure what target and drafts cost on this machine, for searches that follow the speed-up."""
    from archspec.profile import ProfileTimes
    from runners.display.speed import profile_tables
    from runners.features.target import load_target, target_facts
    from runners.progress import Meter
    from runners.search.search_file import SearchFile
    from runners.speed.measure import check_device, measure_profile
    from runners.training.device import pick_device

    file = None if search is None else SearchFile.load(search)
    model = target or (file.target.model if file else None)
    if model is None:
        raise ArchspecError("which target? name it by --target, or a search file by --search")
    settings = _settings(file, batch, context, draft_length, rounds, threads)
    trusted = trust_remote_code or bool(file and file.target.trust_remote_code)
    where, facts = pick_device(device), target_facts(model, trusted)
    settings.check(facts.max_positions)
    check_device(where)
    specs = _specs(draft or [], file, facts, dict(map(setting, fixed or ())), drafts)
    loaded = load_target(model, dtype or (file.target.dtype if file else "float32"), where, trusted)
    with hint("the same command begins anew"), Meter(make_console(stderr=True), "rounds") as meter:
        measured = measure_profile(loaded, model, specs, settings, meter)
    measured.save(out)
    if as_json:
        return print_json(measured.model_dump(mode="json"))
    points = [(size, length) for size in measured.batches for length in measured.contexts]
    times = [ProfileTimes(measured, facts, None, batch=size, context=length, name=str(out)) for size, length in points]
    return show_all(*profile_tables(measured, times), f"profile: {out}")


def _settings(
    file: "SearchFile | None",
    batch: str | None,
    context: str | None,
    draft_length: int | None,
    rounds: int,
    threads: int | None,
) -> "MeasureSettings":
    """What options leave out is as the search file uses it, if it has times, or the usual."""
    from runners.speed.measure import MeasureSettings

    speed, usual = file.speed if file else None, MeasureSettings()
    return MeasureSettings(
        batches=_counts(batch) if batch else (speed.batch,) if speed else usual.batches,
        contexts=_counts(context) if context else (speed.context,) if speed else usual.contexts,
        draft_length=draft_length or (speed.range[-1] if speed else usual.draft_length),
        rounds=rounds,
        threads=threads or (speed.threads if speed else None),
    )


def _counts(text: str) -> tuple[int, ...]:
    return tuple(sorted({count(part) for part in text.split(",")}))


def _specs(
    names: list[str], file: "SearchFile | None", facts: "TargetFacts", overrides: dict[str, Any], most: int
) -> "list[ResolvedSpec]":
    """The drafts to measure, resolved; what was resolved before, such as a trained draft, stays as it is.

    Raises:
        ArchspecError: none is named, one is unknown or does not fit the target, or an override's path does not exist.
    """
    from runners.speed.choose import spread_drafts

    if not names and file is None:
        raise ArchspecError(
            "nothing to measure beside the target: name drafts by --draft, or a search file by --search"
        )
    fixed = (file.fixed if file else {}) | overrides
    named = [_spec(name, facts, fixed) for name in (*names, *(file.baselines if file else ()))]
    return named if file is None else spread_drafts(file.space, facts, fixed, named, most)


def _spec(name: str, facts: "TargetFacts", fixed: dict[str, Any]) -> "ResolvedSpec":
    from archspec.presets import load_document
    from archspec.resolve import ResolvedSpec, resolve
    from archspec.spec import DraftSpec
    from archspec.weights import SPEC_FILE
    from runners.training.single import find_draft
    from search_spaces import apply_overrides

    folder = Path(name)
    document = load_document(str(find_draft(folder) / SPEC_FILE) if folder.is_dir() else name)
    if isinstance(document.data, dict) and "target" in document.data:
        return document.validate(ResolvedSpec)
    written = document.validate(DraftSpec)
    return resolve(apply_overrides(written, fixed, "--set and fixed") if fixed else written, facts, document)
