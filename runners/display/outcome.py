"""What a search comes to, in words and two small tables, read from its ``best-config.json`` alone."""

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from runners.display.columns import Column, fitted_table
from runners.display.view import pick_line, times_line
from runners.search.agreement import SELECTION
from runners.search.result import BestConfig, Decoded

# Predicted and measured speed-up stay at any width.
DECODED_DROPS = (("same text", 16), ("expected", 16), ("length", 16), ("95% interval", 10))
UNLIKE = 0.15  # of T(1), beyond which the machine was not as it was when profiled


def outcome(best: BestConfig, width: int) -> Iterator[RenderableType]:
    """What times it rests on, who was turned away, how far rungs agree, the verdict, the pick, and real decoding."""
    if best.times is not None:
        yield Text(times_line(best.times), style="dim")
    if best.turned_away:
        told = ", ".join(f"{name} {count}" for name, count in sorted(best.turned_away.items()))
        yield Text(f"draws turned away before training, by constraint: {told}", style="dim")
    for agreement in best.agreement:
        yield Text(agreement["text"], style="dim")
    if best.agreement:
        yield Text(SELECTION, style="dim")
    if best.seed_spread is not None:
        yield Text(best.seed_spread["text"], style="dim")
    yield Text(best.verdict.text, style="bold")
    pick = best.recommended
    if pick.name != best.verdict.winner or pick.why != f"the best {best.verdict.objective}":
        yield Text(pick_line(pick.name, pick.why), style="bold")
    if best.decoded:
        yield ""
        yield decoded_table(best.decoded, width)
        yield from (Text(line, style="yellow") for line in decoded_notes(best.decoded))


def decoded_table(decoded: Sequence[Decoded], width: int) -> Table:
    """Predicted beside measured speed-up and acceptance length, one row for each way of drafting."""
    columns: dict[str, Column] = {
        "decoded for real": ("left", [one.name for one in decoded]),
        "draft": ("right", [one.draft for one in decoded]),
        "predicted": ("right", ["" if one.predicted is None else f"{one.predicted:.3f}" for one in decoded]),
        "measured": ("right", [f"{one.measured:.3f}" for one in decoded]),
        "95% interval": ("right", [f"[{one.low:.3f}, {one.high:.3f}]" for one in decoded]),
        "off by": ("right", [_off(one) for one in decoded]),
        "length": ("right", [f"{one.length:.4f}" for one in decoded]),
        "expected": (
            "right",
            ["" if one.expected_length is None else f"{one.expected_length:.4f}" for one in decoded],
        ),
        "same text": (
            "right",
            ["" if one.same_text is None else f"{one.same_text} of {one.responses}" for one in decoded],
        ),
    }
    return fitted_table(columns, width, cut="decoded for real", drops=DECODED_DROPS)


def decoded_notes(decoded: Sequence[Decoded]) -> Iterator[str]:
    """Why predicted and measured cannot be compared, each reason once; else whether the machine was another's speed."""
    for why in dict.fromkeys(one.incomparable for one in decoded if one.incomparable):
        yield f"not comparable: {why}"
    told = [(one.plain_ms / one.profiled_ms - 1, one) for one in decoded if one.profiled_ms and not one.incomparable]
    off, one = max(told, key=lambda pair: abs(pair[0]), default=(0.0, None))
    if one is not None and abs(off) > UNLIKE:
        yield (
            f"the machine was not as it was when profiled: plain decoding took {one.plain_ms:.2f} ms a token, "
            f"{off:+.0%} beside the profile's {one.profiled_ms:.2f}"
        )


def _off(one: Decoded) -> str:
    return "" if one.predicted is None or one.incomparable else f"{one.measured / one.predicted - 1:+.1%}"
