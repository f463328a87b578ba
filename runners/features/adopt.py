"""Making a feature store of another project's feature dump, by reference where possible.

Every file is read once, one at a time: what is wrong is told before anything trains on it.
"""

import hashlib
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from archspec.errors import ArchspecError
from archspec.files import exclusive, write_text
from runners.features.chat import Tokenized
from runners.features.dataset_masks import DatasetMasks
from runners.features.draft_vocabulary import read_vocabulary
from runners.features.dumps import FLOATS, Dumped, check_values, find_dump, open_dumped
from runners.features.manifest import (
    COUNTS,
    FROZEN,
    MANIFEST,
    TEXT,
    VOCABULARY,
    Dump,
    DumpFile,
    DumpKind,
    Manifest,
    StoreKey,
    file_entry,
    read_manifest,
)
from runners.features.proof import LOW_AGREEMENT, Proof, greedy_agreement, prove
from runners.features.shards import ShardWriter, TextWriter, save_or_tell
from runners.features.store import FeatureStore, response_counts
from runners.features.target import Target
from runners.features.texts import parse_layers
from runners.progress import Meter

SAMPLES = 3
SHARD_TOKENS = 65536
_NEAR = 2  # folders up from the store that a relative path may climb
_HEAD_ROOM_BYTES = 64 << 20


@dataclass
class _Source:
    """A dump that was looked at, and a digest of its files' names, sizes and times of change."""

    root: Path
    kind: DumpKind
    files: Sequence[Path]
    listing: str

    def mask(self, path: Path, dumped: Dumped) -> Tensor:
        """[T] bool, True at response tokens; from the prepared dataset where the file does not say."""
        return self._dataset.mask(path, dumped.tokens) if dumped.mask is None else dumped.mask

    @cached_property
    def _dataset(self) -> DatasetMasks:
        return DatasetMasks.beside(self.files[0].parent)


@dataclass
class _Adopted:
    """What the walk over the files collects; the writer depends on whether states are copied or stay."""

    writer: ShardWriter | TextWriter
    counts: Tensor
    seen: set[str] = field(default_factory=set)
    unanswered: int = 0
    duplicates: int = 0


@dataclass(frozen=True)
class _Named:
    """A document's id, which is a hash of its tokens: its side of the split does not hang on the order of files."""

    id: str
    category: str | None = None


def adopt_dump(
    target: Target,
    dump: Path,
    layers: Sequence[str],
    out: Path,
    console: Console,
    kind: str | None = None,
    vocabulary: Path | None = None,
    copy: bool = False,
    own_temperature: float | None = None,
) -> FeatureStore:
    """Make the feature store ``out`` of the dump in folder ``dump``, or reuse it.

    ``layers`` are the aux layers of the dump, ids or words; the target proves them. States stay where they are unless
    ``copy``. ``kind`` is told from the files where they leave no doubt. ``own_temperature`` says that the target wrote
    the text at this temperature; without it the text counts as foreign. ``vocabulary`` is a draft vocabulary to keep.

    Raises:
        ArchspecError: a file of the dump is not what it should be, its layers are others, the vocabulary is no map of
            this target's tokens, ``out`` holds another store, or the disk is too full.
    """
    ids = parse_layers(layers, target.facts)
    if own_temperature is not None and not 0 <= own_temperature < math.inf:
        raise ArchspecError(f"own temperature {own_temperature}: must be 0 or more")
    source = _look(dump, kind, copy)
    wanted = None if vocabulary is None else read_vocabulary(vocabulary, target.facts.vocab_size)
    if read_manifest(out) is not None:
        store = _reusable(out, source, target, ids, wanted, copy, own_temperature)
        console.print(f"features: reusing {out} ({len(store.documents)} documents)", soft_wrap=True)
        return store
    if wanted is not None and (lost := sorted(target.eos_token_ids - set(wanted.tolist()))):
        lost_ids = ", ".join(map(str, lost))
        console.print(f"features: warning: {vocabulary} lacks the end-of-turn token {lost_ids}", soft_wrap=True)
    _check_disk(out, source, target, copy)
    samples = _samples(source, target)
    masks = [source.mask(path, dumped) for path, dumped in samples]
    proof = prove(target, samples, ids)
    first, agreement = samples[0][1], None
    if own_temperature == 0:
        marked = [(dumped, mask) for (_, dumped), mask in zip(samples, masks, strict=True)]
        agreement = greedy_agreement(target, marked, proof.last_state)
    with exclusive(out, "another process writes into this folder"):
        writer = _shards(out, target, proof, first.last.dtype) if copy else TextWriter(out)
        adopted = _Adopted(writer, torch.zeros(target.facts.vocab_size, dtype=torch.int64))
        with Meter(console, "adopted files") as meter:
            for done, path in enumerate(source.files, 1):
                _take(adopted, source, path, target, proof, first, own_temperature is not None)
                meter(done, len(source.files))
        _write(out, source, target, proof, adopted, FLOATS[first.last.dtype], wanted, own_temperature, agreement)
    store = FeatureStore.open(out)
    _tell(store, agreement, console)
    return store


def _look(dump: Path, kind: str | None, copy: bool) -> _Source:
    name, files = find_dump(dump, kind)
    if not copy and (packed := next((path for path in files if path.suffix == ".gz"), None)) is not None:
        raise ArchspecError(f"{packed}: a compressed file cannot be read in place; unpack it, or use --copy")
    digest = hashlib.sha256()
    for path in files:
        stat = path.stat()
        digest.update(f"{path.relative_to(dump).as_posix()}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return _Source(dump, name, files, digest.hexdigest()[:16])


def _reusable(
    out: Path,
    source: _Source,
    target: Target,
    layer_ids: Sequence[int],
    vocabulary: Tensor | None,
    copy: bool,
    own_temperature: float | None,
) -> FeatureStore:
    """The store in ``out``, if it was made by the same words from the same files.

    Raises:
        ArchspecError: it is another one, or damaged.
    """
    store = FeatureStore.open(out)
    manifest, dump = store.manifest, store.manifest.dump
    held = store.vocabulary()
    differs = {
        "captured, not adopted": dump is None,
        "the dump's files": dump is not None and (dump.kind, dump.listing) != (source.kind, source.listing),
        "the target": manifest.key.target != target.fingerprint,
        "the layers": dump is not None and set(dump.layer_ids) != set(layer_ids),
        "the text's origin": (manifest.text_origin == "own", manifest.temperature)
        != (own_temperature is not None, own_temperature),
        "copied or not": dump is not None and bool(dump.files) == copy,
        "the vocabulary": (None if held is None else held.tolist())
        != (None if vocabulary is None else vocabulary.tolist()),
    }
    if other := [what for what, different in differs.items() if different]:
        raise ArchspecError(
            f"{out}: already holds another feature store: {', '.join(other)}. Adopt into another folder, or remove it"
        )
    return store


def _check_disk(out: Path, source: _Source, target: Target, copy: bool) -> None:
    weights = target.weights
    needed = weights.embed_tokens.nbytes + (0 if weights.tied else weights.lm_head.nbytes) + _HEAD_ROOM_BYTES
    needed += sum(path.stat().st_size for path in source.files) if copy else 0
    folder = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.is_dir())
    if (free := shutil.disk_usage(folder).free) < needed:
        rule = f"adopting needs {needed / 2**30:.1f} GiB of free disk, but {free / 2**30:.1f} GiB are free"
        raise ArchspecError(f"{out}: {rule}; " + ("leave out --copy" if copy else "choose another disk"))


def _samples(source: _Source, target: Target) -> list[tuple[Path, Dumped]]:
    """The first, the middle and the last file."""
    last = len(source.files) - 1
    paths = [source.files[index] for index in sorted({last * place // (SAMPLES - 1) for place in range(SAMPLES)})]
    found = [(path, open_dumped(path, source.kind, target.facts.hidden_size)) for path in paths]
    for path, dumped in found:
        check_values(path, dumped, target.facts)
        _check_alike(path, dumped, found[0][1])
    return found


def _check_alike(path: Path, dumped: Dumped, first: Dumped) -> None:
    """Raises ArchspecError where a file is unlike the first in its float type or its number of layers."""
    for name, states in (("aux", dumped.aux), ("last", dumped.last)):
        if states.dtype != first.last.dtype:
            kinds = f"{FLOATS[states.dtype]}, but {FLOATS[first.last.dtype]} in the first file"
            raise ArchspecError(f"{path}: {name} states are {kinds}; a dump has one float type")
    if (count := dumped.aux.shape[1]) != first.aux.shape[1]:
        raise ArchspecError(f"{path}: {count} aux layers, but the first file has {first.aux.shape[1]}")


def _take(
    adopted: _Adopted, source: _Source, path: Path, target: Target, proof: Proof, first: Dumped, own: bool
) -> None:
    """Adopt one file. What follows its last response token is left out: padding, and what a template writes there."""
    stat, dumped = path.stat(), open_dumped(path, source.kind, target.facts.hidden_size)
    check_values(path, dumped, target.facts)
    _check_alike(path, dumped, first)
    mask = source.mask(path, dumped)
    if not bool(mask.any()):
        adopted.unanswered += 1
        return
    length = int(mask.nonzero()[-1]) + 1
    text = Tokenized(dumped.tokens[:length].to(torch.int64), mask[:length], (), own)
    named = _Named(hashlib.sha256(text.tokens.numpy().astype("<i8").tobytes()).hexdigest()[:16])
    if named.id in adopted.seen:
        adopted.duplicates += 1
        return
    adopted.seen.add(named.id)
    adopted.counts += response_counts(text.tokens, text.response_mask, len(adopted.counts))
    if isinstance(adopted.writer, TextWriter):
        entry = file_entry(path).model_dump() | {"name": path.relative_to(source.root).as_posix()}
        adopted.writer.add(named, text, DumpFile(**entry, mtime_ns=stat.st_mtime_ns))
        return
    states, last = {layer: dumped.aux[:length, at] for at, layer in enumerate(proof.layer_ids)}, dumped.last[:length]
    if proof.last_state == "post_norm":
        adopted.writer.add(named, text, states, normed_last=last)
    else:
        adopted.writer.add(named, text, states | {target.facts.num_layers: last})


def _layers(target: Target, proof: Proof) -> tuple[int, ...]:
    """The layers that the store will have; the last state is one of them unless it was normed."""
    last = {target.facts.num_layers} if proof.last_state == "pre_norm" else set[int]()
    return tuple(sorted({*proof.layer_ids, *last}))


def _shards(out: Path, target: Target, proof: Proof, dtype: torch.dtype) -> ShardWriter:
    return ShardWriter(out, _layers(target, proof), target.facts.num_layers, dtype, SHARD_TOKENS)


def _write(
    out: Path,
    source: _Source,
    target: Target,
    proof: Proof,
    adopted: _Adopted,
    dtype: str,
    vocabulary: Tensor | None,
    own_temperature: float | None,
    agreement: float | None,
) -> None:
    writer = adopted.writer
    documents, in_place = writer.documents, isinstance(writer, TextWriter)
    if not documents:
        raise ArchspecError(
            f"{source.root}: none of {len(source.files)} files has a response token; its loss masks are all zero"
        )
    writer.flush()
    target.weights.save(out / FROZEN)
    save_or_tell(out / COUNTS, {"counts": adopted.counts})
    if vocabulary is not None:
        save_or_tell(out / VOCABULARY, {"vocab_ids": vocabulary})
    manifest = Manifest(
        key=StoreKey(
            target=target.fingerprint,
            template="unknown",
            conversations=hashlib.sha256("".join(sorted(adopted.seen)).encode()).hexdigest()[:16],
            dtype=dtype,
            max_length=max(entry.length for entry in documents),
        ),
        facts=target.facts,
        layer_ids=_layers(target, proof),
        text_origin="foreign" if own_temperature is None else "own",
        temperature=own_temperature,
        eos_token_ids=tuple(sorted(target.eos_token_ids)),
        target_path=target.path,
        sources=(str(source.root),),
        tokens=sum(entry.length for entry in documents),
        response_tokens=sum(entry.response_tokens for entry in documents),
        unanswered=adopted.unanswered,
        truncated_away=0,
        logits_error=proof.logits_error,
        own_agreement=agreement,
        shards=tuple(writer.shards) if isinstance(writer, ShardWriter) else (),
        frozen=file_entry(out / FROZEN),
        counts=file_entry(out / COUNTS),
        documents=tuple(documents),
        last_state=proof.last_state,
        dump=Dump(
            kind=source.kind,
            root=_root(source.root, out),
            layer_ids=proof.layer_ids,
            listing=source.listing,
            duplicates=adopted.duplicates,
            files=tuple(writer.files) if isinstance(writer, TextWriter) else (),
        ),
        text=file_entry(out / TEXT) if in_place else None,
        vocabulary=None if vocabulary is None else file_entry(out / VOCABULARY),
    )
    write_text(out / MANIFEST, manifest.model_dump_json(indent=1) + "\n")


def _root(dump: Path, out: Path) -> str:
    """The dump as seen from the store if they lie close together, so that both can be moved; else where it is."""
    relative = Path(os.path.relpath(dump.resolve(), out.resolve()))
    return relative.as_posix() if relative.parts.count("..") <= _NEAR else str(dump.resolve())


def _tell(store: FeatureStore, agreement: float | None, console: Console) -> None:
    manifest = store.manifest
    assert manifest.dump is not None
    where = "read in place" if manifest.dump.files else "copied"
    side = "after" if manifest.last_state == "post_norm" else "before"
    what = f"{len(store.documents)} documents of a {manifest.dump.kind} dump, {where}"
    tokens = f"{manifest.tokens:,} tokens, of which {manifest.response_tokens:,} are responses"
    layers = f"layers {', '.join(map(str, manifest.layer_ids))}, last state {side} the final norm"
    agrees = "" if agreement is None else f"; {agreement:.1%} of the target's own tokens are its argmax"
    lines = [
        f"{store.path}: {what}; {tokens} ({manifest.text_origin} text); {layers}",
        f"features: recomputed logits differ by {manifest.logits_error:.1e} of their size{agrees}",
    ]
    if manifest.unanswered or manifest.dump.duplicates:
        dropped = f"{manifest.unanswered} files without a response token and {manifest.dump.duplicates} whose text"
        lines.append(f"features: dropped {dropped} another file has")
    if agreement is not None and agreement < LOW_AGREEMENT:
        lines.append(
            "features: warning: much of the text is not what this target says now, so acceptance will be a proxy; "
            "leave out --own-temperature, or generate the text again"
        )
    for line in lines:
        console.print(line, soft_wrap=True)
