"""Files of other projects are read as they are written there, and refused in one message where they are not."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from archspec.errors import ArchspecError
from archspec.facts import TargetFacts
from runners.features.dataset_masks import DatasetMasks
from runners.features.draft_vocabulary import read_vocabulary
from runners.features.dumps import check_values, find_dump, open_dumped
from runners.features.target import Target
from tests.runners.dump_files import prepared_dataset, specforge_point

T, H = 10, 32
IDS = torch.tensor([2, 5, 7, 100, 263])


def point(target: Target) -> dict[str, Any]:
    tokens = torch.arange(3, 3 + T)
    return specforge_point(target, (tokens, tokens > 6), [1, 2])


def payload() -> dict[str, Any]:
    return {"token_ids": torch.arange(3, 3 + T), "hidden_states": torch.ones(T, 3, H)}


def test_specforge_states_come_apart_by_layer(target: Target, tmp_path: Path) -> None:
    written = point(target)
    torch.save(written, tmp_path / "data_0.ckpt")
    dumped = open_dumped(tmp_path / "data_0.ckpt", "specforge", H)
    assert torch.equal(dumped.aux[:, 1], written["aux_hidden_state"][0, :, H:])
    assert torch.equal(dumped.last, written["hidden_state"][0])
    assert dumped.mask is not None
    assert dumped.mask.tolist() == written["loss_mask"].bool().tolist()


def test_speculators_states_end_with_the_last(tmp_path: Path) -> None:
    states = torch.randn(T, 3, H)
    save_file(payload() | {"hidden_states": states}, tmp_path / "hs_0.safetensors")
    dumped = open_dumped(tmp_path / "hs_0.safetensors", "speculators", H)
    assert torch.equal(dumped.aux, states[:, :2])
    assert torch.equal(dumped.last, states[:, 2])
    assert dumped.mask is None


def without(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda content: {key: value for key, value in content.items() if key != name}


def put(name: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda content: content | {name: change(content[name])}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            without("aux_hidden_state"),
            r"no tensor aux_hidden_state \(it holds hidden_state, input_ids, loss_mask\); this",
        ),
        (put("aux_hidden_state", lambda _: None), r"no tensor aux_hidden_state \("),
        (put("loss_mask", lambda mask: mask[:-1]), r"loss_mask has 9 entries, but there are 10 tokens"),
        (put("loss_mask", lambda mask: mask * 2), r"loss_mask must hold 0 and 1 only"),
        (
            put("input_ids", lambda ids: ids.float()),
            r"input_ids is \[10\] of float32, but must be one number for each tok",
        ),
        (put("input_ids", lambda ids: ids[:0]), r"input_ids is \[0\] of int64"),
        (put("input_ids", lambda ids: ids.expand(2, -1).clone()), r"input_ids is \[2, 10\] of int64"),
        (
            put("input_ids", lambda _: torch.tensor([5]).expand(1 << 40)),
            r"input_ids must be a plain, contiguous tensor",
        ),
        (put("hidden_state", lambda state: state.to_sparse()), r"hidden_state must be a plain, contiguous tensor"),
        (
            put("hidden_state", lambda state: state.double()),
            r"hidden_state is \[1, 10, 32\] of float64, but must be stat",
        ),
        (
            put("hidden_state", lambda state: state[0]),
            r"hidden_state is \[10, 32\], but aux_hidden_state is \[1, 10, 64\]; either both have a leading 1 or",
        ),
        (
            put("hidden_state", lambda state: state[:, :, 1:].clone()),
            r"hidden_state is \[1, 10, 31\], but must be \[1, 10, 32\]: 10 tokens of a target with hidden size 32",
        ),
        (
            put("aux_hidden_state", lambda state: state[:, :, 1:].clone()),
            r"aux_hidden_state is \[1, 10, 63\], but must be \[1, 10, m \* 32\]: 10 tokens of a target",
        ),
        (put("aux_hidden_state", lambda state: state[:, 1:].clone()), r"aux_hidden_state is \[1, 9, 64\], but must be"),
    ],
)
def test_a_wrong_ckpt_is_refused(
    change: Callable[[dict[str, Any]], dict[str, Any]], message: str, target: Target, tmp_path: Path
) -> None:
    path = tmp_path / "data_0.ckpt"
    torch.save(change(point(target)), path)
    with pytest.raises(ArchspecError, match=rf"data_0\.ckpt: {message}"):
        open_dumped(path, "specforge", H)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("token_ids"), r"no tensor token_ids \(it holds hidden_states\)"),
        (
            put("hidden_states", lambda state: state[:, :1].clone()),
            r"hidden_states is \[10, 1, 32\], but must be \[10, m \+ ",
        ),
        (
            put("hidden_states", lambda state: state[:, 0].clone()),
            r"hidden_states is \[10, 32\], but must be \[10, m \+ 1, 3",
        ),
        (put("hidden_states", lambda state: state[1:].clone()), r"hidden_states is \[9, 3, 32\], but must be"),
        (
            put("hidden_states", lambda state: state.to(torch.float8_e4m3fn)),
            r"hidden_states is .* of float8_e4m3fn, but mu",
        ),
    ],
)
def test_a_wrong_safetensors_file_is_refused(
    change: Callable[[dict[str, Any]], dict[str, Any]], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "hs_0.safetensors"
    save_file(change(payload()), path)
    with pytest.raises(ArchspecError, match=rf"hs_0\.safetensors: {message}"):
        open_dumped(path, "speculators", H)


class Malicious:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.trace),))


def test_code_in_a_pickle_is_never_run(tmp_path: Path) -> None:
    path, trace = tmp_path / "data_0.ckpt", tmp_path / "was-run"
    torch.save({"input_ids": Malicious(trace)}, path)
    with pytest.raises(
        ArchspecError, match=r"data_0\.ckpt: refused: it holds something besides tensors, which could run"
    ):
        open_dumped(path, "specforge", H)
    with pytest.raises(ArchspecError, match=r"refused: it holds something besides tensors"):
        read_vocabulary(path, 264)
    np.save(tmp_path / "d2t.npy", np.array([Malicious(trace)], dtype=object), allow_pickle=True)
    with pytest.raises(ArchspecError, match=r"d2t\.npy: cannot be read as an array of numbers"):
        read_vocabulary(tmp_path / "d2t.npy", 264)
    assert not trace.exists()


def test_damaged_files_are_named(target: Target, tmp_path: Path) -> None:
    path = tmp_path / "data_0.ckpt"
    torch.save(point(target), path)
    path.write_bytes(path.read_bytes()[:900])
    with pytest.raises(ArchspecError, match=r"data_0\.ckpt: damaged, cannot be read \("):
        open_dumped(path, "specforge", H)
    torch.save([1, 2], path)
    with pytest.raises(ArchspecError, match=r"data_0\.ckpt: holds a list, but must hold a dict of tensors"):
        open_dumped(path, "specforge", H)
    (tmp_path / "hs_0.safetensors").write_bytes(b"no header")
    with pytest.raises(ArchspecError, match=r"hs_0\.safetensors: damaged, cannot be read as safetensors"):
        open_dumped(tmp_path / "hs_0.safetensors", "speculators", H)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("input_ids", lambda ids: ids + 260), r"token 272 is outside the target's vocabulary of 264"),
        (put("input_ids", lambda ids: ids - 9), r"token -6 is outside the target's vocabulary of 264"),
        (put("hidden_state", lambda state: state * float("nan")), r"the last states hold NaN or infinity"),
        (put("aux_hidden_state", lambda state: state / 0), r"the aux states hold NaN or infinity"),
    ],
)
def test_unsound_values_are_refused(
    change: Callable[[dict[str, Any]], dict[str, Any]], message: str, target: Target, tmp_path: Path
) -> None:
    path = tmp_path / "data_0.ckpt"
    torch.save(change(point(target)), path)
    with pytest.raises(ArchspecError, match=rf"data_0\.ckpt: {message}"):
        check_values(path, open_dumped(path, "specforge", H), target.facts)


def test_longer_text_than_the_target_has_positions(target: Target, tmp_path: Path) -> None:
    torch.save(point(target), tmp_path / "data_0.ckpt")
    facts: TargetFacts = target.facts.model_copy(update={"max_positions": 8})
    with pytest.raises(ArchspecError, match=r"10 tokens, but the target has 8 positions"):
        check_values(tmp_path, open_dumped(tmp_path / "data_0.ckpt", "specforge", H), facts)


def test_the_kind_is_told_from_the_files(tmp_path: Path) -> None:
    with pytest.raises(ArchspecError, match=r"nowhere: no such folder"):
        find_dump(tmp_path / "nowhere", None)
    message = r"an empty dump; it holds no \*\.ckpt \(specforge\) or hs_N\.safetensors \(speculators\)"
    with pytest.raises(ArchspecError, match=message):
        find_dump(tmp_path, None)
    for name in ("data_10.ckpt", "data_9.ckpt", "notes.txt"):
        (tmp_path / name).touch()
    kind, files = find_dump(tmp_path, None)
    assert (kind, [path.name for path in files]) == ("specforge", ["data_9.ckpt", "data_10.ckpt"])
    with pytest.raises(ArchspecError, match=r"an empty dump; it holds no hs_N\.safetensors \(speculators\)$"):
        find_dump(tmp_path, "speculators")
    (tmp_path / "hidden_states").mkdir()
    (tmp_path / "hidden_states" / "hs_3.safetensors").touch()
    with pytest.raises(
        ArchspecError, match=r"holds files of both projects; say --kind specforge or --kind speculators"
    ):
        find_dump(tmp_path, None)
    assert find_dump(tmp_path, "speculators")[1] == [tmp_path / "hidden_states" / "hs_3.safetensors"]
    with pytest.raises(ArchspecError, match=r"kind 'spec': did you mean 'specforge'\?"):
        find_dump(tmp_path, "spec")


def test_masks_come_from_the_prepared_dataset(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    rows = [(torch.arange(3, 8 + index), torch.arange(5 + index) > 2) for index in range(12)]
    prepared_dataset(tmp_path, rows, pyarrow)
    masks = DatasetMasks.beside(tmp_path / "hidden_states")
    for index, (tokens, mask) in enumerate(rows):
        assert torch.equal(masks.mask(Path(f"hs_{index}.safetensors"), tokens), mask)
    with pytest.raises(ArchspecError, match=r"hs_12\.safetensors: .* has rows 0 to 11, but none for this file"):
        masks.mask(Path("hs_12.safetensors"), rows[0][0])
    with pytest.raises(ArchspecError, match=r"hs_3\.safetensors: its token_ids are not the input_ids of row 3"):
        masks.mask(Path("hs_3.safetensors"), rows[0][0])
    prepared_dataset(tmp_path, [(rows[0][0], rows[1][1])], pyarrow)
    with pytest.raises(ArchspecError, match=r"loss_mask of row 0 must hold 5 entries, 0 or 1"):
        DatasetMasks.beside(tmp_path).mask(Path("hs_0.safetensors"), rows[0][0])
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "../other.arrow"}]}')
    with pytest.raises(
        ArchspecError, match=r"damaged dataset \(ValueError: state\.json names a file outside its folder\)"
    ):
        DatasetMasks.beside(tmp_path)


def test_masks_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ArchspecError, match=r"nothing says which tokens are responses: the prepared dataset \(state\.json"
    ):
        DatasetMasks.beside(tmp_path / "hidden_states")
    (tmp_path / "state.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ArchspecError, match=r"needs the package pyarrow; pip install pyarrow"):
        DatasetMasks.beside(tmp_path / "hidden_states")


def maps(ids: torch.Tensor = IDS, size: int = 264) -> dict[str, torch.Tensor]:
    t2d = torch.zeros(size, dtype=torch.bool)
    t2d[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": t2d}


def test_vocabulary_maps_of_every_kind(tmp_path: Path) -> None:
    torch.save(maps(), tmp_path / "map.pt")
    save_file(maps() | {"fc.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    for name, tensor in maps().items():
        np.save(tmp_path / f"{name}-5.npy", tensor.numpy())
    np.save(tmp_path / "t2d.npy", maps()["t2d"].numpy())
    for name in ("map.pt", "model.safetensors", "d2t-5.npy", "t2d-5.npy", "t2d.npy"):
        assert torch.equal(read_vocabulary(tmp_path / name, 264), IDS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"other": IDS}, r"holds neither d2t nor t2d"),
        ({"d2t": IDS.float()}, r"d2t must be one list of whole numbers, but is \[5\] of float32"),
        (
            {"d2t": torch.zeros(0, dtype=torch.long)},
            r"a draft vocabulary must be rising token ids below 264, .*, but these are 0 ",
        ),
        (
            {"d2t": torch.zeros(5, dtype=torch.long)},
            r"d2t is all zeros, so a draft could propose only the first 5 tokens; a map that was never set",
        ),
        ({"d2t": torch.tensor([5, 3, 260])}, r"a draft vocabulary must .*, but these are 3 ids from 4 to 262"),
        ({"d2t": torch.tensor([5, 300])}, r"a draft vocabulary must .*, but these are 2 ids from 5 to 301"),
        (maps(size=300), r"t2d has 300 entries, but the target's vocabulary has 264"),
        (maps() | {"d2t": maps()["d2t"][:-1]}, r"d2t and t2d do not name the same tokens"),
    ],
)
def test_a_wrong_vocabulary_is_refused(content: dict[str, Any], message: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "map.pt")
    with pytest.raises(ArchspecError, match=rf"map\.pt: {message}"):
        read_vocabulary(tmp_path / "map.pt", 264)


def test_a_vocabulary_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ArchspecError, match=r"map\.pt: no such vocabulary file"):
        read_vocabulary(tmp_path / "map.pt", 264)
    np.save(tmp_path / "map.npy", IDS.numpy())
    with pytest.raises(ArchspecError, match=r"map\.npy: the name must say d2t or t2d, as in d2t-32000\.npy"):
        read_vocabulary(tmp_path / "map.npy", 264)
    (tmp_path / "model.safetensors").write_bytes(b"no header")
    with pytest.raises(ArchspecError, match=r"model\.safetensors: damaged, cannot be read as safetensors"):
        read_vocabulary(tmp_path / "model.safetensors", 264)
