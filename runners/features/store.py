"""The feature store: a target's hidden states on disk, made once, memory-mapped by every trial.

A store is a folder: ``manifest.json`` (written last, so that its presence means the rest is whole), shards of states,
``frozen.safetensors`` (what turns last states into logits) and ``counts.safetensors`` (response tokens by id).
A shard holds whole documents, one after another: ``tokens`` [N] int64, ``response_mask`` [N] bool, ``last`` [N, h_t],
and ``aux.<id>`` [N, h_t] for every other layer; layer n is ``last`` itself and is stored once.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from archspec.errors import ArchspecError
from archspec.facts import TargetFacts
from runners.features.frozen import FrozenWeights

VERSION = 1
MANIFEST, FROZEN, COUNTS = "manifest.json", "frozen.safetensors", "counts.safetensors"
_BLOCK = 1 << 16
_HASH_CHUNK = 1 << 22


class _Closed(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FileEntry(_Closed):
    """One file of the store: its size in bytes, a checksum of all of it, and one of its first and last 64 KiB."""

    name: str
    size: int
    sha256: str
    edges: str


class DocumentEntry(_Closed):
    """One conversation: where it lies (``shard`` number and first row ``start``) and what it holds, in tokens."""

    id: str
    category: str | None
    own: bool
    shard: int
    start: int
    length: int
    response_tokens: int


class StoreKey(_Closed):
    """What makes two captures the same thing; ``conversations`` is a digest of their content."""

    target: str
    template: str
    conversations: str
    dtype: str
    max_length: int


class Manifest(_Closed):
    """Everything about a store but the states.

    ``eos_token_ids`` end a turn of this target; a draft vocabulary needs them whatever their counts.
    ``temperature`` is that of the target's own text, None if there is none or it varies. ``logits_error`` is the
    largest difference between recomputed and real logits, relative to the largest logit, at capture.
    ``own_agreement`` is the share of sampled response tokens that equal the target's argmax, for greedy own text.
    """

    version: int = VERSION
    key: StoreKey
    facts: TargetFacts
    layer_ids: tuple[int, ...]
    text_origin: Literal["own", "foreign", "mixed"]
    temperature: float | None
    eos_token_ids: tuple[int, ...]
    target_path: str
    sources: tuple[str, ...]
    tokens: int
    response_tokens: int
    unanswered: int
    truncated_away: int
    logits_error: float
    own_agreement: float | None
    shards: tuple[FileEntry, ...]
    frozen: FileEntry
    counts: FileEntry
    documents: tuple[DocumentEntry, ...]


@dataclass(frozen=True)
class Document:
    """One conversation of a store; ``index`` is what :meth:`FeatureStore.read` takes, lengths are in tokens."""

    index: int
    id: str
    category: str | None
    length: int
    response_tokens: int
    own: bool


@dataclass(frozen=True)
class Features:
    """One document: T tokens, m aux layers in the order asked for, states h_t wide in the store's float type.

    ``tokens`` [T] int64, ``response_mask`` [T] bool, ``aux`` [T, m, h_t], ``last`` [T, h_t] before the final norm.
    """

    tokens: Tensor
    response_mask: Tensor
    aux: Tensor
    last: Tensor


class FeatureStore:
    """A store that was opened and found whole; use :meth:`open`."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self.documents = [
            Document(index, entry.id, entry.category, entry.length, entry.response_tokens, entry.own)
            for index, entry in enumerate(manifest.documents)
        ]

    @classmethod
    def open(cls, path: Path) -> "FeatureStore":
        """Read the manifest and check each file's presence, size, and first and last block.

        Raises:
            ArchspecError: there is no store, it is of another version, or a file is missing or damaged.
        """
        manifest = read_manifest(path)
        if manifest is None:
            raise ArchspecError(f"{path}: holds no feature store ({MANIFEST} is missing); capture it first")
        for entry in (*manifest.shards, manifest.frozen, manifest.counts):
            _check_entry(path, entry, lambda file, expected: edges_digest(file) == expected.edges)
        return cls(path, manifest)

    def verify(self) -> None:
        """Check the full checksum of every file; reads the whole store.

        Raises:
            ArchspecError: a file is missing or damaged.
        """
        for entry in (*self.manifest.shards, self.manifest.frozen, self.manifest.counts):
            _check_entry(self.path, entry, lambda file, expected: file_digest(file) == expected.sha256)

    @property
    def facts(self) -> TargetFacts:
        """The target's dimensions."""
        return self.manifest.facts

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits over the manifest, without the paths that were written down for the reader."""
        text = self.manifest.model_dump_json(exclude={"target_path", "sources"})
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def size(self) -> int:
        """Bytes on disk, the manifest left out."""
        return sum(entry.size for entry in (*self.manifest.shards, self.manifest.frozen, self.manifest.counts))

    @property
    def token_counts(self) -> Tensor:
        """How often each token of the vocabulary is a response token, [V] int64, over the whole store."""
        with _reading(self.path / COUNTS) as file:
            counts: Tensor = file.get_tensor("counts")
        return counts

    def count_tokens(self, indices: Iterable[int]) -> Tensor:
        """How often each token of the vocabulary is a response token of these documents, [V] int64."""
        counts = torch.zeros(self.facts.vocab_size, dtype=torch.int64)
        wanted = set(indices)
        for number, shard in enumerate(self.manifest.shards):
            entries = [e for i, e in enumerate(self.manifest.documents) if e.shard == number and i in wanted]
            if not entries:
                continue
            with _reading(self.path / shard.name) as file:
                tokens, mask = file.get_tensor("tokens"), file.get_tensor("response_mask")
                for entry in entries:
                    rows = slice(entry.start, entry.start + entry.length)
                    counts += response_counts(tokens[rows], mask[rows], len(counts))
        return counts

    def weights(self) -> FrozenWeights:
        """The target's embedding, final norm and head, memory-mapped."""
        return FrozenWeights.load(self.path / FROZEN)

    def require(self, layer_ids: Sequence[int], fingerprint: str | None = None) -> None:
        """Check that the store has these layers and, if given, was made from the target of this fingerprint.

        Raises:
            ArchspecError: it lacks one of the layers or was made from another target.
        """
        if fingerprint is not None and fingerprint != self.manifest.key.target:
            raise ArchspecError(
                f"{self.path}: the store was made from target {self.manifest.key.target} "
                f"({self.manifest.target_path}), not from target {fingerprint}; capture into another folder"
            )
        if lacking := sorted(set(layer_ids) - set(self.manifest.layer_ids)):
            raise ArchspecError(
                f"{self.path}: the store lacks layer {', '.join(map(str, lacking))}; it has "
                f"{', '.join(map(str, self.manifest.layer_ids))}; capture again with the layers you need"
            )

    def read(self, index: int, layer_ids: Sequence[int]) -> Features:
        """Copy one document out of its shard, which is mapped for the length of this call only.

        A mapping that stayed open would count every page that was ever touched as resident memory.

        Raises:
            ArchspecError: the store lacks one of the layers, or the shard cannot be read.
        """
        self.require(layer_ids)
        entry = self.manifest.documents[index]
        rows = slice(entry.start, entry.start + entry.length)
        last_layer = self.facts.num_layers
        with _reading(self.path / self.manifest.shards[entry.shard].name) as file:
            last = file.get_slice("last")[rows].clone()
            aux = last.new_empty(entry.length, len(layer_ids), last.shape[1])
            for place, layer_id in enumerate(layer_ids):
                aux[:, place] = last if layer_id == last_layer else file.get_slice(f"aux.{layer_id}")[rows]
            tokens = file.get_slice("tokens")[rows].clone()
            mask = file.get_slice("response_mask")[rows].clone()
        return Features(tokens, mask, aux, last)

    def split(self, holdout: float) -> tuple[list[int], list[int]]:
        """Return document indices for training and for evaluation, about ``holdout`` of them for the latter.

        A document's side depends on its id alone, so added documents never move the others.

        Raises:
            ArchspecError: ``holdout`` is not between 0 and 1, or one side is empty.
        """
        if not 0 < holdout < 1:
            raise ArchspecError(f"holdout must lie between 0 and 1, but got {holdout}")
        held = [document.index for document in self.documents if _unit_hash(document.id) < holdout]
        taken = set(held)
        train = [document.index for document in self.documents if document.index not in taken]
        if not held or not train:
            side = "evaluation" if not held else "training"
            raise ArchspecError(
                f"{self.path}: holdout={holdout} leaves none of {len(self.documents)} documents for {side}; "
                "change it or capture more conversations"
            )
        return train, held


def read_manifest(path: Path) -> Manifest | None:
    """Return the manifest in folder ``path``, or None if there is none.

    Raises:
        ArchspecError: it is damaged or of another version.
    """
    file = path / MANIFEST
    if not file.is_file():
        return None
    try:
        text = file.read_text(encoding="utf-8")
        version = _Version.model_validate_json(text).version
        if version != VERSION:
            raise ArchspecError(
                f"{file}: store version {version}, but this program reads version {VERSION}; capture again"
            )
        return Manifest.model_validate_json(text)
    except (ValidationError, UnicodeDecodeError, OSError) as error:
        raise ArchspecError(
            f"{file}: damaged manifest ({str(error).splitlines()[0]}); remove this folder and capture again"
        ) from error


class _Version(BaseModel):
    version: int


def file_entry(path: Path) -> FileEntry:
    """Describe a file that was just written."""
    return FileEntry(name=path.name, size=path.stat().st_size, sha256=file_digest(path), edges=edges_digest(path))


def file_digest(path: Path) -> str:
    """SHA-256 of a whole file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def edges_digest(path: Path) -> str:
    """SHA-256 of a file's first and last 64 KiB, which include a shard's header."""
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(_BLOCK))
        file.seek(max(0, path.stat().st_size - _BLOCK))
        digest.update(file.read(_BLOCK))
    return digest.hexdigest()


def _check_entry(folder: Path, entry: FileEntry, same: Callable[[Path, FileEntry], bool]) -> None:
    path = folder / entry.name
    if not path.is_file():
        raise ArchspecError(f"{path}: this file of the feature store is missing; remove this folder and capture again")
    if (size := path.stat().st_size) != entry.size:
        raise ArchspecError(
            f"{path}: damaged, {size} bytes where the manifest says {entry.size}; remove this folder and capture again"
        )
    if not same(path, entry):
        raise ArchspecError(
            f"{path}: damaged, its content is not what was captured (checksum); remove this folder and capture again"
        )


def _reading(path: Path) -> safe_open:
    try:
        return safe_open(str(path), framework="pt")
    except (OSError, SafetensorError) as error:
        raise ArchspecError(
            f"{path}: damaged, cannot be read ({error}); remove this folder and capture again"
        ) from error


def _unit_hash(text: str) -> float:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def response_counts(tokens: Tensor, response_mask: Tensor, vocab_size: int) -> Tensor:
    """Count response tokens by id, [V] int64."""
    return torch.bincount(tokens[response_mask], minlength=vocab_size)
