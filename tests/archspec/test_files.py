"""Files are whole or absent, whatever happens while they are written."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from archspec import files
from archspec.errors import ArchspecError


def test_text(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "a.txt"
    files.write_text(path, "größer\n")
    assert path.read_bytes() == "größer\n".encode()
    files.write_text(path, "again")
    assert path.read_text() == "again"
    assert list(path.parent.iterdir()) == [path]


def test_json(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    files.write_json(path, {"b": [1, None], "a": "é"})
    assert path.read_text(encoding="utf-8") == '{\n  "b": [\n    1,\n    null\n  ],\n  "a": "é"\n}\n'


@pytest.mark.parametrize("bad", [math.nan, math.inf, {1, 2}])
def test_what_json_cannot_say_leaves_the_old_file(bad: object, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    files.write_json(path, {"fine": 1})
    with pytest.raises((ValueError, TypeError)):
        files.write_json(path, {"fine": 2, "bad": bad})
    assert json.loads(path.read_text()) == {"fine": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_tensors(tmp_path: Path) -> None:
    from safetensors import safe_open

    path = tmp_path / "a.safetensors"
    matrix = torch.arange(6.0).view(2, 3)
    files.save_tensors(path, {"turned": matrix.T, "ids": torch.tensor([3])}, {"made": "here"})
    loaded = load_file(path)
    assert torch.equal(loaded["turned"], matrix.T)
    assert torch.equal(loaded["ids"], torch.tensor([3]))
    with safe_open(path, framework="pt") as opened:
        assert opened.metadata() == {"made": "here"}


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    files.write_text(path, "old")

    def stop_half_way() -> None:
        with files.replacing(path) as temporary:
            assert temporary.parent == path.parent, "only a move within one file system is all or nothing"
            temporary.write_text("ha")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop_half_way()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_old_file_is_there_until_the_new_one_is(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    files.write_text(path, "old")
    with files.replacing(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"


def test_a_lock_is_held_by_one_and_freed_at_the_end(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    rule = "somebody works here"
    with files.exclusive(folder, rule), pytest.raises(ArchspecError, match=f"new: {rule}"):
        files.exclusive(folder, rule).__enter__()
    with files.exclusive(folder, rule):
        pass
