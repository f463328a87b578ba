"""Reading conversations: every layout that is accepted, and every line that is refused by file and number."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from archspec.errors import ArchspecError
from runners.features.conversations import (
    REASONING,
    Conversation,
    Generation,
    Message,
    ToolCall,
    content_id,
    digest,
    parse_row,
    read_conversations,
)


def write(path: Path, *rows: Any) -> Path:
    path.write_text(
        "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n", encoding="utf-8"
    )
    return path


ASKED = [("user", "Hi"), ("assistant", "Hello!")]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}, ASKED),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]}, ASKED),
        ({"conversations": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}, ASKED),
        ({"instruction": "Hi", "input": "", "output": "Hello!"}, ASKED),
        ({"instruction": "Add.", "input": "1 2", "output": "3"}, [("user", "Add.\n\n1 2"), ("assistant", "3")]),
        ({"instruction": "Hi"}, ASKED[:1]),
        ({"prompt": "Hi", "response": "Hello!"}, ASKED),
        ({"prompt": "Hi", "source": "elsewhere"}, ASKED[:1]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}, ASKED[:1]),
    ],
)
def test_layouts(row: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    found = parse_row(row, "here:1")
    assert [(message.role, message.content) for message in found.messages] == expected
    assert found.answered is (expected[-1][0] == "assistant")
    assert found.prompt() == found.messages[:1]
    assert found.id == content_id(found.messages)


def test_id_category_and_generation_come_back(tmp_path: Path) -> None:
    messages = (Message(role="user", content="Größe?"), Message(role="assistant", content="1 m"))
    generation = Generation(token_ids=(7, 8, 2), target="ab12", temperature=0.7, finished=False)
    row = Conversation(id="q-1", category="maths", messages=messages, generation=generation)
    plain = Conversation(id="q-2", messages=messages[:1])
    assert read_conversations(write(tmp_path / "rows.jsonl", row.row(), "", plain.row())) == [row, plain]


NESTED = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"unit": None, "city": "Rome"}}}
WITH_TOOLS: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "Rome?"},
        {"role": "assistant", "content": None, "tool_calls": [NESTED], "reasoning_content": "Ask."},
        {"role": "tool", "content": "18", "name": "weather", "tool_call_id": "c1"},
        {"role": "assistant", "content": "Mild."},
    ],
    "tools": [{"name": "weather", "parameters": {"default": None, "b": 1, "a": 2}}],
}


def changed(turn: int, **values: Any) -> dict[str, Any]:
    turns = [dict(one) for one in WITH_TOOLS["messages"]]
    turns[turn].update(values)
    return {**WITH_TOOLS, "messages": turns}


def test_calls_results_thoughts_and_tools_come_back(tmp_path: Path) -> None:
    found = parse_row(WITH_TOOLS, "here:1")
    call = ToolCall(name="weather", arguments={"unit": None, "city": "Rome"}, id="c1")
    assert found.messages[1] == Message(role="assistant", content="", tool_calls=(call,), reasoning_content="Ask.")
    assert found.messages[2] == Message(role="tool", content="18", name="weather", tool_call_id="c1")
    assert found.tools == tuple(WITH_TOOLS["tools"])
    again = read_conversations(write(tmp_path / "rows.jsonl", found.row()))
    assert again == [found]
    assert json.dumps(again[0].row()) == json.dumps(found.row())  # nulls and the order of keys too
    assert "tool_calls" not in found.messages[3].row()  # some templates ask whether the key is there


@pytest.mark.parametrize(
    "row",
    [
        changed(1, tool_calls=[{"id": "c1", "name": "weather", "arguments": {"unit": None, "city": "Rome"}}]),
        changed(
            1, tool_calls=[{**NESTED, "function": {"name": "weather", "arguments": '{"unit": null, "city": "Rome"}'}}]
        ),
        changed(1, content=""),
        changed(1, reasoning_content=None, thinking="Ask."),
        changed(1, reasoning="Ask."),
        changed(0, tool_calls=None, thinking="", name="Ann"),
        {**WITH_TOOLS, "tools": json.dumps(WITH_TOOLS["tools"])},
    ],
    ids=["flat", "arguments as text", "empty content", "thinking", "twice the same", "empty keys", "tools as text"],
)
def test_ways_to_write_one_conversation(row: dict[str, Any]) -> None:
    assert parse_row(row, "here:1") == parse_row(WITH_TOOLS, "here:1")


def test_everything_the_template_sees_makes_id_and_digest() -> None:
    plain = [{key: turn[key] for key in ("role", "content")} for turn in WITH_TOOLS["messages"] if turn["content"]]
    unit = {"unit": None}
    rows = [
        WITH_TOOLS,
        changed(1, reasoning_content="Think."),
        changed(1, tool_calls=[]),
        changed(1, tool_calls=[{**NESTED, "function": {"name": "weather", "arguments": {"city": "Rome"} | unit}}]),
        changed(2, tool_call_id="c2"),
        {**WITH_TOOLS, "tools": []},
        {**WITH_TOOLS, "tools": [{"name": "weather", "parameters": {"default": None, "a": 2, "b": 1}}]},
        {"messages": plain},
    ]
    found = [parse_row(row, "here:1") for row in rows]
    assert len({one.id for one in found}) == len(rows)
    same_id = [one.model_copy(update={"id": "x"}) for one in found]
    assert len({digest([one]) for one in same_id}) == len(rows)


def test_ids_and_digests_of_plain_conversations_stay() -> None:
    """A document's side of the holdout hangs on its id, a store's reuse on the digest."""
    row = {
        "category": "sums",
        "messages": [{"role": "user", "content": "¿2+2?"}, {"role": "assistant", "content": "4"}],
    }
    found = parse_row({**row, "generation": {"token_ids": [36, 2], "target": "ab"}}, "here:1")
    assert found.id == "522781bafec752db"
    assert digest([found]) == "3f79b930c6f3b946"


def test_several_files_and_numbers_as_ids(tmp_path: Path) -> None:
    one = write(tmp_path / "one.jsonl", {"id": 1, "prompt": "a"})
    two = write(tmp_path / "two.jsonl", {"prompt": "b"})
    found = read_conversations([one, two])
    assert [row.messages[0].content for row in found] == ["a", "b"]
    assert found[0].id == "1"
    assert digest(found) != digest(found[::-1])


GOOD = '{"prompt": "a"}'


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"prompt": "a"', r"rows\.jsonl:2: broken line, not JSON \(.* at column 15\)"),
        ("[1]", r"rows\.jsonl:2: expected a JSON object, but got list"),
        ('{"text": "a"}', r"rows\.jsonl:2: none of the keys messages, conversations, instruction, prompt .*; got text"),
        ('{"messages": []}', r"rows\.jsonl:2: messages: must be a list with at least one turn, but got \[\]"),
        ('{"messages": ["a"]}', r"rows\.jsonl:2: messages\[0\]: must be an object, but got 'a'"),
        (
            '{"messages": [{"role": "usr", "content": "a"}]}',
            r":2: messages\[0\]: role 'usr' is not .* did you mean 'user'",
        ),
        (
            '{"messages": [{"role": ["user"], "content": "a"}]}',
            r":2: messages\[0\]: role \['user'\] is not a known role",
        ),
        ('{"messages": [{"content": "a"}]}', r":2: messages\[0\]: role is missing; a turn has role and content"),
        (
            '{"messages": [{"role": "assistant", "content": null}]}',
            r"messages\[0\]: content: must be text, but got None",
        ),
        (
            '{"messages": [{"role": "user", "content": "a", "tool_calls": [{"name": "f"}]}]}',
            r":2: messages\[0\]: tool_calls in a turn of role 'user'; only assistant turns have it",
        ),
        (
            '{"messages": [{"role": "user", "content": "a", "thinking": "b"}]}',
            r":2: messages\[0\]: reasoning in a turn of role 'user'; only assistant turns have it",
        ),
        (
            '{"messages": [{"role": "assistant", "content": "a", "thinking": "b", "reasoning_content": "c"}]}',
            r":2: messages\[0\]: reasoning_content and thinking are names of one thing, but their texts differ",
        ),
        (
            '{"messages": [{"role": "assistant", "tool_calls": {"name": "f"}}]}',
            r":2: messages\[0\]: tool_calls: must be a list of calls, but got \{'name': 'f'\}",
        ),
        (
            '{"messages": [{"role": "assistant", "tool_calls": [{"function": "f"}]}]}',
            r"tool_calls\[0\]: must be an object with a function's name and arguments, but got \{'function': 'f'\}",
        ),
        (
            '{"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{a"}]}]}',
            r":2: messages\[0\]: tool_calls\[0\]: arguments: must be JSON, but got '\{a' \(",
        ),
        (
            '{"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": [1]}]}]}',
            r"tool_calls\[0\]: arguments must be a JSON object or its text, but got \[1\]",
        ),
        ('{"prompt": "a", "tools": "weather"}', r":2: tools: must be JSON, but got 'weather' \("),
        ('{"prompt": "a", "tools": ["f"]}', r":2: tools: must be a list of JSON schemas of functions, but got \['f'\]"),
        ('{"messages": [{"role": "user"}]}', r":2: messages\[0\]: content is missing; a turn has role and content"),
        (
            '{"conversations": [{"from": "human", "value": 3}]}',
            r":2: conversations\[0\]: value: must be text, but got 3",
        ),
        ('{"instruction": ""}', r":2: instruction is empty"),
        ('{"prompt": "a", "category": 3}', r":2: category must be text, but got 3"),
        ('{"prompt": "a", "generation": {"token_ids": [1]}}', r":2: generation\.target: Field required"),
        ('{"prompt": "a", "generation": {"token_ids": [-1], "target": "x"}}', r":2: generation\.token_ids\.0: "),
    ],
)
def test_a_broken_line_is_named_by_number(tmp_path: Path, row: str, message: str) -> None:
    with pytest.raises(ArchspecError, match=message):
        read_conversations(write(tmp_path / "rows.jsonl", GOOD, row))


def test_an_id_used_twice_names_both_lines(tmp_path: Path) -> None:
    with pytest.raises(ArchspecError, match=r"rows\.jsonl:2: id 'x' was already used at .*rows\.jsonl:1"):
        read_conversations(write(tmp_path / "rows.jsonl", {"id": "x", "prompt": "a"}, {"id": "x", "prompt": "b"}))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ArchspecError, match=r"none\.jsonl: no such conversations file"):
        read_conversations(tmp_path / "none.jsonl")
    with pytest.raises(ArchspecError, match=r"empty\.jsonl: no conversation in it"):
        read_conversations(write(tmp_path / "empty.jsonl", ""))
    (tmp_path / "bytes.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(ArchspecError, match=r"bytes\.jsonl:2: not UTF-8 text"):
        read_conversations(tmp_path / "bytes.jsonl")
    with pytest.raises(ArchspecError, match=r"cannot be read \(Is a directory\)"):
        read_conversations(tmp_path)


def test_the_documented_row_with_tools_is_read() -> None:
    page = (Path(__file__).parents[2] / "docs" / "features.md").read_text(encoding="utf-8")
    [example] = re.findall(r"^```json conversation with tools\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    found = parse_row(json.loads(example), "docs")
    assert [message.role for message in found.messages] == ["user", "assistant", "tool", "assistant"]
    assert found.messages[1].tool_calls[0].id == found.messages[2].tool_call_id
    assert found.messages[1].reasoning_content
    assert found.tools
    assert all(f"`{key}`" in page for key in (*REASONING, "tools", "tool_calls", "name", "tool_call_id"))
