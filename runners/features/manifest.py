"""What a feature store writes down about itself, and how its files are told to be whole."""

import hashlib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from archspec.errors import ArchspecError
from archspec.facts import TargetFacts

VERSION = 1
MANIFEST, FROZEN, COUNTS = "manifest.json", "frozen.safetensors", "counts.safetensors"
TEXT, VOCABULARY = "text.safetensors", "vocabulary.safetensors"
ADOPTED_FIELDS = ("last_state", "dump", "text", "vocabulary")
LATER_FIELDS = (*ADOPTED_FIELDS, "top_p")  # of version 1 that stores had before these were there
_BLOCK = 1 << 16
_HASH_CHUNK = 1 << 22

DumpKind = Literal["specforge", "speculators"]


class _Closed(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FileEntry(_Closed):
    """One file of the store: its size in bytes, a checksum of all of it, and one of its first and last 64 KiB."""

    name: str
    size: int
    sha256: str
    edges: str


class DumpFile(FileEntry):
    """One file that is read where another project left it; ``name`` is below ``Dump.root``."""

    mtime_ns: int


class Dump(_Closed):
    """Where an adopted store's states come from.

    ``layer_ids`` are the aux layers in the order in which a file holds them, in this project's counting. ``root`` is
    relative to the store or absolute. ``listing`` is a digest of all names, sizes and times of change at adoption.
    ``duplicates`` had the text of another file and were left out. ``files`` are those that are read in place, one for
    each document; there are none if the states were copied.
    """

    kind: DumpKind
    root: str
    layer_ids: tuple[int, ...]
    listing: str
    duplicates: int
    files: tuple[DumpFile, ...] = ()


class DocumentEntry(_Closed):
    """One conversation: where it lies (``shard`` number and first row ``start``) and what it holds, in tokens.

    Where the states stayed in a dump, ``shard`` counts the dump's files and ``start`` is the first row of the text.
    """

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
    ``temperature`` and ``top_p`` are those of the target's own text, None if they vary; without such text there is no
    temperature, and ``top_p`` is 1. ``logits_error`` is the largest difference between recomputed and real logits,
    relative to the largest logit, at capture.
    ``own_agreement`` is the share of sampled response tokens that equal the target's argmax, for greedy own text.

    The fields from ``last_state`` to ``vocabulary`` are those of adopted stores: whether last states lie before or
    after the final norm, the dump, the text of documents whose states stayed there, and the draft vocabulary that came
    with it.
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
    last_state: Literal["pre_norm", "post_norm"] = "pre_norm"
    dump: Dump | None = None
    text: FileEntry | None = None
    vocabulary: FileEntry | None = None
    top_p: float | None = 1.0

    @property
    def own_files(self) -> tuple[FileEntry, ...]:
        """Every file in the store's folder but the manifest itself."""
        more = (entry for entry in (self.text, self.vocabulary) if entry is not None)
        return (*self.shards, self.frozen, self.counts, *more)

    def digest(self) -> str:
        """16 hex digits over all but paths, times, and what is as it was before a store could have it."""
        unsaid = [name for name in LATER_FIELDS if getattr(self, name) == type(self).model_fields[name].default]
        exclude: dict[str, Any] = dict.fromkeys(("target_path", "sources", *unsaid), True)
        if self.dump is not None:
            exclude["dump"] = {"root": True, "listing": True, "files": {"__all__": {"mtime_ns"}}}
        return hashlib.sha256(self.model_dump_json(exclude=exclude).encode()).hexdigest()[:16]


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
