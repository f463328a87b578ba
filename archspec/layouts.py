"""Checkpoints of other projects: a name map, a config map and checks, shared by one small module for each format.

A ``Layout`` says how a format names this project's tensors; ``archspec.foreign_config`` makes a spec from its config.
The spec decides which tensors must be there: ``unpack`` refuses anything missing, extra or misshapen.
"""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from archspec.builder import build_draft
from archspec.cost import parameter_shapes
from archspec.errors import ArchspecError
from archspec.modules import Draft
from archspec.resolve import ResolvedSpec


@dataclass(frozen=True)
class Layout:
    """How one project names a draft's tensors.

    ``layer`` is the prefix of layer i; ``plain_norm`` the norm before the attention of a layer without fusion.
    """

    project: str
    layer: Callable[[int], str]
    plain_norm: str = "input_layernorm"


_OUTSIDE_LAYERS = {"inputs.fc": "fc", "inputs.norms": "fc_norm", "inputs.joint_norm": "input_norm"}


def tensor_names(spec: ResolvedSpec, layout: Layout) -> dict[str, str]:
    """Name in ``Draft.state_dict()`` -> name in ``layout``, for every tensor of a draft that the layout can hold.

    Raises:
        KeyError: the spec has a part for which the layout has no name; formats refuse such specs before.
    """
    names = [name for name, _, _ in parameter_shapes(spec)] + ["d2t", "t2d"] * spec.reduced_vocab
    return {name: _foreign_name(name, spec, layout) for name in names}


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


def pack(draft: Draft, layout: Layout) -> dict[str, Tensor]:
    """The draft's tensors under the layout's names, detached."""
    state = draft.state_dict()
    return {theirs: state[ours].detach() for ours, theirs in tensor_names(draft.spec, layout).items()}


def unpack(
    spec: ResolvedSpec,
    layout: Layout,
    tensors: Mapping[str, Tensor],
    source: str,
    *,
    absent: Collection[str] = (),
    unused: Collection[str] = (),
) -> dict[str, Tensor]:
    """The state dict of a draft of ``spec`` from tensors under the layout's names.

    ``absent`` are names of ours that the file may leave out, ``unused`` names of theirs that it may hold for nothing.

    Raises:
        ArchspecError: tensors are missing, extra, misshapen, or d2t and t2d disagree; the message names each one.
    """
    known = tensor_names(spec, layout)
    names = {ours: theirs for ours, theirs in known.items() if ours not in absent or theirs in tensors}
    shapes: dict[str, tuple[int, ...]] = {name: shape for name, shape, _ in parameter_shapes(spec)}
    shapes |= {"d2t": (spec.head.vocab_size,), "t2d": (spec.target.vocab_size,)}
    maps = () if spec.reduced_vocab else tuple(name for name in ("d2t", "t2d") if _says_nothing(name, tensors))
    missing = sorted(set(names.values()) - set(tensors))
    extra = sorted(set(tensors) - set(names.values()) - set(unused) - set(maps))
    problems = [f"{name}: missing from the file" for name in missing]
    problems += [f"{name}: extra; a {layout.project} draft of this config has no such tensor" for name in extra]
    for ours, theirs in names.items():
        if theirs in tensors and tuple(tensors[theirs].shape) != shapes[ours]:
            found = list(tensors[theirs].shape)
            problems.append(f"{theirs}: has shape {found}, but the config asks for {list(shapes[ours])}")
    if problems:
        raise ArchspecError("\n".join(f"{source}: {problem}" for problem in problems))
    state = {ours: tensors[theirs] for ours, theirs in names.items()}
    if spec.reduced_vocab:
        _check_vocabulary(spec, state["d2t"], state["t2d"], source)
    return state


def _says_nothing(name: str, tensors: Mapping[str, Tensor]) -> bool:
    """Whether a map over a full vocabulary is the identity, which SpecForge always writes."""
    if name not in tensors:
        return False
    return bool((tensors[name] == 0).all()) if name == "d2t" else bool(tensors[name].all())


def _check_vocabulary(spec: ResolvedSpec, d2t: Tensor, t2d: Tensor, source: str) -> None:
    ids = d2t.long() + torch.arange(len(d2t))
    rises = bool((ids.diff() > 0).all()) and int(ids[0]) >= 0 and int(ids[-1]) < spec.target.vocab_size
    if d2t.is_floating_point() or not rises:
        rule = f"draft id + d2t must be rising ids below {spec.target.vocab_size}"
        raise ArchspecError(f"{source}: d2t: {rule}; the offsets in this file are not")
    if int(t2d.sum()) != len(ids) or not bool(t2d[ids].all()):
        raise ArchspecError(f"{source}: t2d: marks other target tokens than d2t leads to")


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """``config.json`` and the tensors of ``model.safetensors``.

    Raises:
        ArchspecError: a file is missing or damaged.
    """
    config_path, weights_path = folder / "config.json", folder / "model.safetensors"
    for path in (config_path, weights_path):
        if not path.is_file():
            raise ArchspecError(f"{path}: no such file; a checkpoint has config.json and model.safetensors")
    try:
        config = json.loads(config_path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ArchspecError(f"{config_path}: not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ArchspecError(f"{config_path}: must hold one JSON object")
    try:
        return config, load_file(weights_path)
    except (SafetensorError, OSError) as error:
        raise ArchspecError(f"{weights_path}: cannot be read: {error}") from None


def assemble(spec: ResolvedSpec, state: Mapping[str, Tensor]) -> Draft:
    """A draft that holds ``state``, at the tensors' own dtypes."""
    draft = build_draft(spec)
    draft.load_state_dict(dict(state), strict=True, assign=True)
    return draft
