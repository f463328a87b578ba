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

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Tokenized:
    """``tokens`` [T] int64 and ``response_mask`` [T] bool; ``spans`` are the mask's runs as (start, end) positions.

    ``own`` says that the response is the target's own text, taken from its recorded token ids.
    """

    tokens: Tensor
    response_mask: Tensor
    spans: tuple[tuple[int, int], ...]
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
        ArchspecError: there is no chat template or no assistant turn, the template changes earlier turns or the text
            of a turn, or no token would be marked.
    """
    generation = conversation.generation
    if generation is not None and generation.target == fingerprint:
        prompt = prompt_tokens(conversation, tokenizer)
        tokens = prompt + list(generation.token_ids)
        return _cut(tokens, [False] * len(prompt) + [True] * len(generation.token_ids), max_length, own=True)
    if not any(message.role == "assistant" for message in conversation.messages):
        raise ArchspecError(f"conversation {conversation.id}: has no assistant turn; generate answers first")
    if _MARKER.search(chat_template(tokenizer)):
        tokens, mask = _by_markers(conversation, tokenizer)
    else:
        tokens, mask = _by_prefixes(conversation, tokenizer)
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


def chat_template(tokenizer: Any) -> str:
    """Return the chat template's source.

    Raises:
        ArchspecError: the tokenizer has none.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ArchspecError(
            f"tokenizer {tokenizer.name_or_path}: has no chat template, so responses cannot be told from "
            "prompts; use an instruction-tuned target"
        )
    return str(tokenizer.get_chat_template())


def template_hash(tokenizer: Any) -> str:
    """16 hex digits over the chat template's source."""
    return hashlib.sha256(chat_template(tokenizer).encode()).hexdigest()[:16]


def _cut(tokens: list[int], mask: list[bool], max_length: int, own: bool = False) -> Tokenized:
    tokens, mask = tokens[:max_length], mask[:max_length]
    edges = [index for index, (a, b) in enumerate(zip([False, *mask], [*mask, False], strict=True)) if a != b]
    spans = tuple(zip(edges[::2], edges[1::2], strict=True))
    return Tokenized(torch.tensor(tokens, dtype=torch.int64), torch.tensor(mask, dtype=torch.bool), spans, own)


def _render(tokenizer: Any, conversation: Conversation, messages: Sequence[Message], prompt: bool = False) -> str:
    return str(_apply(tokenizer, conversation, messages, tokenize=False, add_generation_prompt=prompt))


def _apply(tokenizer: Any, conversation: Conversation, messages: Sequence[Message], **options: Any) -> Any:
    chat_template(tokenizer)
    try:
        return tokenizer.apply_chat_template([message.model_dump() for message in messages], **options)
    except Exception as error:  # templates raise jinja errors, and their own through raise_exception
        raise ArchspecError(f"conversation {conversation.id}: the chat template refuses it ({error})") from error


def _encode(tokenizer: Any, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    if not tokenizer.is_fast:
        raise ArchspecError(
            f"tokenizer {tokenizer.name_or_path}: is not a fast tokenizer, so characters cannot be mapped to tokens"
        )
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return list(encoded["input_ids"]), [(int(a), int(b)) for a, b in encoded["offset_mapping"]]


def _by_prefixes(conversation: Conversation, tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Find each assistant turn's characters by rendering the conversation up to it, then map them to tokens."""
    messages = conversation.messages
    whole = _render(tokenizer, conversation, messages)
    ranges = []
    for index, message in enumerate(messages):
        if message.role != "assistant":
            continue
        before = _render(tokenizer, conversation, messages[:index], prompt=True)
        through = _render(tokenizer, conversation, messages[: index + 1])
        shared = _shared_length(whole, through)
        end = _turn_end(tokenizer, whole[len(before) : shared], message.content)
        if not whole.startswith(before) or end is None:
            raise ArchspecError(
                f"conversation {conversation.id}: the chat template changes turn {index} or the turns before it once "
                "the conversation goes on, so response tokens cannot be found; use a template with {% generation %} "
                "markers, or single-turn conversations"
            )
        ranges.append((len(before), len(before) + end))
    tokens, offsets = _encode(tokenizer, whole)
    # A token that straddles a border holds generated text, so it counts.
    return tokens, [any(a < end and start < b and a < b for start, end in ranges) for a, b in offsets]


def _shared_length(one: str, other: str) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _turn_end(tokenizer: Any, region: str, content: str) -> int | None:
    """Length of the generated part of ``region``, which starts at an answer; None if the answer is not in it."""
    text = content.strip()
    at = region.find(text)
    if at < 0 or region[:at].strip():
        return None
    end = at + len(text)
    closer = _special_pattern(tokenizer).match(region, end)
    return closer.end() if closer else end


def _special_pattern(tokenizer: Any) -> re.Pattern[str]:
    specials = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    specials.update(str(token) for token in tokenizer.all_special_tokens)
    words = sorted(map(re.escape, filter(None, specials)), key=len, reverse=True)
    return re.compile(rf"\s*(?:{'|'.join(words)})" if words else r"(?!)")


def _by_markers(conversation: Conversation, tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Take the template's own markers; a closing token that they leave out is added."""
    encoded = _apply(
        tokenizer, conversation, conversation.messages, return_dict=True, return_assistant_tokens_mask=True
    )
    tokens = [int(token) for token in encoded["input_ids"]]
    mask = [bool(flag) for flag in encoded["assistant_masks"]]
    closers = _closing_tokens(tokenizer, conversation)
    for index in range(1, len(tokens)):
        if mask[index - 1] and not mask[index] and tokens[index] in closers and tokens[index - 1] not in closers:
            mask[index] = True
    return tokens, mask


def _closing_tokens(tokenizer: Any, conversation: Conversation) -> set[int]:
    """The end-of-sequence token, and the special token that this template writes right after an answer."""
    index = next(i for i, message in enumerate(conversation.messages) if message.role == "assistant")
    content = conversation.messages[index].content
    through = _render(tokenizer, conversation, conversation.messages[: index + 1])
    at = through.rfind(content.strip())
    found = _special_pattern(tokenizer).match(through, at + len(content.strip())) if at >= 0 else None
    closers = {tokenizer.eos_token_id}
    if found:
        closers.add(tokenizer.convert_tokens_to_ids(found.group().strip()))
    return closers - {None}
