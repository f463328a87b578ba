"""Long work, shown: a bar on a terminal, a line now and then elsewhere."""

import time
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINE_SECONDS = 20.0


class Meter(AbstractContextManager["Meter"]):
    """Called with (done, in all) as often as one likes; ``note`` stands behind the figures."""

    def __init__(self, console: Console, what: str) -> None:
        self._console, self._what, self.note = console, what, ""
        self._last_line = time.monotonic()
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
            text = TextColumn("{task.fields[note]}", style="dim")
            self._bar = Progress(TextColumn("{task.description}"), *columns, text, console=console, transient=True)
            self._task = self._bar.add_task(what, total=None, note="")

    def __enter__(self) -> Self:
        """Begin to draw."""
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        """So much is done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, note=self.note)
        elif time.monotonic() - self._last_line > LINE_SECONDS or done >= total:
            self._last_line = time.monotonic()
            note = f", {self.note}" if self.note else ""
            self._console.print(f"{self._what}: {done:,} of {total:,}{note}", soft_wrap=True)
