"""Tables that fit: a narrow terminal loses whole columns, the least important first, and never a digit of a figure."""

from collections.abc import Mapping, Sequence
from typing import Literal

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

GAP = 2
Cell = str | Text
Column = tuple[Literal["left", "right"], Sequence[Cell]]


def fitted_table(
    columns: Mapping[str, Column],
    width: int,
    *,
    cut: str,
    drops: Sequence[tuple[str, int]],
    most: Mapping[str, int] | None = None,
    styles: Sequence[str] = (),
) -> Table:
    """A table of ``columns`` by their headers, ``width`` cells wide, in which only ``cut`` and ``most`` are shortened.

    ``drops`` are columns in the order in which they go, each with the room in cells that ``cut`` should have, if it
    needs so much, before that one may stay. ``most`` are the greatest widths of further columns of words. ``styles``
    are those of the rows.
    """
    widths = {name: max(map(_width, (name, *cells))) for name, (_, cells) in columns.items()}
    widths |= {name: min(widths[name], room) for name, room in (most or {}).items() if name in widths}
    kept = dict(columns)
    for name, least in drops:
        if _room(widths, kept, cut, width) < min(least, widths[cut]):
            kept.pop(name, None)
    widths[cut] = min(widths[cut], max(1, _room(widths, kept, cut, width)))
    shown = Table(box=None, padding=(0, GAP, 0, 0), header_style="dim", pad_edge=False)
    for name, (justify, _) in kept.items():
        shown.add_column(
            name, justify=justify, no_wrap=True, overflow="ellipsis", min_width=widths[name], max_width=widths[name]
        )
    for index, cells in enumerate(zip(*(cells for _, cells in kept.values()), strict=True)):
        shown.add_row(*cells, style=styles[index] if styles else None)
    return shown


def _room(widths: Mapping[str, int], kept: Mapping[str, Column], cut: str, width: int) -> int:
    """What the others and the gaps between all leave for ``cut``."""
    return width - sum(widths[name] + GAP for name in kept if name != cut)


def _width(cell: Cell) -> int:
    return cell.cell_len if isinstance(cell, Text) else cell_len(cell)
