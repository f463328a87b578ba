"""The folder that a search leaves: what lies where, how one begins, and when it may be resumed."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from archspec.errors import ArchspecError
from archspec.files import write_text
from runners.search.search_file import SearchFile


@dataclass(frozen=True)
class RunFolder:
    """What lies where: the search as resolved, its study, a folder for each trial, and what was found."""

    path: Path

    @property
    def search_file(self) -> Path:
        """The search as resolved: every default, the whole space."""
        return self.path / "search.yaml"

    @property
    def study(self) -> Path:
        """Optuna's journal; ``optuna-dashboard`` reads it."""
        return self.path / "study.log"

    @property
    def provenance(self) -> Path:
        """Target, data, code and hardware of this run."""
        return self.path / "provenance.json"

    @property
    def leaderboard(self) -> Path:
        """One row per architecture."""
        return self.path / "leaderboard.csv"

    @property
    def pareto(self) -> Path:
        """The Pareto set, the recommended pick and the hypervolume over time."""
        return self.path / "pareto.json"

    @property
    def best_config(self) -> Path:
        """The recommended draft."""
        return self.path / "best-config.json"

    @property
    def best(self) -> Path:
        """Its spec and weights."""
        return self.path / "best"

    def trial(self, number: int, seed_offset: int = 0) -> Path:
        """A trial's own folder; repeats with another seed lie inside it."""
        folder = self.path / "trials" / f"{number:04d}"
        return folder / f"seed-{seed_offset}" if seed_offset else folder

    @classmethod
    def begin(cls, path: Path, file: SearchFile) -> Self:
        """Start a new run in ``path``.

        Raises:
            ArchspecError: as ``require_new``.
        """
        cls.require_new(path)
        folder = cls(path)
        write_text(folder.search_file, file.dump())
        return folder

    @staticmethod
    def require_new(path: Path) -> None:
        """Make sure that a run may begin in ``path``; asked before the work that comes before the run.

        Raises:
            ArchspecError: the folder exists and is not empty, or is a file.
        """
        if path.exists() and not path.is_dir():
            raise ArchspecError(f"{path}: is a file, but a run needs a folder; choose another with --out")
        if path.exists() and any(path.iterdir()):
            raise ArchspecError(f"{path}: the run folder exists; go on with --resume, or choose another with --out")

    @classmethod
    def resume(cls, path: Path, file: SearchFile | None) -> tuple[Self, SearchFile]:
        """Go on with the run in ``path``; ``file`` may give it a larger budget, and None takes the run's own.

        Raises:
            ArchspecError: there is no run, or ``file`` asks for another search than the run's.
        """
        folder = cls(path)
        if not folder.search_file.exists():
            raise ArchspecError(f"{path}: holds no run to resume (search.yaml is missing); start it without --resume")
        before = SearchFile.load(folder.search_file)
        if file is None:
            return folder, before
        if file.train.dtype == "auto":  # the run has settled what it means
            file = file.model_copy(update={"train": file.train.model_copy(update={"dtype": before.train.dtype})})
        old, new = before.must_not_change(), file.must_not_change()
        changed = [key for key in old if old[key] != new[key]]
        if changed:
            raise ArchspecError(
                f"{path}: the run was made with other values of {', '.join(changed)} (see {folder.search_file}); "
                "a changed search is a new run: choose another folder with --out"
            )
        return folder, file

    def mend_journal(self) -> None:
        """Remove what a killed writer leaves: a lock, and an unfinished last line, which would hide later writes.

        Only for the process that has the folder to itself.
        """
        self.study.with_name(f"{self.study.name}.lock").unlink(missing_ok=True)
        if not self.study.exists():
            return
        content = self.study.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(self.study, whole)
