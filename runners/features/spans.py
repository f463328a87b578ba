"""Where the generated part of each assistant turn lies in a rendered conversation.

Chat templates rewrite what they are given: they trim, move the system prompt to the last question, drop the thoughts of
earlier turns, close the last turn by another token. So nothing is assumed of a template; it is asked. A turn's texts
are replaced by two different marks, and what the two renderings share on the right is what the template writes after
the turn, whatever its text. What follows a question under the generation prompt is, in the same way, what stands before
the first generated token.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from archspec.errors import ArchspecError
from runners.features.conversations import Message

Span = tuple[int, int]

# They differ in their first and last character, so that what they share is not theirs; upper and lower case show a
# template that changes either.
_MARKS = ("aXmarkedYa", "bXmarkedYb")


class Render(Protocol):
    """Write messages with the chat template, with or without its generation prompt at the end."""

    def __call__(self, messages: Sequence[Message], prompt: bool = False) -> str:
        """Return the text; raises ArchspecError if the template refuses the messages."""
        ...


def assistant_spans(name: str, messages: Sequence[Message], render: Render, special: re.Pattern[str]) -> list[Span]:
    """(start, end) characters of the generated part of each assistant turn in ``render(messages)``, in order.

    It starts where the generation prompt ends and goes through the token that closes the turn, where there is one.
    ``special`` matches one special token. ``name`` is the conversation's, for messages.

    Raises:
        ArchspecError: the template refuses the messages, or what it does with a turn leaves its place in doubt.
    """
    finder = _Finder(name, tuple(messages), render, special, render(messages))
    spans: list[Span] = []
    for index, message in enumerate(messages):
        if message.role != "assistant":
            continue
        span = finder.plain(index) or finder.span(index)
        if spans and span[0] < spans[-1][1]:
            raise finder.doubt(index, "writes it before the end of an earlier turn")
        check_calls(name, [(index, message)], finder.whole[slice(*span)])
        spans.append(span)
    return spans


def check_calls(name: str, turns: Iterable[tuple[int, Message]], written: str) -> None:
    """Raise ArchspecError unless generated text names every function that the turns call, once for each call."""
    called = Counter[str]()
    for index, message in turns:
        for call in message.tool_calls:
            called[call.name] += 1
            if written.count(call.name) < called[call.name]:
                raise ArchspecError(
                    f"conversation {name}: turn {index}: the chat template leaves out a call of {call.name}; use a "
                    "target whose template writes it, or write the call into the turn's content"
                )


@dataclass(frozen=True)
class _Finder:
    name: str
    messages: tuple[Message, ...]
    render: Render
    special: re.Pattern[str]
    whole: str

    def doubt(self, index: int, what: str) -> ArchspecError:
        return ArchspecError(
            f"conversation {self.name}: turn {index}: the chat template {what}, so its response tokens cannot be "
            "found; use a template with {% generation %} markers, or end the conversation before that turn"
        )

    def plain(self, index: int) -> Span | None:
        """The span of a turn that is written as it is given, between the generation prompt and a special token."""
        text, before = self.messages[index].content.strip(), self.before(index)
        if not text or self.messages[index].tool_calls or not self.whole.startswith(before):
            return None
        at = self.whole.find(text, len(before))
        closer = next_token(self.special, self.whole, at + len(text)) if at >= 0 else None
        if closer is None or self.whole[len(before) : at].strip():
            return None
        return len(before), closer[1]

    def span(self, index: int) -> Span:
        """The span of any turn, found by marks."""
        one, two = (self.render(self.with_mark(index, mark)) for mark in _MARKS)
        if one == two:
            check_calls(self.name, [(index, self.messages[index])], "")
            raise self.doubt(index, "leaves its text out")
        head, after = one[: _shared(one, two)], _tail(one, two)
        if not one.startswith(_MARKS[0], len(head)) or not one.endswith(_MARKS[0] + after):
            raise self.doubt(index, "changes its text")
        start = self.start(index, head)
        close_start, close_end = self.closing(index, after)
        if not self.whole.endswith(after[close_start:]):
            raise self.doubt(index, "lets its text change what follows it")
        text_end = len(self.whole) - len(after) + close_start
        turn = self.messages[index]
        if not self.whole[start:text_end].strip() and (turn.content.strip() or turn.tool_calls):
            raise self.doubt(index, "leaves its text out")
        return start, text_end + close_end - close_start

    def start(self, index: int, head: str) -> int:
        """Where the generation prompt of a turn ends; ``head`` is what stands before its text, whatever that is."""
        before = self.before(index)
        if before == self.render(self.messages[:index]):
            self.check_header(index, before)
        if self.whole.startswith(before):
            return len(before)
        last = self.messages[:index]
        one, two = (self.render(_marked_at(last, index - 1, mark), prompt=True) for mark in _MARKS)
        three, four = (self.render(self.with_mark(index - 1, mark)) for mark in _MARKS)
        asked, after = _tail(one, two), _tail(three, four)
        at = len(self.whole) - len(after)
        if one == two or three == four or not self.whole.endswith(after):
            raise self.doubt(index, f"changes what stands around turn {index - 1} with the text of that turn")
        if after.startswith(asked):
            return at + len(asked)
        # Earlier turns may lack the end of the generation prompt, such as a block of thoughts that it opens.
        if at < len(head) and self.whole.startswith(head) and asked.startswith(head[at:]):
            return len(head)
        raise self.doubt(index, f"writes {after[:40]!r} before it, but {asked[:40]!r} where it asks for it")

    def check_header(self, index: int, before: str) -> None:
        """Without a generation prompt, a header before the answer would be taken for generated text."""
        answer = Message(role="assistant", content=_MARKS[0])
        written = self.render((*self.messages[:index], answer))
        at = written.find(_MARKS[0], len(before))
        if at < 0 or not written.startswith(before) or written[len(before) : at].strip():
            raise self.doubt(index, f"writes {written[len(before) : at]!r} before it, but has no generation prompt")

    def closing(self, index: int, after: str) -> Span:
        """Start and end of the closing token in ``after``; empty at the end of the generated text if there is none.

        ``after`` is compared with what follows the turn in the other position, at the end or inside of a conversation:
        what both share belongs to the turn. A call may hold special tokens before the closing one, so there the last
        counts, and in an answer the first.
        """
        called = bool(self.messages[index].tool_calls)
        other = self.elsewhere(index)
        if other is None:
            sure = None if called else next_token(self.special, after, 0)
            tokens = list(self.special.finditer(after))
            if sure is None and len(tokens) != 1:
                raise self.doubt(index, f"allows no other continuation of it and writes {after[:40]!r} after it")
            return sure or tokens[0].span()
        shared = _shared(after, other)
        for text in (after, other):
            cut = [token.start() for token in self.special.finditer(text) if token.start() < shared < token.end()]
            shared = min([shared, *cut])
        if tokens := list(self.special.finditer(after, 0, shared)):
            return tokens[-1 if called else 0].span()
        # Neither shares a token with the other: the last turn is closed by another one, or by none.
        end = len(after[:shared].rstrip())
        return next_token(self.special, after, end) or (end, end)

    def elsewhere(self, index: int) -> str | None:
        """What follows the turn at the end of a conversation if it stands inside, else what follows it inside."""
        turn = self.messages[index]
        more: tuple[Message, ...] = ()
        if index + 1 == len(self.messages):
            results = [Message(role="tool", content="0", name=c.name, tool_call_id=c.id) for c in turn.tool_calls]
            more = tuple(results) or (Message(role="user", content="0"),)
        try:
            one, two = (self.render((*self.messages[:index], _marked(turn, mark), *more)) for mark in _MARKS)
        except ArchspecError:  # a template may allow only some roles after this one
            return None
        return None if one == two else _tail(one, two)

    def before(self, index: int) -> str:
        """All that the template writes before a turn is generated."""
        if index == 0:
            raise ArchspecError(
                f"conversation {self.name}: turn 0 is the assistant's, so nothing asks for it; begin with a user turn"
            )
        return self.render(self.messages[:index], prompt=True)

    def with_mark(self, index: int, mark: str) -> tuple[Message, ...]:
        return _marked_at(self.messages, index, mark)


def _marked_at(messages: Sequence[Message], index: int, mark: str) -> tuple[Message, ...]:
    return (*messages[:index], _marked(messages[index], mark), *messages[index + 1 :])


def _marked(message: Message, mark: str) -> Message:
    """Every text of a turn replaced; texts that are not there stay away, since templates ask for that."""
    calls = tuple(call.model_copy(update={"arguments": {"0": mark}}) for call in message.tool_calls)
    return message.model_copy(
        update={
            "content": mark if message.content.strip() or not calls else message.content,
            "reasoning_content": mark if message.reasoning_content else None,
            "tool_calls": calls,
        }
    )


def _shared(one: str, two: str) -> int:
    """Length of the longest text that both begin with."""
    low, high = 0, min(len(one), len(two))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == two[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _tail(one: str, two: str) -> str:
    """The longest text that both end with."""
    return one[len(one) - _shared(one[::-1], two[::-1]) :]


@cache
def special_pattern(words: frozenset[str]) -> re.Pattern[str]:
    """A pattern of any one of ``words``, the longest first; of nothing if there are none."""
    return re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))) if words else r"(?!)")


def next_token(special: re.Pattern[str], text: str, at: int) -> Span | None:
    """The special token that follows ``at``, perhaps after blanks, which the target generates before it."""
    token = special.match(text, len(text) - len(text[at:].lstrip()))
    return token.span() if token else None


def ends_with(special: re.Pattern[str], text: str) -> bool:
    """Whether ``text`` ends with a special token."""
    return any(token.end() == len(text) for token in special.finditer(text))
