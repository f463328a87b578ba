"""A capture by workers of a real Ray cluster: the store of a plain capture, though a worker dies on the way."""

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

import torch

from archspec.errors import ArchspecError
from archspec.files import write_text
from archspec.schema import Document
from runners.features.answers import AnswerOrder, answer_prompts
from runners.features.capture import capture
from runners.features.conversations import Conversation
from runners.features.parts import PartOrder
from runners.features.target import Target, load_target, target_facts
from runners.features.work import Order, Tell
from runners.search.ray_capture import MARK_FILE, RayWorkers, Start, carry_out, target_of, told_of
from runners.search.ray_nodes import alive_nodes
from runners.search.run_folder import RunFolder
from runners.search.runner_settings import RunnerSettings
from runners.search.search_file import SearchFile, TargetSettings
from runners.search.session import open_features
from runners.search.worker import Place
from tests.runners.tiny import conversation, save_tiny, tiny_target

TINY = {"dtype": "float32", "max_length": 256, "batch_tokens": 150, "shard_tokens": 150}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("model")))


class Deadly(PartOrder):
    """Part 2 ends the process of its first worker."""

    def run(self, target: Target, tell: Tell) -> None:
        mark = self.out / "died"
        if self.part.number == 1 and not mark.exists():
            write_text(mark, "")
            os.kill(os.getpid(), signal.SIGKILL)
        super().run(target, tell)


class Fatal(PartOrder):
    """Every worker dies of part 1."""

    def run(self, target: Target, tell: Tell) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Among(RayWorkers):
    """Workers that get other orders in place of their own."""

    kind: type[PartOrder] = Deadly

    def carry_out(self, target: Target, orders: Sequence[Any], tell: Tell) -> None:
        changed: list[Order] = [self.kind(order.part, order.texts, order.out, order.plan) for order in orders]
        super().carry_out(target, changed, tell)


def workers(kind: type[RayWorkers], ray_cluster: Any, model: str, count: int, lines: list[str]) -> RayWorkers:
    settings = TargetSettings(model=model, device="cpu")
    return kind(str(ray_cluster.address), settings, count, lines.append)


# A worker, without Ray


def start(model: str, folder: Path, **changes: str) -> Start:
    write_text(folder / MARK_FILE, "mark")
    told = {"fingerprint": tiny_target().fingerprint, "mark": "mark", **changes}
    return Start(TargetSettings(model=model), folder=folder, threads=1, node_name="n", **told)


def test_a_worker_loads_the_target_that_the_driver_has(model: str, tmp_path: Path) -> None:
    here = Place("1", "n", ())
    assert target_of(start(model, tmp_path), here).fingerprint == tiny_target().fingerprint
    with pytest.raises(
        ArchspecError, match=r"sees the target .* as \w{16}, but the driver as other; all nodes must see"
    ):
        target_of(start(model, tmp_path, fingerprint="other"), here)
    with pytest.raises(ArchspecError, match=r"sees another folder as .*, which must be on a shared path"):
        target_of(start(model, tmp_path, mark="other"), here)
    there = start(model, tmp_path)
    (tmp_path / MARK_FILE).unlink()
    with pytest.raises(ArchspecError, match=r"does not see .* \(.*No such file.*\), which must be on a shared path"):
        target_of(there, here)


def test_a_worker_tells_how_far_it_is(tmp_path: Path) -> None:
    prompts = tuple(conversation("word", name=f"p{number}") for number in range(4))
    order = AnswerOrder(0, 1, prompts, tmp_path, 99, 2, 0.0, 2, 0)
    assert told_of(order, "first") == 0
    carry_out(order, "first", tiny_target())
    assert (told_of(order, "first"), told_of(order, "second")) == (2, 0)  # the rest came within a second


def test_out_of_memory_says_what_needs_less(tmp_path: Path) -> None:
    class Large(AnswerOrder):
        def run(self, target: Target, tell: Tell) -> None:
            raise torch.OutOfMemoryError("tried to allocate 80 GiB")

    with pytest.raises(ArchspecError, match="out of memory: tried to allocate 80 GiB; smaller batches need less"):
        carry_out(Large(0, 1, (), tmp_path, 99, 2, 0.0, 2, 0), "a", tiny_target())


# Workers of a cluster


@pytest.mark.slow
def test_two_workers_make_the_store_though_one_dies(
    ray_cluster: Any, model: str, own_text: list[Conversation], tmp_path: Path
) -> None:
    target, lines, told = load_target(model), list[str](), list[tuple[int, int]]()
    store = capture(
        target,
        own_text,
        [1, 3],
        tmp_path / "store",
        **TINY,  # type: ignore[arg-type]
        on_progress=lambda done, total: told.append((done, total)),
        workers=workers(Among, ray_cluster, model, 2, lines),
    )
    plain = capture(target, own_text, [1, 3], tmp_path / "plain", **TINY)  # type: ignore[arg-type]
    assert (tmp_path / "store/died").exists()
    assert store.fingerprint == plain.fingerprint
    assert lines[0] == "cluster: workers: 1 on node-a, 1 on node-b"
    assert "died" in lines[1]
    assert lines[1].endswith("part 2 of 2 begins again")
    assert told[-1] == (store.manifest.tokens, store.manifest.tokens)
    assert not (tmp_path / "store/.parts").exists()


@pytest.mark.slow
def test_a_part_of_which_every_worker_dies_is_told(
    ray_cluster: Any, model: str, own_text: list[Conversation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runners.search.ray_capture.ATTEMPTS", 2)
    monkeypatch.setattr(Among, "kind", Fatal)
    with pytest.raises(ArchspecError, match=r"part \d of 2 has ended 2 workers, the last the worker on node node-\w"):
        capture(
            load_target(model),
            own_text,
            [1],
            tmp_path / "store",
            **TINY,  # type: ignore[arg-type]
            workers=workers(Among, ray_cluster, model, 2, []),
        )


@pytest.mark.slow
def test_a_cluster_that_loses_its_last_node_is_told(
    ray_cluster: Any, model: str, own_text: list[Conversation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the driver; the nodes of the session's cluster stay."""
    nodes = [alive_nodes, alive_nodes, dict]
    monkeypatch.setattr(Among, "kind", Fatal)
    monkeypatch.setattr("runners.search.ray_capture.alive_nodes", lambda: nodes.pop(0)())
    with pytest.raises(ArchspecError, match="no node of the Ray cluster is left; mend the cluster"):
        capture(
            load_target(model),
            own_text,
            [1],
            tmp_path / "store",
            **TINY,  # type: ignore[arg-type]
            workers=workers(Among, ray_cluster, model, 1, []),
        )


def test_a_cluster_too_busy_for_a_worker_is_told(
    ray_cluster: Any, model: str, own_text: list[Conversation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runners.search.ray_capture.START_SECONDS", -1)
    with pytest.raises(ArchspecError, match=r"no worker has started within -1 s; is the cluster so busy"):
        capture(
            load_target(model),
            own_text,
            [1],
            tmp_path / "store",
            **TINY,  # type: ignore[arg-type]
            workers=workers(RayWorkers, ray_cluster, model, 1, []),
        )


@pytest.mark.slow
def test_a_node_without_the_target_is_named(
    ray_cluster: Any, model: str, own_text: list[Conversation], tmp_path: Path
) -> None:
    with pytest.raises(ArchspecError, match=r"^node node-\w: package:no_such_package: no such Python package"):
        capture(
            load_target(model),
            own_text,
            [1],
            tmp_path / "store",
            **TINY,  # type: ignore[arg-type]
            workers=workers(RayWorkers, ray_cluster, "package:no_such_package", 1, []),
        )


@pytest.mark.slow
def test_two_workers_answer_as_this_process_does(ray_cluster: Any, model: str, tmp_path: Path) -> None:
    prompts = [conversation("word " * (1 + 3 * number % 7), name=f"p{number}") for number in range(9)]
    target, two = load_target(model), workers(RayWorkers, ray_cluster, model, 2, [])
    answer_prompts(target, prompts, 8, 0.0, 2, 0, tmp_path / "here")
    answer_prompts(target, prompts, 8, 0.0, 2, 0, tmp_path / "there", workers=two)
    assert (tmp_path / "there").read_text() == (tmp_path / "here").read_text()


@pytest.mark.slow
def test_a_search_on_a_cluster_captures_there(
    ray_cluster: Any, model: str, own_text: list[Conversation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.jsonl").write_text("".join(json.dumps(row.row()) + "\n" for row in own_text), encoding="utf-8")
    data = {
        "target": {"model": os.path.relpath(model), "device": "cpu"},
        "data": {"conversations": ["text.jsonl"], "max_length": 256},
        "features": {"path": "features", "workers": 2, "batch_tokens": 150, "shard_tokens": 150},
        "space": {"base": "eagle3", "choices": {"depth": [1, 2]}},
        "fixed": {"inputs.aux_layers": [1, 2], "head.vocab_size": 128},
        "budget": {"trials": 2, "rungs": [100, 200]},
        "runner": {"kind": "ray", "address": str(ray_cluster.address)},
    }
    file, lines = Document(data, "search").validate(SearchFile), list[str]()
    store = open_features(file, target_facts(model), RunFolder(tmp_path / "run"), lines.append, None)
    assert store.manifest.layer_ids == (1, 2, 3)
    assert "cluster: workers: 1 on node-a, 1 on node-b" in lines
    local = file.model_copy(update={"runner": RunnerSettings()})  # finds the store, and has no need of Ray
    again = open_features(local, target_facts(model), RunFolder(tmp_path / "run"), lines.append, None)
    assert again.fingerprint == store.fingerprint


def test_what_no_node_holds_is_refused_with_both_numbers(
    ray_cluster: Any, model: str, own_text: list[Conversation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runners.search.ray_capture.LIBRARY_BYTES", 9 << 30)
    with pytest.raises(ArchspecError) as caught:
        capture(
            load_target(model),
            own_text,
            [1],
            tmp_path / "store",
            **TINY,  # type: ignore[arg-type]
            workers=workers(RayWorkers, ray_cluster, model, 2, []),
        )
    message = str(caught.value)
    assert message.startswith("a worker with the target asks for 0 GPU, 1 CPU and 9.7 GB of memory, but no node has")
    assert "node-a: 2 GPU, 2 CPU, 4.3 GB of memory" in message
