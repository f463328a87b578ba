"""The formats by name, and which one a checkpoint is in. No torch."""

from collections.abc import Collection, Mapping
from typing import Any

from archspec.eagle1 import Eagle1
from archspec.errors import ArchspecError, nearest
from archspec.foreign_config import AUX_KEY, BLOCK, mapping_of
from archspec.format import Format
from archspec.resolve import ResolvedSpec
from archspec.sglang import Sglang, has_hidden_norms_alone
from archspec.specforge import SpecForge
from archspec.speculators import Speculators
from archspec.vllm import Vllm

FORMATS: dict[str, Format] = {each.name: each for each in (Vllm(), Sglang(), SpecForge(), Speculators(), Eagle1())}


def format_named(name: str) -> Format:
    """The format of this name.

    Raises:
        ArchspecError: there is none.
    """
    if name not in FORMATS:
        raise ArchspecError(f"format {name!r}: {nearest(name, FORMATS)}")
    return FORMATS[name]


def format_of(config: Mapping[str, Any], names: Collection[str], source: str) -> Format:
    """The format that a checkpoint is in, from its config and the names of its tensors.

    Where a checkpoint means the same to all projects it is read as vLLM does.

    Raises:
        ArchspecError: it means different drafts to different projects, so its format must be named.
    """
    written = mapping_of(config, BLOCK, source).get("format")
    if written is not None:
        if not isinstance(written, str) or written not in FORMATS:
            raise ArchspecError(f"{source}: {BLOCK}.format = {written!r}: {nearest(written, FORMATS)}")
        return FORMATS[written]
    if "speculators_model_type" in config:
        return FORMATS["speculators"]
    if not any("hidden_norm" in name for name in names):
        return FORMATS["eagle1"]
    if any(name.startswith(("midlayers.", "fuse_layer.")) for name in names):
        return FORMATS["specforge"]
    if config.get("norm_output") is not None:
        rule = (
            "SpecForge means the norm before the head, engines the state that is fed back; "
            "say which by --format specforge, vllm or sglang"
        )
        raise ArchspecError(f"{source}: norm_output is set, and projects read it differently: {rule}")
    if has_hidden_norms_alone(names):
        return FORMATS["sglang"]
    if config.get(AUX_KEY) is None and mapping_of(config, "eagle_config", source).get(AUX_KEY) is not None:
        rule = (
            "SpecForge and SGLang count such ids from 0, vLLM from 1; say which by --format specforge, sglang or vllm"
        )
        raise ArchspecError(
            f"{source}: {AUX_KEY} stands in eagle_config alone, and projects read it differently: {rule}"
        )
    return FORMATS["vllm"]


def configs(spec: ResolvedSpec) -> dict[str, dict[str, Any]]:
    """The ``config.json`` of every format that holds ``spec``, by the format's name."""
    return {name: each.config(spec) for name, each in FORMATS.items() if not each.limits(spec)}


def unheld(spec: ResolvedSpec) -> dict[str, list[str]]:
    """What every format that does not hold ``spec`` lacks, ``field = value: rule`` by the format's name."""
    found = {name: [str(limit) for limit in each.limits(spec)] for name, each in FORMATS.items()}
    return {name: limits for name, limits in found.items() if limits}
