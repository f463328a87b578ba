"""The target's answers from many workers: runs of whole batches, each into files of its own, joined in one file.

Every attempt at an order appends to a file that no other attempt writes to, and begins with what the order's other
files do not answer. They lie in ``.NAME.parts`` beside the answers, and are joined to them at the end, or at the start
of the next call.
"""

import shutil
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from archspec.errors import ArchspecError
from archspec.files import exclusive, write_text
from runners.features.conversations import Conversation
from runners.features.generate import (
    Generated,
    Progress,
    already_answered,
    append,
    check_options,
    generate_responses,
    unanswered,
)
from runners.features.parts import PARTS_A_WORKER
from runners.features.target import Target
from runners.features.work import Tell, Workers


@dataclass(frozen=True)
class AnswerOrder:
    """Prompts to be answered into ``folder``; ``longest`` is the longest prompt with its answer, in tokens."""

    number: int
    count: int
    conversations: tuple[Conversation, ...]
    folder: Path
    longest: int
    max_new_tokens: int
    temperature: float
    batch_size: int
    seed: int
    top_p: float = 1.0

    @property
    def name(self) -> str:
        """See ``Order``."""
        return f"answers, part {self.number + 1} of {self.count}"

    @property
    def size(self) -> int:
        """Prompts."""
        return len(self.conversations)

    @property
    def done(self) -> bool:
        """See ``Order``; orders are made of what is unanswered."""
        return False

    def absolute(self) -> Self:
        """See ``Order``."""
        return replace(self, folder=self.folder.absolute())

    def memory(self, target: Target) -> int:
        """See ``Order``: keys and values of a batch."""
        facts = target.facts
        return 2 * facts.num_layers * facts.kv_heads * facts.head_dim * 4 * self.batch_size * self.longest

    def run(self, target: Target, tell: Tell) -> None:
        """See ``Order``."""
        done = _answers(self.folder.glob(f"{self.number:04d}-*.jsonl"), target, self.temperature, self.top_p)
        rest = [one for one in self.conversations if one.id not in done]
        generate_responses(
            target,
            rest,
            self.max_new_tokens,
            self.temperature,
            self.batch_size,
            self.seed,
            self.folder / f"{self.number:04d}-{uuid.uuid4().hex}.jsonl",
            lambda answered, _total, _tokens: tell(self.size - len(rest) + answered),
            self.top_p,
        )


def answer_prompts(
    target: Target,
    conversations: Sequence[Conversation],
    max_new_tokens: int,
    temperature: float,
    batch_size: int,
    seed: int,
    out_path: Path,
    on_progress: Progress | None = None,
    workers: Workers | None = None,
    top_p: float = 1.0,
) -> Generated:
    """As ``generate_responses``, by ``workers`` if given; ``on_progress`` then does not know the tokens.

    The answers are those of one worker up to rounding, which may decide between two tokens that are almost as likely:
    batches are the same unless the run was interrupted. They stand longest prompt first, those of an interrupted run
    before the others.

    Raises:
        ArchspecError: see ``generate_responses``; or another process answers into ``out_path``, or the workers cannot.
    """
    folder, made = out_path.with_name(f".{out_path.name}.parts"), None
    if workers is not None or folder.is_dir():
        with exclusive(folder, f"another process writes answers for {out_path}"):
            _join(folder, out_path, target, temperature, top_p)  # what an interrupted run left
            if workers is not None:
                check_options(max_new_tokens, temperature, batch_size, top_p)
                orders = _orders(
                    target,
                    conversations,
                    max_new_tokens,
                    temperature,
                    batch_size,
                    seed,
                    out_path,
                    folder,
                    workers,
                    top_p,
                )
                made = _carry_out(target, len(conversations), orders, out_path, on_progress, workers)
        shutil.rmtree(folder, ignore_errors=True)
    if made is not None:
        return made
    return generate_responses(
        target, conversations, max_new_tokens, temperature, batch_size, seed, out_path, on_progress, top_p
    )


def _orders(
    target: Target,
    conversations: Sequence[Conversation],
    max_new_tokens: int,
    temperature: float,
    batch_size: int,
    seed: int,
    out_path: Path,
    folder: Path,
    workers: Workers,
    top_p: float,
) -> list[AnswerOrder]:
    """Runs of whole batches of what is unanswered, some for each worker."""
    rows = unanswered(target, conversations, temperature, seed, out_path, top_p)
    batches = -(-len(rows) // batch_size)
    count = min(batches, workers.count * PARTS_A_WORKER)
    cuts = [number * batches // count * batch_size for number in range(count + 1)] if count else []
    longest = min(len(rows[0].prompt) + max_new_tokens, target.facts.max_positions) if rows else 0
    return [
        AnswerOrder(
            number,
            count,
            tuple(row.conversation for row in rows[cuts[number] : cuts[number + 1]]),
            folder,
            longest,
            max_new_tokens,
            temperature,
            batch_size,
            seed,
            top_p,
        )
        for number in range(count)
    ]


def _carry_out(
    target: Target,
    total: int,
    orders: Sequence[AnswerOrder],
    out_path: Path,
    on_progress: Progress | None,
    workers: Workers,
) -> Generated:
    asked, started = sum(order.size for order in orders), time.monotonic()
    if not orders:
        return Generated(0, total, 0, 0, 0.0)
    workers.carry_out(target, orders, lambda done: on_progress(total - asked + done, total, 0) if on_progress else None)
    new = _join(orders[0].folder, out_path, target, orders[0].temperature, orders[0].top_p)
    if len(new) < asked:
        raise ArchspecError(f"{out_path}: {asked - len(new)} answers are missing; the same command makes them")
    found = [row.generation for row in new if row.generation is not None]
    tokens = sum(len(one.token_ids) for one in found)
    unfinished = sum(not one.finished for one in found)
    return Generated(len(new), total - asked, unfinished, tokens, time.monotonic() - started)


def _join(folder: Path, out_path: Path, target: Target, temperature: float, top_p: float) -> list[Conversation]:
    """Append the answers in ``folder`` that ``out_path`` lacks, in the order of the parts; returns them."""
    found = _answers(folder.glob("*.jsonl"), target, temperature, top_p)
    before = already_answered(out_path, target, temperature, top_p)
    new = [row for row in found.values() if row.id not in before]
    if new:
        append(out_path, new)
    return new


def _answers(files: Iterable[Path], target: Target, temperature: float, top_p: float) -> dict[str, Conversation]:
    """What stands in ``files``. One with a torn last line is replaced, since who tore it may still write to it."""
    found: dict[str, Conversation] = {}
    for path in sorted(files):
        text = path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if len(whole) < len(text):
            write_text(path, whole.decode())
        for name, row in already_answered(path, target, temperature, top_p).items():
            found.setdefault(name, row)
    return found
