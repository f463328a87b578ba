"""Dimensions from the header of a GGUF file, without reading its tensors or importing transformers.

The reader that transformers uses makes an object of every entry of the vocabulary, which takes seconds.
Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

import mmap
import struct
from pathlib import Path
from typing import Any

from archspec.errors import ArchspecError
from archspec.facts import TargetFacts

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_SAME_NAME_ARCHITECTURES = ("llama", "qwen2", "qwen3")


class _Reader:
    """Walks a mapped file from front to back."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

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
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data[:4] != b"GGUF":
                raise ValueError("it does not begin with GGUF")
            reader = _Reader(data)
            reader.number("<I")
            if (version := reader.number("<I")) not in (2, 3):
                raise ValueError(f"version {version} is not 2 or 3")
            reader.number("<Q")
            return dict(_entry(reader) for _ in range(reader.number("<Q")))
    except (OSError, ValueError, struct.error) as error:
        raise ArchspecError(f"target {path}: its config cannot be read, damaged GGUF header ({error})") from error


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
        model_type=architecture,
        hidden_size=hidden,
        num_layers=find("block_count"),
        vocab_size=find("vocab_size", len(header.get("tokenizer.ggml.tokens", ())) or None),
        heads=heads,
        kv_heads=find("attention.head_count_kv", heads),
        head_dim=find("attention.key_length", hidden // heads),
        intermediate_size=find("feed_forward_length"),
        rope_theta=as_written(find("rope.freq_base", 10_000.0)),
        norm_eps=as_written(find("attention.layer_norm_rms_epsilon")),
        max_positions=find("context_length"),
    )


def as_written(value: float) -> float:
    """Undo the float32 rounding of GGUF metadata: 9.99999974e-06 was written as 1e-05."""
    return float(f"{float(value):.6g}")
