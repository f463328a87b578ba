"""Dimensions from the header of a GGUF file, without reading its weights or importing transformers.

The reader that transformers uses makes an object of every entry of the vocabulary, which takes seconds.
Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.

Scaled positions stand in two places. ``rope.scaling.*`` has kind and numbers of linear and yarn. Llama 3.1's rule has
no key: the converter (convert_hf_to_gguf.py of llama.cpp) writes what the frequency of each pair is divided by, as the
tensor ``rope_freqs.weight``. The rule's numbers are known again where the tensor is what it gives with the bounds of
every Llama from 3.1 on (1, 4 and 8,192 positions).

A mixture of experts may be called ``llama``: the same converter writes Mixtral so, and ``expert_count`` tells it apart.
"""

import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from archspec.attention import stretched
from archspec.errors import ArchspecError
from archspec.facts import TargetFacts
from archspec.rope import ORIGINAL, Llama3Rope, Rope, target_rope, yarn_scale

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_SAME_NAME_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_MIXTURE = "mixtral"
_DIVISORS, _FLOAT32, _ALIGNMENT = "rope_freqs.weight", 0, 32
_MOST_PAIRS = 4096
Value = TypeVar("Value")


class _Reader:
    """Walks a mapped file from front to back."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    @property
    def at(self) -> int:
        """Where the next thing stands, in bytes from the front."""
        return self._at

    def floats(self, at: int, count: int) -> tuple[float, ...]:
        """``count`` float32 numbers from byte ``at`` on, without going there."""
        return struct.unpack_from(f"<{count}f", self._data, at)

    def number(self, layout: str) -> Any:
        (value,) = struct.unpack_from(layout, self._data, self._at)
        self._at += struct.calcsize(layout)
        return value

    def text(self) -> str:
        size = self.number("<Q")
        if self._at + size > len(self._data):
            raise ValueError("a text runs beyond the end of the file")
        raw = self._data[self._at : self._at + size]
        self._at += size
        return raw.decode("utf-8")

    def value(self, kind: int) -> Any:
        """Return a scalar or text; of an array only its length, as ``range(length)``."""
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._skip_array(self.number("<I"), self.number("<Q"))
        if kind not in _SCALARS:
            raise ValueError(f"unknown kind of value {kind}")
        return self.number(_SCALARS[kind])

    def _skip_array(self, kind: int, count: int) -> range:
        if kind in _SCALARS:
            self._at += count * struct.calcsize(_SCALARS[kind])
        else:
            for _ in range(count):
                if kind == _STRING:
                    self._at += 8 + int(struct.unpack_from("<Q", self._data, self._at)[0])
                else:
                    self.value(kind)
        return range(count)


def read_header(path: Path) -> dict[str, Any]:
    """Return the metadata of a GGUF file; an array is given as ``range(length)``.

    Raises:
        ArchspecError: the file is no GGUF file of a known version, or its header is damaged.
    """
    return _walk(path, lambda _reader, _tensors, metadata: metadata)


def _walk(path: Path, then: Callable[[_Reader, int, dict[str, Any]], Value]) -> Value:
    """What ``then`` makes of the reader behind the metadata, the number of tensors and the metadata."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data[:4] != b"GGUF":
                raise ValueError("it does not begin with GGUF")
            reader = _Reader(data)
            reader.number("<I")
            if (version := reader.number("<I")) not in (2, 3):
                raise ValueError(f"version {version} is not 2 or 3")
            tensors = reader.number("<Q")
            return then(reader, tensors, dict(_entry(reader) for _ in range(reader.number("<Q"))))
    except (OSError, ValueError, struct.error) as error:
        raise ArchspecError(f"target {path}: its config cannot be read, damaged GGUF header ({error})") from error


def _divisors(reader: _Reader, tensors: int, metadata: dict[str, Any]) -> tuple[float, ...] | None:
    """The numbers of ``rope_freqs.weight``, None where the file has no such tensor of floats."""
    found = None
    for _ in range(tensors):
        name, sizes = reader.text(), [reader.number("<Q") for _ in range(reader.number("<I"))]
        kind, offset = reader.number("<I"), reader.number("<Q")
        if name == _DIVISORS and kind == _FLOAT32 and len(sizes) == 1 and sizes[0] <= _MOST_PAIRS:
            found = sizes[0], offset
    if found is None:
        return None
    count, offset = found
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    return reader.floats(-(-reader.at // alignment) * alignment + offset, count)


def _entry(reader: _Reader) -> tuple[str, Any]:
    return reader.text(), reader.value(reader.number("<I"))


def gguf_facts(path: Path) -> TargetFacts | None:
    """Read the target's dimensions; None for an architecture whose header needs transformers' own reading.

    Raises:
        ArchspecError: the header is damaged or lacks a dimension.
    """
    header = read_header(path)
    architecture = str(header.get("general.architecture"))
    if architecture not in _SAME_NAME_ARCHITECTURES:
        return None

    def find(name: str, default: Any = None) -> Any:
        value = header.get(f"{architecture}.{name}", default)
        if value is None:
            raise ArchspecError(
                f"target {path}: its config lacks a dimension that a draft needs ({architecture}.{name})"
            )
        return value

    hidden, heads = find("embedding_length"), find("attention.head_count")
    return TargetFacts(
        model_type=_MIXTURE if find("expert_count", 0) else architecture,
        hidden_size=hidden,
        num_layers=find("block_count"),
        vocab_size=find("vocab_size", len(header.get("tokenizer.ggml.tokens", ())) or None),
        heads=heads,
        kv_heads=find("attention.head_count_kv", heads),
        head_dim=find("attention.key_length", hidden // heads),
        intermediate_size=find("feed_forward_length"),
        rope_theta=as_written(find("rope.freq_base", 10_000.0)),
        norm_eps=as_written(find("attention.layer_norm_rms_epsilon")),
        rope_scaling=gguf_rope(path),
        max_positions=find("context_length"),
    )


def gguf_rope(path: Path) -> Rope | str:
    """How positions are scaled: ``none``, a scaling, or a word for what drafts do not have.

    ``none`` also for architectures whose header needs transformers' own reading: it reads what it knows of theirs.

    Raises:
        ArchspecError: the header is damaged.
    """
    header, divisors = _walk(path, lambda reader, tensors, metadata: (metadata, _divisors(reader, tensors, metadata)))
    architecture = str(header.get("general.architecture"))
    if architecture not in _SAME_NAME_ARCHITECTURES:
        return "none"

    def find(name: str, default: Any = None) -> Any:
        value = header.get(f"{architecture}.{name}", default)
        return as_written(value) if isinstance(value, float) else value

    kind = find("rope.scaling.type", "none")
    if kind != "none":
        keys = {name: find(f"rope.scaling.{key}") for name, key in _SCALING_KEYS.items()} | {"rope_type": kind}
        sharpened = find("rope.scaling.attn_factor", 1.0)  # beside the paper's factor, not in its place
        if kind == "yarn" and sharpened != 1 and keys["factor"]:
            keys["attention_factor"] = as_written(sharpened * yarn_scale(keys["factor"]))
        return target_rope(keys, find("context_length"))
    return "none" if divisors is None else _rule_of(divisors, find("rope.freq_base", 10_000.0))


_SCALING_KEYS = {
    "factor": "factor",
    ORIGINAL: "original_context_length",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}


def _rule_of(divisors: tuple[float, ...], theta: float) -> Llama3Rope | str:
    """Llama 3.1's rule with the greatest divisor as its factor, if it gives these ``divisors``; else their name."""
    if not divisors or max(divisors) < 1:
        return _DIVISORS
    rope = Llama3Rope(
        type="llama3",
        factor=as_written(max(divisors)),
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_positions=8192,
    )
    plain_F = theta ** -(torch.arange(len(divisors), dtype=torch.float32) / len(divisors))
    known = torch.allclose(plain_F / torch.tensor(divisors), stretched(plain_F, theta, rope), rtol=1e-4, atol=0)
    return rope if known else _DIVISORS


def as_written(value: float) -> float:
    """Undo the float32 rounding of GGUF metadata: 9.99999974e-06 was written as 1e-05."""
    return float(f"{float(value):.6g}")
