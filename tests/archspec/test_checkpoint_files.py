"""The files of a checkpoint: one or in shards, pickles that run nothing, and how missing and damaged ones are told."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from archspec.checkpoints import export, load
from archspec.errors import ArchspecError
from tests.archspec.drafts import assert_same, make, make_draft, refused


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint in vLLM's format."""
    export(make_draft(make()), tmp_path / "checkpoint", "vllm")
    return tmp_path / "checkpoint"


def save_in_shards(folder: Path) -> Path:
    """Two shards and their index in place of the one file."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shards = {name: f"model-{1 + i % 2:05}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
    for shard in set(shards.values()):
        save_file({name: tensors[name] for name in tensors if shards[name] == shard}, folder / shard)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": shards}), encoding="utf-8")
    return index


def test_shards_are_read_by_their_index(folder: Path) -> None:
    draft = load(folder)
    index = save_in_shards(folder)
    assert_same(draft, load(folder))
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors: cannot be read: " in refused(folder)
    index.write_text(json.dumps({"weight_map": {"fc.weight": "../elsewhere.safetensors"}}), encoding="utf-8")
    rule = "weight_map names '../elsewhere.safetensors', which is not a file beside it"
    assert refused(folder).endswith(f"model.safetensors.index.json: {rule}")
    index.write_text("{}", encoding="utf-8")
    rule = "weight_map must say which file holds which tensor"
    assert refused(folder).endswith(f"model.safetensors.index.json: {rule}")


def test_a_pickle_of_tensors_is_read(folder: Path) -> None:
    draft = load(folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert_same(draft, load(folder))


class Hostile:
    """Runs a command when it is unpickled."""

    def __init__(self, touched: Path) -> None:
        self.touched = touched

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.touched,)


def test_a_hostile_pickle_is_refused_and_not_run(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    file, touched = folder / "pytorch_model.bin", tmp_path / "touched"
    for save in (torch.save, lambda content, path: path.write_bytes(pickle.dumps(content, protocol=2))):
        save({"fc.weight": Hostile(touched)}, file)
        told = "cannot be read as plain tensors (UnpicklingError); ask for model.safetensors instead"
        assert refused(folder).endswith(f"pytorch_model.bin: {told}")
        assert not touched.exists()


@pytest.mark.parametrize("content", [b"", b"no pickle", b"\x80\x02.", b"\x80\x02}q\x00.", b"\x95\xff"])
def test_a_damaged_pickle_is_refused(content: bytes, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(content)
    assert "pytorch_model.bin: cannot be read as plain tensors (" in refused(folder)


def test_a_cut_pickle_of_the_old_kind_is_refused(folder: Path) -> None:
    """torch meets some damage with errors that it does not document, such as IndexError."""
    file, tensors = folder / "pytorch_model.bin", load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, file, _use_new_zipfile_serialization=False)
    whole = file.read_bytes()
    for length in range(1, len(whole) - 1, len(whole) // 40):
        file.write_bytes(whole[:length])
        assert "pytorch_model.bin: cannot be read as plain tensors (" in refused(folder)


@pytest.mark.parametrize("content", [[torch.zeros(2)], {"fc.weight": 3}, {"model": {"fc.weight": torch.zeros(2)}}])
def test_a_pickle_of_something_else_is_refused(content: Any, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(content, folder / "pytorch_model.bin")
    assert refused(folder).endswith("pytorch_model.bin: must hold tensors by name and nothing else")


def test_missing_and_damaged_files_are_named(folder: Path, tmp_path: Path) -> None:
    rule = "no such file; a checkpoint has config.json and model.safetensors"
    (folder / "model.safetensors").write_bytes(b"not tensors")
    assert "model.safetensors: cannot be read: " in refused(folder)
    (folder / "model.safetensors").unlink()
    assert refused(folder) == f"/model.safetensors: {rule}"
    (folder / "config.json").write_text("{", encoding="utf-8")
    assert "/config.json: not valid JSON: " in refused(folder)
    (folder / "config.json").write_text("[]", encoding="utf-8")
    assert refused(folder) == "/config.json: must hold one JSON object"
    (folder / "config.json").unlink()
    assert refused(folder) == f"/config.json: {rule}"


def test_an_unknown_format_is_refused_with_the_nearest(folder: Path) -> None:
    with pytest.raises(ArchspecError, match="format 'sg-lang': did you mean 'sglang'"):
        load(folder, "sg-lang")
