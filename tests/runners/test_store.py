"""The store: it is opened only when whole, holds nothing in memory, and splits stably."""

import shutil
from pathlib import Path

import psutil
import pytest
import torch
from safetensors import safe_open

from archspec.errors import ArchspecError
from runners.features.capture import capture
from runners.features.conversations import Conversation
from runners.features.store import FeatureStore
from runners.features.target import Target


@pytest.fixture
def copy(tiny_store: FeatureStore, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_store.path, tmp_path / "copy"))


def test_read_gives_shapes_order_and_types(tiny_store: FeatureStore) -> None:
    features = tiny_store.read(0, [2, 0])
    length = tiny_store.documents[0].length
    assert features.aux.shape == (length, 2, 32)
    assert features.last.shape == (length, 32)
    assert features.tokens.dtype == torch.int64
    assert features.response_mask.dtype == torch.bool
    assert torch.equal(features.aux.flip(1), tiny_store.read(0, [0, 2]).aux)
    assert tiny_store.read(0, []).aux.shape == (length, 0, 32)


def test_each_layer_is_stored_once_and_the_offsets_agree(tiny_store: FeatureStore) -> None:
    for number, entry in enumerate(tiny_store.manifest.shards):
        documents = [document for document in tiny_store.manifest.documents if document.shard == number]
        with safe_open(str(tiny_store.path / entry.name), framework="pt") as file:
            assert set(file.keys()) == {"aux.0", "aux.1", "aux.2", "last", "tokens", "response_mask", "offsets"}
            ends = [document.start + document.length for document in documents]
            assert file.get_tensor("offsets").tolist() == [0, *ends]


def test_opening_again_gives_the_same_store(tiny_store: FeatureStore) -> None:
    again = FeatureStore.open(tiny_store.path)
    again.verify()
    assert again.fingerprint == tiny_store.fingerprint
    assert again.documents == tiny_store.documents


def test_counts_of_some_documents_add_up(tiny_store: FeatureStore) -> None:
    odd, even = list(range(1, 12, 2)), list(range(0, 12, 2))
    assert torch.equal(tiny_store.count_tokens(odd) + tiny_store.count_tokens(even), tiny_store.token_counts)
    features = tiny_store.read(3, [])
    expected = torch.bincount(features.tokens[features.response_mask], minlength=264)
    assert torch.equal(tiny_store.count_tokens([3]), expected)


def test_reading_does_not_grow_with_the_store(target: Target, own_text: list[Conversation], tmp_path: Path) -> None:
    rows = [row.model_copy(update={"id": f"{row.id}-{copy}"}) for copy in range(60) for row in own_text]
    store = capture(target, rows, [0, 1, 2, 3], tmp_path / "large", "float32", 256, 8_000, 8_000)
    stored = store.size
    store.read(0, [0, 1, 2, 3])
    before = psutil.Process().memory_info().rss
    for document in store.documents:
        store.read(document.index, [0, 1, 2, 3])
    grown = psutil.Process().memory_info().rss - before
    assert stored > 20 << 20
    assert grown < stored / 5


def test_split_is_stable_under_added_documents(target: Target, own_text: list[Conversation], tmp_path: Path) -> None:
    few = capture(target, own_text[:8], [1], tmp_path / "few", "float32", 256)
    many = capture(target, own_text, [1], tmp_path / "many", "float32", 256)
    held = [{store.documents[index].id for index in store.split(0.4)[1]} for store in (few, many)]
    assert held[0] == held[1] & {document.id for document in few.documents}
    train, heldout = many.split(0.4)
    assert sorted(train + heldout) == list(range(12))


def test_split_leaves_something_on_both_sides(tiny_store: FeatureStore) -> None:
    with pytest.raises(ArchspecError, match=r"holdout must lie between 0 and 1, but got 1\.5"):
        tiny_store.split(1.5)
    with pytest.raises(ArchspecError, match=r"holdout=1e-09 leaves none of 12 documents for evaluation"):
        tiny_store.split(1e-9)


def test_missing_layer_and_other_target(tiny_store: FeatureStore, target: Target) -> None:
    tiny_store.require([0, 3], target.fingerprint)
    with pytest.raises(
        ArchspecError, match=r"the store lacks layer 4, 7; it has 0, 1, 2, 3; capture again with the layers"
    ):
        tiny_store.require([1, 7, 4])
    with pytest.raises(ArchspecError, match=r"was made from target \w{16} \(tiny-0\), not from target feedbeef"):
        tiny_store.require([1], "feedbeef")
    with pytest.raises(ArchspecError, match=r"the store lacks layer 9"):
        tiny_store.read(0, [9])


def test_no_store_here(tmp_path: Path) -> None:
    with pytest.raises(ArchspecError, match=r"holds no feature store \(manifest\.json is missing\); capture it first"):
        FeatureStore.open(tmp_path)


SHARD = "shard-00001.safetensors"


def test_a_missing_shard_is_named(copy: Path) -> None:
    (copy / SHARD).unlink()
    with pytest.raises(ArchspecError, match=r"shard-00001\.safetensors: this file of the feature store is missing"):
        FeatureStore.open(copy)


def test_a_truncated_shard_is_named(copy: Path) -> None:
    size = (copy / SHARD).stat().st_size
    with (copy / SHARD).open("r+b") as file:
        file.truncate(size - 100)
    with pytest.raises(
        ArchspecError, match=rf"shard-00001\.safetensors: damaged, {size - 100} bytes where .* says {size}"
    ):
        FeatureStore.open(copy)


@pytest.mark.parametrize("name", [SHARD, "frozen.safetensors", "counts.safetensors"])
@pytest.mark.parametrize("at", [0, -40])
def test_an_overwritten_file_is_named_at_open(copy: Path, name: str, at: int) -> None:
    overwrite(copy / name, at)
    with pytest.raises(ArchspecError, match=rf"{name}: damaged, its content is not what was captured \(checksum\)"):
        FeatureStore.open(copy)


def test_damage_in_the_middle_is_found_by_verify(target: Target, own_text: list[Conversation], tmp_path: Path) -> None:
    store = capture(target, own_text, [0, 1, 2, 3], tmp_path / "store", "float32", 256)
    shard = store.path / store.manifest.shards[0].name
    assert shard.stat().st_size > 4 * (1 << 16)
    overwrite(shard, shard.stat().st_size // 2)
    opened = FeatureStore.open(store.path)
    with pytest.raises(ArchspecError, match=r"shard-00000\.safetensors: damaged, its content is not what was captured"):
        opened.verify()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            '"version": 1',
            '"version": 9',
            r"manifest\.json: store version 9, but this program reads version 1; capture again",
        ),
        ('"tokens"', '"tokenz"', r"manifest\.json: damaged manifest \("),
        ("{", "[", r"manifest\.json: damaged manifest \("),
    ],
)
def test_manifest_of_another_version_or_damaged(copy: Path, old: str, new: str, message: str) -> None:
    path = copy / "manifest.json"
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(ArchspecError, match=message):
        FeatureStore.open(copy)


def overwrite(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= 0xFF
    path.write_bytes(bytes(data))
