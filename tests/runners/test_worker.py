"""What a node of a cluster is asked and does, without a cluster: checks, the store's copy, and what a task tells."""

import multiprocessing
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from rich.console import Console

from archspec.errors import ArchspecError
from runners.features.adopt import adopt_dump
from runners.features.store import FeatureStore
from runners.features.target import Target
from runners.search.executor import Failure
from runners.search.staging import stage
from runners.search.worker import (
    MARK_FILE,
    WORKER_FILE,
    Place,
    Shared,
    UnfitNodeError,
    look_at,
    problem_of,
    read_sign,
    run_task,
)
from runners.training.trial import Measurement
from tests.runners.dump_files import specforge_dump, texts
from tests.runners.tasks import Raises, rung_task

HERE = Place("id-1", "node-1", ())


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task without a GPU hides all of them from its process, which here is the tests'."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def shared(tiny_store: FeatureStore, tmp_path: Path) -> Shared:
    (tmp_path / "run").mkdir()
    return Shared.of(tiny_store.path, tiny_store.fingerprint, tmp_path / "run")


@contextmanager
def full_disk() -> Iterator[None]:
    """Nothing can be written: every file is to stay empty."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_fit_node_has_no_problem_and_keeps_nothing(shared: Shared) -> None:
    look = look_at(shared, HERE)
    assert look.problem is None
    assert look.dtype in ("float32", "bfloat16")
    assert [path.name for path in shared.folder.iterdir()] == [MARK_FILE]


def test_another_store_is_told_with_both_fingerprints(shared: Shared, other_store: Path) -> None:
    other = FeatureStore.open(other_store).fingerprint
    assert other != shared.fingerprint
    assert problem_of(replace(shared, features=other_store), "node-1") == (
        f"node node-1 sees the feature store {other_store} as {other}, but the search uses {shared.fingerprint}; "
        "all nodes must see one store"
    )


def test_a_store_that_is_not_there_is_told(shared: Shared, tmp_path: Path) -> None:
    problem = problem_of(replace(shared, features=tmp_path / "nowhere"), "node-1")
    assert problem is not None
    assert problem.startswith(
        f"node node-1 cannot read the feature store {shared.fingerprint}: {tmp_path / 'nowhere'}:"
    )


def test_a_run_folder_that_is_not_shared_is_told(shared: Shared, tmp_path: Path) -> None:
    """Also one that has the same name on both machines and is another."""
    nowhere = problem_of(replace(shared, folder=tmp_path / "local"), "node-1")
    assert nowhere is not None
    assert nowhere.startswith(f"node node-1 does not see the run folder {tmp_path / 'local'}: ")
    assert nowhere.endswith("it must be on a shared path")
    assert problem_of(replace(shared, mark="of another search"), "node-1") == (
        f"node node-1 sees another folder as {shared.folder}; the run folder must be on a shared path"
    )


def test_a_run_folder_that_cannot_be_written_is_told(shared: Shared) -> None:
    with full_disk():
        problem = problem_of(shared, "node-1")
    assert problem is not None
    assert problem.startswith(f"node node-1 cannot write into the run folder {shared.folder}: ")


def test_a_task_tells_where_it_runs_and_how_far_it_is(shared: Shared, tiny_store: FeatureStore, tmp_path: Path) -> None:
    task = rung_task(tiny_store, tmp_path / "0007")
    task.directory.mkdir()
    assert read_sign(task.directory, "attempt") is None
    result = run_task(task, "attempt", 1, Place("id-1", "node-1", ("3",)), shared)
    assert isinstance(result, Measurement)
    sign = read_sign(task.directory, "attempt")
    assert sign is not None
    assert (sign.node, sign.places, sign.where) == ("id-1", (("id-1", ("3",)),), "node-1 gpu 3")
    assert sign.report is not None
    assert sign.report.step >= 1
    assert isinstance(sign.report.step_kl, tuple)
    assert read_sign(task.directory, "a later one") is None
    assert "seed 0 on node-1 gpu 3, process" in (task.directory / "log.txt").read_text(encoding="utf-8")


def test_a_file_that_is_half_there_is_no_sign(tmp_path: Path) -> None:
    (tmp_path / WORKER_FILE).write_text('{"attempt": "a')
    assert read_sign(tmp_path, "a") is None


def test_a_task_on_an_unfit_node_does_not_begin(shared: Shared, tiny_store: FeatureStore, tmp_path: Path) -> None:
    task = rung_task(tiny_store, tmp_path / "0007")
    with pytest.raises(UnfitNodeError, match="sees another folder") as caught:
        run_task(task, "attempt", 1, HERE, replace(shared, mark="other"))
    assert caught.value.node == "id-1"
    assert not task.directory.exists()


def test_failures_are_sorted_as_everywhere(tiny_store: FeatureStore, tmp_path: Path) -> None:
    task = rung_task(tiny_store, tmp_path, features=Raises("x"))
    assert run_task(task, "attempt", 1, HERE, None) == Failure("error", "RuntimeError: the disk is on fire")


# Staging


class Copied(NamedTuple):
    """A copy, and when its manifest was last changed."""

    path: Path
    changed: int


def copied(store: FeatureStore, into: Path) -> Copied:
    path = stage(store.path, into)
    return Copied(path, (path / "manifest.json").stat().st_ctime_ns)


def test_a_store_is_copied_once(tiny_store: FeatureStore, tmp_path: Path) -> None:
    first = copied(tiny_store, tmp_path / "disk")
    assert first.path == tmp_path / "disk" / tiny_store.fingerprint
    assert FeatureStore.open(first.path).fingerprint == tiny_store.fingerprint
    assert copied(tiny_store, tmp_path / "disk") == first
    left = [path.name for path in (tmp_path / "disk").iterdir() if not path.name.endswith(".lock")]
    assert left == [tiny_store.fingerprint]


def test_processes_of_a_node_take_turns(tiny_store: FeatureStore, tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(3) as pool:
        found = pool.starmap(copied, [(tiny_store, tmp_path / "disk")] * 3)
    assert len(set(found)) == 1


def test_what_a_kill_left_is_not_taken_for_a_copy(tiny_store: FeatureStore, tmp_path: Path) -> None:
    torn = tmp_path / f".{tiny_store.fingerprint}.1.part"
    shutil.copytree(tiny_store.path, torn)
    (torn / "manifest.json").write_text("{}")
    assert FeatureStore.open(stage(tiny_store.path, tmp_path)).fingerprint == tiny_store.fingerprint
    assert not torn.exists()


def test_a_copy_that_differs_is_not_kept(tiny_store: FeatureStore, tmp_path: Path) -> None:
    """The middle of a file is damaged where it is read from: opening does not see it, the copy's checksum does."""
    damaged = tmp_path / "damaged"
    shutil.copytree(tiny_store.path, damaged)
    shard = damaged / max(tiny_store.manifest.shards, key=lambda entry: entry.size).name
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 255
    shard.write_bytes(content)
    try:
        FeatureStore.open(damaged)
    except ArchspecError:
        pytest.skip("the tiny store's files are all edge")
    with pytest.raises(ArchspecError, match=r"damaged|checksum"):
        stage(damaged, tmp_path / "disk")
    assert not (tmp_path / "disk" / tiny_store.fingerprint).exists()


def test_another_store_under_the_copys_name_is_refused(
    tiny_store: FeatureStore, other_store: Path, tmp_path: Path
) -> None:
    shutil.copytree(other_store, tmp_path / tiny_store.fingerprint)
    with pytest.raises(ArchspecError, match=rf"{tiny_store.fingerprint}: holds store [0-9a-f]+ instead; remove it"):
        stage(tiny_store.path, tmp_path)


def test_a_disk_without_room_is_told(tiny_store: FeatureStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with full_disk(), pytest.raises(ArchspecError, match=r"cannot be staged there: .*File too large"):
        stage(tiny_store.path, tmp_path / "disk")
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(ArchspecError, match=r"cannot be staged there: it needs 0\.0 GB, but 0\.0 GB are free"):
        stage(tiny_store.path, tmp_path / "disk")


def test_a_store_whose_states_lie_elsewhere_is_not_staged(
    target: Target, tiny_store: FeatureStore, tmp_path: Path
) -> None:
    dump = specforge_dump(tmp_path / "dump", target, texts(tiny_store), [0, 1, 2])
    adopted = adopt_dump(target, dump, ["0", "1", "2"], tmp_path / "store", Console(quiet=True), own_temperature=0.0)
    with pytest.raises(ArchspecError, match=r"cannot be staged: its states lie in the dump .*adopt it with --copy"):
        stage(adopted.path, tmp_path / "disk")
