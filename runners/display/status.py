"""A run seen from outside, during and after it: files are read, nothing is written, locked or loaded."""

import csv
import io
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from archspec.errors import ArchspecError
from runners.display.view import (
    NEEDED_COLUMNS,
    Row,
    Running,
    View,
    clock,
    pick_line,
    proxy_of_rows,
    times_line,
)
from runners.search.run_folder import RunFolder
from runners.search.search_file import SearchFile

PROGRESS_FILE = "progress.json"
SILENT_SECONDS = 120.0


def read_status(path: Path) -> tuple[View, dict[str, Any]]:
    """The run in ``path`` as the table's view, and the same as plain data for scripts.

    Raises:
        ArchspecError: there is no run, or one of its files cannot be read.
    """
    folder = RunFolder(path)
    if not folder.search_file.exists():
        raise ArchspecError(f"{path}: holds no run (search.yaml is missing)")
    file = SearchFile.load(folder.search_file)
    progress = _json(path / PROGRESS_FILE) or {}
    state, note = _state(folder, progress)
    running = [Running(**told) for told in progress.get("running", [])]
    rows = _leaderboard(folder)
    best = _json(folder.best_config) or {}
    times, pick = best.get("times"), best.get("recommended")
    view = View(
        title=str(path),
        rows=tuple(Row.of(row, next((r for r in running if r.trial == int(row["trial"])), None)) for row in rows),
        trials=len(rows) if state == "finished" else max(file.plan.trials, len(rows)),
        rungs=file.plan.rungs,
        confidence=file.objective.confidence,
        proxy=proxy_of_rows(rows),
        followed=file.objective.followed,
        objectives=file.objective.directions,
        elapsed=progress.get("elapsed"),
        left=progress.get("left") if state == "running" else None,
        note=note,
        closing=(
            *([times_line(times)] if times else []),
            *([pick_line(pick["name"], pick["why"])] if pick else []),
        ),
    )
    data = {
        "run": str(path),
        "state": state,
        "trials": {"ended": view.ended, "planned": view.trials},
        "elapsed_seconds": view.elapsed,
        "left_seconds": view.left,
        "proxy": bool(view.proxy),
        "proxy_reason": view.proxy,
        "best": None if view.best is None else asdict(view.best),
        "verdict": best.get("verdict"),
        "times": times,
        "recommended": pick,
        "rows": [asdict(row) for row in view.rows],
    }
    return view, data


def _state(folder: RunFolder, progress: dict[str, Any]) -> tuple[str, str]:
    """Finished, running, silent, stopped or new; and what a reader should be told."""
    age = time.time() - progress.get("updated", 0.0)
    resume = f"go on with: archspec search --resume --out {folder.path}"
    if progress.get("ended") == "finished":
        return "finished", ""
    if progress.get("ended") == "stopped":
        return "stopped", f"stopped {clock(age)} ago; {resume}"
    if not progress:
        return "new", "no trial has begun yet"
    if age > SILENT_SECONDS:
        return "silent", f"no sign of the search for {clock(age)}: a long evaluation, or it was killed; then {resume}"
    return "running", ""


def _leaderboard(folder: RunFolder) -> list[dict[str, str]]:
    try:
        rows = list(csv.DictReader(io.StringIO(folder.leaderboard.read_text(encoding="utf-8"))))
    except FileNotFoundError:
        return []
    lacking = sorted(NEEDED_COLUMNS - set(rows[0])) if rows else []
    if lacking:
        rule = "it was written by another version, or edited"
        raise ArchspecError(f"{folder.leaderboard}: column {lacking[0]} is missing; {rule}")
    return rows


def _json(path: Path) -> dict[str, Any] | None:
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ArchspecError(f"{path}: not valid JSON ({error})") from None
    return data
