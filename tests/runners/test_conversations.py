"""Reading conversations: every layout that is accepted, and every line that is refused by file and number."""

import json
from pathlib import Path
from typing import Any

import pytest

from archspec.errors import ArchspecError
from runners.features.conversations import (
    Conversation,
    Generation,
    Message,
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
