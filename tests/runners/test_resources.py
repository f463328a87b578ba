"""What a trial asks for, where it is placed, and what is refused with both numbers. No Ray, no processes."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from archspec.errors import ArchspecError
from archspec.schema import Document
from runners.features.store import FeatureStore
from runners.search.resources import Ledger, Need, Node, Sizer, by_training_memory
from runners.search.runner_settings import ResourceSettings
from runners.search.search_file import SearchFile
from runners.training.trial import RungTask
from tests.runners.drafts import tiny_spec
from tests.runners.tasks import rung_task

GB = 10**9
BIG = Node("a", "node-a", 8, 64 * GB, 2, 80 * GB)
SMALL = Node("b", "node-b", 4, 32 * GB, 1, 24 * GB)
PLAIN = Node("c", "node-c", 16, 16 * GB, 0)


@dataclass(frozen=True)
class Bytes:
    device: int
    host: int


def by_number(task: RungTask, device: str, workers: int) -> Need:
    """Trial n needs n GB on its device, and 2 GB of the host's memory more on a GPU."""
    return Bytes(task.number * GB, 2 * GB if device == "cuda" else task.number * GB)


@pytest.fixture
def task(tiny_store: FeatureStore, tmp_path: Path) -> Any:
    """A task that needs so many GB."""

    def make(gigabytes: int, **train: Any) -> RungTask:
        own = {"device": "auto", "threads": None, "learning_rate": 1e-6 * gigabytes}  # each is estimated by itself
        return rung_task(tiny_store, tmp_path, number=gigabytes, train=own | train)

    return make


def ledger(*nodes: Node, **resources: Any) -> Ledger:
    made = Ledger(Sizer(ResourceSettings.model_validate(resources), by_number))
    for node in nodes:
        made.add(node)
    return made


def taken(ledger: Ledger, task: RungTask, key: str) -> list[tuple[str, tuple[int, ...], float]] | None:
    """Place and take a task: node, devices and share of each worker; None if it does not fit."""
    placed = ledger.place(task)
    if placed is None:
        return None
    ledger.take(key, placed)
    return [(one.node.name, one.gpus, one.request.gpus) for one in placed]


def test_an_estimate_becomes_a_share_of_the_nodes_own_gpu(task: Any) -> None:
    sizer = ledger(BIG, SMALL).sizer
    assert sizer.request(task(20), BIG, True).gpus == 0.25
    assert sizer.request(task(20), SMALL, True).gpus == 0.84  # 20 / 24, rounded up to a hundredth
    assert sizer.request(task(30), SMALL, True).gpus == 1.25
    assert sizer.request(task(20), BIG, True).memory == 2 * GB
    assert sizer.request(task(20, threads=3), BIG, True).cpus == 3


def test_what_the_file_says_goes_before_estimates(task: Any) -> None:
    sizer = ledger(BIG, gpus=0.5, cpus=2, memory=5 * GB).sizer
    request = sizer.request(task(70, threads=3), BIG, True)
    assert (request.gpus, request.cpus, request.memory) == (0.5, 2, 5 * GB)


@pytest.mark.parametrize(
    ("device", "resources", "any_gpu", "on_gpu"),
    [
        ("auto", {}, True, True),
        ("auto", {}, False, False),
        ("auto", {"gpu_memory": GB}, False, True),
        ("cuda", {}, False, True),
        ("cpu", {}, True, False),
        ("auto", {"gpus": 0}, True, False),
        ("auto", {"gpus": 0.3}, False, True),
    ],
)
def test_where_a_trial_trains(task: Any, device: str, resources: dict[str, Any], any_gpu: bool, on_gpu: bool) -> None:
    assert ledger(**resources).sizer.on_gpu(device, any_gpu) == on_gpu


def test_a_gpu_of_unknown_size_is_taken_whole_unless_the_file_tells(task: Any) -> None:
    unknown = replace(BIG, gpu_memory=None)
    assert ledger(unknown).sizer.request(task(1), unknown, True).gpus == 1
    assert ledger(unknown, gpu_memory=10 * GB).sizer.request(task(1), unknown, True).gpus == 0.1


def test_no_gpu_is_promised_more_than_it_has(task: Any) -> None:
    """0.6 and 0.6 leave 0.8 of two GPUs, but no room for a third 0.6."""
    made = ledger(BIG)
    assert taken(made, task(48), "1") == [("node-a", (0,), 0.6)]
    assert taken(made, task(48), "2") == [("node-a", (1,), 0.6)]
    assert taken(made, task(48), "3") is None
    assert taken(made, task(32), "4") == [("node-a", (0,), 0.4)]
    made.free("2")
    assert taken(made, task(80), "5") == [("node-a", (1,), 1.0)]


def test_a_share_goes_where_ray_puts_it_and_moves_when_ray_did_otherwise(task: Any) -> None:
    made = ledger(BIG)
    assert taken(made, task(40), "1") == [("node-a", (0,), 0.5)]
    assert taken(made, task(16), "2") == [("node-a", (0,), 0.2)]  # the fullest that has room
    request = made.sizer.request(task(16), BIG, True)
    made.moved("2", [("a", ("1",))], request)
    assert taken(made, task(40), "3") == [("node-a", (0,), 0.5)]
    made.moved("3", [("a", ("GPU-5ab3",))], request)  # a name that says nothing of the device
    assert taken(made, task(72), "4") is None


def test_a_team_that_ray_placed_counts_with_all_its_workers(task: Any) -> None:
    made = ledger(BIG, replace(BIG, id="z", name="node-z"), workers=2)
    made.take("1", [])  # submitted to no node in particular
    made.moved("1", [("a", ("0",)), ("z", ("1",))], made.sizer.request(task(40), BIG, True))
    assert taken(made, task(40), "2") in (
        [("node-a", (1,), 1.0), ("node-z", (0,), 1.0)],
        [("node-z", (0,), 1.0), ("node-a", (1,), 1.0)],
    )
    assert taken(made, task(40), "3") is None


def test_cores_and_memory_count_too(task: Any) -> None:
    made = ledger(PLAIN, cpus=7)
    assert [taken(made, task(4), str(number)) is not None for number in range(3)] == [True, True, False]
    made = ledger(PLAIN)
    assert [taken(made, task(6), str(number)) is not None for number in range(3)] == [True, True, False]


def test_idle_nodes_come_first_and_one_that_failed_last(task: Any) -> None:
    made = ledger(BIG, replace(BIG, id="z", name="node-z"))
    first = made.place(task(8))
    assert first is not None
    made.take("1", first)
    other = made.place(task(8))
    assert other is not None
    assert other[0].node != first[0].node
    avoiding = made.place(task(8), avoid=other[0].node.id)
    assert avoiding is not None
    assert avoiding[0].node == first[0].node


def test_what_no_gpu_holds_is_refused_with_both_numbers(task: Any) -> None:
    made = ledger(BIG, SMALL)
    assert made.refusal(task(80)) is None
    refused = made.refusal(task(81))
    assert refused is not None
    assert (refused.kind, refused.retry) == ("out_of_memory", False)
    assert refused.reason.startswith("not begun: training is estimated to need 81.0 GB of GPU memory, but the largest")
    assert "GPU has 80.0 GB (node-a)" in refused.reason
    each = ledger(BIG, workers=2).refusal(task(81))  # each holds all weights, so a team needs no less of a GPU
    assert each is not None
    assert each.reason.startswith("not begun: each worker is estimated to need 81.0 GB of GPU memory")
    assert each.reason.endswith(
        "smaller batch_tokens or more runner.resources.workers lower the part that batches take"
    )


def test_what_no_nodes_memory_holds_is_refused_with_both_numbers(task: Any) -> None:
    refused = ledger(PLAIN).refusal(task(17))
    assert refused is not None
    assert refused.reason == (
        "not begun: training is estimated to need 0 GPU, 1 CPU and 17.0 GB of memory, but no room in the cluster is "
        "so large (node-c: 0 GPU, 16 CPU, 16.0 GB of memory)"
    )
    assert ledger(PLAIN).refusal(task(17), more_to_come=True) is None


def test_a_node_that_left_does_not_make_trials_fail(task: Any) -> None:
    made = ledger(BIG, SMALL)
    made.lose("a")
    assert made.place(task(40)) is None
    assert made.refusal(task(40)) is None
    assert made.refusal(task(81)) is not None


def test_amounts_that_no_node_has_are_refused_at_the_start(task: Any) -> None:
    with pytest.raises(ArchspecError) as caught:
        ledger(BIG, PLAIN, cpus=20, gpus=1).require(task(1))
    assert str(caught.value) == (
        "runner.resources: a trial asks for 1 GPU, 20 CPU, but no room in the cluster is so large "
        "(node-a: 2 GPU of 80.0 GB, 8 CPU, 64.0 GB of memory; node-c: 0 GPU, 16 CPU, 16.0 GB of memory)"
    )
    with pytest.raises(ArchspecError, match="a trial asks for 1 GPU, 1 CPU, but"):
        ledger(PLAIN).require(task(1, device="cuda"))
    with pytest.raises(ArchspecError, match="a trial asks for 4 workers with 1 GPU, 1 CPU each"):
        ledger(BIG, SMALL, workers=4).require(task(1))
    ledger(BIG, PLAIN).require(task(500))  # an estimate is the candidate's matter, not the file's


def test_workers_of_one_trial_have_a_gpu_each(task: Any) -> None:
    made = ledger(BIG, SMALL, workers=3)
    assert taken(made, task(100), "1") == [("node-a", (0,), 1.0), ("node-a", (1,), 1.0), ("node-b", (0,), 1.0)]
    assert taken(made, task(1), "2") is None


def test_the_real_estimate_grows_with_the_draft(tiny_store: FeatureStore, tmp_path: Path) -> None:
    estimate = by_training_memory(200)
    small = rung_task(tiny_store, tmp_path)
    large = replace(small, spec=tiny_spec(tiny_store.facts, changes={"layers.0.mlp.intermediate_size": 4096}))
    for device in ("cpu", "cuda"):
        assert 0 < estimate(small, device, 1).device < estimate(large, device, 1).device
    assert estimate(small, "cpu", 1).host > 0


START = (
    "target: {model: m}\ndata: {conversations: [t.jsonl]}\nfeatures: f\nspace: norms\nbudget: {trials: 1, rungs: [9]}\n"
)


@pytest.mark.parametrize(
    ("runner", "message"),
    [
        ("kind: ray, resources: {gpus: 2}", "gpus = 2: must be auto or between 0 and 1, since a worker trains"),
        ("kind: ray, resources: {cpus: 0}", "cpus = 0: must be auto or a positive number of cores"),
        ("kind: ray, resources: {memory: 1.5}", "memory = 1.5: must be auto or a positive number of bytes"),
        ("kind: ray, resources: {gpus: 0.5, workers: 2}", "resources.gpus: 0.5 with 2 workers: workers of one"),
        ("kind: ray, autoscale: true", "autoscale = True: must be false or a positive number of trials that may wait"),
        ("kind: ray, stage_to: scratch", "runner.stage_to: 'scratch' must be an absolute path, since nodes differ"),
        ("kind: ray, address: 'ray://head:10001'", "runner.address: 'ray://head:10001' is no cluster to join"),
        ("kind: ray, address: local", "or leave it out to start Ray here"),
        ("address: auto", "runner.address: the local runner has no such setting; use kind: ray, or leave it out"),
        ("resources: {gpus: 1}", "runner.resources: the local runner has no such setting"),
        ("kind: ray}\ntrain: {device: 'cuda:1'", "search:7: train.device: the Ray runner gives every trial"),
    ],
)  # fmt: skip
def test_what_a_runner_cannot_honour_is_an_error(runner: str, message: str) -> None:
    with pytest.raises(ArchspecError) as caught:
        Document.parse(f"{START}runner: {{{runner}}}\n", "search").validate(SearchFile)
    assert message in str(caught.value)
    assert str(caught.value).startswith("search:")


def test_where_trials_run_may_change_on_a_resume() -> None:
    files = [
        Document.parse(f"{START}runner: {{{runner}}}\n", "search").validate(SearchFile)
        for runner in ("kind: local", "kind: ray, address: auto, resources: {gpus: 0.25, memory: 2e9}, autoscale: 4")
    ]
    assert files[0].must_not_change() == files[1].must_not_change()
    assert files[1].runner.resources.memory == 2 * GB
    assert Document.parse(files[1].dump(), "dump").validate(SearchFile) == files[1]
