"""Writing a feature store's shards and text, one whole file at a time. Shapes: T positions, H hidden size, N tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor

from archspec.errors import ArchspecError
from archspec.files import save_tensors
from runners.features.chat import Tokenized
from runners.features.manifest import TEXT, DocumentEntry, DumpFile, FileEntry, file_entry


class Named(Protocol):
    """What a shard's index keeps of a conversation."""

    @property
    def id(self) -> str:
        """Unique in the store."""
        ...

    @property
    def category(self) -> str | None:
        """Acceptance is reported by it."""
        ...


@dataclass
class ShardWriter:
    """Collects documents and writes a shard into ``out`` whenever ``shard_tokens`` tokens are there.

    States come by layer id and are stored as ``dtype``; those of ``last_layer`` are named ``last``, and no layer is
    stored twice. Where last states were already normed they are no layer's, and come apart. Shards are counted from
    ``first``.
    """

    out: Path
    layers: Sequence[int]
    last_layer: int
    dtype: torch.dtype
    shard_tokens: int
    documents: list[DocumentEntry] = field(default_factory=list)
    shards: list[FileEntry] = field(default_factory=list)
    first: int = 0
    _parts: dict[str, list[Tensor]] = field(default_factory=dict)
    _filled: int = 0

    def __post_init__(self) -> None:
        """Remove what an interrupted capture left; a folder with a manifest never comes here."""
        for stale in (*self.out.glob("shard-*.safetensors"), *self.out.glob(".*.part")):
            stale.unlink()

    def add(
        self, conversation: Named, text: Tokenized, states: dict[int, Tensor], normed_last: Tensor | None = None
    ) -> None:
        """Take one document; ``states`` are [T, H] by layer id, ``normed_last`` [T, H] comes with every one or none."""
        self.documents.append(_entry(conversation, text, self._number, self._filled))
        self._keep("tokens", text.tokens)
        self._keep("response_mask", text.response_mask)
        for layer in self.layers:
            name = "last" if layer == self.last_layer and normed_last is None else f"aux.{layer}"
            self._keep(name, states[layer].to(device="cpu", dtype=self.dtype, copy=True))
        if normed_last is not None:
            self._keep("last", normed_last.to(device="cpu", dtype=self.dtype, copy=True))
        self._filled += len(text.tokens)
        if self._filled >= self.shard_tokens:
            self.flush()

    def flush(self) -> None:
        """Write what was collected as the next shard."""
        if not self._filled:
            return
        starts = [entry.start for entry in self.documents if entry.shard == self._number]
        tensors = {name: torch.cat(parts) for name, parts in self._parts.items()}
        tensors["offsets"] = torch.tensor([*starts, self._filled])
        path = self.out / f"shard-{self._number:05d}.safetensors"
        save_or_tell(path, tensors)
        self.shards.append(file_entry(path))
        self._parts, self._filled = {}, 0

    @property
    def _number(self) -> int:
        return self.first + len(self.shards)

    def _keep(self, name: str, part: Tensor) -> None:
        self._parts.setdefault(name, []).append(part)


@dataclass
class TextWriter:
    """Collects the text of documents whose states stay in the files of a dump, each in one of its own."""

    out: Path
    documents: list[DocumentEntry] = field(default_factory=list)
    files: list[DumpFile] = field(default_factory=list)
    _tokens: list[Tensor] = field(default_factory=list)
    _masks: list[Tensor] = field(default_factory=list)
    _filled: int = 0

    def add(self, conversation: Named, text: Tokenized, file: DumpFile) -> None:
        """Take one document's text; ``file`` holds its states from the first row on."""
        self.documents.append(_entry(conversation, text, len(self.files), self._filled))
        self.files.append(file)
        self._tokens.append(text.tokens.to(torch.int32, copy=True))
        self._masks.append(text.response_mask.clone())
        self._filled += len(text.tokens)

    def flush(self) -> None:
        """Write ``tokens`` [N] int32 and ``response_mask`` [N] of all documents."""
        save_or_tell(self.out / TEXT, {"tokens": torch.cat(self._tokens), "response_mask": torch.cat(self._masks)})


def _entry(conversation: Named, text: Tokenized, shard: int, start: int) -> DocumentEntry:
    return DocumentEntry(
        id=conversation.id,
        category=conversation.category,
        own=text.own,
        shard=shard,
        start=start,
        length=len(text.tokens),
        response_tokens=int(text.response_mask.sum()),
    )


def save_or_tell(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write one file of a store.

    Raises:
        ArchspecError: the disk is full, or cannot be written to.
    """
    try:
        save_tensors(path, tensors)
    except (OSError, SafetensorError) as error:
        raise ArchspecError(f"{path}: cannot be written ({error})") from error
