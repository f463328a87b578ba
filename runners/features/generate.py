"""The target's own answers to prompts: batched, length-bucketed, restartable.

Shapes: B rows of a batch, T positions (prompts are padded on the left), H hidden size, V vocabulary.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from archspec.errors import ArchspecError
from runners.features.chat import prompt_tokens
from runners.features.conversations import Conversation, Generation, Message, read_conversations
from runners.features.sampling import tempered
from runners.features.target import Target

Progress = Callable[[int, int, int], None]


@dataclass(frozen=True)
class Generated:
    """What one call did; ``skipped`` conversations were already answered in the file, ``tokens`` are new ones."""

    answered: int
    skipped: int
    unfinished: int
    tokens: int
    seconds: float


@dataclass
class Row:
    """One conversation while it is being answered; ``random`` is its own generator."""

    conversation: Conversation
    prompt: list[int]
    random: torch.Generator
    tokens: list[int] = field(default_factory=list)
    finished: bool = False


def generate_responses(
    target: Target,
    conversations: Sequence[Conversation],
    max_new_tokens: int,
    temperature: float,
    batch_size: int,
    seed: int,
    out_path: Path,
    on_progress: Progress | None = None,
    top_p: float = 1.0,
) -> Generated:
    """Answer each conversation's last user turn and append the rows to ``out_path``, one finished batch at a time.

    Conversations whose id already stands in ``out_path`` are skipped, so a stopped run goes on where it was. An answer
    that a conversation already has is replaced. At temperature 0 decoding is greedy; otherwise each conversation draws
    from its own generator, seeded by ``seed`` and its id, so that neither batches nor a restart change the text, among
    the likeliest tokens that have ``top_p`` of the probability together.
    ``on_progress`` gets conversations done, conversations in all, and tokens generated in this call.

    Raises:
        ArchspecError: a prompt leaves no room for an answer, or ``out_path`` holds answers of another target,
            temperature, top-p or prompt, or a broken line before its last.
    """
    check_options(max_new_tokens, temperature, batch_size, top_p)
    rows = unanswered(target, conversations, temperature, seed, out_path, top_p)
    started, tokens, unfinished, skipped = time.monotonic(), 0, 0, len(conversations) - len(rows)
    for start in range(0, len(rows), batch_size):
        batch = rows[start : start + batch_size]
        _answer(target, batch, max_new_tokens, temperature, top_p)
        append(out_path, [_answered(row, target, temperature, top_p) for row in batch])
        tokens += sum(len(row.tokens) for row in batch)
        unfinished += sum(not row.finished for row in batch)
        if on_progress:
            on_progress(skipped + start + len(batch), len(conversations), tokens)
    return Generated(len(rows), skipped, unfinished, tokens, time.monotonic() - started)


def unanswered(
    target: Target,
    conversations: Sequence[Conversation],
    temperature: float,
    seed: int,
    out_path: Path,
    top_p: float = 1.0,
) -> list[Row]:
    """What ``out_path`` does not answer yet, longest first: the batch that may not fit in memory comes at once.

    Raises:
        ArchspecError: see :func:`generate_responses`.
    """
    done = already_answered(out_path, target, temperature, top_p)
    for one in conversations:
        if one.id in done and (done[one.id].prompt(), done[one.id].tools) != (one.prompt(), one.tools):
            raise ArchspecError(f"{out_path}: conversation {one.id} answers another prompt; write to a new file")
    todo = list({one.id: one for one in conversations if one.id not in done}.values())
    rows = [Row(one, _prompt(target, one), _random(seed, one.id)) for one in todo]
    return sorted(rows, key=lambda row: -len(row.prompt))


@torch.no_grad()
def _answer(target: Target, rows: Sequence[Row], max_new_tokens: int, temperature: float, top_p: float) -> None:
    """Fill ``tokens`` and ``finished`` of ``rows``; a row that is finished leaves the batch."""
    from runners.features.cache import roomy_cache  # imports transformers, which takes seconds

    last, limit = target.facts.num_layers, target.facts.max_positions
    ids_BT, mask_BT = _pad_left([row.prompt for row in rows], target)
    positions_BT = (mask_BT.cumsum(-1) - 1).clamp_min(0)
    cache = roomy_cache(target.model.config)
    active = list(rows)
    while active:
        state_BH = target.states(ids_BT, [last], mask_BT, cache, positions_BT)[last][:, -1]
        chosen = _choose(target.logits(state_BH), active, temperature, top_p)
        for row, token in zip(active, chosen, strict=True):
            row.tokens.append(token)
            row.finished = token in target.eos_token_ids
        keep = [
            index
            for index, row in enumerate(active)
            if not row.finished and len(row.tokens) < max_new_tokens and len(row.prompt) + len(row.tokens) < limit
        ]
        if len(keep) < len(active):
            kept = torch.tensor(keep, device=target.device, dtype=torch.int64)
            active, mask_BT = [active[index] for index in keep], mask_BT[kept]
            if active:
                cache.batch_select_indices(kept)
        ids_BT = torch.tensor([[row.tokens[-1]] for row in active], device=target.device)
        positions_BT = torch.tensor([[len(row.prompt) + len(row.tokens) - 1] for row in active], device=target.device)
        mask_BT = torch.cat([mask_BT, mask_BT.new_ones(len(active), 1)], dim=1)


def _choose(logits_BV: Tensor, rows: Sequence[Row], temperature: float, top_p: float) -> list[int]:
    if temperature == 0:
        return [int(token) for token in logits_BV.argmax(-1)]
    # Gumbel trick: the largest of log p + Gumbel noise is a sample from p, with one draw of noise per row.
    noise_BV = torch.stack([torch.empty(logits_BV.shape[-1]).exponential_(generator=row.random) for row in rows])
    scores_BV = tempered(logits_BV, temperature, top_p)
    return [int(token) for token in (scores_BV - noise_BV.to(logits_BV.device).log()).argmax(-1)]


def _pad_left(prompts: Sequence[list[int]], target: Target) -> tuple[Tensor, Tensor]:
    """Return token ids and attention mask, both [B, T] int64; the padding token is never attended to."""
    width = max(map(len, prompts))
    ids = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=target.device), torch.tensor(mask, device=target.device)


def _prompt(target: Target, conversation: Conversation) -> list[int]:
    prompt = prompt_tokens(conversation, target.tokenizer)
    if len(prompt) >= target.facts.max_positions:
        raise ArchspecError(
            f"conversation {conversation.id}: its prompt has {len(prompt)} tokens, which leaves no room "
            f"for an answer in the target's {target.facts.max_positions} positions"
        )
    return prompt


def _random(seed: int, identity: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed} {identity}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def _answered(row: Row, target: Target, temperature: float, top_p: float) -> Conversation:
    text = target.tokenizer.decode(row.tokens, skip_special_tokens=True)
    return Conversation(
        id=row.conversation.id,
        category=row.conversation.category,
        messages=(*row.conversation.prompt(), Message(role="assistant", content=text)),
        tools=row.conversation.tools,
        generation=Generation(
            token_ids=tuple(row.tokens),
            target=target.fingerprint,
            temperature=temperature,
            top_p=top_p,
            finished=row.finished,
        ),
    )


def append(path: Path, rows: Sequence[Conversation]) -> None:
    """Add answers to a file, and have them on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row.row(), ensure_ascii=False) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())


def already_answered(path: Path, target: Target, temperature: float, top_p: float = 1.0) -> dict[str, Conversation]:
    """Rows in ``path`` by id; a last line without its newline, left by a kill while it was written, is cut off first.

    Raises:
        ArchspecError: a row is broken, or holds an answer of another target, temperature or top-p.
    """
    if not path.exists():
        return {}
    whole = path.read_bytes()
    complete = whole[: whole.rfind(b"\n") + 1]
    if len(complete) < len(whole):
        with path.open("r+b") as file:
            file.truncate(len(complete))
    if not complete.strip():
        return {}
    return {row.id: row for row in _check_rows(path, target, temperature, top_p)}


def _check_rows(path: Path, target: Target, temperature: float, top_p: float) -> Iterator[Conversation]:
    for row in read_conversations(path):
        if row.generation is None or row.generation.target != target.fingerprint:
            other = "given text" if row.generation is None else f"target {row.generation.target}"
            raise ArchspecError(
                f"{path}: conversation {row.id} holds an answer of {other}, not of {target.fingerprint}; "
                "write the answers to a new file"
            )
        if row.generation.temperature != temperature:
            raise ArchspecError(
                f"{path}: conversation {row.id} was generated at temperature "
                f"{row.generation.temperature}, not {temperature}; write the answers to a new file"
            )
        if row.generation.top_p != top_p:
            raise ArchspecError(
                f"{path}: conversation {row.id} was generated with top-p {row.generation.top_p}, not {top_p}; "
                "write the answers to a new file"
            )
        yield row


def check_options(max_new_tokens: int, temperature: float, batch_size: int, top_p: float = 1.0) -> None:
    """Refuse what makes no sense.

    Raises:
        ArchspecError: with the values.
    """
    if max_new_tokens < 1 or batch_size < 1 or temperature < 0:
        raise ArchspecError(
            "max_new_tokens and batch_size must be at least 1 and temperature at least 0, but got "
            f"{max_new_tokens}, {batch_size}, {temperature}"
        )
    if not 0 < top_p <= 1:
        raise ArchspecError(f"top_p {top_p}: must be above 0 and at most 1, which leaves nothing out")
