"""SpecForge's layout (``LlamaForCausalLMEagle3``), which SGLang and vLLM also read.

Written: ``midlayer.*`` for the first layer, ``layers.N.*`` for deeper ones. Also read: ``layers.0.*`` for the first,
``midlayers.N.*`` (pull request 401) and ``fuse_layer.*`` with ``additional_layers.N.*`` (pull request 449).
``norm_output`` here means "norm before the head", true by default; elsewhere it means that the state after the norm is
fed back. So it is written only where the head has no norm.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from archspec.errors import ArchspecError
from archspec.facts import TargetFacts
from archspec.files import save_tensors, write_json
from archspec.foreign_config import BLOCK, Choices, LlamaKeys, aux_layers_of, mapping_of, spec_of, target_of
from archspec.layouts import Layout, assemble, pack, read_folder, unpack
from archspec.modules import Draft
from archspec.resolve import ResolvedLayer, ResolvedSpec
from archspec.schema import Document

LAYOUT = Layout("SpecForge", lambda i: "midlayer" if i == 0 else f"layers.{i}")
_READ_ONLY = (
    Layout("SpecForge", lambda i: f"layers.{i}"),
    Layout("SpecForge #401", lambda i: f"midlayers.{i}"),
    Layout("SpecForge #449", lambda i: "fuse_layer" if i == 0 else f"additional_layers.{i - 1}", "hidden_norm"),
)


def draft_model_config(spec: ResolvedSpec) -> dict[str, Any]:
    """The config dict that SpecForge reads; what ``unsupported`` names is lost in it.

    Layer ids stand twice: at the top in vLLM's counting, which is this project's, and inside ``eagle_config`` from 0.
    """
    target, first, ids = spec.target, spec.layers[0], list(spec.inputs.aux_layers)
    heads = next((layer.attention for layer in spec.layers if layer.attention is not None), None) or target
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "intermediate_size": first.mlp.intermediate_size,
        "num_attention_heads": heads.heads,
        "num_key_value_heads": heads.kv_heads,
        "head_dim": heads.head_dim,
        "num_hidden_layers": len(spec.layers),
        "max_position_embeddings": target.max_positions,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
        "vocab_size": target.vocab_size,
        "draft_vocab_size": spec.head.vocab_size,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "use_cache": True,
        "fc_norm": spec.inputs.norm == "each",
        "norm_before_fc": spec.inputs.norm == "joint",
        "num_aux_hidden_states": len(ids),
        "eagle_aux_hidden_state_layer_ids": ids,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [i - 1 for i in ids]},
    }
    if spec.hidden_size != target.hidden_size:
        config["target_hidden_size"] = target.hidden_size
    if spec.head.norm == "none":
        config["norm_output"] = False
    return config


def unsupported(spec: ResolvedSpec) -> list[str]:
    """What this layout cannot express: one ``field = value: rule`` for each such field, empty if it holds the draft."""
    found = [
        ("inputs.aux_layers", list(spec.inputs.aux_layers), 0 in spec.inputs.aux_layers, "use layers from 1"),
        ("inputs.norm", spec.inputs.norm, spec.inputs.norm == "target", "use none, each or joint"),
        ("inputs.projection", spec.inputs.projection, spec.inputs.projection != "linear", "use linear"),
        ("inputs.bias", spec.inputs.bias, spec.inputs.bias, "use false"),
        ("feedback", spec.feedback, spec.feedback != "pre_norm", "SpecForge feeds back pre_norm"),
    ]
    for i, layer in enumerate(spec.layers):
        found += [(f"layers.{i}.{field}", *rest) for field, *rest in _layer_limits(i, layer, spec.layers[0])]
    return [f"{field} = {_written(value)}: {rule}" for field, value, wrong, rule in found if wrong]


def _layer_limits(index: int, layer: ResolvedLayer, first: ResolvedLayer) -> list[tuple[str, Any, bool, str]]:
    """(field, value, whether the layout lacks it, rule) of one layer."""
    fusion, attention, mlp = "concat" if index == 0 else "none", layer.attention, layer.mlp
    limits: list[tuple[str, Any, bool, str]] = [
        ("fusion", layer.fusion, layer.fusion != fusion, f"use {fusion}; only the first layer reads the embedding"),
        ("stream", layer.stream, layer.stream != "h", "use h"),
        ("residual_from", layer.residual_from, layer.residual_from != "raw", "use raw"),
        ("attention", "none", attention is None, "every layer has attention"),
        ("mlp.depth", mlp.depth, mlp.depth != 1, "use 1"),
        (
            "mlp.intermediate_size",
            mlp.intermediate_size,
            mlp.intermediate_size != first.mlp.intermediate_size,
            f"all layers have the same; use {first.mlp.intermediate_size}",
        ),
    ]
    if attention is None:
        return limits
    limits += [
        ("attention.norm", attention.norm, attention.norm != "own", "use own"),
        ("attention.qk_norm", attention.qk_norm, attention.qk_norm, "use false"),
        ("attention.bias", attention.bias, attention.bias, "use false"),
        ("attention.window", attention.window, attention.window is not None, "use null"),
    ]
    for name in ("heads", "kv_heads", "head_dim"):
        value, same = getattr(attention, name), getattr(first.attention or attention, name)
        limits.append((f"attention.{name}", value, value != same, f"all layers have the same; use {same}"))
    return limits


def _written(value: Any) -> str:
    """A value as a spec file writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def export(draft: Draft, folder: Path) -> None:
    """Write ``model.safetensors`` and ``config.json``, each whole or not at all.

    Raises:
        ArchspecError: the layout cannot express the draft; the message names every such field.
    """
    spec = draft.spec
    problems = unsupported(spec)
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise ArchspecError(f"{spec.name}: SpecForge's layout cannot hold this draft:\n{lines}")
    tensors = pack(draft, LAYOUT)
    dtype = str(draft.lm_head.weight.dtype).removeprefix("torch.")
    if spec.head.norm == "none":
        tensors["norm.weight"] = torch.ones(spec.hidden_size, dtype=draft.lm_head.weight.dtype)
    block = {
        "name": spec.name,
        "target": spec.target.model_dump(mode="json"),
        "embedding": spec.embedding,
        "head_weights": spec.head.weights,
    }
    save_tensors(folder / "model.safetensors", tensors, {"format": "pt"})
    write_json(folder / "config.json", {**draft_model_config(spec), "torch_dtype": dtype, BLOCK: block})


def load(folder: Path, target: TargetFacts | None = None) -> Draft:
    """The draft in ``folder``. ``target`` is needed for checkpoints that ``export`` did not write.

    Raises:
        ArchspecError: a file is missing or damaged, the config describes no draft of this kind, or a tensor is missing,
            extra or misshapen.
    """
    config, tensors = read_folder(folder)
    return assemble(*read(config, tensors, target, str(folder)))


def layout_of(names: Collection[str]) -> Layout:
    """Which of the known layouts a checkpoint has; the written one where none is found, so that errors speak of it."""
    found = (known for known in _READ_ONLY if any(name.startswith(f"{known.layer(0)}.") for name in names))
    layout = next(found, LAYOUT)
    second = layout.layer(1)
    if f"{second}.hidden_norm.weight" in names and f"{second}.input_layernorm.weight" not in names:
        return replace(layout, plain_norm="hidden_norm")  # as SGLang names it
    return layout


def read(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: TargetFacts | None, source: str
) -> tuple[ResolvedSpec, dict[str, Tensor]]:
    """Spec and state dict from a config dict and tensors under the layout's names; ``source`` is named in messages.

    Raises:
        ArchspecError: as ``load``.
    """
    keys = Document(config, source).validate(LlamaKeys)
    layout = layout_of(tensors)
    norm_output = config.get("norm_output", True)
    choices = Choices(
        aux_layers=aux_layers_of(config, source),
        input_norm="each" if config.get("fc_norm") else "joint" if config.get("norm_before_fc") else "none",
        head_norm="own" if norm_output else "none",
    )
    facts, block = target_of(config, target, source), mapping_of(config, BLOCK, source)
    spec = spec_of(keys, choices, layout, tensors, facts, block, source)
    unused = () if norm_output else ("norm.weight",)
    return spec, unpack(spec, layout, tensors, source, unused=unused)
