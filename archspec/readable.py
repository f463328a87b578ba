"""Keys of other projects' configs that make another model of a draft than can be built here, and so are refused.

No torch. Keys that are merely unknown are ignored: these are the ones that somebody's code obeys.
"""

from collections.abc import Mapping
from typing import Any

from archspec.errors import ArchspecError
from archspec.foreign_config import flag_of, mapping_of

PLAIN_LAYERS = ("LlamaForCausalLM", "Qwen3ForCausalLM")
"""Architectures that do not say EAGLE: EAGLE-1's, and those of drafts published under their layers' name."""

PARTIAL = ("partial_rotary_factor", "rotary_pct", "rotary_emb_fraction")
"""How much of a head is rotated, in the spellings that vLLM 0.32 reads (``patch_rope_parameters``)."""


def require_readable(config: Mapping[str, Any], sizes: Mapping[str, Any], source: str) -> None:
    """Refuse a config that describes a draft of another kind; ``sizes`` is where its Llama keys stand.

    Raises:
        ArchspecError: a key asks for what drafts do not have here; the message names it.
    """
    _require_architecture(config.get("architectures"), source)
    for keys in (config, sizes):
        if keys.get("quantization_config"):
            rule = "quantised drafts are not read; ask for the unquantised checkpoint"
            raise ArchspecError(f"{source}: quantization_config: {rule}")
        if flag_of(keys, "parallel_drafting", False, source):
            rule = "such a draft proposes all tokens at once; only drafts that propose one after another can be read"
            raise ArchspecError(f"{source}: parallel_drafting is true: {rule}")
        if flag_of(keys, "mlp_bias", False, source):
            raise ArchspecError(f"{source}: mlp_bias is true: the MLPs of drafts have no biases here")
        _require_whole_rotation(keys, source)
    if not flag_of(mapping_of(config, "eagle_config", source), "use_aux_hidden_state", True, source):
        rule = "such a draft reads the target's last state alone, through another fc"
        raise ArchspecError(f"{source}: eagle_config.use_aux_hidden_state is false: {rule}; it cannot be read")


def _require_architecture(names: Any, source: str) -> None:
    if names is None:
        return
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ArchspecError(f"{source}: architectures = {names!r}: must be a list of names")
    for name in names:
        eagle = "eagle" in name.lower() and "peagle" not in name.lower()
        if not eagle and name not in PLAIN_LAYERS:
            rule = f"only EAGLE drafts can be read: names that say eagle (not peagle), {' and '.join(PLAIN_LAYERS)}"
            raise ArchspecError(f"{source}: architectures names {name!r}; {rule}")


def _require_whole_rotation(keys: Mapping[str, Any], source: str) -> None:
    for place in ("rope_parameters", "rope_scaling", ""):
        within = mapping_of(keys, place, source) if place else keys
        for key, value in within.items():
            where = f"{source}: {place}.{key}" if place else f"{source}: {key}"
            if key in PARTIAL and value is not None and value != 1:
                raise ArchspecError(f"{where} = {value!r}: must be 1: drafts rotate the whole head")
            if place and isinstance(value, Mapping):
                raise ArchspecError(f"{where}: positions of a kind of layer alone; all layers of a draft have the same")
