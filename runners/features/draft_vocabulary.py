"""Reading the draft vocabulary that another project made: the map d2t, or the mask t2d, or both.

``d2t`` [D] holds offsets, target id = i + d2t[i]; ``t2d`` [V] is true where a target token has a place. SpecForge
(``generate_vocab_mapping_file`` at f1424fb) writes both into one ``.pt`` file; speculators 0.9.0 (``train/cli.py``)
writes ``d2t-D.npy`` and ``t2d-D.npy``; the checkpoints of both hold both.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from archspec.errors import ArchspecError
from runners.features.dumps import load_plain

_NAMES = ("d2t", "t2d")


def read_vocabulary(path: Path, target_size: int) -> Tensor:
    """The target ids [D] int64, rising, that the draft vocabulary in ``path`` holds.

    ``path`` is a ``.pt`` or ``.safetensors`` file, or one of a pair of ``.npy`` files.

    Raises:
        ArchspecError: the file cannot be read safely, the map is not rising or beyond ``target_size``, d2t was never
            set, or d2t and t2d disagree.
    """
    found = _read(path)
    if "d2t" in found and 0 < len(found["d2t"]) < target_size and not bool(found["d2t"].any()):
        rule = f"so a draft could propose only the first {len(found['d2t'])} tokens; a map that was never set"
        raise ArchspecError(f"{path}: d2t is all zeros, {rule}")
    chosen: dict[str, Tensor] = {}
    if (d2t := found.get("d2t")) is not None:
        chosen["d2t"] = d2t + torch.arange(len(d2t))
    if (t2d := found.get("t2d")) is not None:
        if len(t2d) != target_size:
            raise ArchspecError(f"{path}: t2d has {len(t2d)} entries, but the target's vocabulary has {target_size}")
        chosen["t2d"] = (t2d != 0).nonzero()[:, 0]
    ids = chosen.get("d2t", chosen.get("t2d", torch.empty(0, dtype=torch.int64)))
    if not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= target_size or bool((ids.diff() <= 0).any()):
        got = f"{len(ids)} ids" + (f" from {int(ids.min())} to {int(ids.max())}" if len(ids) else "")
        raise ArchspecError(
            f"{path}: a draft vocabulary must be rising token ids below {target_size}, given as d2t with target id = "
            f"i + d2t[i], but these are {got}"
        )
    if len(chosen) == 2 and not torch.equal(chosen["d2t"], chosen["t2d"]):
        raise ArchspecError(f"{path}: d2t and t2d do not name the same tokens")
    return ids


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise ArchspecError(f"{path}: no such vocabulary file")
    if path.suffix == ".npy":
        tensors: dict[str, Any] = {name: _array(file) for name, file in _pair(path).items() if file.is_file()}
    elif path.suffix == ".safetensors":
        tensors = _from_safetensors(path)
    else:
        tensors = load_plain(path)
    found = {name: tensors[name] for name in _NAMES if isinstance(tensors.get(name), Tensor)}
    if not found:
        raise ArchspecError(f"{path}: holds neither d2t nor t2d")
    for name, tensor in found.items():
        if tensor.dim() != 1 or tensor.is_floating_point() or tensor.is_complex() or not tensor.is_contiguous():
            kind = f"{list(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"
            raise ArchspecError(f"{path}: {name} must be one list of whole numbers, but is {kind}")
    return {name: tensor.to(torch.int64) for name, tensor in found.items()}


def _pair(path: Path) -> dict[str, Path]:
    """``d2t-32000.npy`` and ``t2d-32000.npy``, whichever of them ``path`` is."""
    name = next((name for name in _NAMES if name in path.name), None)
    if name is None:
        raise ArchspecError(f"{path}: the name must say d2t or t2d, as in d2t-32000.npy")
    return {other: path.with_name(path.name.replace(name, other)) for other in _NAMES}


def _array(path: Path) -> Tensor:
    try:
        return torch.from_numpy(np.load(path, allow_pickle=False))
    except (OSError, ValueError, TypeError) as error:
        raise ArchspecError(f"{path}: cannot be read as an array of numbers ({error})") from error


def _from_safetensors(path: Path) -> dict[str, Any]:
    try:
        with safe_open(str(path), framework="pt") as file:
            held = set(file.keys())  # a checkpoint holds much else
            return {name: file.get_tensor(name) for name in _NAMES if name in held}
    except (OSError, SafetensorError) as error:
        raise ArchspecError(f"{path}: damaged, cannot be read as safetensors ({error})") from error
