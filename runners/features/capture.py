"""Filling a feature store: the target reads every conversation once, and its states go to disk.

Shapes: B rows, T positions (padded on the right), H the target's hidden size, N tokens of a shard.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from archspec.errors import ArchspecError, nearest
from archspec.files import exclusive, write_text
from runners.features.chat import TokenizedSet, template_hash, tokenize_all
from runners.features.conversations import Conversation, digest
from runners.features.parts import PartOrder, PartRecord, Plan, Text, join_parts, orders, part_count, remove_parts
from runners.features.proof import LOW_AGREEMENT
from runners.features.shards import save_or_tell
from runners.features.store import (
    COUNTS,
    FROZEN,
    MANIFEST,
    FeatureStore,
    Manifest,
    StoreKey,
    file_entry,
    read_manifest,
    response_counts,
)
from runners.features.target import DTYPES, Target
from runners.features.work import Here, Workers

STORE_DTYPES = ("float32", "bfloat16")
_HEAD_ROOM_BYTES = 64 << 20
_HEAD_ROOM_SHARE = 0.05

Report = Callable[[str], None]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class CapturePlan:
    """What a capture will write: documents, tokens and bytes, and the bytes free on that disk."""

    documents: int
    tokens: int
    bytes: int
    free_bytes: int

    @property
    def needed_bytes(self) -> int:
        """Bytes that must be free before the start: what is written, and head room."""
        return int(self.bytes * (1 + _HEAD_ROOM_SHARE)) + _HEAD_ROOM_BYTES


def capture(
    target: Target,
    conversations: Sequence[Conversation],
    layer_ids: Sequence[int],
    out: Path,
    dtype: str = "float32",
    max_length: int = 1024,
    batch_tokens: int = 4096,
    shard_tokens: int = 65536,
    on_progress: Progress | None = None,
    report: Report | None = None,
    sources: Sequence[str] = (),
    workers: Workers | None = None,
) -> FeatureStore:
    """Store the states of ``layer_ids`` and the last state for every conversation, or reuse a store that has them.

    The target's own text is recorded as such where a conversation's ``generation`` names this target. Batches hold at
    most ``batch_tokens`` padded tokens (one longer document makes a batch of its own); a shard is written when it has
    ``shard_tokens``. ``on_progress`` gets tokens done and in all; ``report`` gets lines for the user: size, reuse,
    dropped conversations, checks. ``sources`` names the files that the text came from. ``workers`` make the parts of
    the store, this process if None; a capture that was interrupted goes on with the parts that it began with.

    Raises:
        ArchspecError: bad options, no response text, too little free disk (all before the first forward), a folder
            that holds another store, logits that cannot be recomputed from the states, a disk that fills up, or
            workers that cannot work.
    """
    report, workers = report or _silent, workers or Here()
    _check_options(target, layer_ids, dtype, max_length, batch_tokens, shard_tokens)
    layers = tuple(sorted({*layer_ids, target.facts.num_layers}))
    key = StoreKey(
        target=target.fingerprint,
        template=template_hash(target.tokenizer),
        conversations=digest(conversations),
        dtype=dtype,
        max_length=max_length,
    )
    if (store := _reused(out, key, layers, report)) is not None:
        return store
    texts = tokenize_all(conversations, target.tokenizer, max_length, target.fingerprint)
    _check_tokens(texts, target)
    parts = _parts(target, texts, key, layers, out, batch_tokens, shard_tokens, workers)
    tokens = _announce(target, texts, parts, report)
    with exclusive(out, "another process captures into this folder"):
        if (store := _reused(out, key, layers, report)) is not None:  # made while the text was being tokenized
            return store
        parts[0].plan.begin(out)
        workers.carry_out(target, parts, lambda done: on_progress(done, tokens) if on_progress else None)
        made = [(order.part, record) for order in parts if (record := order.record()) is not None]
        if len(made) < len(parts):
            raise ArchspecError(f"{out}: some parts of the capture are damaged; the same command makes them again")
        _report_checks([record for _, record in made], report)
        _finish(target, texts, join_parts(out, made), key, layers, out, sources)
        remove_parts(out)
    return FeatureStore.open(out)


def _reused(out: Path, key: StoreKey, layers: Sequence[int], report: Report) -> FeatureStore | None:
    store = reusable(out, key, layers)
    if store is not None:
        remove_parts(out)  # of a capture that was killed after all else was done
        report(f"features: reusing {out} ({len(store.documents)} documents, {store.manifest.tokens} tokens)")
    return store


def _in_order(texts: TokenizedSet) -> list[Text]:
    """Longest first: the batch that may not fit in memory comes at once, and documents of like length together."""
    greedy = [text.own and one.generation is not None and one.generation.temperature == 0 for one, text in texts.kept]
    every = [Text(one.id, one.category, text, own) for (one, text), own in zip(texts.kept, greedy, strict=True)]
    return sorted(every, key=lambda text: -len(text))


def _parts(
    target: Target,
    texts: TokenizedSet,
    key: StoreKey,
    layers: tuple[int, ...],
    out: Path,
    batch_tokens: int,
    shard_tokens: int,
    workers: Workers,
) -> list[PartOrder]:
    """What is to be captured, in as many parts as it was begun with, if it was."""
    in_order = _in_order(texts)
    plan = Plan(
        key=key,
        layer_ids=layers,
        target_dtype=str(target.dtype).removeprefix("torch."),
        batch_tokens=batch_tokens,
        shard_tokens=shard_tokens,
        parts=part_count([len(text) for text in in_order], batch_tokens, shard_tokens, workers.count),
    )
    before = Plan.standing(out)
    same = before is not None and before.model_copy(update={"parts": plan.parts}) == plan
    return orders(in_order, out, before if before is not None and same else plan)


def _announce(target: Target, texts: TokenizedSet, parts: Sequence[PartOrder], report: Report) -> int:
    """Tell what will be written, and refuse it if the disk cannot hold it; returns the tokens in all."""
    out, plan = parts[0].out, parts[0].plan
    made = [record for order in parts if (record := order.record()) is not None] if Plan.standing(out) == plan else []
    size = plan_capture(target, texts, plan.layer_ids, out, plan.key.dtype)
    rest = replace(size, bytes=size.bytes - sum(entry.size for record in made for entry in record.shards))
    report(
        f"features: {size.tokens} tokens of {size.documents} conversations, {len(plan.layer_ids)} layers in "
        f"{plan.key.dtype}: {_human(size.bytes)} in {out} ({_human(size.free_bytes)} free)"
    )
    if texts.unanswered or texts.truncated_away:
        report(
            f"features: dropped {texts.unanswered} conversations without an answer and {texts.truncated_away} "
            f"without one inside {plan.key.max_length} tokens"
        )
    if made:
        report(f"features: going on with an interrupted capture: {len(made)} of {len(parts)} parts are there")
    if rest.free_bytes < rest.needed_bytes:
        raise ArchspecError(
            f"{out}: capture needs {_human(rest.needed_bytes)} of free disk ({_human(rest.bytes)} and head "
            f"room), but {_human(rest.free_bytes)} are free; ask for fewer layers, use bfloat16, or "
            "choose another disk"
        )
    return size.tokens


def _report_checks(records: Sequence[PartRecord], report: Report) -> None:
    """Tell the figures of the first part, which the manifest keeps, and warn if those of any part are low."""
    first = records[0]
    report(
        f"features: recomputed logits differ by {first.logits_error:.1e} of their size"
        + (
            ""
            if first.own_agreement is None
            else f"; {first.own_agreement:.1%} of the target's own tokens are its argmax"
        )
    )
    if any(one.own_agreement is not None and one.own_agreement < LOW_AGREEMENT for one in records):
        report(
            "features: warning: much of the text marked as this target's own is not what it says now, so acceptance "
            "will be a proxy; generate it again in this float type"
        )


def plan_capture(target: Target, texts: TokenizedSet, layers: Sequence[int], out: Path, dtype: str) -> CapturePlan:
    """Work out the bytes that capturing ``texts`` will take, beside what is free where ``out`` will lie."""
    tokens = sum(len(text.tokens) for _, text in texts.kept)
    hidden, element = target.facts.hidden_size, DTYPES[dtype].itemsize
    tables = (target.model.get_input_embeddings().weight, target.model.get_output_embeddings().weight)
    frozen = sum({table.data_ptr(): table.nbytes for table in tables}.values())  # tied tables count once
    per_token = len(layers) * hidden * element + 8 + 1  # a token id is 8 bytes, its mask 1
    folder = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.is_dir())
    return CapturePlan(
        documents=len(texts.kept),
        tokens=tokens,
        bytes=tokens * per_token + frozen + 8 * target.facts.vocab_size,
        free_bytes=shutil.disk_usage(folder).free,
    )


def reusable(out: Path, key: StoreKey, layers: Sequence[int]) -> FeatureStore | None:
    """Return the store in ``out`` if it is the same capture with at least these layers; None if there is no store.

    Raises:
        ArchspecError: the store there is another one, or damaged.
    """
    manifest = read_manifest(out)
    if manifest is None:
        return None
    names = {
        "target": "target",
        "template": "chat template",
        "conversations": "conversations",
        "dtype": "dtype",
        "max_length": "max_length",
    }
    other = [
        f"{label} {getattr(manifest.key, name)} instead of {getattr(key, name)}"
        for name, label in names.items()
        if getattr(manifest.key, name) != getattr(key, name)
    ]
    if lacking := sorted(set(layers) - set(manifest.layer_ids)):
        other.append(f"no layer {', '.join(map(str, lacking))} (it has {', '.join(map(str, manifest.layer_ids))})")
    if other:
        raise ArchspecError(
            f"{out}: already holds another feature store: {'; '.join(other)}. "
            "Capture into another folder, or remove this one"
        )
    return FeatureStore.open(out)


def _finish(
    target: Target,
    texts: TokenizedSet,
    made: PartRecord,
    key: StoreKey,
    layers: Sequence[int],
    out: Path,
    sources: Sequence[str],
) -> None:
    counts = torch.zeros(target.facts.vocab_size, dtype=torch.int64)
    for _, text in texts.kept:
        counts += response_counts(text.tokens, text.response_mask, target.facts.vocab_size)
    target.weights.save(out / FROZEN)
    save_or_tell(out / COUNTS, {"counts": counts})
    own = [text.own for _, text in texts.kept]
    generations = [one.generation for one, text in texts.kept if text.own and one.generation]
    temperatures, top_ps = ({getattr(one, name) for one in generations} for name in ("temperature", "top_p"))
    manifest = Manifest(
        key=key,
        facts=target.facts,
        layer_ids=tuple(layers),
        text_origin="own" if all(own) else "mixed" if any(own) else "foreign",
        temperature=temperatures.pop() if len(temperatures) == 1 else None,
        top_p=1.0 if not top_ps else top_ps.pop() if len(top_ps) == 1 else None,
        eos_token_ids=tuple(sorted(target.eos_token_ids)),
        target_path=target.path,
        sources=tuple(sources),
        tokens=sum(entry.length for entry in made.documents),
        response_tokens=sum(entry.response_tokens for entry in made.documents),
        unanswered=texts.unanswered,
        truncated_away=texts.truncated_away,
        logits_error=made.logits_error,
        own_agreement=made.own_agreement,
        shards=made.shards,
        frozen=file_entry(out / FROZEN),
        counts=file_entry(out / COUNTS),
        documents=made.documents,
    )
    write_text(out / MANIFEST, manifest.model_dump_json(indent=1) + "\n")


def _check_options(
    target: Target, layer_ids: Sequence[int], dtype: str, max_length: int, batch_tokens: int, shard_tokens: int
) -> None:
    if dtype not in STORE_DTYPES:
        raise ArchspecError(f"feature dtype {dtype!r}: {nearest(dtype, STORE_DTYPES)}")
    target.check_layers(layer_ids)
    if not 2 <= max_length <= target.facts.max_positions:
        raise ArchspecError(
            f"max_length {max_length}: must be 2 to {target.facts.max_positions}, the positions that "
            f"target {target.path} has"
        )
    if batch_tokens < 1 or shard_tokens < 1:
        raise ArchspecError(f"batch_tokens and shard_tokens must be at least 1, but got {batch_tokens}, {shard_tokens}")


def _check_tokens(texts: TokenizedSet, target: Target) -> None:
    for conversation, text in texts.kept:
        if (worst := int(text.tokens.max())) >= target.facts.vocab_size:
            raise ArchspecError(
                f"conversation {conversation.id}: token id {worst} is beyond the target's vocabulary of "
                f"{target.facts.vocab_size}"
            )


def _silent(line: str) -> None:
    """Report nothing."""


def _human(count: int) -> str:
    size = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
