"""What commands show of specs and measurements. No torch."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from archspec.cost import draft_params, flops_per_token, parameter_shapes, trainable_params, weight_bytes
from archspec.presets import load_preset, preset_names, preset_text
from archspec.resolve import ResolvedSpec
from archspec.servable import verdicts
from archspec.spec import LayerSpec
from runners.display.view import interval, proxy_note
from runners.training.proxy import proxy_of

MISSING = "—"


def presets() -> list[dict[str, Any]]:
    """Every preset: name, what it is (its comment), layers, how the embedding enters each, feedback."""
    found = []
    for name in preset_names():
        spec = load_preset(name)
        fusion = [layer.fusion for layer in spec.layers for _ in range(layer.repeat)]
        about = " ".join(line.lstrip("# ") for line in preset_text(name).splitlines() if line.startswith("#"))
        found.append({"name": name, "layers": len(fusion), "fusion": fusion, "about": about})
    return found


def presets_table() -> Table:
    """The presets for people."""
    table = _table("name", "fusion of its layers", "what it is")
    table.columns[0].no_wrap = True
    for preset in presets():
        kinds = [(kind, len(list(group))) for kind, group in itertools.groupby(preset["fusion"])]
        fusion = ", ".join(kind if count == 1 else f"{kind} x {count}" for kind, count in kinds)
        table.add_row(preset["name"], fusion, preset["about"])
    return table


def cost(spec: ResolvedSpec) -> dict[str, int]:
    """Totals of one draft, beside the target."""
    return {
        "params": draft_params(spec),
        "trainable_params": trainable_params(spec),
        "flops_per_token": flops_per_token(spec),
        "bytes_bfloat16": weight_bytes(spec, "bfloat16"),
    }


def cost_parts(spec: ResolvedSpec) -> dict[str, dict[str, int]]:
    """Parameters, trainable parameters and FLOPs of one draft step for every part of the draft."""
    parts: dict[str, dict[str, int]] = {}
    for name, shape, trainable in parameter_shapes(spec):
        part = parts.setdefault(_part(name), {"params": 0, "trainable_params": 0, "flops_per_token": 0})
        size = shape[0] * (shape[1] if len(shape) == 2 else 1)
        part["params"] += size
        part["trainable_params"] += size * trainable
        part["flops_per_token"] += 2 * size * (len(shape) == 2 and name != "embed_tokens.weight")
    return parts


def cost_table(spec: ResolvedSpec) -> Table:
    """The parts, and what the whole adds beside the target: a frozen embedding is the target's own."""
    table = _table("part", "parameters", "trainable", "FLOPs a token", right=(1, 2, 3))
    for part, sizes in cost_parts(spec).items():
        table.add_row(part, *(f"{sizes[key]:,}" for key in ("params", "trainable_params", "flops_per_token")))
    total = cost(spec)
    figures = [f"{total[key]:,}" for key in ("params", "trainable_params", "flops_per_token")]
    table.add_section()
    table.add_row("beside the target", *figures, style="bold")
    table.add_row("in bfloat16", f"{total['bytes_bfloat16'] / 1e6:,.2f} MB", "", "")
    return table


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """(dotted path, value in ``a``, value in ``b``) of every value that differs; ``—`` where one has no such path.

    A layer that only one of them has is one difference.
    """
    shared = min(len(a["layers"]), len(b["layers"]))
    left, right = (dict(_leaves(spec | {"layers": spec["layers"][:shared]})) for spec in (a, b))
    paths = [*left, *(path for path in right if path not in left)]
    pairs = ((path, left.get(path, MISSING), right.get(path, MISSING)) for path in paths)
    return [pair for pair in pairs if pair[1] != pair[2]] + _whole_layers(a, b)


def differences_table(found: list[tuple[str, Any, Any]], a: str, b: str) -> Table:
    """Differences for people."""
    table = _table("field", a, b)
    for path, left, right in found:
        table.add_row(path, _written(left), _written(right))
    return table


def cost_difference_table(a: ResolvedSpec, b: ResolvedSpec) -> Table:
    """What two drafts cost, and by how much the second differs."""
    table = _table("cost", a.name, b.name, "difference", right=(1, 2, 3))
    left, right = cost(a), cost(b)
    for key, value in left.items():
        table.add_row(key, f"{value:,}", f"{right[key]:,}", f"{(right[key] - value) / value:+.1%}")
    return table


def acceptance_table(record: Mapping[str, Any]) -> RenderableType:
    """Acceptance of one draft, overall and by draft step. Rates are shares of cycles, lengths tokens a cycle.

    Lengths go on beyond the draft steps of a cycle, as far as they were measured.
    """
    proxy = proxy_of(record)
    title = (
        f"acceptance length{' (proxy)' * bool(proxy)} {record['length']:.4f} "
        f"{interval(record['low'], record['high'])}, rate {record['rate']:.4f}: {record['draft']} draft"
        f"{_sampling(record)}, {record['cycles']:,.0f} cycles, "
        f"{record['conversations']} conversations, {record['response_tokens']:,} response tokens"
    )
    table = _table("draft step", "given those before", "of all cycles", "length with so many", right=(1, 2, 3))
    columns = (record["conditional"], record["per_position"], record["length_by_k"])
    for step, figures in enumerate(itertools.zip_longest(*columns)):
        table.add_row(str(step), *(MISSING if figure is None else f"{figure:.4f}" for figure in figures))
    note = [Text(proxy_note(proxy), style="yellow")] if proxy else []
    return Group(Text(title, style="bold"), table, *note)


def categories_table(record: Mapping[str, Any]) -> Table:
    """Acceptance length by text category."""
    table = _table("category", "length", "cycles", "conversations", right=(1, 2, 3))
    for name, told in record["by_category"].items():
        table.add_row(name, f"{told['length']:.4f}", f"{told['cycles']:,.0f}", str(told["conversations"]))
    return table


def decoding_table(check: Mapping[str, Any]) -> RenderableType:
    """The real decoding loop beside the evaluator and beside plain decoding, on the same responses."""
    columns = ("real decoding", "cycles", "accepted", "length", "ms a cycle", "tokens/s", "speed-up")
    table = _table(*columns, right=tuple(range(1, len(columns))))
    chain = {**check, "tokens_per_second": check["draft_tokens_per_second"]}
    for timed in (chain, *([check["tree"]] if check["tree"] else [])):
        table.add_row(
            timed["shape"],
            f"{timed['cycles']:,}",
            f"{timed['accepted']:,}",
            f"{timed['length']:.4f}",
            f"{timed['milliseconds_per_cycle']:.1f}",
            f"{timed['tokens_per_second']:,.1f}",
            f"{timed['speedup']:.3f} [{timed['speedup_low']:.3f}, {timed['speedup_high']:.3f}]",
        )
    evaluator = check["evaluator"]
    cycles = evaluator["cycles"]
    accepted = (evaluator["length"] - 1) * cycles
    table.add_row("evaluator of the chain", f"{cycles:,.0f}", f"{accepted:,.0f}", f"{evaluator['length']:.4f}")
    table.add_row("plain decoding", "", "", "", "", f"{check['plain_tokens_per_second']:,.1f}", "1")
    return Group(table, *map(Text, _same_texts(check)))


def _table(*columns: str, right: tuple[int, ...] = ()) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim", pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index in right else "left")
    return table


def _sampling(record: Mapping[str, Any]) -> str:
    """How the target is sampled, where it is."""
    if not record.get("temperature"):
        return ""
    top_p = "" if record["top_p"] == 1 else f", top-p {record['top_p']:g}"
    return f" at temperature {record['temperature']:g}{top_p}"


def _same_texts(check: Mapping[str, Any]) -> Iterator[str]:
    """How far the texts are those of plain decoding, one line for each shape."""
    if check["same_text"] is None:
        yield f"{check['responses']} texts in each way, drawn{_sampling(check)}"
        return
    yield f"{check['same_text']} of {check['responses']} texts equal plain greedy decoding"
    if check["tree"]:
        yield f"{check['tree']['same_text']} of {check['responses']} with the tree"


def _part(name: str) -> str:
    if name.startswith("layers."):
        _, index, inner, *_ = name.split(".")
        kind = {"attention": "attention", "mlps": "mlp"}.get(inner, "fusion and norms")
        return f"layers.{index} {kind}"
    words = {"embed_tokens": "embedding", "lm_head": "head", "norm": "final norm"}
    first = name.split(".")[0]
    return words.get(first, first)


def _whole_layers(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """A line for each layer that only one of two specs has."""
    left, right = a.get("layers", []), b.get("layers", [])
    return [
        (
            f"layers.{index}",
            _layer(left[index]) if index < len(left) else MISSING,
            _layer(right[index]) if index < len(right) else MISSING,
        )
        for index in range(min(len(left), len(right)), max(len(left), len(right)))
    ]


def _layer(data: dict[str, Any]) -> str:
    """What a layer says beyond the defaults."""
    usual = dict(_leaves(LayerSpec().model_dump(mode="json")))
    said = {path: value for path, value in _leaves(data) if path == "fusion" or usual.get(path) != value}
    return ", ".join(f"{path}: {_written(value)}" for path, value in said.items())


def _leaves(data: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves by dotted path; a list of plain values is one leaf."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    nested = isinstance(data, dict) or (isinstance(data, list) and any(isinstance(item, dict) for item in data))
    if not nested:
        yield path, data
        return
    for key, value in items:
        yield from _leaves(value, f"{path}.{key}" if path else str(key))


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


def verdicts_table(spec: ResolvedSpec) -> Table:
    """Which engines serve the draft, so that nobody trains first and learns it afterwards."""
    table = _table("engine", "serves it", "because")
    for verdict in verdicts(spec):
        told = "\n".join(map(str, verdict.limits or verdict.notes))
        table.add_row(f"{verdict.engine} {verdict.version}", verdict.word, told)
    return table
