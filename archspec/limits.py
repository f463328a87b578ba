"""What of a draft a format or an engine cannot hold, field by field. No torch.

``Holds`` says what a project takes beyond the plain EAGLE-3 family: one fused layer and plain ones after it, of equal
sizes, each with attention and one MLP. ``limits`` compares a spec with it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from archspec.resolve import ResolvedAttention, ResolvedLayer, ResolvedSpec
from archspec.rope import KINDS, YarnRope


@dataclass(frozen=True)
class Limit:
    """One field whose value a project cannot hold, and what it takes instead."""

    field: str
    value: Any
    rule: str

    def __str__(self) -> str:
        written = str(self.value).lower() if isinstance(self.value, bool) else str(self.value)
        return f"{self.field} = {written}: {self.rule}"


@dataclass(frozen=True)
class Holds:
    """What ``project`` takes. The defaults are what every project takes.

    ``embedding_id`` and ``last_id``: whether layers 0 and n can be aux layers. ``own_embedding``: whether an embedding
    of its own survives in a draft as wide as the target; ``other_width``: whether a draft may have another width.
    ``skips_square_fc``: whether fc is skipped where the aux states together are as wide as the draft.
    ``biased_qk_norm``: whether q/k norms and biases go together. ``mixed_windows``: whether some layers may
    have a window and others none. ``ropes`` are the kinds of scaled positions; ``attention_factor``: whether YaRN may
    have another than the paper's. ``first_fusion`` and ``first_norm`` are the first layer's fusion and norm before
    attention.
    """

    project: str
    first_fusion: str = "concat"
    first_norm: str = "own"
    max_layers: int | None = None
    input_norms: tuple[str, ...] = ("none", "each", "joint")
    head_norms: tuple[str, ...] = ("own",)
    feedbacks: tuple[str, ...] = ("pre_norm", "post_norm")
    residuals: tuple[str, ...] = ("raw", "normed")
    qk_norm: bool = False
    bias: bool = False
    biased_qk_norm: bool = False
    window: bool = False
    mixed_windows: bool = False
    embedding_id: bool = False
    last_id: bool = True
    own_embedding: bool = True
    other_width: bool = True
    skips_square_fc: bool = False
    ropes: tuple[str, ...] = tuple(KINDS)
    attention_factor: bool = True


def limits(spec: ResolvedSpec, holds: Holds) -> list[Limit]:
    """Every field of ``spec`` that the project cannot hold; empty if it holds the draft."""
    found = [*_of_inputs(spec, holds), *_of_whole(spec, holds), *of_rope(spec, holds)]
    for i, layer in enumerate(spec.layers):
        found += of_layer(f"layers.{i}", i, layer, spec.layers[0], holds)
    return found + (list(_of_windows(spec, holds)) if holds.window else [])


def _of_inputs(spec: ResolvedSpec, holds: Holds) -> Iterator[Limit]:
    inputs, target = spec.inputs, spec.target
    ids, width = inputs.aux_layers, len(inputs.aux_layers) * spec.target.hidden_size
    if 0 in ids and not holds.embedding_id:
        yield Limit("inputs.aux_layers", list(ids), f"{holds.project} cannot read the embedding (0); use layers from 1")
    if target.num_layers in ids and not holds.last_id:
        rule = f"{holds.project} cannot read the last layer's output; use layers up to {target.num_layers - 1}"
        yield Limit("inputs.aux_layers", list(ids), rule)
    if holds.skips_square_fc and width == spec.hidden_size:
        rule = f"{holds.project} skips fc where the aux states together are as wide as the draft, {width}"
        yield Limit("inputs.aux_layers", list(ids), f"{rule}; read {len(ids) + 1} layers")
    if inputs.norm not in holds.input_norms:
        yield Limit("inputs.norm", inputs.norm, f"use {_either(holds.input_norms)}")
    if inputs.projection != "linear":
        yield Limit("inputs.projection", inputs.projection, "use linear")
    if inputs.bias:
        yield Limit("inputs.bias", True, "use false")


def _of_whole(spec: ResolvedSpec, holds: Holds) -> Iterator[Limit]:
    project, as_target = holds.project, spec.hidden_size == spec.target.hidden_size
    if not as_target and not holds.other_width:
        rule = f"{project} takes drafts as wide as their target; use {spec.target.hidden_size}"
        yield Limit("hidden_size", spec.hidden_size, rule)
    if as_target and spec.embedding == "trained" and not holds.own_embedding:
        yield Limit("embedding", "trained", f"{project} puts the target's in its place; use frozen")
    if holds.max_layers is not None and len(spec.layers) > holds.max_layers:
        yield Limit("layers", len(spec.layers), f"{project} has {holds.max_layers}; use {holds.max_layers}")
    if spec.feedback not in holds.feedbacks:
        yield Limit("feedback", spec.feedback, f"{project} feeds back {_either(holds.feedbacks)}")
    if spec.head.norm not in holds.head_norms:
        yield Limit("head.norm", spec.head.norm, f"use {_either(holds.head_norms)}")


def of_rope(spec: ResolvedSpec, holds: Holds) -> Iterator[Limit]:
    """The limits of scaled positions."""
    rope = spec.rope_scaling
    if rope == "none":
        return
    if rope.type not in holds.ropes:
        yield Limit("rope_scaling.type", rope.type, f"use {_either((*holds.ropes, 'none'))}")
    elif isinstance(rope, YarnRope) and rope.attention_scale != rope.usual_scale and not holds.attention_factor:
        rule = f"{holds.project} has 0.1 ln(factor) + 1; use null"
        yield Limit("rope_scaling.attention_factor", rope.attention_scale, rule)


def of_layer(at: str, index: int, layer: ResolvedLayer, first: ResolvedLayer, holds: Holds) -> Iterator[Limit]:
    """The limits of one layer, which stands ``at`` a path; ``first`` is the draft's first."""
    fusion, norm = (holds.first_fusion, holds.first_norm) if index == 0 else ("none", "own")
    mlp, size = layer.mlp, first.mlp.intermediate_size
    residuals = holds.residuals if index == 0 else ("raw",)
    if layer.fusion != fusion:
        yield Limit(f"{at}.fusion", layer.fusion, f"use {fusion}; only the first layer reads the embedding")
    if layer.stream != "h":
        yield Limit(f"{at}.stream", layer.stream, "use h")
    if layer.residual_from not in residuals:
        yield Limit(f"{at}.residual_from", layer.residual_from, f"use {_either(residuals)}")
    if layer.attention is None:
        yield Limit(f"{at}.attention", "none", "every layer has attention")
    else:
        if layer.attention.norm != norm:
            yield Limit(f"{at}.attention.norm", layer.attention.norm, f"use {norm}")
        yield from _of_attention(f"{at}.attention", layer.attention, first.attention or layer.attention, holds)
    if mlp.depth != 1:
        yield Limit(f"{at}.mlp.depth", mlp.depth, "use 1")
    if mlp.intermediate_size != size:
        yield Limit(f"{at}.mlp.intermediate_size", mlp.intermediate_size, f"all layers have the same; use {size}")


def _of_attention(at: str, attention: ResolvedAttention, first: ResolvedAttention, holds: Holds) -> Iterator[Limit]:
    for name, held in (("qk_norm", holds.qk_norm), ("bias", holds.bias)):
        if getattr(attention, name) and not held:
            yield Limit(f"{at}.{name}", True, "use false")
    if attention.window is not None and not holds.window:
        yield Limit(f"{at}.window", attention.window, "use null")
    if attention.qk_norm and attention.bias and holds.qk_norm and holds.bias and not holds.biased_qk_norm:
        yield Limit(f"{at}.bias", True, f"{holds.project} has no bias on o beside q/k norms; use false")
    switches = {"qk_norm": holds.qk_norm, "bias": holds.bias}
    for name in ("heads", "kv_heads", "head_dim", "qk_norm", "bias"):
        value, same = getattr(attention, name), getattr(first, name)
        if value != same and switches.get(name, True):
            yield Limit(f"{at}.{name}", value, f"all layers have the same; use {str(same).lower()}")


def _of_windows(spec: ResolvedSpec, holds: Holds) -> Iterator[Limit]:
    """Configs have one window, which all layers use or, where the project can mix, any of them."""
    windows = {i: layer.attention.window for i, layer in enumerate(spec.layers) if layer.attention is not None}
    first = next((window for window in windows.values() if window is not None), None)
    for i, window in windows.items():
        if window not in (first, None) or (window is None and not holds.mixed_windows and first is not None):
            others = " or null" if holds.mixed_windows else ""
            value = "null" if window is None else window
            yield Limit(f"layers.{i}.attention.window", value, f"all windows are the same; use {first}{others}")


def _either(values: tuple[str, ...]) -> str:
    return values[0] if len(values) == 1 else f"{', '.join(values[:-1])} or {values[-1]}"
