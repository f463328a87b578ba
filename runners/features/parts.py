"""A capture in parts: runs of whole shards, made one by one or by many workers, that are one store in the end.

A single run reads the conversations longest first in batches, and ends a shard with the document that fills it. Both
follow from the lengths alone, so a part is told by its number. A part runs every batch that holds a document of its own
as a single run would and keeps its own documents: all shards are the same bytes, on the same hardware, in however many
parts they are made. A batch on the border of two parts is read twice.

Below the store's folder, ``.parts/plan.json`` says what is being captured and in how many parts, and ``.parts/0003``
holds part 3: its shards, and ``part.json``. The folder gets its name when all of it is written. Joining moves shards
into the store's folder, and the manifest comes last.

Shapes: B rows, T positions (padded on the right), H the target's hidden size.
"""

import shutil
import uuid
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Self

import torch
from pydantic import ValidationError
from torch import Tensor

from archspec.errors import ArchspecError
from archspec.files import write_text
from archspec.schema import Closed
from runners.features.chat import Tokenized
from runners.features.manifest import DocumentEntry, FileEntry, StoreKey, edges_digest
from runners.features.proof import LOGIT_TOLERANCE
from runners.features.shards import ShardWriter
from runners.features.target import DTYPES, Target
from runners.features.work import Tell

PARTS = ".parts"
PLAN, RECORD = "plan.json", "part.json"
SHARDS_A_PART = 16  # at most: what a worker's death costs
PARTS_A_WORKER = 4  # so that no worker is long alone at the end
BATCHES_A_PART = 8  # at least: a batch on a border is read twice
_CHECKED_POSITIONS = 64


@dataclass(frozen=True)
class Text:
    """One conversation as tokens; ``greedy`` if its response is the target's own at temperature 0."""

    id: str
    category: str | None
    tokenized: Tokenized
    greedy: bool

    def __len__(self) -> int:
        return len(self.tokenized.tokens)


@dataclass(frozen=True)
class Part:
    """Documents ``start`` to ``stop`` of the capture's order, which begin shard ``shard``.

    ``batches`` are (start, stop) in the same order; the first and the last may reach beyond the part.
    """

    number: int
    start: int
    stop: int
    shard: int
    batches: tuple[tuple[int, int], ...]


class Plan(Closed):
    """What is being captured. All but ``parts`` must agree for a capture to go on."""

    key: StoreKey
    layer_ids: tuple[int, ...]
    target_dtype: str
    batch_tokens: int
    shard_tokens: int
    parts: int

    @classmethod
    def standing(cls, out: Path) -> "Plan | None":
        """The plan that a capture into ``out`` began with and did not end; None if there is none that can be read."""
        try:
            return cls.model_validate_json((out / PARTS / PLAN).read_text(encoding="utf-8"))
        except (OSError, ValidationError, UnicodeDecodeError):
            return None

    def begin(self, out: Path) -> None:
        """Go on with the same plan in ``out``, or remove what an interrupted capture left and write this one down."""
        leftovers = list(out.glob(".*.part"))
        if Plan.standing(out) == self:
            leftovers += (out / PARTS).glob(".*.part")
        else:
            leftovers += [out / PARTS, *out.glob("shard-*.safetensors")]
        for stale in leftovers:
            if stale.is_dir():
                shutil.rmtree(stale)
            else:
                stale.unlink(missing_ok=True)
        write_text(out / PARTS / PLAN, self.model_dump_json(indent=1) + "\n")


class PartRecord(Closed):
    """What was made: a part, or all of them joined. The figures are of its first batch; see ``Manifest``."""

    shards: tuple[FileEntry, ...]
    documents: tuple[DocumentEntry, ...]
    logits_error: float
    own_agreement: float | None


@dataclass(frozen=True)
class PartOrder:
    """One part to be captured; ``texts`` are those of all its batches."""

    part: Part
    texts: Sequence[Text]
    out: Path
    plan: Plan

    @property
    def name(self) -> str:
        """See ``Order``."""
        return f"part {self.part.number + 1} of {self.plan.parts}"

    @property
    def folder(self) -> Path:
        """See ``Order``."""
        return self.out / PARTS

    @property
    def size(self) -> int:
        """Tokens of the part."""
        return sum(map(len, self._own))

    @property
    def done(self) -> bool:
        """See ``Order``."""
        return self.record() is not None

    def absolute(self) -> Self:
        """See ``Order``."""
        return replace(self, out=self.out.absolute())

    def memory(self, target: Target) -> int:
        """See ``Order``: a shard's documents, and once more when it is written."""
        a_token = 9 + len(self.plan.layer_ids) * target.facts.hidden_size * DTYPES[self.plan.key.dtype].itemsize
        return 2 * (self.plan.shard_tokens + self.plan.key.max_length) * a_token

    @property
    def _own(self) -> Sequence[Text]:
        first = self.part.batches[0][0]
        return self.texts[self.part.start - first : self.part.stop - first]

    def run(self, target: Target, tell: Tell) -> None:
        """See ``Order``."""
        capture_part(target, self, tell)

    def record(self) -> PartRecord | None:
        """What was made of this part, if it is there and whole; its shards may have been moved by joining."""
        folder = self.folder / f"{self.part.number:04d}"
        try:
            record = PartRecord.model_validate_json((folder / RECORD).read_text(encoding="utf-8"))
            for entry in record.shards:
                file = _there(folder, self.out, entry)
                if file.stat().st_size != entry.size or edges_digest(file) != entry.edges:
                    return None
        except (OSError, ValidationError, UnicodeDecodeError):
            return None
        made = [(entry.id, entry.length, entry.response_tokens) for entry in record.documents]
        asked = [(text.id, len(text), int(text.tokenized.response_mask.sum())) for text in self._own]
        return record if made == asked else None


def batch_bounds(lengths: Sequence[int], batch_tokens: int) -> list[tuple[int, int]]:
    """Group documents of falling length into batches of at most ``batch_tokens`` padded tokens, or of one document."""
    bounds, start = [], 0
    for stop in range(1, len(lengths) + 1):
        if stop == len(lengths) or lengths[start] * (stop + 1 - start) > batch_tokens:
            bounds.append((start, stop))
            start = stop
    return bounds


def divide(lengths: Sequence[int], batch_tokens: int, shard_tokens: int, count: int) -> list[Part]:
    """Cut documents of falling length into at most ``count`` parts of about as many shards each."""
    filled, shards = 0, [0]  # the first document of every shard, and the end
    for stop, length in enumerate(lengths, 1):
        filled += length
        if filled >= shard_tokens or stop == len(lengths):
            shards.append(stop)
            filled = 0
    batches = batch_bounds(lengths, batch_tokens)
    starts = [start for start, _ in batches]
    shard_count = len(shards) - 1
    count = min(count, shard_count)
    cuts = [number * shard_count // count for number in range(count + 1)]
    parts = []
    for number, (first, last) in enumerate(pairwise(cuts)):
        start, stop = shards[first], shards[last]
        own = batches[bisect_right(starts, start) - 1 : bisect_right(starts, stop - 1)]
        parts.append(Part(number, start, stop, first, tuple(own)))
    return parts


def part_count(lengths: Sequence[int], batch_tokens: int, shard_tokens: int, workers: int) -> int:
    """How many parts to make for so many workers."""
    if workers == 1:
        return 1
    tokens = sum(lengths)
    finest = max(workers, tokens // (BATCHES_A_PART * batch_tokens))
    count = min(finest, max(workers * PARTS_A_WORKER, tokens // (SHARDS_A_PART * shard_tokens)))
    return len(divide(lengths, batch_tokens, shard_tokens, count))


def orders(texts: Sequence[Text], out: Path, plan: Plan) -> list[PartOrder]:
    """The parts of ``plan`` as orders; ``texts`` are all, longest first."""
    parts = divide([len(text) for text in texts], plan.batch_tokens, plan.shard_tokens, plan.parts)
    return [PartOrder(part, texts[part.batches[0][0] : part.batches[-1][1]], out, plan) for part in parts]


def capture_part(target: Target, order: PartOrder, tell: Tell) -> None:
    """Make one part unless it is there: its folder appears when all of it is written.

    Raises:
        ArchspecError: logits cannot be recomputed from the states, or the disk cannot be written.
    """
    if order.record() is not None:
        return tell(order.size)
    temporary = order.folder / f".{order.part.number:04d}.{uuid.uuid4().hex}.part"
    final = order.folder / f"{order.part.number:04d}"
    try:
        temporary.mkdir()
        record = _forward(target, order, temporary, tell)
        write_text(temporary / RECORD, record.model_dump_json() + "\n")
        if order.record() is None:  # else another attempt, given up too early, was faster
            shutil.rmtree(final, ignore_errors=True)
            temporary.rename(final)
    except OSError as error:
        raise ArchspecError(f"{temporary}: cannot be written ({error})") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def join_parts(out: Path, made: Iterable[tuple[Part, PartRecord]]) -> PartRecord:
    """Move the shards of all parts into ``out``; what was moved before stays. The record of all is that of the store.

    Its figures are those of the first part, as they are where there is no other.
    """
    shards: list[FileEntry] = []
    documents: list[DocumentEntry] = []
    figures: list[PartRecord] = []
    for part, record in made:
        folder = out / PARTS / f"{part.number:04d}"
        for entry in record.shards:
            if (folder / entry.name).exists():
                (folder / entry.name).replace(out / entry.name)
        shards += record.shards
        documents += record.documents
        figures.append(record)
    return figures[0].model_copy(update={"shards": tuple(shards), "documents": tuple(documents)})


def remove_parts(out: Path) -> None:
    """Remove what is left of the parts of a store that is whole."""
    shutil.rmtree(out / PARTS, ignore_errors=True)


def _there(folder: Path, out: Path, entry: FileEntry) -> Path:
    return folder / entry.name if (folder / entry.name).exists() else out / entry.name


def _forward(target: Target, order: PartOrder, folder: Path, tell: Tell) -> PartRecord:
    part, plan, done = order.part, order.plan, 0
    layers, last_layer = plan.layer_ids, target.facts.num_layers
    writer = ShardWriter(folder, layers, last_layer, DTYPES[plan.key.dtype], plan.shard_tokens, first=part.shard)
    error, agreement = 0.0, None
    for number, (start, stop) in enumerate(part.batches):
        batch = order.texts[start - part.batches[0][0] : stop - part.batches[0][0]]
        ids_BT = torch.zeros(len(batch), max(map(len, batch)), dtype=torch.int64)
        for row, text in enumerate(batch):
            ids_BT[row, : len(text)] = text.tokenized.tokens
        # No attention mask: with padding on the right, causal attention never lets a real token see it.
        states = target.states(ids_BT.to(target.device), layers)
        if number == 0:
            last = states[last_layer].to(writer.dtype)
            error, agreement = _logits_error(target, ids_BT, last), _own_agreement(target, batch, last)
        for row, text in enumerate(batch):
            if part.start <= start + row < part.stop:
                writer.add(text, text.tokenized, {layer: state[row, : len(text)] for layer, state in states.items()})
                done += len(text)
        tell(done)
    writer.flush()
    return PartRecord(
        shards=tuple(writer.shards), documents=tuple(writer.documents), logits_error=error, own_agreement=agreement
    )


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
def _own_agreement(target: Target, batch: Sequence[Text], last_BTH: Tensor) -> float | None:
    """Share of greedy own response tokens that equal the argmax one position before; None without such text."""
    same = seen = 0
    for row, text in enumerate(batch):
        if not text.greedy:
            continue
        tokens, positions = text.tokenized.tokens, text.tokenized.response_mask.nonzero()[:, 0]
        for chunk in torch.split(positions[positions > 0], _CHECKED_POSITIONS):  # never a whole document's logits
            argmax = target.logits(last_BTH[row, (chunk - 1).to(last_BTH.device)]).argmax(-1).cpu()
            same += int((argmax == tokens[chunk]).sum())
            seen += len(chunk)
    return same / seen if seen else None
