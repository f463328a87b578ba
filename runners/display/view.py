"""How a search looks: one table for the live display, for ``status`` and for the end. It does not import torch."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from runners.display.columns import Column, fitted_table
from runners.search.objective import Direction, ObjectiveName
from runners.training.proxy import FOREIGN

BAR_WIDTH = 8
WHERE_WIDTH, LEAST_WITH_WHERE = 20, 100
NAME, SHORT_NAME = 24, 16  # room that a draft's name should have, and at least has beside what matters most


@dataclass(frozen=True)
class Running:
    """A task in flight: ``tokens`` of ``goal`` are trained. ``seed_offset`` is 0 for the search's own seed.

    ``where`` names node and device, None on this machine.
    """

    trial: int
    seed_offset: int
    rung: int
    tokens: int
    goal: int
    tokens_per_second: float | None
    where: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


NEEDED_COLUMNS = frozenset(  # others are not in every older file
    [
        "rank",
        "trial",
        "name",
        "baseline",
        "state",
        "rungs",
        "train_tokens",
        "acceptance_length",
        "low",
        "high",
        "seeds",
        "params",
        "tokens_per_second",
        "failure_kind",
        "own_text",
    ]
)


@dataclass(frozen=True)
class Row:
    """One architecture as a leaderboard row tells it, with what it is doing now.

    ``value`` is the followed objective's; ``pareto`` whether no other architecture is better in every objective.
    """

    rank: int | None
    trial: int
    name: str
    baseline: bool
    state: str
    rungs: int
    tokens: int
    value: float | None
    speedup: float | None
    best_k: int | None
    pareto: bool
    length: float | None
    low: float | None
    high: float | None
    seeds: int
    params: int
    tokens_per_second: float | None
    failure_kind: str
    running: Running | None

    @classmethod
    def of(cls, row: Mapping[str, Any], running: Running | None) -> Self:
        """From a row of ``leaderboard.csv``, whose values may be text; an old one follows the acceptance length."""
        return cls(
            rank=int(row["rank"]) if row["rank"] else None,
            trial=int(row["trial"]),
            name=row["name"],
            baseline=str(row["baseline"]) == "True",
            state=row["state"],
            rungs=int(row["rungs"]),
            tokens=int(row["train_tokens"]),
            value=_number(row.get("value", row["acceptance_length"])),
            speedup=_number(row.get("speedup")),
            best_k=int(row["best_k"]) if row.get("best_k") else None,
            pareto=str(row.get("pareto")) == "True",
            length=_number(row["acceptance_length"]),
            low=_number(row["low"]),
            high=_number(row["high"]),
            seeds=int(row["seeds"]),
            params=int(row["params"]),
            tokens_per_second=_number(row["tokens_per_second"]),
            failure_kind=row["failure_kind"],
            running=running,
        )


@dataclass(frozen=True)
class View:
    """A search at one moment. ``left`` are estimated seconds; ``note`` says what is not to be seen in the rows.

    ``objectives`` are by name ``maximize`` or ``minimize``, ``followed`` the one that ranks. ``proxy`` says why
    acceptance is not what an engine would tell, and is empty where it is. ``closing`` are lines below the table.
    """

    title: str
    rows: tuple[Row, ...]
    trials: int
    rungs: tuple[int, ...]
    confidence: float
    proxy: str
    followed: ObjectiveName
    objectives: Mapping[ObjectiveName, Direction]
    elapsed: float | None = None
    left: float | None = None
    note: str = ""
    closing: tuple[str, ...] = ()

    @property
    def ended(self) -> int:
        """Trials that are over."""
        return sum(row.state != "running" for row in self.rows)

    @property
    def best(self) -> Row | None:
        """The first of those that came to the end, else the best at the highest rung that any has reached."""
        ranked = [row for row in self.rows if row.rank == 1]
        sign = 1 if self.objectives[self.followed] == "maximize" else -1
        measured = [(row.rungs, sign * row.value, -row.trial, row) for row in self.rows if row.value is not None]
        return ranked[0] if ranked else max(measured, default=(None,))[-1]


def render(view: View, width: int, height: int | None = None) -> RenderableType:
    """Header and table, ``width`` columns wide; at most ``height`` lines, the least interesting rows left out."""
    rows = sorted(view.rows, key=lambda row: (row.running is None, row.rank is None))
    room = len(rows) if height is None else max(3, height - 8 - bool(view.proxy) - bool(view.note))
    hidden = len(rows) - room
    parts: list[RenderableType] = [header(view), *([table(view, rows[:room], width)] if rows else [])]
    if len(view.objectives) > 1 and any(row.pareto for row in rows):
        parts.append(Text(f"  * on the Pareto set over {', '.join(view.objectives)}", style="dim"))
    if hidden > 0:
        parts.append(Text(f"  … and {hidden} more in leaderboard.csv", style="dim"))
    if view.closing:
        parts.append(Text("\n".join(("", *view.closing))))
    return Group(*parts)


def header(view: View) -> Text:
    """What is searched, how far it is, and the best so far."""
    line = Text.assemble((view.title, "bold"), ("  ·  ", "dim"), f"{view.ended} of {view.trials} trials")
    if view.elapsed is not None:
        line.append("  ·  ", "dim").append(f"{clock(view.elapsed)} elapsed")
    if view.left is not None:
        line.append("  ·  ", "dim").append(f"about {clock(view.left)} left")
    best = view.best
    if best is not None:
        line.append("\nbest so far  " if view.ended < view.trials else "\nbest  ", "dim").append(
            best.name, "bold green"
        ).append(f"  {_measure(best)}")
    if view.note:
        line.append(f"\n{view.note}", "yellow")
    if view.proxy:
        line.append(f"\n{proxy_note(view.proxy)}", "yellow")
    return line.append("\n")


def table(view: View, rows: Sequence[Row], width: int) -> Table:
    """One row for each architecture; narrow terminals lose the columns that matter least."""
    starred = len(view.objectives) > 1
    spread = f"{view.confidence:.0%} interval"
    columns: dict[str, Column] = {
        "#": ("right", [f"{row.rank or ''}{'*' * (row.pareto and starred)}" for row in rows]),
        "trial": ("right", [str(row.trial) for row in rows]),
        "draft": ("left", [row.name for row in rows]),
        "state": ("left", [_state(view, row) for row in rows]),
        "where": ("left", [(row.running.where if row.running else None) or "" for row in rows]),
        "tokens": ("right", [_tokens(row) for row in rows]),
        "speed-up": ("right", [_speedup(row) for row in rows]),
        "length (proxy)" if view.proxy else "length": (
            "right",
            ["" if row.length is None else f"{row.length:.4f}" for row in rows],
        ),
        spread: ("left", [interval(row.low, row.high) for row in rows]),
        "seeds": ("right", [str(row.seeds or "") for row in rows]),
        "params": ("right", [count(row.params) for row in rows]),
        "tok/s": ("right", [_speed(row) for row in rows]),
    }
    told_nothing = {"seeds"} if all(row.seeds <= 1 for row in rows) else set()
    told_nothing |= {"speed-up"} if all(row.speedup is None for row in rows) else set()
    placed = any(row.running and row.running.where for row in rows)
    told_nothing |= set() if placed and width >= LEAST_WITH_WHERE else {"where"}
    return fitted_table(
        {name: column for name, column in columns.items() if name not in told_nothing},
        width,
        cut="draft",
        drops=[*((name, NAME) for name in ("tok/s", "params", "seeds", spread)), ("tokens", SHORT_NAME)],
        most={"where": WHERE_WIDTH},
        styles=[_style(row) for row in rows],
    )


def times_line(source: str) -> str:
    """Where the times of a search come from."""
    return f"speed-up predicted from the {source}"


def pick_line(name: str, why: str) -> str:
    """The recommended draft and why it is."""
    return f"recommended: {name}, {why}"


def proxy_note(reason: str) -> str:
    """What tables say of figures that are a proxy for this reason."""
    return f"proxy: {reason}, so acceptance is only an indication"


def proxy_of_rows(rows: Sequence[Mapping[str, Any]]) -> str:
    """Why the acceptance in rows of ``leaderboard.csv`` is a proxy; empty if it is exact.

    Before anything is measured, and in an old file, the text's origin tells.
    """
    telling = [row for row in rows if int(row["rungs"])] or rows
    by_origin = (FOREIGN if str(row["own_text"]) != "True" else "" for row in telling)
    reasons = [row["proxy"] for row in telling if "proxy" in row and int(row["rungs"])] or by_origin
    return next(filter(None, reasons), "")


def _speedup(row: Row) -> str:
    return "" if row.speedup is None else f"{row.speedup:.3f} k={row.best_k}"


def _tokens(row: Row) -> str:
    running = row.running
    return f"{running.tokens if running and not running.seed_offset else row.tokens:,}"


def _speed(row: Row) -> str:
    speed = (row.running.tokens_per_second if row.running else None) or row.tokens_per_second
    return f"{speed:,.0f}" if speed else ""


def _state(view: View, row: Row) -> Text:
    total, running = len(view.rungs), row.running
    if running is not None:
        what = f"seed {running.seed_offset + 1}" if running.seed_offset else f"rung {running.rung + 1}/{total}"
        return Text.assemble((f"{what} ", "cyan"), bar(running.tokens / running.goal))
    match row.state:
        case "complete":
            return Text("done", style="green")
        case "pruned":
            return Text(f"stopped {row.rungs}/{total}")
        case "failed":
            return Text(f"failed: {row.failure_kind.replace('_', ' ')}", style="red")
        case _:
            return Text(f"waiting {row.rungs}/{total}", style="cyan")


def _style(row: Row) -> str:
    if row.rank == 1:
        return "bold"
    return "dim" if row.state == "pruned" else ""


def bar(share: float) -> Text:
    """A bar that is filled to ``share`` of it."""
    filled = round(max(0.0, min(1.0, share)) * BAR_WIDTH)
    return Text.assemble(("━" * filled, "cyan"), ("─" * (BAR_WIDTH - filled), "bright_black"))


def interval(low: float | None, high: float | None) -> str:
    """``[1.2801, 1.3442]``, or nothing."""
    return "" if low is None or high is None else f"[{low:.4f}, {high:.4f}]"


def _measure(row: Row) -> str:
    speed = f"speed-up {row.speedup:.3f} at k = {row.best_k}, length " if row.speedup is not None else ""
    return f"{speed}{row.length:.4f} {interval(row.low, row.high)}"


def clock(seconds: float) -> str:
    """``4:07`` or ``1:02:33``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def count(number: int) -> str:
    """``21.3M`` for 21,312,000."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)


def _number(value: Any) -> float | None:
    return None if value in ("", None) else float(value)
