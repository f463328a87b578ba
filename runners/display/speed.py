"""Times for people: what `profile` measured, what `show` says a draft costs, what `eval` predicts. No torch."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from archspec.profile import Profile, ProfileTimes, Spread

MISSING = "—"
UNREST = 0.15


def profile_tables(profile: Profile, times: Sequence[ProfileTimes]) -> Iterator[RenderableType]:
    """Two tables for each of ``times``, which are of this profile at its batch sizes and context lengths."""
    threads = "" if profile.threads is None else f", {profile.threads} thread{'s' * (profile.threads > 1)}"
    yield Text(f"{profile.target.model} on {profile.hardware}, {profile.dtype}{threads}", style="bold")
    for one in times:
        yield Text(f"\nbatch {one.batch}, {one.context} tokens of context; milliseconds, and quartiles", style="bold")
        yield target_table(profile, one)
        yield Text("")
        yield drafts_table(profile, one)
        yield Text(_fit_line(one))
    if profile.unrest > UNREST:
        rule = f"the quartiles of T(1) lie {profile.unrest:.0%} of it apart; measure again when nothing else runs"
        yield Text(f"the machine was not quiet: {rule}", style="yellow")


def target_table(profile: Profile, times: ProfileTimes) -> Table:
    """T(m) by rows m, and how many times T(1) it is."""
    table = _table("target, tokens a sequence", "ms", "quartiles", "times T(1)", right=(1, 2, 3))
    for time in profile.target_times:
        if (time.batch, time.context) == (times.batch, times.context):
            share = time.ms / times.target_ms(1)
            table.add_row(str(time.rows), f"{time.ms:.2f}", _spread(time.spread), f"{share:.2f}")
    return table


def drafts_table(profile: Profile, times: ProfileTimes) -> Table:
    """Every draft's step and T_0, and by how much the fit misses its step when it is fitted without it."""
    table = _table("draft", "step ms", "quartiles", "T_0 ms", "quartiles", "fit without it", right=(1, 2, 3, 4, 5))
    for draft in profile.drafts:
        for time in draft.times:
            if (time.batch, time.context) == (times.batch, times.context):
                error = times.fit_errors.get(str(draft.hash))
                table.add_row(
                    draft.label,
                    f"{time.step_ms:.3f}",
                    _spread(time.step_spread, 3),
                    f"{time.cycle_ms:.2f}",
                    _spread(time.cycle_spread),
                    MISSING if error is None else f"{error:+.1%}",
                )
    return table


def step_tables(steps: Mapping[str, Any]) -> Iterator[RenderableType]:
    """What a draft step and a cycle take (``StepTimes.as_dict``): parts where they are known, and a row for every k.

    A draft breaks even at the acceptance length at which a cycle takes as long as plain decoding of its tokens, and
    never where that is above k + 1, which no acceptance reaches.
    """
    alone, step, fixed = steps["target_ms"][1], steps["draft_ms"], steps["cycle_ms"]
    yield Text(f"\n{steps['source']}; milliseconds", style="bold")
    if steps["parts"]:
        parts = _table("part of a draft step", "ms", "share", right=(1, 2))
        for name, ms in steps["parts"].items():
            parts.add_row(name, f"{ms:.3f}", f"{ms / step:.1%}")
        yield parts
    yield Text(f"draft step {step:.3f} ({steps['draft_source']}), T_0 {fixed:.3f}, T(1) {alone:.3f}\n")
    cycles = _table("drafted k", "T(k + 1)", "cycle", "breaks even at length", right=(0, 1, 2, 3))
    for rows, ms in steps["target_ms"].items():
        if rows > 1:
            cycle = ms + (rows - 1) * step + fixed
            even = f"{cycle / alone:.3f}" if cycle <= rows * alone else "never"
            cycles.add_row(str(rows - 1), f"{ms:.3f}", f"{cycle:.3f}", even)
    yield cycles


def prediction_tables(told: Mapping[str, Any], proxy: bool) -> Iterator[RenderableType]:
    """The speed-up at every k (``Prediction.as_dict``), the best one marked, and the times that it rests on."""
    best = f"speed-up{' (proxy)' * proxy} {told['speedup']:.3f} at k = {told['k']}"
    yield Text(f"{best}, predicted from the {told['source']}", style="bold")
    table = _table("drafted k", "length", "cycle ms", "speed-up", right=(0, 1, 2, 3))
    for k, at in told["by_k"].items():
        style = "bold" if k == told["k"] else ""
        table.add_row(str(k), f"{at['length']:.4f}", f"{at['cycle_ms']:.3f}", f"{at['speedup']:.3f}", style=style)
    yield table
    step = f"milliseconds: draft step {told['draft_ms']:.3f} ({told['draft_source']})"
    yield Text(f"{step}, T_0 {told['cycle_ms']:.3f}, T(1) {told['target_ms'][1]:.3f}")


def comparison_table(told: Mapping[str, Any]) -> RenderableType:
    """Predicted beside measured speed-up (``Comparison.as_dict``), and a note where the two are of different things."""
    chain = f"chain of {told['k']}, by the length of"
    table = _table(chain, "predicted", "measured", "95% interval", "off by", right=(1, 2, 3, 4))
    measured = f"{told['measured']:.3f}", f"[{told['low']:.3f}, {told['high']:.3f}]"
    for name, end in (("all held-out conversations", ""), ("those decoded", "_for_decoded")):
        table.add_row(name, f"{told['predicted' + end]:.3f}", *measured, f"{told['off_by' + end]:+.1%}")
    why = told["incomparable"]
    return Group(table, Text(f"not comparable: {why}", style="yellow")) if why else table


def _fit_line(times: ProfileTimes) -> str:
    if times.fit_error is None:
        return (
            "other drafts: scaled by what they read from memory, with an error that is not known; measure more drafts"
        )
    return f"other drafts: fitted, with a mean error of {times.fit_error:.1%} on drafts left out of the fit"


def _spread(spread: Spread | None, digits: int = 2) -> str:
    return MISSING if spread is None else f"{spread[0]:.{digits}f} to {spread[1]:.{digits}f}"


def _table(*columns: str, right: tuple[int, ...]) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim", pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index in right else "left")
    return table
