"""A capture in parts: the same store as in one, whenever it was killed, and whoever goes on with it."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from archspec.errors import ArchspecError
from runners.features.capture import capture
from runners.features.conversations import Conversation, Generation
from runners.features.parts import PartOrder, batch_bounds, divide, part_count
from runners.features.store import FeatureStore
from runners.features.target import Target
from runners.features.work import Here
from tests.runners.tiny import conversation

LAYERS = (1, 3)


class Three(Here):
    """This process in place of three workers."""

    count = 3


class Usage(NamedTuple):
    free: int


def take(target: Target, rows: list[Conversation], out: Path, workers: Here | None = None, **options: Any) -> Any:
    settings = {"dtype": "float32", "max_length": 256, "batch_tokens": 150, "shard_tokens": 150}
    return capture(target, rows, LAYERS, out, **{**settings, **options}, workers=workers)


@pytest.fixture(scope="module")
def plain(target: Target, own_text: list[Conversation], tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    store = take(target, own_text, tmp_path_factory.mktemp("plain") / "store")
    assert isinstance(store, FeatureStore)
    assert len(store.manifest.shards) >= 5
    return store


def assert_same(store: FeatureStore, plain: FeatureStore) -> None:
    assert store.fingerprint == plain.fingerprint
    assert store.manifest == plain.manifest.model_copy(update={"sources": store.manifest.sources})
    names = sorted(path.name for path in store.path.iterdir())
    assert names == sorted(path.name for path in plain.path.iterdir())
    for name in names:
        assert (store.path / name).read_bytes() == (plain.path / name).read_bytes(), name


def forwards(target: Target, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Grows by the shape of every batch that the target reads from now on."""
    seen: list[tuple[int, ...]] = []
    right = target.states

    def states(ids: Any, layers: Any, *rest: Any) -> Any:
        seen.append(tuple(ids.shape))
        return right(ids, layers, *rest)

    monkeypatch.setattr(target, "states", states)
    return seen


def test_three_parts_are_the_store_of_one(
    target: Target, own_text: list[Conversation], plain: FeatureStore, tmp_path: Path
) -> None:
    store = take(target, own_text, tmp_path / "store", Three())
    assert_same(store, plain)
    store.verify()
    assert store.split(0.3) == plain.split(0.3)


def test_a_plain_capture_reuses_the_store_that_was_made_of_parts(
    target: Target, own_text: list[Conversation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = take(target, own_text, tmp_path / "store", Three())
    seen = forwards(target, monkeypatch)
    assert take(target, own_text, tmp_path / "store").fingerprint == store.fingerprint
    assert not seen


@given(
    st.lists(st.integers(2, 60), min_size=1, max_size=40), st.integers(1, 200), st.integers(1, 200), st.integers(1, 9)
)
def test_parts_are_runs_of_whole_shards_and_know_the_batches_of_a_single_run(
    lengths: list[int], batch_tokens: int, shard_tokens: int, count: int
) -> None:
    lengths = sorted(lengths, reverse=True)
    parts, batches = divide(lengths, batch_tokens, shard_tokens, count), batch_bounds(lengths, batch_tokens)
    assert [(part.number, part.start) for part in parts] == [*enumerate([0, *(part.stop for part in parts[:-1])])]
    assert parts[-1].stop == len(lengths)
    assert 1 <= len(parts) <= count
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        assert part.batches == tuple(one for one in batches if one[0] < part.stop and part.start < one[1])
        assert following is None or sum(lengths[part.start : part.stop]) >= shard_tokens * (
            following.shard - part.shard
        )
    (whole,) = divide(lengths, batch_tokens, shard_tokens, 1)
    assert (whole.batches, whole.shard) == (tuple(batches), 0)
    assert all(lengths[start] * (stop - start) <= batch_tokens or stop - start == 1 for start, stop in batches)


@pytest.mark.parametrize(
    ("documents", "workers", "count"),
    [
        (1000, 1, 1),  # as ever
        (50, 4, 1),  # a shard is the least
        (1000, 2, 2),  # borders would be too many for more
        (10_000, 2, 8),  # four for each worker
        (100_000, 2, 62),  # or as many as keep a part small
    ],
)
def test_how_many_parts(documents: int, workers: int, count: int) -> None:
    assert part_count([64] * documents, 4096, 6400, workers) == count


class Killed(BaseException):
    """This process is no more."""


@contextmanager
def killed_at(step: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Die at the given change of the file system: neither it nor any after it happens, be it tidying up."""
    steps: list[str] = []

    def deadly(function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            steps.append(f"{function.__name__} {arguments[0]}")
            if len(steps) > step:
                raise Killed
            return function(*arguments, **options)

        return call

    with monkeypatch.context() as patched:
        for name in ("replace", "rename", "unlink", "mkdir"):
            patched.setattr(Path, name, deadly(getattr(Path, name)))
        patched.setattr(shutil, "rmtree", deadly(shutil.rmtree))
        yield steps


@pytest.mark.parametrize("first", range(24))
def test_killed_at_any_step_it_goes_on(
    target: Target,
    own_text: list[Conversation],
    plain: FeatureStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    first: int,
) -> None:
    """Every 24th step, so that a test stays short; only the part that was interrupted is captured again."""
    for step in range(first, 1000, 24):
        out = tmp_path / str(step)
        with killed_at(step, monkeypatch) as steps:
            try:
                take(target, own_text, out, Three())
            except Killed:
                pass
            else:
                assert len(steps) > 30
                return
        whole = {int(path.parent.name) for path in out.glob(".parts/0*/part.json")}
        done = (out / "manifest.json").exists()
        lines: list[str] = []
        with monkeypatch.context() as patched:
            seen = forwards(target, patched)
            assert_same(take(target, own_text, out, Three(), report=lines.append), plain)
        parts = divide([document.length for document in plain.documents], 150, 150, 3)
        missing = [] if done else [part for part in parts if part.number not in whole]
        assert len(seen) == sum(len(part.batches) for part in missing)
        going_on = f"features: going on with an interrupted capture: {len(whole)} of 3 parts are there"
        assert (going_on in lines) == (bool(whole) and not done)


def interrupted(target: Target, rows: list[Conversation], out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave a capture of three parts with the first of them."""
    with monkeypatch.context() as patched:
        right = PartOrder.run

        def run(order: PartOrder, *arguments: Any) -> None:
            if order.part.number:
                raise Killed
            right(order, *arguments)

        patched.setattr(PartOrder, "run", run)
        with pytest.raises(Killed):
            take(target, rows, out, Three())
    assert [*out.glob(".parts/0*/part.json")]


def test_another_number_of_workers_goes_on_with_the_parts_that_there_are(
    target: Target, own_text: list[Conversation], plain: FeatureStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(target, own_text, tmp_path / "store", monkeypatch)
    lines: list[str] = []
    told: list[tuple[int, int]] = []
    seen = forwards(target, monkeypatch)
    store = take(
        target,
        own_text,
        tmp_path / "store",
        report=lines.append,
        on_progress=lambda done, total: told.append((done, total)),
    )
    assert_same(store, plain)
    assert lines[1] == "features: going on with an interrupted capture: 1 of 3 parts are there"
    assert 0 < sum(rows for rows, _ in seen) < len(own_text)
    assert told[0][0] > 0
    assert told[-1] == (plain.manifest.tokens, plain.manifest.tokens)


@pytest.mark.parametrize(
    "change", [{"shard_tokens": 149}, {"batch_tokens": 149}, {"dtype": "bfloat16"}, {"conversations": 11}]
)
def test_another_capture_begins_anew(
    target: Target,
    own_text: list[Conversation],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
) -> None:
    interrupted(target, own_text, tmp_path / "store", monkeypatch)
    lines: list[str] = []
    options = dict(change)
    rows = own_text[: options.pop("conversations", 12)]
    store = take(target, rows, tmp_path / "store", Three(), report=lines.append, **options)
    assert not any("going on" in line for line in lines)
    assert_same(store, take(target, rows, tmp_path / "plain", **options))


def test_a_damaged_part_is_made_again(
    target: Target, own_text: list[Conversation], plain: FeatureStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(target, own_text, tmp_path / "store", monkeypatch)
    shard = tmp_path / "store/.parts/0000/shard-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert_same(take(target, own_text, tmp_path / "store", Three()), plain)


def test_a_late_attempt_leaves_what_a_faster_one_has_made(
    target: Target, own_text: list[Conversation], plain: FeatureStore, tmp_path: Path
) -> None:
    """A worker that was given up for dead may still write."""

    class Twice(Three):
        def carry_out(self, target: Target, orders: Any, tell: Any) -> None:
            for order in orders:
                faster: list[Any] = []

                def told(done: int, order: Any = order, faster: list[Any] = faster) -> None:
                    if not faster:
                        faster.append(None)
                        order.run(target, tell)
                        record = order.folder / f"{order.part.number:04d}" / "part.json"
                        faster[0] = record.stat().st_ino

                order.run(target, told)
                assert faster == [(order.folder / f"{order.part.number:04d}" / "part.json").stat().st_ino]
            assert not [*orders[0].folder.glob(".*.part")]

    assert_same(take(target, own_text, tmp_path / "store", Twice()), plain)


def test_workers_that_leave_a_part_out_are_told(target: Target, own_text: list[Conversation], tmp_path: Path) -> None:
    class Lazy(Three):
        def carry_out(self, target: Target, orders: Any, tell: Any) -> None:
            super().carry_out(target, orders[1:], tell)

    with pytest.raises(ArchspecError, match="some parts of the capture are damaged; the same command makes them"):
        take(target, own_text, tmp_path / "store", Lazy())
    assert not (tmp_path / "store/manifest.json").exists()


def test_the_disk_must_hold_what_is_not_there_yet(
    target: Target, own_text: list[Conversation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "store"
    interrupted(target, own_text, out, monkeypatch)
    monkeypatch.setattr("runners.features.capture.shutil.disk_usage", lambda path: Usage(free=1 << 20))
    with pytest.raises(ArchspecError) as caught:
        take(target, own_text, out, Three())
    rest = float(str(caught.value).split("free disk (")[1].split(" KiB")[0])
    with pytest.raises(ArchspecError) as caught:
        take(target, own_text, tmp_path / "fresh", Three())
    whole = float(str(caught.value).split("free disk (")[1].split(" KiB")[0])
    size = sum(path.stat().st_size for path in out.glob(".parts/0000/shard-*"))
    assert whole - rest == pytest.approx(size / 1024, abs=0.2)


def test_low_agreement_in_any_part_is_warned_of(target: Target, own_text: list[Conversation], tmp_path: Path) -> None:
    false = Generation(token_ids=tuple(range(3, 10)), target=target.fingerprint)
    rows = [
        *own_text,
        *(conversation("Hi", "no", name=f"{n}").model_copy(update={"generation": false}) for n in "abcdefghijkl"),
    ]
    lines: list[str] = []
    take(target, rows, tmp_path / "store", Three(), report=lines.append)
    assert "100.0% of the target's own tokens are its argmax" in lines[-2]
    assert lines[-1].startswith("features: warning: much of the text marked as this target's own is not what it says")
