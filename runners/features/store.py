"""The feature store: a target's hidden states on disk, made once, memory-mapped by every trial.

A store is a folder: ``manifest.json`` (written last, so that its presence means the rest is whole), shards of states,
``frozen.safetensors`` (what turns last states into logits) and ``counts.safetensors`` (response tokens by id).
A shard holds whole documents, one after another: ``tokens`` [N] int64, ``response_mask`` [N] bool, ``last`` [N, h_t],
and ``aux.<id>`` [N, h_t] for every other layer; layer n is ``last`` itself and is stored once.

An adopted store is made of another project's dump. Its states stay there, one file a document, unless they were copied;
``text.safetensors`` then holds ``tokens`` [N] int32 and ``response_mask`` [N] of all documents in a row. If the dump's
last states had already been normed, ``last`` is not layer n, and the head that the store hands out does not norm again.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from archspec.errors import ArchspecError
from archspec.facts import TargetFacts
from runners.features.dumps import adopted_states
from runners.features.frozen import FrozenWeights
from runners.features.manifest import (
    COUNTS,
    FROZEN,
    MANIFEST,
    TEXT,
    VOCABULARY,
    DocumentEntry,
    Dump,
    FileEntry,
    Manifest,
    StoreKey,
    edges_digest,
    file_digest,
    file_entry,
    read_manifest,
)

__all__ = [
    "COUNTS",
    "FROZEN",
    "MANIFEST",
    "DocumentEntry",
    "FeatureStore",
    "FileEntry",
    "Manifest",
    "StoreKey",
    "file_entry",
    "read_manifest",
    "response_counts",
]


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

    ``tokens`` [T] int64, ``response_mask`` [T] bool, ``aux`` [T, m, h_t], ``last`` [T, h_t], which the head of
    :meth:`FeatureStore.weights` takes: before the final norm unless the manifest says otherwise.
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

        Of a dump's files, of which there may be many thousands, the blocks are read only where the time of change is
        not the recorded one.

        Raises:
            ArchspecError: there is no store, it is of another version, or a file is missing or damaged.
        """
        manifest = read_manifest(path)
        if manifest is None:
            raise ArchspecError(f"{path}: holds no feature store ({MANIFEST} is missing); capture it first")
        for entry in manifest.own_files:
            _check_entry(path, entry, lambda file, expected: edges_digest(file) == expected.edges)
        _check_dump(path, manifest.dump, whole=False)
        return cls(path, manifest)

    def verify(self) -> None:
        """Check the full checksum of every file; reads the whole store.

        Raises:
            ArchspecError: a file is missing or damaged.
        """
        for entry in self.manifest.own_files:
            _check_entry(self.path, entry, lambda file, expected: file_digest(file) == expected.sha256)
        _check_dump(self.path, self.manifest.dump, whole=True)

    @property
    def facts(self) -> TargetFacts:
        """The target's dimensions."""
        return self.manifest.facts

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits over the manifest, without paths and times."""
        return self.manifest.digest()

    @property
    def size(self) -> int:
        """Bytes on disk, the manifest left out, those that stayed in a dump included."""
        dumped = self.manifest.dump.files if self.manifest.dump is not None else ()
        return sum(entry.size for entry in (*self.manifest.own_files, *dumped))

    @property
    def token_counts(self) -> Tensor:
        """How often each token of the vocabulary is a response token, [V] int64, over the whole store."""
        with _reading(self.path / COUNTS) as file:
            counts: Tensor = file.get_tensor("counts")
        return counts

    def count_tokens(self, indices: Iterable[int]) -> Tensor:
        """How often each token of the vocabulary is a response token of these documents, [V] int64."""
        counts = torch.zeros(self.facts.vocab_size, dtype=torch.int64)
        by_file: dict[str, list[DocumentEntry]] = {}
        for index in sorted(set(indices)):
            entry = self.manifest.documents[index]
            by_file.setdefault(self._text_file(entry), []).append(entry)
        for name, entries in by_file.items():
            with _reading(self.path / name) as file:
                tokens, mask = file.get_tensor("tokens"), file.get_tensor("response_mask")
                for entry in entries:
                    rows = slice(entry.start, entry.start + entry.length)
                    counts += response_counts(tokens[rows], mask[rows], len(counts))
        return counts

    def weights(self) -> FrozenWeights:
        """The target's embedding, final norm and head, memory-mapped; the head takes last states as they are here."""
        return replace(FrozenWeights.load(self.path / FROZEN), reads_normed=self.manifest.last_state == "post_norm")

    def vocabulary(self, size: int | None = None) -> Tensor | None:
        """The target ids [D] int64, rising, of the draft vocabulary that was adopted with the states, if any.

        With a ``size`` it counts only if it has that many places. A draft that was trained elsewhere keeps the map that
        its head's rows were made for.
        """
        if self.manifest.vocabulary is None:
            return None
        with _reading(self.path / VOCABULARY) as file:
            ids: Tensor = file.get_tensor("vocab_ids").clone()
        return ids if size in (None, len(ids)) else None

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
                f"{', '.join(map(str, self.manifest.layer_ids))}; {self._way_out(lacking)}"
            )

    def _way_out(self, lacking: Sequence[int]) -> str:
        last = self.facts.num_layers
        if self.manifest.last_state == "post_norm" and last in lacking:
            return (
                f"the dump that it was adopted from keeps layer {last} only after the target's final norm, which "
                "cannot be undone; let the draft read other layers, or capture the text"
            )
        if self.manifest.dump is not None:
            return "the dump that it was adopted from has no others; capture the text with the layers you need"
        return "capture again with the layers you need"

    def read(self, index: int, layer_ids: Sequence[int]) -> Features:
        """Copy one document out of its shard, which is mapped for the length of this call only.

        A mapping that stayed open would count every page that was ever touched as resident memory.

        Raises:
            ArchspecError: the store lacks one of the layers, or the shard cannot be read.
        """
        self.require(layer_ids)
        entry = self.manifest.documents[index]
        rows = slice(entry.start, entry.start + entry.length)
        at_last = self.facts.num_layers if self.manifest.last_state == "pre_norm" else None
        with _reading(self.path / self._text_file(entry)) as file:
            tokens = file.get_slice("tokens")[rows].to(torch.int64, copy=True)
            mask = file.get_slice("response_mask")[rows].clone()
            if self._dumped is None:
                last = file.get_slice("last")[rows].clone()
                aux = _stacked(last, layer_ids, at_last, lambda layer: file.get_slice(f"aux.{layer}")[rows])
        if self._dumped is not None:
            path = self.path / self._dumped.root / self._dumped.files[entry.shard].name
            states, mapped = adopted_states(path, self._dumped, entry.length, self.facts.hidden_size)
            last = mapped.clone()
            aux = _stacked(last, layer_ids, at_last, states.__getitem__)
        return Features(tokens, mask, aux, last)

    @property
    def _dumped(self) -> Dump | None:
        """The dump that the states stayed in, if they did."""
        return self.manifest.dump if self.manifest.dump is not None and self.manifest.dump.files else None

    def _text_file(self, entry: DocumentEntry) -> str:
        return TEXT if self._dumped is not None else self.manifest.shards[entry.shard].name

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


def _check_dump(folder: Path, dump: Dump | None, whole: bool) -> None:
    if dump is None:
        return
    for entry in dump.files:
        path = folder / dump.root / entry.name
        try:
            stat = path.stat()
        except OSError as error:
            raise ArchspecError(f"{path}: this file of the adopted dump is missing; adopt the dump again") from error
        if stat.st_size != entry.size:
            rule = f"{stat.st_size} bytes where the manifest says {entry.size}"
            raise ArchspecError(f"{path}: changed since it was adopted, {rule}; adopt the dump again")
        if whole:
            same = file_digest(path) == entry.sha256
        else:
            same = stat.st_mtime_ns == entry.mtime_ns or edges_digest(path) == entry.edges
        if not same:
            raise ArchspecError(f"{path}: its content changed since it was adopted (checksum); adopt the dump again")


def _stacked(last_TH: Tensor, layer_ids: Sequence[int], at_last: int | None, read: Callable[[int], Tensor]) -> Tensor:
    """A copy of these layers, [T, m, H]; layer ``at_last`` is the last state itself."""
    aux = last_TH.new_empty(len(last_TH), len(layer_ids), last_TH.shape[1])
    for place, layer_id in enumerate(layer_ids):
        aux[:, place] = last_TH if layer_id == at_last else read(layer_id)
    return aux


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
