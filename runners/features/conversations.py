"""Conversations as JSONL, one object a line, in the layouts that are in use.

``messages`` (role, content), ShareGPT ``conversations`` (from, value), Alpaca (instruction, input, output), or
``prompt`` with an optional ``response``; each may carry ``id`` and ``category``, and other keys are passed over.
Text that a target generated also carries ``generation``: its exact token ids, because tokenising generated text again
does not always give the ids back.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, ValidationError

from archspec.errors import ArchspecError, nearest

ROLES = {
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "developer": "developer",
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
}
LAYOUTS = ("messages", "conversations", "instruction", "prompt")


class _Closed(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Message(_Closed):
    """One turn; ``role`` is one of the values of :data:`ROLES`."""

    role: str
    content: str


class Generation(_Closed):
    """How the last assistant turn came about. ``token_ids`` end with the end-of-turn token when ``finished``."""

    token_ids: tuple[NonNegativeInt, ...] = Field(min_length=1)
    target: str
    temperature: NonNegativeFloat = 0.0
    finished: bool = True


class Conversation(_Closed):
    """One conversation. ``generation``, where present, describes the last assistant turn."""

    id: str
    category: str | None = None
    messages: tuple[Message, ...]
    generation: Generation | None = None

    @property
    def answered(self) -> bool:
        """Whether the last turn is the assistant's."""
        return self.messages[-1].role == "assistant"

    def prompt(self) -> tuple[Message, ...]:
        """The messages before the assistant's last answer, or all of them where it is still to come."""
        return self.messages[:-1] if self.answered else self.messages

    def row(self) -> dict[str, Any]:
        """The JSON object that :func:`read_conversations` reads back as this conversation."""
        return self.model_dump(mode="json", exclude_none=True)


def read_conversations(paths: Path | Sequence[Path]) -> list[Conversation]:
    """Read one or several JSONL files, in order; empty lines are passed over.

    Raises:
        ArchspecError: a file is missing or empty, or a line is no JSON object of a known layout. The message names
            file and line number, counted from 1.
    """
    found: list[Conversation] = []
    seen: dict[str, str] = {}
    for path in [paths] if isinstance(paths, Path) else paths:
        before = len(found)
        for number, line in enumerate(_lines(path), start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            row = _json_object(line, where)
            conversation = parse_row(row, where)
            if row.get("id") is not None:
                if conversation.id in seen:
                    raise ArchspecError(f"{where}: id {conversation.id!r} was already used at {seen[conversation.id]}")
                seen[conversation.id] = where
            found.append(conversation)
        if len(found) == before:
            raise ArchspecError(f"{path}: no conversation in it; expected one JSON object a line")
    return found


def parse_row(row: dict[str, Any], where: str) -> Conversation:
    """Turn one JSON object of any known layout into a conversation; ``where`` begins every error message.

    Raises:
        ArchspecError: the layout is unknown, or a field of it is missing or of the wrong type.
    """
    messages = _messages(row, where)
    category = row.get("category")
    if category is not None and not isinstance(category, str):
        raise ArchspecError(f"{where}: category must be text, but got {category!r}")
    try:
        generation = None if row.get("generation") is None else Generation.model_validate(row["generation"])
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in ("generation", *first["loc"]))
        raise ArchspecError(f"{where}: {place}: {first['msg']}") from error
    identity = row.get("id")
    return Conversation(
        id=content_id(messages) if identity is None else str(identity),
        category=category,
        messages=messages,
        generation=generation,
    )


def content_id(messages: Iterable[Message]) -> str:
    """16 hex digits over roles and contents: the id of a conversation that has none of its own."""
    text = json.dumps([[message.role, message.content] for message in messages], ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def digest(conversations: Iterable[Conversation]) -> str:
    """16 hex digits over everything in ``conversations``, in order."""
    sha = hashlib.sha256()
    for conversation in conversations:
        sha.update(json.dumps(conversation.row(), sort_keys=True).encode())
    return sha.hexdigest()[:16]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError as error:
        raise ArchspecError(f"{path}: no such conversations file") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ArchspecError(f"{path}:{line}: not UTF-8 text ({error.reason})") from error
    except OSError as error:
        raise ArchspecError(f"{path}: cannot be read ({error.strerror})") from error


def _json_object(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ArchspecError(f"{where}: broken line, not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(row, dict):
        raise ArchspecError(f"{where}: expected a JSON object, but got {type(row).__name__}")
    return row


def _messages(row: dict[str, Any], where: str) -> tuple[Message, ...]:
    if "messages" in row:
        return _turns(row["messages"], f"{where}: messages")
    if "conversations" in row:
        return _turns(row["conversations"], f"{where}: conversations")
    if "instruction" in row:
        parts = [_text(row.get(key) or "", f"{where}: {key}") for key in ("instruction", "input")]
        question = "\n\n".join(part for part in parts if part)
        return _exchange(question, row.get("output"), where, "instruction", "output")
    if "prompt" in row:
        return _exchange(_text(row["prompt"], f"{where}: prompt"), row.get("response"), where, "prompt", "response")
    raise ArchspecError(
        f"{where}: none of the keys {', '.join(LAYOUTS)} is there, so the layout is unknown; "
        f"got {', '.join(map(str, row)) or 'an empty object'}"
    )


def _exchange(question: str, answer: Any, where: str, question_key: str, answer_key: str) -> tuple[Message, ...]:
    if not question:
        raise ArchspecError(f"{where}: {question_key} is empty")
    user = Message(role="user", content=question)
    if answer is None or answer == "":
        return (user,)
    return user, Message(role="assistant", content=_text(answer, f"{where}: {answer_key}"))


def _turns(turns: Any, where: str) -> tuple[Message, ...]:
    if not isinstance(turns, list) or not turns:
        raise ArchspecError(f"{where}: must be a list with at least one turn, but got {turns!r:.80}")
    return tuple(_turn(turn, f"{where}[{index}]") for index, turn in enumerate(turns))


def _turn(turn: Any, where: str) -> Message:
    if not isinstance(turn, dict):
        raise ArchspecError(f"{where}: must be an object, but got {turn!r:.80}")
    role_key, content_key = ("from", "value") if "from" in turn else ("role", "content")
    for key in (role_key, content_key):
        if key not in turn:
            raise ArchspecError(f"{where}: {key} is missing; a turn has role and content, or from and value")
    role = turn[role_key]
    if role not in ROLES:
        raise ArchspecError(f"{where}: {role_key} {role!r} is not a known role; {nearest(role, ROLES)}")
    return Message(role=ROLES[role], content=_text(turn[content_key], f"{where}: {content_key}"))


def _text(value: Any, where: str) -> str:
    """Accept text, and a list of ``{"type": "text", "text": …}`` parts, which is how some APIs write it."""
    if isinstance(value, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in value):
        return "".join(str(part.get("text", "")) for part in value)
    if not isinstance(value, str):
        raise ArchspecError(f"{where}: must be text, but got {value!r:.80}")
    return value
