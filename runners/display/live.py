"""Watching a search: a table that stays in place on a terminal, one plain line for each event elsewhere.

Either way ``leaderboard.csv`` is rewritten after every rung, and ``progress.json`` tells other processes what is in
flight. What takes longer the more architectures there are is done now and then only once they are many.
"""

import statistics
import time
from abc import abstractmethod
from contextlib import AbstractContextManager
from dataclasses import replace
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from archspec.files import write_json
from runners.display.outcome import outcome
from runners.display.status import PROGRESS_FILE
from runners.display.view import Row, Running, View, clock, interval, proxy_of_rows, render
from runners.search.driver import Search
from runners.search.executor import Event, Failure, Finished, Progress, Started
from runners.search.leaderboard import leaderboard_rows, write_leaderboard
from runners.search.record import Record
from runners.search.result import BestConfig
from runners.training.proxy import proxy_of
from runners.training.trial import Measurement, RungTask

PROGRESS_SECONDS = 2.0
DRAW_SECONDS = 0.5
FEW = 100  # architectures up to which every rung is told at once
LINE_SECONDS = 60.0

Key = tuple[int, int]


class Pace:
    """Counts trained tokens of this process, and from them the time that is left."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._began: dict[Key, tuple[float, int]] = {}
        self._where: dict[Key, str | None] = {}
        self._trained = 0
        self.running: dict[Key, Running] = {}

    @property
    def elapsed(self) -> float:
        """Seconds since the first look."""
        return time.monotonic() - self._start

    def take(self, event: Event, seed: int) -> None:
        """Take an event of the search, whose own seed is ``seed``."""
        task, key = event.task, (event.task.number, event.task.seed)
        if isinstance(event, Started):
            before = task.rungs[task.rung - 1] if task.rung else 0
            self._began[key] = (time.monotonic(), before)
            self._where[key] = event.where
            self.running[key] = self._state(task, before, seed, None)
            return
        tokens = self.running[key].tokens if key in self.running else 0
        if isinstance(event, Finished):
            self.running.pop(key, None)
            if isinstance(event.result, Measurement):
                self._trained += max(0, event.result.tokens - tokens)
            return
        self._trained += max(0, event.report.tokens - tokens)
        since, before = self._began.get(key, (self._start, 0))
        speed = (event.report.tokens - before) / max(time.monotonic() - since, 1e-6)
        self.running[key] = self._state(task, event.report.tokens, seed, speed)

    def left(self, search: Search) -> float | None:
        """Estimated seconds to the end, evaluation and start-up in their present share; None while nothing is known."""
        if not self._trained or self.elapsed < 1:
            return None
        rate, file, records = self._trained / self.elapsed, search.file, search.study.records
        plan = file.plan
        to_begin = 0 if search.exhausted else max(0, plan.trials - len(records))
        full, closed = plan.rungs[-1], [r for r in records.values() if r.state != "running" and r.measurements]
        if plan.keep is None:
            usual = statistics.fmean(r.measurements[-1].tokens for r in closed) if closed else full
            under_way = sum(max(0.0, max(usual, r.goal) - r.tokens) for r in self.running.values() if not r.seed_offset)
        else:
            usual = plan.rungs[0]
            done = {number: record.measurements[-1].tokens for number, record in records.items() if record.measurements}
            done |= {r.trial: r.tokens for r in self.running.values() if not r.seed_offset}
            under_way = max(0.0, plan.stage_tokens - (plan.trials - len(records)) * usual - sum(done.values()))
        new = to_begin * usual
        if file.budget.hours is not None:
            new = min(new, max(0.0, file.budget.hours * 3600 - self.elapsed) * rate)
        repeats = full * (plan.seeds - 1) * min(plan.finalists, len(records) + to_begin)
        repeats -= sum(m.tokens for record in records.values() for m in record.repeats)
        repeats -= sum(r.tokens for r in self.running.values() if r.seed_offset)
        return (under_way + new + max(0.0, repeats)) / rate

    def _state(self, task: RungTask, tokens: int, seed: int, speed: float | None) -> Running:
        where = self._where.get((task.number, task.seed))
        return Running(task.number, task.seed - seed, task.rung, tokens, task.rungs[task.rung], speed, where)


def view_of(search: Search, pace: Pace) -> View:
    """The search as it stands in this process."""
    running = {r.trial: r for r in pace.running.values()}
    told = leaderboard_rows(search)
    rows = tuple(Row.of(row, running.get(row["trial"])) for row in told)
    plan, objective = search.file.plan, search.file.objective
    return View(
        title=str(search.folder.path),
        rows=rows,
        trials=max(plan.trials, len(rows)) if not search.exhausted else len(rows),
        rungs=plan.rungs,
        confidence=objective.confidence,
        proxy=proxy_of_rows(told),
        followed=objective.followed,
        objectives=objective.directions,
        elapsed=pace.elapsed,
        left=pace.left(search),
    )


def at_once(search: Search, event: Event) -> bool:
    """Whether all architectures are looked at for this event alone, not only when some time has passed."""
    return not isinstance(event, Progress) and len(search.study.records) <= FEW


class Watching(AbstractContextManager["Watching"]):
    """The common part: pace, leaderboard, progress for other processes. ``show`` is the display's."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.pace = Pace()
        self._search: Search | None = None
        self._written = 0.0
        self._stale = False

    def __enter__(self) -> Self:
        """Start to watch."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Say that nothing is in flight any more."""
        if self._search is not None:
            self.pace.running.clear()
            self._tell_others(self._search, "finished" if kind is None else "stopped")

    def began(self, search: Search) -> None:
        """See ``Watcher``."""
        self._search = search
        self._tell_others(search, None)

    def changed(self, search: Search, event: Event) -> None:
        """See ``Watcher``."""
        self._search = search
        self.pace.take(event, search.file.seed)
        self._stale |= not isinstance(event, Progress)
        if at_once(search, event) or time.monotonic() - self._written > PROGRESS_SECONDS:
            if self._stale:
                write_leaderboard(search)
                self._stale = False
            self._tell_others(search, None)
        self.show(search, event)

    @abstractmethod
    def show(self, search: Search, event: Event) -> None:
        """Display what changed."""

    def _tell_others(self, search: Search, ended: str | None) -> None:
        self._written = time.monotonic()
        left = None if ended else self.pace.left(search)
        write_json(
            search.folder.path / PROGRESS_FILE,
            {
                "updated": round(time.time(), 1),
                "elapsed": round(self.pace.elapsed, 1),
                "left": None if left is None else round(left, 1),
                "running": [running.as_dict() for running in self.pace.running.values()],
                "ended": ended,
            },
        )


class LiveTable(Watching):
    """The table on a terminal; it goes when the search ends, and the final one takes its place."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._view: View | None = None
        self._drawn = 0.0
        self._live = Live(
            console=console, get_renderable=self._render, refresh_per_second=2, transient=True, screen=False
        )

    def __enter__(self) -> Self:
        """Start to draw."""
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop drawing."""
        self._live.__exit__(kind, error, trace)
        super().__exit__(kind, error, trace)

    def began(self, search: Search) -> None:
        """See ``Watcher``."""
        super().began(search)
        if search.study.records:
            self._view = view_of(search, self.pace)

    def show(self, search: Search, event: Event) -> None:
        """See ``Watching``."""
        if at_once(search, event) or time.monotonic() - self._drawn > DRAW_SECONDS:
            self._drawn = time.monotonic()
            self._view = view_of(search, self.pace)

    def _render(self) -> RenderableType:
        if self._view is None:
            return Text("the first trial begins …", style="dim")
        return render(self._view, self.console.width, self.console.height)


class PlainLines(Watching):
    """One line for each event, and one a minute for a trial in training."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._said: dict[Key, float] = {}

    def show(self, search: Search, event: Event) -> None:
        """See ``Watching``."""
        record, key = search.study.records[event.task.number], (event.task.number, event.task.seed)
        now = time.monotonic()
        if isinstance(event, Progress) and now - self._said.setdefault(key, now) < LINE_SECONDS:
            return
        self._said[key] = now
        line = f"[{clock(self.pace.elapsed)}] {describe(search, record, event)}"
        self.console.print(line, soft_wrap=True)


def describe(search: Search, record: Record, event: Event) -> str:
    """One event in words."""
    task, offset = event.task, event.task.seed - search.file.seed
    who = f"trial {record.number} {record.name}" + (f", seed {offset + 1}" if offset else "")
    rung, goal = f"rung {task.rung + 1} of {len(task.rungs)}", f"{task.rungs[task.rung]:,} tokens"
    if isinstance(event, Started):
        return f"{who}: {rung} begins, to {goal}" + (f", on {event.where}" if event.where else "")
    if isinstance(event, Progress):
        return f"{who}: {rung}, {event.report.tokens:,} of {goal}, loss {event.report.loss:.3f}"
    if isinstance(event.result, Failure):
        again = "; running it again" if search.goes_on(task) else ""
        return f"{who}: {rung} {event.result.kind}: {event.result.reason}{again}"
    told = event.result.acceptance
    proxy = " (proxy)" if proxy_of(told) else ""
    fates = {"pruned": "; stopped", "complete": "; done"}
    if not search.goes_on(task.at(task.rung + 1)):
        fates["running"] = "; waits for its stage to end"
    measured = f"acceptance length{proxy} {event.result.length:.4f} {interval(told['low'], told['high'])}"
    predicted = search.study.scorer.speedup(record, event.result)
    if predicted is not None:
        measured += f", speed-up{proxy} {predicted.value:.3f} at k = {predicted.k}"
    fate = fates.get(record.state, "") if not offset else ""
    return f"{who}: {rung}, {measured}, {event.result.tokens_per_second:,.0f} tokens/s{fate}"


def summary(search: Search, best: BestConfig, width: int) -> list[RenderableType]:
    """What is shown when a search ends: the leaderboard, what it rests on, the verdict, and where everything lies."""
    pace = Pace()
    view = replace(view_of(search, pace), elapsed=time.monotonic() - search.started, left=None)
    folder = search.folder
    paths = (folder.best_config, folder.best, folder.leaderboard, folder.pareto)
    return [
        render(view, width),
        "",
        *outcome(best, width),
        Text("\n".join(map(str, paths)), style="dim"),
    ]


def watching(console: Console) -> Watching:
    """The table on a terminal, lines elsewhere."""
    return LiveTable(console) if console.is_terminal else PlainLines(console)
