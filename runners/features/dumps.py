"""What the offline feature dumps of SpecForge and speculators look like on disk, and how one file is read.

Facts, read in the sources named. Shapes: T tokens, m aux layers, H the target's hidden size.

SpecForge (``scripts/prepare_hidden_states.py`` at f1424fb, ``OfflineEagle3Dataset`` and ``offline_reader.py`` at
1d62d19): ``rows_A-B/data_N.ckpt``, a dict written by ``torch.save``, or the same gzipped as ``.ckpt.gz``. ``input_ids``
[T] and ``loss_mask`` [T] (l_t marks token t, padded with zeros to the longest of a batch), ``hidden_state`` [1, T, H]
(the last state *after* the final norm, as SGLang's logits processor gets it) and ``aux_hidden_state`` [1, T, m*H].

speculators (0.9.0, ``train/data.py`` and ``data_generation/offline.py``; the writer is vLLM 0.32's
``ExampleHiddenStatesConnector``): ``hs_N.safetensors`` with ``token_ids`` [T] and ``hidden_states`` [T, m+1, H], whose
last entry is the state of layer n *before* the final norm. The loss mask (l_t marks token t; training shifts tokens,
states and mask together) is not in these files but in row N of the prepared dataset, see ``dataset_masks.py``. A
``loss_mask`` [T] that lies in the file is taken instead.

Neither writes down which layers it holds. Files are untrusted: ``torch.load(weights_only=True)`` and safetensors only.
"""

import gzip
import io
import os
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from archspec.errors import ArchspecError, nearest
from archspec.facts import TargetFacts
from runners.features.manifest import Dump, DumpKind

FLOATS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_SUFFIXES = (".ckpt", ".ckpt.gz")
_HIDDEN_STATES = "hidden_states"
_SPECULATORS_FILE = re.compile(r"hs_\d+\.safetensors")
_UNPACKED_LIMIT = 1 << 33  # bytes of one document; a larger one is no conversation


@dataclass(frozen=True)
class Dumped:
    """One file's content as views of the mapped file: ``tokens`` [T], ``aux`` [T, m, H], ``last`` [T, H].

    ``mask`` [T] bool is True where token t is a response token, None where the file does not say.
    """

    tokens: Tensor
    mask: Tensor | None
    aux: Tensor
    last: Tensor


def find_dump(dump: Path, kind: str | None) -> tuple[DumpKind, list[Path]]:
    """The kind of the dump in folder ``dump`` and its files, in the order of their numbers.

    Raises:
        ArchspecError: it is no folder, holds no dump, or holds both kinds and ``kind`` does not say which.
    """
    if kind is not None and kind not in get_args(DumpKind):
        raise ArchspecError(f"kind {kind!r}: {nearest(kind, get_args(DumpKind))}")
    if not dump.is_dir():
        raise ArchspecError(f"{dump}: no such folder; name the folder that holds the dump")
    found = {name: files for name in get_args(DumpKind) if (files := _files(dump, name)) and kind in (None, name)}
    if not found:
        what = {"specforge": "*.ckpt", "speculators": "hs_N.safetensors"}
        wanted = " or ".join(f"{what[name]} ({name})" for name in get_args(DumpKind) if kind in (None, name))
        raise ArchspecError(f"{dump}: an empty dump; it holds no {wanted}")
    if len(found) > 1:
        raise ArchspecError(f"{dump}: holds files of both projects; say --kind specforge or --kind speculators")
    ((name, files),) = found.items()
    return name, sorted(files, key=_by_number)


def _files(dump: Path, kind: DumpKind) -> list[Path]:
    if kind == "specforge":
        walk = ((Path(folder), names) for folder, _, names in os.walk(dump))
        return [folder / name for folder, names in walk for name in names if name.endswith(_SUFFIXES)]
    inner = dump / _HIDDEN_STATES
    return [path for path in (inner if inner.is_dir() else dump).iterdir() if _SPECULATORS_FILE.fullmatch(path.name)]


def _by_number(path: Path) -> list[tuple[int, str]]:
    """``data_9`` before ``data_10``."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", str(path))]


def open_dumped(path: Path, kind: DumpKind, hidden_size: int) -> Dumped:
    """Map one file and check its keys, types and shapes; values are not looked at.

    Raises:
        ArchspecError: it cannot be read safely, or a tensor is missing or not of the shape that the others call for.
    """
    tensors = _load(path, kind)
    tokens = _line(path, tensors, "input_ids" if kind == "specforge" else "token_ids", _WHOLE)
    mask = None
    if kind == "specforge" or "loss_mask" in tensors:
        mask = _line(path, tensors, "loss_mask", (*_WHOLE, torch.bool, *FLOATS))
        if len(mask) != len(tokens):
            raise ArchspecError(f"{path}: loss_mask has {len(mask)} entries, but there are {len(tokens)} tokens")
        if bool(((mask != 0) & (mask != 1)).any()):
            raise ArchspecError(f"{path}: loss_mask must hold 0 and 1 only")
        mask = mask != 0
    split = _specforge_states if kind == "specforge" else _speculators_states
    aux, last = split(path, tensors, len(tokens), hidden_size)
    return Dumped(tokens, mask, aux, last)


def check_values(path: Path, dumped: Dumped, facts: TargetFacts) -> None:
    """Check every token and every state of one file.

    Raises:
        ArchspecError: a token is outside the vocabulary, the text is too long, or a state is not finite.
    """
    low, high = int(dumped.tokens.min()), int(dumped.tokens.max())
    if low < 0 or high >= facts.vocab_size:
        worst = low if low < 0 else high
        raise ArchspecError(f"{path}: token {worst} is outside the target's vocabulary of {facts.vocab_size}")
    if len(dumped.tokens) > facts.max_positions:
        raise ArchspecError(f"{path}: {len(dumped.tokens)} tokens, but the target has {facts.max_positions} positions")
    for name, states in (("aux", dumped.aux), ("last", dumped.last)):
        if not bool(torch.isfinite(states).all()):
            raise ArchspecError(f"{path}: the {name} states hold NaN or infinity")


def adopted_states(path: Path, dump: Dump, length: int, hidden_size: int) -> tuple[dict[int, Tensor], Tensor]:
    """Views of the first ``length`` rows of every aux layer, by id, and of the last state, [length, H] each.

    Raises:
        ArchspecError: the file changed since it was adopted.
    """
    try:
        dumped = open_dumped(path, dump.kind, hidden_size)
    except ArchspecError as error:
        raise ArchspecError(f"{error}; the dump changed since it was adopted: adopt it again") from error
    if len(dumped.tokens) < length or dumped.aux.shape[1] != len(dump.layer_ids):
        raise ArchspecError(
            f"{path}: {len(dumped.tokens)} tokens and {dumped.aux.shape[1]} aux layers, but {length} and "
            f"{len(dump.layer_ids)} were adopted; the dump changed: adopt it again"
        )
    return {layer: dumped.aux[:length, slot] for slot, layer in enumerate(dump.layer_ids)}, dumped.last[:length]


def _specforge_states(path: Path, tensors: dict[str, Any], length: int, hidden: int) -> tuple[Tensor, Tensor]:
    last, aux = _floats(path, tensors, "hidden_state"), _floats(path, tensors, "aux_hidden_state")
    if last.dim() != aux.dim():
        raise ArchspecError(
            f"{path}: hidden_state is {list(last.shape)}, but aux_hidden_state is {list(aux.shape)}; either both have "
            "a leading 1 or neither"
        )
    lead = [1] * (last.dim() == 3)
    if list(last.shape) != [*lead, length, hidden]:
        raise _misshapen(path, "hidden_state", last, f"[1, {length}, {hidden}]", length, hidden)
    if list(aux.shape[:-1]) != [*lead, length] or aux.shape[-1] == 0 or aux.shape[-1] % hidden:
        raise _misshapen(path, "aux_hidden_state", aux, f"[1, {length}, m * {hidden}]", length, hidden)
    return aux.reshape(length, -1, hidden), last.reshape(length, hidden)


def _speculators_states(path: Path, tensors: dict[str, Any], length: int, hidden: int) -> tuple[Tensor, Tensor]:
    states = _floats(path, tensors, _HIDDEN_STATES)
    if states.dim() != 3 or states.shape[0] != length or states.shape[1] < 2 or states.shape[2] != hidden:
        raise _misshapen(path, _HIDDEN_STATES, states, f"[{length}, m + 1, {hidden}]", length, hidden)
    return states[:, :-1], states[:, -1]


def _misshapen(path: Path, name: str, tensor: Tensor, wanted: str, length: int, hidden: int) -> ArchspecError:
    why = f"{length} tokens of a target with hidden size {hidden}"
    return ArchspecError(f"{path}: {name} is {list(tensor.shape)}, but must be {wanted}: {why}")


def _line(path: Path, tensors: dict[str, Any], name: str, dtypes: Sequence[torch.dtype]) -> Tensor:
    """A tensor [T], or [1, T] without its 1."""
    tensor = _tensor(path, tensors, name)
    if tensor.dtype not in dtypes or tensor.dim() not in (1, 2) or tensor.shape[:-1].numel() != 1 or not tensor.numel():
        kind = f"{list(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"
        raise ArchspecError(f"{path}: {name} is {kind}, but must be one number for each token, [T] or [1, T]")
    return tensor.reshape(-1)


def _floats(path: Path, tensors: dict[str, Any], name: str) -> Tensor:
    tensor = _tensor(path, tensors, name)
    if tensor.dtype not in FLOATS or tensor.dim() not in (2, 3):
        kind = f"{list(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"
        raise ArchspecError(f"{path}: {name} is {kind}, but must be states in {', '.join(FLOATS.values())}")
    return tensor


def _tensor(path: Path, tensors: dict[str, Any], name: str) -> Tensor:
    tensor = tensors.get(name)
    if not isinstance(tensor, Tensor):
        has = ", ".join(sorted(map(str, tensors))) or "nothing"
        raise ArchspecError(f"{path}: no tensor {name} (it holds {has}); this is not a feature dump of that kind")
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or not tensor.is_contiguous():
        # An expanded tensor could make terabytes of one stored byte.
        raise ArchspecError(f"{path}: {name} must be a plain, contiguous tensor")
    return tensor


def _load(path: Path, kind: DumpKind) -> dict[str, Any]:
    if kind == "specforge":
        return load_plain(path)
    try:
        with safe_open(str(path), framework="pt") as file:
            names = file.keys()
            return {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise ArchspecError(f"{path}: damaged, cannot be read as safetensors ({error})") from error


def load_plain(path: Path) -> dict[str, Any]:
    """A dict that ``torch.save`` wrote, mapped unless it is gzipped; nothing but plain tensors is unpickled.

    Raises:
        ArchspecError: the file is damaged, is no dict, or holds anything that could run code.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            source: Any = str(path)
            if path.suffix == ".gz":
                with gzip.open(path) as packed:
                    source = io.BytesIO(packed.read(_UNPACKED_LIMIT))
            data = torch.load(source, map_location="cpu", mmap=path.suffix != ".gz", weights_only=True)
    except Exception as error:  # the readers of damaged files raise whatever they like
        if "Weights only load failed" in str(error):
            rule = "it holds something besides tensors, which could run code; it is not read in any other way"
            raise ArchspecError(f"{path}: refused: {rule}") from error
        line = (str(error).strip() or "no message").splitlines()[0][:200]
        raise ArchspecError(f"{path}: damaged, cannot be read ({type(error).__name__}: {line})") from error
    if not isinstance(data, dict):
        raise ArchspecError(f"{path}: holds a {type(data).__name__}, but must hold a dict of tensors")
    return data
