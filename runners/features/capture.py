"""Filling a feature store: the target reads every conversation once, and its states go to disk.

Shapes: B rows, T positions (padded on the right), H the target's hidden size, N tokens of a shard.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from archspec.errors import ArchspecError, nearest
from archspec.files import exclusive, write_text
from runners.features.chat import Tokenized, TokenizedSet, template_hash, tokenize_all
from runners.features.conversations import Conversation, digest
from runners.features.proof import LOGIT_TOLERANCE, LOW_AGREEMENT
from runners.features.shards import ShardWriter, save_or_tell
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

STORE_DTYPES = ("float32", "bfloat16")
_HEAD_ROOM_BYTES = 64 << 20
_HEAD_ROOM_SHARE = 0.05
_CHECKED_POSITIONS = 64

Report = Callable[[str], None]
Progress = Callable[[int, int], None]
_Kept = tuple[Conversation, Tokenized]


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
) -> FeatureStore:
    """Store the states of ``layer_ids`` and the last state for every conversation, or reuse a store that has them.

    The target's own text is recorded as such where a conversation's ``generation`` names this target. Batches hold at
    most ``batch_tokens`` padded tokens (one longer document makes a batch of its own); a shard is written when it has
    ``shard_tokens``. ``on_progress`` gets tokens done and in all; ``report`` gets lines for the user: size, reuse,
    dropped conversations, checks. ``sources`` names the files that the text came from.

    Raises:
        ArchspecError: bad options, no response text, too little free disk (all before the first forward), a folder
            that holds another store, logits that cannot be recomputed from the states, or a disk that fills up.
    """
    report = report or _silent
    _check_options(target, layer_ids, dtype, max_length, batch_tokens, shard_tokens)
    layers = tuple(sorted({*layer_ids, target.facts.num_layers}))
    key = StoreKey(
        target=target.fingerprint,
        template=template_hash(target.tokenizer),
        conversations=digest(conversations),
        dtype=dtype,
        max_length=max_length,
    )
    if (store := reusable(out, key, layers)) is not None:
        report(f"features: reusing {out} ({len(store.documents)} documents, {store.manifest.tokens} tokens)")
        return store
    texts = tokenize_all(conversations, target.tokenizer, max_length, target.fingerprint)
    _check_tokens(texts, target)
    plan = plan_capture(target, texts, layers, out, dtype)
    _announce(plan, texts, layers, out, key, report)
    with exclusive(out, "another process captures into this folder"):
        writer = ShardWriter(out, layers, target.facts.num_layers, DTYPES[dtype], shard_tokens)
        checks = _forward_all(target, texts.kept, writer, batch_tokens, plan.tokens, on_progress)
        _report_checks(checks, report)
        _finish(target, texts, writer, key, layers, checks, sources)
    return FeatureStore.open(out)


def _announce(
    plan: CapturePlan, texts: TokenizedSet, layers: Sequence[int], out: Path, key: StoreKey, report: Report
) -> None:
    """Tell what will be written, and refuse it if the disk cannot hold it."""
    report(
        f"features: {plan.tokens} tokens of {plan.documents} conversations, {len(layers)} layers in {key.dtype}: "
        f"{_human(plan.bytes)} in {out} ({_human(plan.free_bytes)} free)"
    )
    if texts.unanswered or texts.truncated_away:
        report(
            f"features: dropped {texts.unanswered} conversations without an answer and {texts.truncated_away} "
            f"without one inside {key.max_length} tokens"
        )
    if plan.free_bytes < plan.needed_bytes:
        raise ArchspecError(
            f"{out}: capture needs {_human(plan.needed_bytes)} of free disk ({_human(plan.bytes)} and head "
            f"room), but {_human(plan.free_bytes)} are free; ask for fewer layers, use bfloat16, or "
            "choose another disk"
        )


def _report_checks(checks: "_Checks", report: Report) -> None:
    report(
        f"features: recomputed logits differ by {checks.logits_error:.1e} of their size"
        + ("" if checks.agreement is None else f"; {checks.agreement:.1%} of the target's own tokens are its argmax")
    )
    if checks.agreement is not None and checks.agreement < LOW_AGREEMENT:
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


@dataclass
class _Checks:
    logits_error: float
    agreement: float | None


def _forward_all(
    target: Target,
    kept: Sequence[_Kept],
    writer: ShardWriter,
    batch_tokens: int,
    total: int,
    on_progress: Progress | None,
) -> _Checks:
    checks, done = _Checks(0.0, None), 0
    for number, batch in enumerate(_batches(kept, batch_tokens)):
        width = max(len(text.tokens) for _, text in batch)
        ids_BT = torch.zeros(len(batch), width, dtype=torch.int64)
        for row, (_, text) in enumerate(batch):
            ids_BT[row, : len(text.tokens)] = text.tokens
        # No attention mask: with padding on the right, causal attention never lets a real token see it.
        states = target.states(ids_BT.to(target.device), writer.layers)
        if number == 0:
            last = states[writer.last_layer].to(writer.dtype)
            checks = _Checks(_logits_error(target, ids_BT, last), _own_agreement(target, batch, last))
        for row, (conversation, text) in enumerate(batch):
            size = len(text.tokens)
            writer.add(conversation, text, {layer: state[row, :size] for layer, state in states.items()})
            done += size
        if on_progress:
            on_progress(done, total)
    writer.flush()
    return checks


def _batches(kept: Sequence[_Kept], batch_tokens: int) -> Iterator[list[_Kept]]:
    """Group documents of like length, longest first: the batch that may not fit in memory comes at once."""
    batch: list[_Kept] = []
    for pair in sorted(kept, key=lambda pair: -len(pair[1].tokens)):
        width = len(batch[0][1].tokens) if batch else 0
        if batch and width * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(pair)
    if batch:
        yield batch


@torch.no_grad()
def _logits_error(target: Target, ids_BT: Tensor, last_BTH: Tensor) -> float:
    """Compare logits recomputed from the states, in the type they are stored in, with the model's own.

    Raises:
        ArchspecError: they differ by more than rounding explains.
    """
    ids = ids_BT[:1, :_CHECKED_POSITIONS].to(target.device)
    own = target.model(input_ids=ids, use_cache=False).logits[0].float()
    ours = target.logits(last_BTH[0, : ids.shape[1]]).float()
    error = float((own - ours).abs().max() / own.abs().max().clamp_min(1e-6))
    coarser = max((target.dtype, last_BTH.dtype), key=lambda dtype: torch.finfo(dtype).eps)
    tolerance = LOGIT_TOLERANCE[str(coarser).removeprefix("torch.")]
    if not error <= tolerance:
        raise ArchspecError(
            f"target {target.path}: logits recomputed from the captured states differ from its own by "
            f"{error:.1e} of their size (at most {tolerance:.0e}); the states are not the right ones"
        )
    return error


@torch.no_grad()
def _own_agreement(target: Target, batch: Sequence[_Kept], last_BTH: Tensor) -> float | None:
    """Share of greedy own response tokens that equal the argmax one position before; None without such text."""
    same = seen = 0
    for row, (conversation, text) in enumerate(batch):
        if not text.own or conversation.generation is None or conversation.generation.temperature != 0:
            continue
        positions = text.response_mask.nonzero()[:, 0]
        for chunk in torch.split(positions[positions > 0], _CHECKED_POSITIONS):  # never a whole document's logits
            argmax = target.logits(last_BTH[row, (chunk - 1).to(last_BTH.device)]).argmax(-1).cpu()
            same += int((argmax == text.tokens[chunk]).sum())
            seen += len(chunk)
    return same / seen if seen else None


def _finish(
    target: Target,
    texts: TokenizedSet,
    writer: ShardWriter,
    key: StoreKey,
    layers: Sequence[int],
    checks: _Checks,
    sources: Sequence[str],
) -> None:
    counts = torch.zeros(target.facts.vocab_size, dtype=torch.int64)
    for _, text in texts.kept:
        counts += response_counts(text.tokens, text.response_mask, target.facts.vocab_size)
    target.weights.save(writer.out / FROZEN)
    save_or_tell(writer.out / COUNTS, {"counts": counts})
    own = [text.own for _, text in texts.kept]
    temperatures = {one.generation.temperature for one, text in texts.kept if text.own and one.generation}
    manifest = Manifest(
        key=key,
        facts=target.facts,
        layer_ids=tuple(layers),
        text_origin="own" if all(own) else "mixed" if any(own) else "foreign",
        temperature=temperatures.pop() if len(temperatures) == 1 else None,
        eos_token_ids=tuple(sorted(target.eos_token_ids)),
        target_path=target.path,
        sources=tuple(sources),
        tokens=sum(entry.length for entry in writer.documents),
        response_tokens=sum(entry.response_tokens for entry in writer.documents),
        unanswered=texts.unanswered,
        truncated_away=texts.truncated_away,
        logits_error=checks.logits_error,
        own_agreement=checks.agreement,
        shards=tuple(writer.shards),
        frozen=file_entry(writer.out / FROZEN),
        counts=file_entry(writer.out / COUNTS),
        documents=tuple(writer.documents),
    )
    write_text(writer.out / MANIFEST, manifest.model_dump_json(indent=1) + "\n")


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
