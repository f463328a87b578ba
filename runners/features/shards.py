"""Writing a feature store's shards, one whole file at a time. Shapes: T positions, H hidden size."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from archspec.errors import ArchspecError
from archspec.files import save_tensors
from runners.features.chat import Tokenized
from runners.features.conversations import Conversation
from runners.features.store import DocumentEntry, FileEntry, file_entry


@dataclass
class ShardWriter:
    """Collects documents and writes a shard into ``out`` whenever ``shard_tokens`` tokens are there.

    States come by layer id and are stored as ``dtype``; those of ``last_layer`` are named ``last``, and no layer is
    stored twice.
    """

    out: Path
    layers: Sequence[int]
    last_layer: int
    dtype: torch.dtype
    shard_tokens: int
    documents: list[DocumentEntry] = field(default_factory=list)
    shards: list[FileEntry] = field(default_factory=list)
    _parts: dict[str, list[Tensor]] = field(default_factory=dict)
    _filled: int = 0

    def __post_init__(self) -> None:
        """Remove what an interrupted capture left; a folder with a manifest never comes here."""
        for stale in (*self.out.glob("shard-*.safetensors"), *self.out.glob(".*.part")):
            stale.unlink()

    def add(self, conversation: Conversation, text: Tokenized, states: dict[int, Tensor]) -> None:
        """Take one document; ``states`` are [T, H] by layer id."""
        self.documents.append(
            DocumentEntry(
                id=conversation.id,
                category=conversation.category,
                own=text.own,
                shard=len(self.shards),
                start=self._filled,
                length=len(text.tokens),
                response_tokens=int(text.response_mask.sum()),
            )
        )
        self._keep("tokens", text.tokens)
        self._keep("response_mask", text.response_mask)
        for layer in self.layers:
            name = "last" if layer == self.last_layer else f"aux.{layer}"
            self._keep(name, states[layer].to(device="cpu", dtype=self.dtype, copy=True))
        self._filled += len(text.tokens)
        if self._filled >= self.shard_tokens:
            self.flush()

    def flush(self) -> None:
        """Write what was collected as the next shard."""
        if not self._filled:
            return
        starts = [entry.start for entry in self.documents if entry.shard == len(self.shards)]
        tensors = {name: torch.cat(parts) for name, parts in self._parts.items()}
        tensors["offsets"] = torch.tensor([*starts, self._filled])
        path = self.out / f"shard-{len(self.shards):05d}.safetensors"
        save_or_tell(path, tensors)
        self.shards.append(file_entry(path))
        self._parts, self._filled = {}, 0

    def _keep(self, name: str, part: Tensor) -> None:
        self._parts.setdefault(name, []).append(part)


def save_or_tell(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write one file of a store.

    Raises:
        ArchspecError: the disk is full, or cannot be written to.
    """
    try:
        save_tensors(path, tensors)
    except (OSError, SafetensorError) as error:
        raise ArchspecError(f"{path}: cannot be written ({error})") from error
