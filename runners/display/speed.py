"""What `profile` shows: times of the target by rows, of every draft, and how well the fit knows drafts left out."""

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
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
