"""What a search comes to, in words and two small tables, read from its ``best-config.json`` alone."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from runners.search.agreement import SELECTION
from runners.search.result import BestConfig, Decoded


def outcome(best: BestConfig) -> Iterator[RenderableType]:
    """What times it rests on, who was turned away, how far rungs agree, the verdict, the pick, and real decoding."""
    if best.times is not None:
        yield Text(f"speed-up predicted from the {best.times}", style="dim")
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
    if best.recommended.name != best.verdict.winner or len(best.objectives) > 1:
        yield Text(f"recommended: {best.recommended.name}, {best.recommended.why}", style="bold")
    if best.decoded:
        yield ""
        yield decoded_table(best.decoded)


def decoded_table(decoded: list[Decoded]) -> Table:
    """Predicted beside measured speed-up and acceptance length, one row for each way of drafting."""
    shown = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    shown.add_column("decoded for real", no_wrap=True, overflow="ellipsis")
    for name in ("draft", "predicted", "measured", "95% interval", "off by", "length", "expected", "same text"):
        shown.add_column(name, justify="right", no_wrap=True)
    for one in decoded:
        predicted = "" if one.predicted is None else f"{one.predicted:.3f}"
        off = "" if one.predicted is None else f"{one.measured / one.predicted - 1:+.1%}"
        expected = "" if one.expected_length is None else f"{one.expected_length:.4f}"
        shown.add_row(
            one.name,
            one.draft,
            predicted,
            f"{one.measured:.3f}",
            f"[{one.low:.3f}, {one.high:.3f}]",
            off if one.comparable else "",
            f"{one.length:.4f}",
            expected,
            "" if one.same_text is None else f"{one.same_text} of {one.responses}",
        )
    return shown
