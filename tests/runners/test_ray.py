"""The Ray runner keeps the executors' contract on a real cluster of two nodes, and no more runs than fits."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path, PosixPath
from typing import Any

import pytest

pytest.importorskip("ray")

from archspec.errors import ArchspecError
from archspec.files import write_text
from runners.display.status import read_status
from runners.features.conversations import Conversation
from runners.features.store import FeatureStore
from runners.search.executor import Event, Executor, Finished, Started
from runners.search.leaderboard import leaderboard_rows
from runners.search.local import LocalExecutor
from runners.search.ray_nodes import NODES_FILE, here
from runners.search.ray_runner import connect
from runners.search.search_file import SearchFile
from runners.search.session import Prepared, execute
from runners.search.worker import WORKER_FILE, Shared
from runners.training.trial import Measurement
from tests.runners.executor_contract import ExecutorContract, events_until_finished, failure, outcome
from tests.runners.ray_cluster import GIB, Fixed, make_executor, reason
from tests.runners.replay import new_folder, search_file
from tests.runners.tasks import Hangs, rung_task
from tests.runners.tiny import save_tiny


@pytest.fixture
def address(ray_cluster: Any) -> str:
    return str(ray_cluster.address)


@pytest.mark.slow
class TestRayExecutor(ExecutorContract):
    @pytest.fixture(autouse=True)
    def _join(self, address: str) -> None:
        self.address = address

    def make(self, concurrent: int = 1, task_seconds: float | None = None) -> Executor:
        return make_executor(self.address, concurrent=concurrent, seconds=task_seconds, resources={"gpus": 0.5})


# What fits


@pytest.mark.slow
def test_two_candidates_of_different_needs_and_no_more_than_fits(
    address: str, tiny_store: FeatureStore, tmp_path: Path
) -> None:
    """Three GPUs of 10 GB: one large candidate fills one, two small ones share another; Ray and the count agree."""

    def need(task: Any, device: str, workers: int) -> Fixed:
        return Fixed((9 if task.number == 0 else 4) * GIB // 16)

    resources = {"gpu_memory": 10 * GIB // 16, "cpus": 0.25, "memory": GIB // 16}
    executor = make_executor(address, estimate=need, resources=resources)
    tasks = [
        rung_task(
            tiny_store,
            tmp_path / str(number),
            number=number,
            features=Hangs("x"),
            train={"device": "auto", "learning_rate": 1e-6 * (number + 1)},  # each is estimated by itself
        )
        for number in range(9)
    ]
    try:
        submitted = []
        for task in tasks:
            assert executor.refusal(task) is None
            if executor.fits(task):
                executor.submit(task)
                submitted.append(task.number)
        assert submitted == [0, 1, 2, 3, 4]
        assert executor.full
        started: list[Started] = []
        while len(started) < len(submitted):
            started += [event for event in executor.wait(30) if isinstance(event, Started)]
        places = sorted(str(event.where) for event in started)
        assert len(places) == 5
        assert len(set(places)) == 3
        assert sum(place.startswith("node-a gpu") for place in places) in (3, 4)
    finally:
        executor.shutdown()


def test_a_trial_that_no_gpu_holds_is_refused_before_submission(
    address: str, tiny_store: FeatureStore, tmp_path: Path
) -> None:
    executor = make_executor(address, estimate=lambda *_: Fixed(12 * 10**9), resources={"gpu_memory": 10 * 10**9})
    task = rung_task(tiny_store, tmp_path, train={"device": "auto"})
    assert "12.0 GB of GPU memory, but the largest GPU has 10.0 GB" in reason(executor.refusal(task))
    assert not executor.fits(task)
    executor.shutdown()


def test_a_file_that_asks_for_more_than_any_node_has_is_refused(
    address: str, tiny_store: FeatureStore, tmp_path: Path
) -> None:
    executor = make_executor(address, resources={"gpus": 1, "cpus": 3})
    with pytest.raises(ArchspecError) as caught:
        executor.refusal(rung_task(tiny_store, tmp_path))
    assert "a trial asks for 1 GPU, 3 CPU, but" in str(caught.value)
    assert "node-a: 2 GPU, 2 CPU, 4.3 GB of memory" in str(caught.value)
    executor.shutdown()


# Nodes


class Mounted(PosixPath):
    """A path that leads elsewhere on one node, as a mount that was forgotten there would: to ``PATH-of-NODE``."""

    def __reduce__(self) -> Any:
        return _as_seen_here, (str(self),)


def _as_seen_here(path: str) -> Path:
    other = Path(f"{path}-of-{here(None).name}")
    return other if other.exists() else Path(path)


@pytest.mark.slow
def test_a_node_that_sees_another_store_ends_the_search_at_the_start(
    address: str, tiny_store: FeatureStore, other_store: Path, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "store").symlink_to(tiny_store.path)
    (tmp_path / "store-of-node-b").symlink_to(other_store)
    shared = Shared.of(Mounted(tmp_path / "store"), tiny_store.fingerprint, tmp_path / "run")
    with pytest.raises(ArchspecError) as caught:
        make_executor(address, shared=shared)
    seen = FeatureStore.open(other_store).fingerprint
    assert str(caught.value) == (
        f"node node-b sees the feature store {tmp_path / 'store-of-node-b'} as {seen}, but the search uses "
        f"{tiny_store.fingerprint}; all nodes must see one store"
    )
    told = (tmp_path / "run" / NODES_FILE).read_text(encoding="utf-8")
    assert "node node-b sees the feature store" in told


@pytest.mark.slow
def test_trials_wait_for_a_node_to_come_and_leave_it_alone_if_it_is_unfit(
    ray_cluster: Any, address: str, tiny_store: FeatureStore, other_store: Path, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "store").symlink_to(tiny_store.path)
    (tmp_path / "store-of-node-c").symlink_to(other_store)
    shared = Shared.of(Mounted(tmp_path / "store"), tiny_store.fingerprint, tmp_path / "run")
    wanted: dict[str, Any] = {"autoscale": 1, "resources": {"cpus": 3, "gpus": 0}}
    fine, wary = make_executor(address, **wanted), make_executor(address, shared=shared, **wanted)
    node = None
    try:
        task = rung_task(tiny_store, tmp_path / "0", rungs=(1,))
        assert fine.refusal(task) is None
        assert fine.fits(task)
        fine.submit(task)
        assert not fine.fits(task)
        assert list(fine.wait(1)) == []
        node = ray_cluster.add_node(num_cpus=3, node_name="node-c")
        started, *_, ended = events_until_finished(fine)
        assert isinstance(started, Started)
        assert started.where == "node-c"
        assert isinstance(ended, Finished)
        assert isinstance(ended.result, Measurement)
        result = failure(wary, rung_task(tiny_store, tmp_path / "1", rungs=(1,)))
        assert (result.kind, result.retry) == ("crashed", True)
        assert result.reason.startswith(f"node node-c sees the feature store {tmp_path / 'store-of-node-c'} as ")
        told = json.loads((tmp_path / "run" / NODES_FILE).read_text(encoding="utf-8"))
        assert list(told["refused"].values()) == [result.reason]
    finally:
        fine.shutdown()
        wary.shutdown()
        if node is not None:
            ray_cluster.remove_node(node)


@pytest.mark.slow
def test_every_node_stages_the_store_once_and_trials_read_the_copy(
    address: str, tiny_store: FeatureStore, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    shared = Shared.of(tiny_store.path, tiny_store.fingerprint, tmp_path / "run")
    resources = {"gpus": 0.5}
    executor = make_executor(address, shared=shared, stage_to=str(tmp_path / "disk"), resources=resources)
    task = rung_task(tiny_store, tmp_path / "run" / "0000", rungs=(1,))
    try:
        while executor.full:
            assert list(executor.wait(1)) == []
        assert isinstance(outcome(executor, task), Measurement)
    finally:
        executor.shutdown()
    staged = tmp_path / "disk" / tiny_store.fingerprint
    assert FeatureStore.open(staged).fingerprint == tiny_store.fingerprint
    assert str(staged) in (tmp_path / "run" / NODES_FILE).read_text(encoding="utf-8")


# Joining


def test_a_process_stays_on_its_cluster(address: str) -> None:
    assert connect(address) == connect("auto") == (False, None)
    with pytest.raises(ArchspecError, match=f"this process is on the Ray cluster {address} already, not on other:1"):
        connect("other:1")
    with pytest.raises(ArchspecError, match="already, so none can be started"):
        connect(None)


SCRIPT = """
import sys
from archspec.errors import ArchspecError
from runners.search.ray_runner import connect
try:
    connect(sys.argv[1])
except ArchspecError as error:
    sys.exit(str(error))
"""


@pytest.mark.parametrize("where", ["127.0.0.1:1", "nowhere"])
def test_a_cluster_that_does_not_answer_is_told_at_once(where: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, where], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr.startswith(f"runner.address: {where}: no Ray cluster answers (")
    assert done.stderr.rstrip().endswith(
        "give HOST:PORT of the head node, port 6379 unless it was started with another"
    )


# A whole search


@pytest.mark.slow
def test_a_search_on_ray_equals_the_local_one(address: str, tiny_store: FeatureStore, tmp_path: Path) -> None:
    class Watcher:
        def __init__(self) -> None:
            self.events: list[Event] = []

        def began(self, search: Any) -> None:
            pass

        def changed(self, search: Any, event: Event) -> None:
            self.events.append(event)

    budget = {"trials": 2, "rungs": [400, 800], "seeds": 2}
    runs: dict[str, list[dict[str, Any]]] = {}
    for kind in ("local", "ray"):
        file = search_file(tiny_store, budget, baselines=["eagle3"], objective={"draft_length": 3, "bootstrap": 50})
        folder = new_folder(tmp_path / kind, file)
        if kind == "local":
            executor: Executor = LocalExecutor()
        else:
            shared = Shared.of(tiny_store.path, tiny_store.fingerprint, folder.path)
            executor = make_executor(address, shared=shared, concurrent=1, resources={"gpus": 0.5})
        watcher = Watcher()
        _, search = execute(Prepared(folder, file, tiny_store), watcher, executor)
        kept = ("rank", "trial", "hash", "state", "rungs", "acceptance_length", "low", "high", "loss", "seeds")
        runs[kind] = [{name: row[name] for name in kept} for row in leaderboard_rows(search)]
        wheres = {event.where for event in watcher.events if isinstance(event, Started)}
        assert (None in wheres) == (kind == "local")
    assert runs["ray"] == runs["local"]
    assert (tmp_path / "ray" / "trials" / "0000" / WORKER_FILE).is_file()


@pytest.mark.slow
def test_a_search_starts_ray_itself_and_settles_what_auto_is(
    tiny_store: FeatureStore, own_text: list[Conversation], tmp_path: Path
) -> None:
    """The command as users run it; estimates decide what a trial takes."""
    save_tiny(tmp_path / "target")
    lines = [json.dumps({"messages": [m.model_dump() for m in text.messages]}) for text in own_text]
    (tmp_path / "text.jsonl").write_text("\n".join(lines), encoding="utf-8")
    file = small_search(tmp_path, "concurrent: 1")
    command = [sys.executable, "-m", "cli", "search", str(file), "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "begins, to 60 tokens, on " in done.stdout
    settled = SearchFile.load(tmp_path / "run" / "search.yaml")
    assert settled.train.dtype in ("float32", "bfloat16")
    nodes = json.loads((tmp_path / "run" / NODES_FILE).read_text(encoding="utf-8"))
    assert len(nodes["fit"]) == 1
    assert read_status(tmp_path / "run")[1]["state"] == "finished"


def small_search(folder: Path, runner: str) -> Path:
    """A search file on Ray over the target and the text in ``folder``."""
    text = f"""
        target: {{model: {folder / "target"}, device: cpu}}
        data: {{conversations: [{folder / "text.jsonl"}], holdout: 0.3, max_length: 256}}
        features: {folder / "features"}
        space: {{base: eagle3, choices: {{depth: [1, 2]}}}}
        fixed: {{inputs.aux_layers: [1, 2, 3], head.vocab_size: full}}
        train: {{batch_tokens: 300, ttt_steps: 2}}
        budget: {{trials: 1, rungs: [60]}}
        runner: {{kind: ray, {runner}}}
    """
    write_text(folder / "search.yaml", textwrap.dedent(text))
    return folder / "search.yaml"


# Without Ray

BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ray":
            raise ModuleNotFoundError("No module named 'ray'", name="ray")

sys.meta_path.insert(0, Blocker())
sys.argv = ["archspec", "search", sys.argv[1], "--out", sys.argv[2]]
from cli import main
main()
"""


def test_without_ray_one_message_says_what_to_install(tmp_path: Path) -> None:
    save_tiny(tmp_path / "target")
    command = [sys.executable, "-c", BLOCKED, str(small_search(tmp_path, "concurrent: 1")), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "runner.kind: ray needs Ray, which is not installed here: pip install 'draft-archspec[ray]'" in done.stderr
    assert "Traceback" not in done.stderr
