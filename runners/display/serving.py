"""What `serve-check` shows: the engine's figures beside the evaluator's, and the verdict. No torch."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from runners.serving.check import ServeCheck

MISSING = "—"
UNKNOWN = "not shown by the engine"


def serve_table(check: ServeCheck) -> Table:
    """Acceptance per position and in all; shares are over cycles, as the engine reports them."""
    table = Table(box=None, padding=(0, 1), header_style="dim", pad_edge=False)
    for index, column in enumerate(("", check.engine, "evaluator", "may differ by", "")):
        table.add_column(column, justify="right" if 0 < index < 4 else "left")
    table.add_row("cycles", f"{check.cycles[0]:,}", f"{check.cycles[1]:,.0f}", "", "")
    for one in (*check.positions, check.length):
        verdict = Text("agrees", "green") if one.agrees else Text("differs", "red")
        table.add_row(one.name, f"{one.engine:.4f}", f"{one.ours:.4f}", f"{one.allowed:.4f}", verdict)
    return table


def serve_report(check: ServeCheck) -> RenderableType:
    """The table, what else was checked, and what is wrong."""
    facts = [
        ("draft", f"{check.draft}, {check.draft_length} tokens a cycle, on {check.device} in float32"),
        ("greedy text", f"equal with and without the draft in {check.same_text} of {check.responses} responses"),
        ("target", f"{check.own_tokens} of {check.tokens} tokens are its argmax here"),
        ("aux layers", _layers(check)),
        ("missing tensors", UNKNOWN if check.missing is None else ", ".join(check.missing) or "none"),
        ("unused tensors", UNKNOWN if check.unused is None else ", ".join(check.unused) or "none"),
        ("power", check.power),
    ]
    width = max(len(name) for name, _ in facts) + 2
    lines = [Text(f"{name:<{width}}{told}") for name, told in facts]
    lines += [Text(f"note: {note}", "yellow") for note in check.notes]
    lines += [Text(problem, "red") for problem in check.problems]
    return Group(serve_table(check), Text(""), *lines, Text(""), _verdict(check))


def _layers(check: ServeCheck) -> str:
    used, meant = (", ".join(map(str, layers or ())) for layers in (check.aux_layers, check.expected_aux_layers))
    return f"{used or UNKNOWN}; the draft was trained on {meant}"


def _verdict(check: ServeCheck) -> Text:
    if not check.agrees:
        return Text(f"{check.engine} disagrees with the evaluator", "bold red")
    exactly = ", to the last token" if check.identical else ""
    return Text(f"{check.engine} agrees with the evaluator{exactly}", "bold green")
