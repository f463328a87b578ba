"""Commands on searches: search, status."""

from pathlib import Path
from typing import Annotated

import typer

from archspec.errors import ArchspecError
from runners.display.console import hint, make_console, print_json, show_all
from runners.display.options import JsonOption

app = typer.Typer()


@app.command(epilog="Example:  archspec search examples/smollm2-search.yaml --out runs/first")
def search(
    file: Annotated[Path | None, typer.Argument(help="The search file; a resumed run has its own.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Run folder; runs/FILE's name if left out.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    runner: Annotated[str | None, typer.Option(help="local or ray, in place of the file's.")] = None,
    address: Annotated[str | None, typer.Option(help="Standing Ray cluster, HOST:PORT or auto.")] = None,
    concurrent: Annotated[int | None, typer.Option(min=1, help="Trials at a time.")] = None,
    stage_to: Annotated[Path | None, typer.Option(help="Local disk of the nodes, to copy the features to.")] = None,
) -> None:
    """Search for the best draft: capture, train candidates rung by rung, measure, write best-config.json."""
    if file is None and not (resume and out):
        raise ArchspecError("give a search file, or --resume with --out and the run folder")
    from runners.display import live
    from runners.progress import Meter
    from runners.search import session
    from runners.search.overrides import load_search

    folder = out or Path("runs") / (file or Path()).stem
    changes = {"kind": runner, "address": address, "concurrent": concurrent, "stage_to": stage_to}
    loaded = load_search(file, folder, changes)
    console, again = make_console(), f"go on with: archspec search --resume --out {folder}"
    with hint(again if resume else "the same command begins anew"), Meter(console, "captured tokens") as meter:
        prepared = session.prepare(folder, loaded, resume, console.print, meter)
    with hint(again), live.watching(console) as watcher:
        best, done = session.execute(prepared, watcher, report=console.print)
    show_all(*live.summary(done, best, console.width))


@app.command(epilog="Example:  archspec status runs/first --json")
def status(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    as_json: JsonOption = False,
) -> None:
    """Show a run, during or after it, from its files alone."""
    from runners.display.status import read_status
    from runners.display.view import render

    view, data = read_status(run)
    return print_json(data) if as_json else show_all(render(view, make_console().width))
