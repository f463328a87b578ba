"""speculators' EAGLE-3 layout (``Eagle3DraftModel``): ``layers.N.*``, sizes nested in ``transformer_layer_config``.

``norm_output`` means that the state after the final norm is fed back. ``norm_before_residual`` is true where the key is
missing, as engines read it. The head is a frozen copy of the target's rows.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from archspec.errors import ArchspecError
from archspec.facts import TargetFacts
from archspec.foreign_config import BLOCK, Choices, LlamaKeys, aux_layers_of, mapping_of, spec_of, target_of
from archspec.layouts import Layout, unpack
from archspec.resolve import ResolvedSpec
from archspec.schema import Document

LAYOUT = Layout("speculators", lambda i: f"layers.{i}")


def read(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: TargetFacts | None, source: str
) -> tuple[ResolvedSpec, dict[str, Tensor]]:
    """Spec and state dict from a config dict and tensors under the layout's names; ``source`` is named in messages.

    Raises:
        ArchspecError: the config describes no EAGLE-3 draft, or a tensor is missing, extra or misshapen.
    """
    kind = config.get("speculators_model_type")
    if kind != "eagle3":
        raise ArchspecError(f"{source}: speculators_model_type = {kind!r}: only eagle3 drafts can be read")
    sizes = mapping_of(config, "transformer_layer_config", source)
    outside = {key: config.get(key) for key in ("draft_vocab_size", "target_hidden_size")}
    keys = Document({**sizes, **outside}, source).validate(LlamaKeys)
    choices = Choices(
        aux_layers=aux_layers_of(config, source),
        input_norm="each" if config.get("fc_norm") else "joint" if config.get("norm_before_fc") else "none",
        residual_from="normed" if config.get("norm_before_residual", True) else "raw",
        qk_norm=keys.model_type == "qwen3",
        windows=_windows(sizes, keys.num_hidden_layers),
        feedback="post_norm" if config.get("norm_output") else "pre_norm",
        frozen_head=True,
    )
    facts, block = target_of(config, target, source), mapping_of(config, BLOCK, source)
    spec = spec_of(keys, choices, LAYOUT, tensors, facts, block, source)
    return spec, unpack(spec, LAYOUT, tensors, source)


def _windows(sizes: Mapping[str, Any], count: int) -> tuple[int | None, ...]:
    """Sliding window of every layer, in tokens; None sees everything."""
    window = sizes.get("sliding_window")
    kinds = sizes.get("layer_types") or ["full_attention"] * count
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
