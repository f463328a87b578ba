"""Conversations as JSONL, one object a line, in the layouts that are in use.

``messages`` (role, content), ShareGPT ``conversations`` (from, value), Alpaca (instruction, input, output), or
``prompt`` with an optional ``response``; each may carry ``id``, ``category`` and ``tools``, and other keys are passed
over. Text that a target generated also carries ``generation``: its exact token ids, because tokenising generated text
again does not always give the ids back.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

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
REASONING = ("reasoning_content", "thinking", "reasoning")


class _Closed(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ToolCall(_Closed):
    """A function that the assistant calls; ``arguments`` keep their order, since the template writes them in it."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None

    def row(self) -> dict[str, Any]:
        """The JSON object as chat templates and OpenAI's API nest it, but with ``arguments`` as an object."""
        identity = {} if self.id is None else {"id": self.id}
        return {**identity, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class Message(_Closed):
    """One turn; ``role`` is one of the values of :data:`ROLES`.

    ``tool_calls`` and ``reasoning_content`` (what the assistant thought first) belong to assistant turns, ``name`` and
    ``tool_call_id`` (which call this answers) to tool turns.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning_content: str | None = None
    name: str | None = None
    tool_call_id: str | None = None

    def row(self) -> dict[str, Any]:
        """The JSON object of this turn; what it does not have is left out, as some templates ask for mere presence."""
        return {"role": self.role, "content": self.content, **self.extras()}

    def extras(self) -> dict[str, Any]:
        """What this turn has beside role and content."""
        calls = {"tool_calls": [call.row() for call in self.tool_calls]} if self.tool_calls else {}
        texts = {key: getattr(self, key) for key in ("reasoning_content", "name", "tool_call_id")}
        return calls | {key: text for key, text in texts.items() if text is not None}


class Generation(_Closed):
    """How the last assistant turn came about. ``token_ids`` end with the end-of-turn token when ``finished``."""

    token_ids: tuple[NonNegativeInt, ...] = Field(min_length=1)
    target: str
    temperature: NonNegativeFloat = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    finished: bool = True

    def row(self) -> dict[str, Any]:
        """The JSON object; ``top_p`` is left out where it is 1, so that rows from before it was known stay the same."""
        return self.model_dump(mode="json", exclude={"top_p"} if self.top_p == 1 else None)


class Conversation(_Closed):
    """One conversation. ``generation``, where present, describes the last assistant turn.

    ``tools`` are JSON schemas of functions, handed to the chat template as they are.
    """

    id: str
    category: str | None = None
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
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
        row: dict[str, Any] = {"id": self.id}
        if self.category is not None:
            row["category"] = self.category
        row["messages"] = [message.row() for message in self.messages]
        if self.tools:
            row["tools"] = list(self.tools)
        if self.generation is not None:
            row["generation"] = self.generation.row()
        return row


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
    messages, tools = _messages(row, where), _tools(row.get("tools"), f"{where}: tools")
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
        id=content_id(messages, tools) if identity is None else str(identity),
        category=category,
        messages=messages,
        tools=tools,
        generation=generation,
    )


def content_id(messages: Iterable[Message], tools: Sequence[dict[str, Any]] = ()) -> str:
    """16 hex digits over everything in messages and tools: the id of a conversation that has none of its own."""
    parts: list[Any] = []
    for message in messages:
        extras = message.extras()
        parts.append([message.role, message.content, extras] if extras else [message.role, message.content])
    text = json.dumps([*parts, {"tools": list(tools)}] if tools else parts, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def digest(conversations: Iterable[Conversation]) -> str:
    """16 hex digits over everything in ``conversations``, in order."""
    sha = hashlib.sha256()
    for one in conversations:
        # Templates write tools and arguments in their own order, so there the order counts.
        ordered = bool(one.tools) or any(message.tool_calls for message in one.messages)
        sha.update(json.dumps(one.row(), sort_keys=not ordered).encode())
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
    if role_key not in turn:
        raise ArchspecError(f"{where}: {role_key} is missing; a turn has role and content, or from and value")
    role = turn[role_key]
    if not isinstance(role, str) or role not in ROLES:
        raise ArchspecError(f"{where}: {role_key} {role!r} is not a known role; {nearest(role, ROLES)}")
    role = ROLES[role]
    calls, reasoning = _calls(turn.get("tool_calls"), f"{where}: tool_calls"), _reasoning(turn, where)
    if role != "assistant" and (calls or reasoning):
        key = "tool_calls" if calls else "reasoning"
        raise ArchspecError(f"{where}: {key} in a turn of role {role!r}; only assistant turns have it")
    if content_key not in turn and not (calls or reasoning):
        raise ArchspecError(f"{where}: {content_key} is missing; a turn has role and content, or from and value")
    content = turn.get(content_key)
    links = {key: turn[key] for key in ("name", "tool_call_id") if role == "tool" and turn.get(key) is not None}
    return Message(
        role=role,
        content="" if content is None and (calls or reasoning) else _text(content, f"{where}: {content_key}"),
        tool_calls=calls,
        reasoning_content=reasoning,
        **{key: _text(value, f"{where}: {key}") for key, value in links.items()},
    )


def _reasoning(turn: dict[str, Any], where: str) -> str | None:
    found = {key: _text(turn[key], f"{where}: {key}") for key in REASONING if turn.get(key)}
    if len(set(found.values())) > 1:
        raise ArchspecError(f"{where}: {' and '.join(found)} are names of one thing, but their texts differ; keep one")
    return next(iter(found.values()), None)


def _calls(calls: Any, where: str) -> tuple[ToolCall, ...]:
    if not calls:
        return ()
    if not isinstance(calls, list):
        raise ArchspecError(f"{where}: must be a list of calls, but got {calls!r:.80}")
    return tuple(_call(call, f"{where}[{index}]") for index, call in enumerate(calls))


def _call(call: Any, where: str) -> ToolCall:
    """Accept a call nested under ``function`` or flat.

    Arguments that are JSON text, as OpenAI's API writes them, become an object: templates expect one, and serving
    engines convert them before they render (sglang 0.5.23: ``entrypoints/openai/serving_chat.py``).
    """
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ArchspecError(f"{where}: must be an object with a function's name and arguments, but got {call!r:.80}")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = _json_value(arguments, f"{where}: arguments")
    if not isinstance(arguments, dict):
        raise ArchspecError(f"{where}: arguments must be a JSON object or its text, but got {arguments!r:.80}")
    identity = call.get("id")
    return ToolCall(name=function["name"], arguments=arguments, id=None if identity is None else str(identity))


def _tools(tools: Any, where: str) -> tuple[dict[str, Any], ...]:
    if isinstance(tools, str) and tools.strip():
        tools = _json_value(tools, where)
    if not tools:
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ArchspecError(f"{where}: must be a list of JSON schemas of functions, but got {tools!r:.80}")
    return tuple(tools)


def _json_value(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ArchspecError(f"{where}: must be JSON, but got {text!r:.80} ({error.msg})") from error


def _text(value: Any, where: str) -> str:
    """Accept text, and a list of ``{"type": "text", "text": …}`` parts, which is how some APIs write it."""
    if isinstance(value, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in value):
        return "".join(str(part.get("text", "")) for part in value)
    if not isinstance(value, str):
        raise ArchspecError(f"{where}: must be text, but got {value!r:.80}")
    return value
