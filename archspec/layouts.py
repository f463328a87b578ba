"""How other projects name a draft's tensors. No torch.

A ``Layout`` is one naming; ``tensor_names`` maps this project's names (those of ``Draft.state_dict()``) to it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from archspec.cost import parameter_shapes
from archspec.resolve import ResolvedSpec

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """``layer`` is the prefix of layer i; ``plain_norm`` the norm before the attention of a layer without fusion."""

    layer: Callable[[int], str]
    plain_norm: str = "input_layernorm"


_OUTSIDE_LAYERS = {"inputs.fc": "fc", "inputs.norms": "fc_norm", "inputs.joint_norm": "input_norm"}


def tensor_names(spec: ResolvedSpec, layout: Layout) -> dict[str, str]:
    """Name in ``Draft.state_dict()`` -> name in ``layout``, for every tensor of a draft that the layout can hold.

    Raises:
        KeyError: the spec has a part for which the layout has no name; formats refuse such specs before.
    """
    return {name: _foreign_name(name, spec, layout) for name in tensor_shapes(spec)}


def tensor_shapes(spec: ResolvedSpec) -> dict[str, Shape]:
    """Name in ``Draft.state_dict()`` -> shape, the vocabulary maps included."""
    shapes = {name: shape for name, shape, _ in parameter_shapes(spec)}
    maps = {"d2t": (spec.head.vocab_size,), "t2d": (spec.target.vocab_size,)}
    return shapes | maps if spec.reduced_vocab else shapes


def _foreign_name(name: str, spec: ResolvedSpec, layout: Layout) -> str:
    if not name.startswith("layers."):
        renamed = (
            theirs + name[len(ours) :] for ours, theirs in _OUTSIDE_LAYERS.items() if name.startswith(f"{ours}.")
        )
        return next(renamed, name)
    _, index, part, rest = name.split(".", 3)
    layer = spec.layers[int(index)]
    prefix = layout.layer(int(index))
    if part == "project":
        return f"fc.{rest}"
    if part == "mlps":
        kind, number, leaf = rest.split(".", 2)
        if kind == "norms" and number == "0":
            return f"{prefix}.post_attention_layernorm.{leaf}"
        if kind == "mlps":
            return f"{prefix}.mlp.{leaf}" if layer.mlp.depth == 1 else f"{prefix}.mlps.{number}.{leaf}"
    parts = {
        "attention": "self_attn",
        "embed_norm": "input_layernorm",
        "state_norm": "hidden_norm" if layer.fusion == "concat" else layout.plain_norm,
    }
    return f"{prefix}.{parts[part]}.{rest}"
