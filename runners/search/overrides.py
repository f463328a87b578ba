"""A search file as the command line changes it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from archspec.schema import Document
from runners.search.run_folder import RunFolder
from runners.search.runner_settings import RunnerSettings
from runners.search.search_file import SearchFile


def load_search(path: Path | None, folder: Path, changes: Mapping[str, Any]) -> SearchFile | None:
    """The search file at ``path``, or None for the one that the run in ``folder`` has, with ``runner`` changed.

    ``changes`` are fields of ``runner``; None is no change. Another kind of runner keeps only ``concurrent``.

    Raises:
        ArchspecError: there is no such file, or a change breaks a rule of the runner.
    """
    told = {name: value for name, value in changes.items() if value is not None}
    if not told:
        return None if path is None else SearchFile.load(path)
    file = SearchFile.load(path or RunFolder(folder).search_file)
    kind = told.get("kind", "ray" if "address" in told or "stage_to" in told else file.runner.kind)
    kept = file.runner.model_dump() if kind == file.runner.kind else {"concurrent": file.runner.concurrent}
    runner = Document({**kept, **told, "kind": kind}, "command line: runner").validate(RunnerSettings)
    return file.model_copy(update={"runner": runner})
