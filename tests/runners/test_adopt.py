"""A store of another project's dump is the store that this project would have captured from the same text."""

import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from rich.console import Console

from archspec.errors import ArchspecError
from archspec.modules import Draft
from archspec.resolve import ResolvedSpec
from runners.features.adopt import adopt_dump
from runners.features.capture import capture
from runners.features.conversations import read_conversations
from runners.features.generate import generate_responses
from runners.features.manifest import LATER_FIELDS
from runners.features.store import FeatureStore
from runners.features.target import Target
from runners.training.acceptance import measure_acceptance
from runners.training.settings import EvalSettings
from runners.training.teacher import Teacher
from runners.training.trial import make_draft, run_rung
from tests.runners.drafts import everything, tiny_spec, trained_draft
from tests.runners.dump_files import prepared_dataset, specforge_dump, specforge_point, speculators_dump, texts
from tests.runners.tasks import rung_task
from tests.runners.tiny import conversation

LAYERS = ("0", "1", "2")
Dumper = Callable[..., Path]
DUMPERS = [pytest.param(specforge_dump, id="specforge"), pytest.param(speculators_dump, id="speculators")]


def adopt(
    target: Target, dump: Path, layers: tuple[str, ...] = LAYERS, out: Path | None = None, **options: Any
) -> FeatureStore:
    return adopt_dump(target, dump, layers, out or dump.parent / "store", quiet(), **options)


def quiet() -> Console:
    return Console(file=io.StringIO())


def spec_of(store: FeatureStore, **changes: Any) -> ResolvedSpec:
    return tiny_spec(store.facts, changes={"inputs.aux_layers": [0, 1, 2], **changes})


@pytest.fixture(scope="module")
def native(target: Target, tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    """This project's capture of twelve different texts that the tiny target wrote."""
    folder = tmp_path_factory.mktemp("native")
    prompts = [conversation(f"{index} " * (1 + index % 5), name=f"own-{index}") for index in range(12)]
    generate_responses(target, prompts, 24, 0.0, 6, 0, folder / "own.jsonl")
    return capture(target, read_conversations(folder / "own.jsonl"), [0, 1, 2, 3], folder / "store", "float32", 256)


@pytest.fixture(scope="module")
def dump(target: Target, native: FeatureStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return specforge_dump(tmp_path_factory.mktemp("dump") / "dump", target, texts(native), [0, 1, 2])


@pytest.fixture(scope="module")
def adopted(target: Target, dump: Path) -> FeatureStore:
    return adopt(target, dump, own_temperature=0.0)


@pytest.fixture
def copied(dump: Path, adopted: FeatureStore, tmp_path: Path) -> FeatureStore:
    """Dump and store moved together, which a relative path allows."""
    shutil.copytree(dump.parent, tmp_path / "moved")
    return FeatureStore.open(tmp_path / "moved" / "store")


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("dumper", DUMPERS)
def test_features_counts_and_teacher_are_those_of_a_native_capture(
    dumper: Dumper, copy: bool, target: Target, native: FeatureStore, tmp_path: Path
) -> None:
    store = adopt(target, dumper(tmp_path / "dump", target, texts(native), [0, 1, 2]), copy=copy)
    assert len(store.documents) == len(native.documents)
    assert torch.equal(store.token_counts, native.token_counts)
    assert torch.equal(store.count_tokens([1, 4, 7]), native.count_tokens([1, 4, 7]))
    for document in store.documents:
        ours, theirs = store.read(document.index, [2, 0, 1]), native.read(document.index, [2, 0, 1])
        assert torch.equal(ours.tokens, theirs.tokens)
        assert torch.equal(ours.response_mask, theirs.response_mask)
        torch.testing.assert_close(ours.aux, theirs.aux, rtol=1e-5, atol=1e-5)
        logits = Teacher(store.weights()).logits(ours.last), Teacher(native.weights()).logits(theirs.last)
        torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)
    assert (store.manifest.dump is not None and bool(store.manifest.dump.files)) is not copy
    store.verify()


def test_by_reference_no_state_is_copied(adopted: FeatureStore, dump: Path) -> None:
    states = sum(path.stat().st_size for path in dump.rglob("*.ckpt"))
    own = sum(path.stat().st_size for path in adopted.path.iterdir())
    assert own - adopted.manifest.frozen.size < states / 10
    assert adopted.size > states
    assert adopted.manifest.dump is not None
    assert adopted.manifest.dump.root == "../dump"


def test_a_store_far_from_its_dump_names_it_absolutely(target: Target, dump: Path, tmp_path: Path) -> None:
    store = adopt(target, dump, out=tmp_path / "a" / "b" / "c" / "store")
    assert store.manifest.dump is not None
    assert store.manifest.dump.root == str(dump.resolve())
    assert store.read(0, [1]).aux.shape[1] == 1


@pytest.mark.parametrize("sampled", ["greedy", "sampled"])
def test_acceptance_of_one_draft_is_the_same(
    sampled: Any, target: Target, native: FeatureStore, adopted: FeatureStore
) -> None:
    draft = trained_draft(native, spec_of(native), tokens=4000)
    settings = EvalSettings(draft_length=3, bootstrap=10, draft=sampled)
    warm = {"temperature": 1.0} if sampled == "sampled" else {}  # at temperature 0 nothing would be sampled
    stores = [FeatureStore(store.path, store.manifest.model_copy(update=warm)) for store in (native, adopted)]
    theirs, ours = (measure_acceptance(draft, store, everything(store), settings) for store in stores)
    assert ours.length == pytest.approx(theirs.length, abs=1e-5)
    assert ours.conditional == pytest.approx(theirs.conditional, abs=1e-5)
    assert 1.05 < ours.length < 3.9


def test_training_is_the_same_as_on_a_native_capture(native: FeatureStore, adopted: FeatureStore) -> None:
    trained: list[Draft] = [trained_draft(store, spec_of(store), tokens=900) for store in (native, adopted)]
    for theirs, ours in zip(trained[0].parameters(), trained[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=2e-4)


def test_a_trial_runs_on_an_adopted_store(adopted: FeatureStore, tmp_path: Path) -> None:
    measured = run_rung(rung_task(adopted, tmp_path / "trial", spec=spec_of(adopted), rungs=(600,)))
    assert measured.length > 1
    assert measured.acceptance["own_text"] is True


def test_the_layer_before_the_norm_is_refused_where_it_was_normed(adopted: FeatureStore) -> None:
    message = r"lacks layer 3; it has 0, 1, 2; the dump .* keeps layer 3 only after the target's final norm, which cann"
    with pytest.raises(ArchspecError, match=message):
        adopted.require([1, 3])
    with pytest.raises(
        ArchspecError, match=r"lacks layer 9; .* the dump that it was adopted from has no others; captu"
    ):
        adopted.read(0, [9])


def test_an_aux_layer_n_of_a_normed_dump_may_be_read(target: Target, native: FeatureStore, tmp_path: Path) -> None:
    dump = specforge_dump(tmp_path / "dump", target, texts(native)[:3], [1, 3])
    for copy in (False, True):
        store = adopt(target, dump, ("1", "3"), tmp_path / f"store{copy}", copy=copy)
        theirs = native.read(0, [3, 1])
        torch.testing.assert_close(store.read(0, [3, 1]).aux, theirs.aux, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(store.read(0, []).last, theirs.last, atol=1e-2)


def test_last_states_of_speculators_are_layer_n(target: Target, native: FeatureStore, tmp_path: Path) -> None:
    store = adopt(target, speculators_dump(tmp_path / "dump", target, texts(native)[:2], [1]), ("1",))
    assert store.manifest.layer_ids == (1, 3)
    assert store.manifest.last_state == "pre_norm"
    torch.testing.assert_close(store.read(0, [3]).aux, native.read(0, [3]).aux, rtol=1e-5, atol=1e-5)


def test_masks_of_speculators_come_from_its_dataset(target: Target, native: FeatureStore, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    rows = texts(native)
    dump = speculators_dump(tmp_path / "dump", target, rows, [0, 1, 2], masks=False)
    with pytest.raises(
        ArchspecError, match=r"hidden_states: nothing says which tokens are responses: the prepared data"
    ):
        adopt(target, dump)
    assert not (tmp_path / "store").exists()
    prepared_dataset(dump, rows, pyarrow)
    store = adopt(target, dump)
    assert torch.equal(store.token_counts, native.token_counts)
    assert torch.equal(store.read(5, []).response_mask, native.read(5, []).response_mask)


@pytest.mark.parametrize("dumper", DUMPERS)
def test_a_shift_by_one_is_refused_with_the_layers_that_fit(
    dumper: Dumper, target: Target, native: FeatureStore, tmp_path: Path
) -> None:
    dump = dumper(tmp_path / "dump", target, texts(native)[:4], [0, 1, 2])
    message = r"the aux states are those of layers 0, 1, 2, not 1, 2, 3; use --layers 0,1,2"
    with pytest.raises(ArchspecError, match=message):
        adopt(target, dump, ("1", "2", "3"))
    with pytest.raises(ArchspecError, match=r"layers 0, 1, 2, not 0, 1; use --layers 0,1,2"):
        adopt(target, dump, ("0", "1"))
    assert not (tmp_path / "store").exists()


def test_padding_is_left_out_and_ids_hang_on_the_text_alone(
    adopted: FeatureStore, dump: Path, target: Target, tmp_path: Path
) -> None:
    point = torch.load(dump / "rows_0-2" / "data_1.ckpt", weights_only=True)
    assert len(point["input_ids"]) == adopted.documents[1].length + 3
    other = shutil.copytree(dump, tmp_path / "dump")
    (other / "rows_0-2" / "data_0.ckpt").rename(other / "rows_4-6" / "data_99.ckpt")
    again = adopt(target, other)
    assert {one.id for one in again.documents} == {one.id for one in adopted.documents}
    assert [one.id for one in again.documents] != [one.id for one in adopted.documents]
    sides = [{store.documents[index].id for index in store.split(0.4)[1]} for store in (adopted, again)]
    assert sides[0] == sides[1]
    assert again.manifest.key.conversations == adopted.manifest.key.conversations


def test_empty_masks_and_second_copies_are_dropped_and_counted(dump: Path, target: Target, tmp_path: Path) -> None:
    other = shutil.copytree(dump, tmp_path / "dump")
    shutil.copy(other / "rows_0-2" / "data_0.ckpt", other / "rows_0-2" / "data_50.ckpt")
    edit(other, lambda point: point | {"loss_mask": point["loss_mask"] * 0}, "rows_2-4/data_3.ckpt")
    console = quiet()
    store = adopt_dump(target, other, LAYERS, tmp_path / "store", console)
    assert (len(store.documents), store.manifest.unanswered) == (11, 1)
    assert store.manifest.dump is not None
    assert store.manifest.dump.duplicates == 1
    assert "dropped 1 files without a response token and 1 whose text another file has" in output(console)
    edit(other, lambda point: point | {"loss_mask": point["loss_mask"] * 0})
    with pytest.raises(ArchspecError, match=r"none of 13 files has a response token; its loss masks are all zero"):
        adopt(target, other, out=tmp_path / "none")


def test_text_is_foreign_unless_told(adopted: FeatureStore, dump: Path, target: Target, tmp_path: Path) -> None:
    assert (adopted.manifest.text_origin, adopted.manifest.temperature) == ("own", 0.0)
    assert adopted.manifest.own_agreement == 1.0
    assert all(document.own for document in adopted.documents)
    foreign = adopt(target, dump, out=tmp_path / "store")
    assert (foreign.manifest.text_origin, foreign.manifest.temperature) == ("foreign", None)
    assert foreign.manifest.own_agreement is None
    assert not any(document.own for document in foreign.documents)
    warm = adopt(target, dump, out=tmp_path / "warm", own_temperature=0.7)
    assert (warm.manifest.temperature, warm.manifest.own_agreement) == (0.7, None)
    with pytest.raises(ArchspecError, match=r"own temperature -1: must be 0 or more"):
        adopt(target, dump, own_temperature=-1)


def test_a_false_claim_of_own_text_is_warned_of(target: Target, tmp_path: Path) -> None:
    tokens = torch.arange(3, 40)
    path = tmp_path / "dump" / "data_0.ckpt"
    path.parent.mkdir()
    torch.save(specforge_point(target, (tokens, tokens > 9), [0, 1, 2]), path)
    console = quiet()
    adopt_dump(target, path.parent, LAYERS, tmp_path / "store", console, own_temperature=0.0)
    assert "warning: much of the text is not what this target says now" in output(console)


def test_a_changed_dump_is_named(copied: FeatureStore) -> None:
    path = copied.path.parent / "dump" / "rows_2-4" / "data_2.ckpt"
    data, stat = path.read_bytes(), path.stat()
    os.utime(path, ns=(1, 1))
    FeatureStore.open(copied.path)  # a new time alone is no change
    path.write_bytes(bytes([data[0] ^ 0xFF]) + data[1:])
    with pytest.raises(
        ArchspecError, match=r"data_2\.ckpt: its content changed since it was adopted \(checksum\); adopt"
    ):
        FeatureStore.open(copied.path)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    opened = FeatureStore.open(copied.path)  # thousands of files are not read where size and time are as they were
    with pytest.raises(ArchspecError, match=r"data_2\.ckpt: its content changed"):
        opened.verify()
    path.write_bytes(data[:-100])
    message = (
        rf"data_2\.ckpt: changed since it was adopted, {len(data) - 100} bytes where the manifest says {len(data)}; "
    )
    with pytest.raises(ArchspecError, match=message):
        FeatureStore.open(copied.path)
    with pytest.raises(
        ArchspecError, match=r"data_2\.ckpt: damaged, .*; the dump changed since it was adopted: adopt it"
    ):
        copied.read(2, [1])
    path.unlink()
    with pytest.raises(
        ArchspecError, match=r"data_2\.ckpt: this file of the adopted dump is missing; adopt the dump agai"
    ):
        FeatureStore.open(copied.path)


def test_a_file_exchanged_after_opening_is_named(copied: FeatureStore, target: Target) -> None:
    path = copied.path.parent / "dump" / "rows_2-4" / "data_2.ckpt"
    tokens = torch.arange(3, 9)
    torch.save(specforge_point(target, (tokens, tokens > 5), [0, 1]), path)
    with pytest.raises(ArchspecError, match=r"6 tokens and 2 aux layers, but \d+ and 3 were adopted; the dump changed"):
        copied.read(2, [1])


def test_the_same_words_reuse_a_store_and_others_are_refused(
    adopted: FeatureStore, dump: Path, native: FeatureStore, target: Target
) -> None:
    console = quiet()
    again = adopt_dump(target, dump, LAYERS, adopted.path, console, own_temperature=0.0)
    assert again.fingerprint == adopted.fingerprint
    assert output(console) == f"features: reusing {adopted.path} (12 documents)\n"
    message = r"already holds another feature store: the text's origin, copied or not\. Adopt into another folder"
    with pytest.raises(ArchspecError, match=message):
        adopt(target, dump, copy=True)
    with pytest.raises(ArchspecError, match=r"already holds another feature store: captured, not adopted, "):
        adopt(target, dump, out=native.path)


def test_a_moved_dump_leaves_the_fingerprint(copied: FeatureStore, adopted: FeatureStore) -> None:
    assert copied.fingerprint == adopted.fingerprint
    assert (
        adopted.fingerprint
        != FeatureStore(adopted.path, adopted.manifest.model_copy(update={"last_state": "pre_norm"})).fingerprint
    )


def test_manifests_from_before_adoption_open_with_their_fingerprint(native: FeatureStore, tmp_path: Path) -> None:
    old = Path(shutil.copytree(native.path, tmp_path / "old"))
    data = {k: v for k, v in json.loads((old / "manifest.json").read_text()).items() if k not in LATER_FIELDS}
    (old / "manifest.json").write_text(json.dumps(data, indent=1))
    kept = {k: v for k, v in data.items() if k not in ("target_path", "sources")}
    text = json.dumps(kept, separators=(",", ":"))
    text = re.sub(r"e-0(\d)", r"e-\1", text)  # pydantic writes 1e-5 where json writes 1e-05
    store = FeatureStore.open(old)
    assert store.fingerprint == hashlib.sha256(text.encode()).hexdigest()[:16] == native.fingerprint
    assert store.manifest.last_state == "pre_norm"


def test_reading_a_dump_does_not_hold_it(target: Target, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = [(torch.randint(3, 264, (400,), generator=generator), torch.arange(400) > 20) for _ in range(30)]
    store = adopt(target, specforge_dump(tmp_path / "dump", target, rows, [0, 1, 2]))
    store.read(0, [0, 1])
    before = psutil.Process().memory_info().rss
    for document in store.documents:
        store.read(document.index, [0, 1, 2])
    assert psutil.Process().memory_info().rss - before < store.size / 5


def test_a_kept_vocabulary_is_that_of_drafts_of_its_size(dump: Path, target: Target, tmp_path: Path) -> None:
    ids = torch.tensor([2, 5, 7, 100, 200, 263])
    t2d = torch.zeros(264, dtype=torch.bool)
    t2d[ids] = True
    torch.save({"d2t": ids - torch.arange(6), "t2d": t2d}, tmp_path / "vocab.pt")
    store = adopt(target, dump, out=tmp_path / "store", vocabulary=tmp_path / "vocab.pt")
    same = make_draft(spec_of(store, **{"head.vocab_size": 6}), store, everything(store), 0)
    assert torch.equal(same.vocab_ids, ids)
    other = make_draft(spec_of(store, **{"head.vocab_size": 7}), store, everything(store), 0)
    assert len(other.vocab_ids) == 7
    assert not set(ids.tolist()) <= set(other.vocab_ids.tolist())
    adopt(target, dump, out=tmp_path / "store", vocabulary=tmp_path / "vocab.pt")
    with pytest.raises(ArchspecError, match=r"already holds another feature store: the vocabulary\."):
        adopt(target, dump, out=tmp_path / "store")


def test_a_vocabulary_without_the_end_of_turn_is_warned_of(dump: Path, target: Target, tmp_path: Path) -> None:
    torch.save({"d2t": torch.tensor([3, 3])}, tmp_path / "vocab.pt")
    console = quiet()
    adopt_dump(target, dump, LAYERS, tmp_path / "store", console, vocabulary=tmp_path / "vocab.pt")
    assert "vocab.pt lacks the end-of-turn token 2" in output(console)


def test_compressed_files_are_copied_or_refused(target: Target, native: FeatureStore, tmp_path: Path) -> None:
    import gzip

    dump = specforge_dump(tmp_path / "dump", target, texts(native)[:2], [0, 1, 2])
    for path in list(dump.rglob("*.ckpt")):
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes(), 1))
        path.unlink()
    with pytest.raises(
        ArchspecError, match=r"data_0\.ckpt\.gz: a compressed file cannot be read in place; unpack it, or"
    ):
        adopt(target, dump)
    store = adopt(target, dump, copy=True)
    torch.testing.assert_close(store.read(0, [1]).aux, native.read(0, [1]).aux, rtol=1e-5, atol=1e-5)


def test_a_full_disk_is_told_before_the_work(
    dump: Path, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr("runners.features.adopt.shutil.disk_usage", lambda _: usage)
    with pytest.raises(
        ArchspecError, match=r"adopting needs 0\.1 GiB of free disk, but 0\.0 GiB are free; leave out --co"
    ):
        adopt(target, dump, out=tmp_path / "store", copy=True)


def edit(dump: Path, change: Callable[[dict[str, Any]], dict[str, Any]], name: str = "*.ckpt") -> None:
    for path in dump.rglob(name):
        torch.save(change(torch.load(path, weights_only=True)), path)


def output(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
