"""Conversations as tokens, with a mask of those that the assistant generates.

A response token is one that the target itself would produce: the answer's text and the token that closes the turn, but
not what the template writes after that (a newline, an end-of-document token).
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from archspec.errors import ArchspecError
from runners.features.conversations import Conversation, Message
from runners.features.spans import Span, assistant_spans, check_calls, ends_with, next_token, special_pattern

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Tokenized:
    """``tokens`` [T] int64 and ``response_mask`` [T] bool; ``spans`` are the mask's runs as (start, end) positions.

    ``own`` says that the response is the target's own text, taken from its recorded token ids.
    """

    tokens: Tensor
    response_mask: Tensor
    spans: tuple[Span, ...]
    own: bool = False


@dataclass(frozen=True)
class TokenizedSet:
    """Conversations that have response tokens, beside the counts of those that were dropped."""

    kept: tuple[tuple[Conversation, Tokenized], ...]
    unanswered: int
    truncated_away: int


def tokenize(conversation: Conversation, tokenizer: Any, max_length: int, fingerprint: str | None = None) -> Tokenized:
    """Render a conversation with the tokenizer's chat template and mark its response tokens.

    With a ``generation`` block of the target ``fingerprint`` the tokens are the rendered prompt and exactly the
    recorded ids; earlier assistant turns, which that target did not write, are then not marked. Otherwise all assistant
    turns are marked. What lies beyond ``max_length`` tokens is cut off; the mask may be empty after that.

    Raises:
        ArchspecError: there is no chat template or no assistant turn, the template refuses the conversation or leaves
            a turn's place in doubt, or no token would be marked.
    """
    generation = conversation.generation
    if generation is not None and generation.target == fingerprint:
        prompt = prompt_tokens(conversation, tokenizer)
        tokens = prompt + list(generation.token_ids)
        return _cut(tokens, [False] * len(prompt) + [True] * len(generation.token_ids), max_length, own=True)
    if not any(message.role == "assistant" for message in conversation.messages):
        raise ArchspecError(f"conversation {conversation.id}: has no assistant turn; generate answers first")
    if _MARKER.search(chat_template(tokenizer, conversation)):
        tokens, mask = _by_markers(conversation, tokenizer)
    else:
        tokens, mask = _by_template(conversation, tokenizer)
    if not any(mask):
        raise ArchspecError(
            f"conversation {conversation.id}: the chat template marks no response token; check its generation markers"
        )
    return _cut(tokens, mask, max_length)


def tokenize_all(
    conversations: Sequence[Conversation], tokenizer: Any, max_length: int, fingerprint: str | None = None
) -> TokenizedSet:
    """Tokenize many; conversations without an answer, or without one inside ``max_length``, are dropped and counted.

    Raises:
        ArchspecError: as :func:`tokenize`, or nothing is left.
    """
    kept: list[tuple[Conversation, Tokenized]] = []
    unanswered = truncated_away = 0
    for conversation in conversations:
        if not any(message.role == "assistant" for message in conversation.messages) and not conversation.generation:
            unanswered += 1
            continue
        tokenized = tokenize(conversation, tokenizer, max_length, fingerprint)
        if tokenized.spans:
            kept.append((conversation, tokenized))
        else:
            truncated_away += 1
    if not kept:
        raise ArchspecError(
            f"no conversation has response tokens: {unanswered} of {len(conversations)} have no answer, "
            f"{truncated_away} have none within max_length={max_length}; generate answers first, or "
            "raise max_length"
        )
    return TokenizedSet(tuple(kept), unanswered, truncated_away)


def prompt_tokens(conversation: Conversation, tokenizer: Any) -> list[int]:
    """Token ids of everything before the last answer, ending with the template's generation prompt.

    Raises:
        ArchspecError: there is no chat template, or it refuses the conversation.
    """
    text = _render(tokenizer, conversation, conversation.prompt(), prompt=True)
    return [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]


def chat_template(tokenizer: Any, conversation: Conversation | None = None) -> str:
    """Return the chat template's source; some tokenizers have another one for conversations with tools.

    Raises:
        ArchspecError: the tokenizer has none.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ArchspecError(
            f"tokenizer {tokenizer.name_or_path}: has no chat template, so responses cannot be told from "
            "prompts; use an instruction-tuned target"
        )
    try:
        return str(tokenizer.get_chat_template(tools=_tools(conversation)))
    except ValueError as error:
        raise ArchspecError(f"tokenizer {tokenizer.name_or_path}: has no default chat template ({error})") from error


def template_hash(tokenizer: Any) -> str:
    """16 hex digits over the chat template's source, and over that of the one for tools if there is another."""
    text, named = chat_template(tokenizer), tokenizer.chat_template
    if isinstance(named, dict) and "tool_use" in named:
        text += str(named["tool_use"])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _cut(tokens: list[int], mask: list[bool], max_length: int, own: bool = False) -> Tokenized:
    tokens, mask = tokens[:max_length], mask[:max_length]
    return Tokenized(torch.tensor(tokens, dtype=torch.int64), torch.tensor(mask, dtype=torch.bool), _runs(mask), own)


def _render(tokenizer: Any, conversation: Conversation, messages: Sequence[Message], prompt: bool = False) -> str:
    return str(_apply(tokenizer, conversation, messages, tokenize=False, add_generation_prompt=prompt))


def _apply(tokenizer: Any, conversation: Conversation, messages: Sequence[Message], **options: Any) -> Any:
    chat_template(tokenizer, conversation)
    rows = [message.row() for message in messages]
    for row in rows:  # Qwen3's template reads the one name, gpt-oss's the other
        if "reasoning_content" in row:
            row["thinking"] = row["reasoning_content"]
    try:
        return tokenizer.apply_chat_template(rows, tools=_tools(conversation), **options)
    except Exception as error:  # templates raise jinja errors, and their own through raise_exception
        raise ArchspecError(f"conversation {conversation.id}: the chat template refuses it ({error})") from error


def _tools(conversation: Conversation | None) -> list[dict[str, Any]] | None:
    return list(conversation.tools) or None if conversation else None


def _check_fast(tokenizer: Any) -> None:
    if not tokenizer.is_fast:
        raise ArchspecError(
            f"tokenizer {tokenizer.name_or_path}: is not a fast tokenizer, so characters cannot be mapped to tokens"
        )


def _parts(encoded: Any) -> tuple[list[int], list[Span]]:
    """Token ids, and the characters [start, end) of each."""
    return [int(token) for token in encoded["input_ids"]], [(int(a), int(b)) for a, b in encoded["offset_mapping"]]


def _by_template(conversation: Conversation, tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Find each assistant turn's characters by what the template writes, then map them to tokens."""

    def render(messages: Sequence[Message], prompt: bool = False) -> str:
        return _render(tokenizer, conversation, messages, prompt)

    _check_fast(tokenizer)
    text = render(conversation.messages)
    tokens, offsets = _parts(tokenizer(text, add_special_tokens=False, return_offsets_mapping=True))
    spans = assistant_spans(conversation.id, conversation.messages, render, _special(tokenizer))
    return tokens, _overlapping(offsets, spans)


def _by_markers(conversation: Conversation, tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Take the template's own markers, but end each span at the closing token, whether they leave it out or go on."""
    _check_fast(tokenizer)
    text = _render(tokenizer, conversation, conversation.messages)
    encoded = _apply(
        tokenizer,
        conversation,
        conversation.messages,
        return_dict=True,
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"return_offsets_mapping": True},
    )
    tokens, offsets = _parts(encoded)
    special, spans = _special(tokenizer), list[Span]()
    for first, last in _runs([bool(flag) for flag in encoded["assistant_masks"]]):
        start, end = offsets[first][0], offsets[last - 1][1]
        end = start + len(text[start:end].rstrip())
        if not ends_with(special, text[start:end]):
            closer = next_token(special, text, end)
            end = closer[1] if closer else offsets[last - 1][1]
        spans.append((start, end))
    written = "".join(text[start:end] for start, end in spans)
    check_calls(conversation.id, enumerate(conversation.messages), written)
    return tokens, _overlapping(offsets, spans)


def _overlapping(offsets: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    # A token that straddles a border holds generated text, so it counts.
    return [any(a < end and start < b and a < b for start, end in spans) for a, b in offsets]


def _runs(mask: Sequence[bool]) -> tuple[Span, ...]:
    edges = [index for index, (a, b) in enumerate(zip([False, *mask], [*mask, False], strict=True)) if a != b]
    return tuple(zip(edges[::2], edges[1::2], strict=True))


def _special(tokenizer: Any) -> re.Pattern[str]:
    specials = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    specials.update(str(token) for token in tokenizer.all_special_tokens)
    return special_pattern(frozenset(specials - {""}))
