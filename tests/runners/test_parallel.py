"""Two workers against one on the same batches: the same steps, weights and acceptance, and nobody is left waiting.

The two processes are started once and go through every scenario of this file in turn; a test reads what they told.
"""

import json
import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from runners.features.store import FeatureStore
from runners.training.acceptance import measure_acceptance
from runners.training.parallel import ALONE, Item, ProcessGroup, Workers
from runners.training.settings import EvalSettings
from runners.training.trainer import StepReport, Trainer
from runners.training.trial import CHECKPOINT_FILE, METRICS_FILE, Measurement, read_metrics, run_rung
from tests.runners.drafts import SETTINGS, everything, new_trainer, run, single_thread, tiny_spec
from tests.runners.tasks import rung_task

WORKERS = 2
TOKENS, STOP = 1500, 700
EVALUATE = EvalSettings(draft_length=3, bootstrap=50, batch_tokens=200)
SPECS: dict[str, dict[str, Any]] = {
    "plain": {},
    "deep, reduced, trained": {"depth": 2, "head.vocab_size": 40, "embedding": "trained"},
}
SINGLY = SETTINGS.model_copy(update={"batch_tokens": 1})

Told = dict[str, Any]


def trainer_of(store: FeatureStore, workers: Workers, name: str = "plain", seed: int = 0, **settings: Any) -> Trainer:
    spec = tiny_spec(store.facts, changes=SPECS[name])
    return new_trainer(
        store, SETTINGS.model_copy(update=settings), spec=spec, seed=seed, total_tokens=TOKENS, workers=workers
    )


# What each of the two workers does


def trains(store: FeatureStore, folder: Path, workers: Workers) -> Told:
    """Every kind of draft, straight through, and its acceptance then."""
    told = {}
    for name in SPECS:
        trainer = trainer_of(store, workers, name)
        steps = reported(run(trainer, TOKENS))
        found = measure_acceptance(trainer.draft, store, everything(store), EVALUATE, workers=workers)
        trainer.save(folder / f"{name}-{rank_of(workers)}")
        told[name] = {"steps": steps, "acceptance": found.as_dict(), "tokens": trainer.progress.tokens}
    return told


def trains_in_bfloat16(store: FeatureStore, _folder: Path, workers: Workers) -> Told:
    return {"steps": reported(run(trainer_of(store, workers, dtype="bfloat16"), STOP))}


def takes_conversations_singly(store: FeatureStore, folder: Path, workers: Workers) -> Told:
    """Batches of one conversation, so that the second worker never has any."""
    trainer = trainer_of(store, workers, batch_tokens=1)
    steps = reported(run(trainer, STOP))
    trainer.save(folder / f"singly-{rank_of(workers)}")
    return {"steps": steps}


def stops_and_goes_on(store: FeatureStore, folder: Path, workers: Workers) -> Told:
    """From a checkpoint that one worker wrote, and up to one that one worker reads."""
    going_on = trainer_of(store, workers)
    going_on.load(folder / "of one")
    steps = reported(run(going_on, TOKENS))
    stopping = trainer_of(store, workers)
    run(stopping, STOP)
    if workers.first:
        stopping.save(folder / "of two")
    return {"steps": steps}


def goes_wrong_on_one(store: FeatureStore, _folder: Path, workers: Workers) -> Told:
    """The second worker's weights break after two steps."""
    trainer = trainer_of(store, workers)

    def poison(report: StepReport) -> None:
        if report.step == 2 and not workers.first:
            trainer.draft.lm_head.weight.data.fill_(torch.nan)

    return {"error": error_of(lambda: trainer.run(TOKENS, poison)), "step": trainer.progress.step}


def differs_on_one(store: FeatureStore, _folder: Path, workers: Workers) -> Told:
    trainer = trainer_of(store, workers, seed=0 if workers.first else 1)
    return {"error": error_of(lambda: trainer.run(TOKENS))}


def starts_a_little_differently(store: FeatureStore, _folder: Path, workers: Workers) -> Told:
    """As on another processor, whose products round in another way."""
    trainer = trainer_of(store, workers)
    if not workers.first:
        for parameter in trainer.draft.trainable_parameters():
            parameter.data += 1e-3
    return {"steps": reported(run(trainer, STOP))}


def runs_rungs(store: FeatureStore, folder: Path, workers: Workers) -> Told:
    """Both rungs of a trial, as a runner would, and the first once more."""
    task, steps = rung_task(store, folder / "trial"), list[StepReport]()
    told = [run_rung(task.at(rung), steps.append, workers).as_dict() for rung in (0, 1, 0)]
    return {"measurements": told, "steps": reported(steps)}


def lacks_a_store_on_one(store: FeatureStore, folder: Path, workers: Workers) -> Told:
    features = store.path if workers.first else folder / "not seen from here"
    return {"error": error_of(lambda: run_rung(rung_task(store, folder / "blind", features=features), workers=workers))}


def cannot_write(store: FeatureStore, folder: Path, workers: Workers) -> Told:
    (folder / "file").write_text("")
    return {"error": error_of(lambda: run_rung(rung_task(store, folder / "file" / "trial"), workers=workers))}


def finds_another_draft(store: FeatureStore, folder: Path, workers: Workers) -> Told:
    return {"error": error_of(lambda: run_rung(rung_task(store, folder / "trial", seed=5), workers=workers))}


SCENARIOS: list[Callable[[FeatureStore, Path, Workers], Told]] = [
    trains,
    trains_in_bfloat16,
    takes_conversations_singly,
    stops_and_goes_on,
    goes_wrong_on_one,
    differs_on_one,
    starts_a_little_differently,
    runs_rungs,
    finds_another_draft,
    lacks_a_store_on_one,
    cannot_write,
]


def work(rank: int, store: Path, folder: Path) -> None:
    single_thread()
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORKERS)
    told = {scenario.__name__: scenario(FeatureStore.open(store), folder, ProcessGroup()) for scenario in SCENARIOS}
    (folder / f"told-{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


def rank_of(workers: Workers) -> int:
    return 0 if workers.first else 1


def reported(steps: list[StepReport]) -> list[list[float]]:
    return [[one.step, one.tokens, one.learning_rate, one.loss, one.grad_norm, *one.step_kl] for one in steps]


def error_of(action: Callable[[], object]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


# What they told


@pytest.fixture(scope="module")
def folder(tiny_store: FeatureStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the two workers have been; what one worker left for them was there before."""
    single_thread()
    folder = tmp_path_factory.mktemp("workers")
    stopped = trainer_of(tiny_store, ALONE)
    run(stopped, STOP)
    stopped.save(folder / "of one")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.runners.test_parallel", "torch._dynamo"])
    processes = [context.Process(target=work, args=(rank, tiny_store.path, folder)) for rank in range(WORKERS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        process.kill()
    assert [process.exitcode for process in processes] == [0, 0]
    return folder


@pytest.fixture(scope="module")
def told(folder: Path) -> dict[str, list[Told]]:
    """What each worker told of each scenario."""
    each = [json.loads((folder / f"told-{rank}.json").read_text()) for rank in range(WORKERS)]
    return {name: [told[name] for told in each] for name in each[0]}


@pytest.fixture
def alone(tiny_store: FeatureStore) -> Callable[..., Trainer]:
    return lambda name="plain", **settings: trainer_of(tiny_store, ALONE, name, **settings)


def weights(path: Path) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in load_file(path).items() if name.startswith("param.")}


def largest_relative_gap(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    return max(float((ours[name] - theirs[name]).norm() / theirs[name].norm()) for name in theirs)


def assert_same_steps(told: list[Told], wanted: list[StepReport], tolerance: float = 1e-5) -> None:
    """Both workers told the very same, and what one worker tells up to rounding."""
    assert told[0]["steps"] == told[1]["steps"]
    assert len(wanted) >= 3
    torch.testing.assert_close(
        torch.tensor(told[0]["steps"]), torch.tensor(reported(wanted)), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("name", SPECS)
def test_two_workers_train_as_one(
    told: dict[str, list[Told]], folder: Path, alone: Callable[..., Trainer], name: str
) -> None:
    straight = alone(name)
    assert_same_steps([one[name] for one in told["trains"]], run(straight, TOKENS))
    straight.save(folder / "alone")
    ours = [weights(folder / f"{name}-{rank}") for rank in range(WORKERS)]
    assert all(torch.equal(tensor, ours[1][key]) for key, tensor in ours[0].items())
    assert largest_relative_gap(ours[0], weights(folder / "alone")) < 1e-5


@pytest.mark.parametrize("name", SPECS)
def test_acceptance_is_the_same_whoever_measures_it(
    told: dict[str, list[Told]], tiny_store: FeatureStore, folder: Path, alone: Callable[..., Trainer], name: str
) -> None:
    trainer = alone(name)
    trainer.load(folder / f"{name}-0")
    found = measure_acceptance(trainer.draft, tiny_store, everything(tiny_store), EVALUATE).as_dict()
    assert [one[name]["acceptance"] for one in told["trains"]] == [found, found]


def test_two_workers_train_as_one_in_bfloat16(told: dict[str, list[Told]], alone: Callable[..., Trainer]) -> None:
    """A product's last bits depend on its rows, and bfloat16 has few bits."""
    assert_same_steps(told["trains_in_bfloat16"], run(alone(dtype="bfloat16"), STOP), 2e-2)


def test_a_worker_without_a_conversation_adds_nothing(
    told: dict[str, list[Told]], folder: Path, alone: Callable[..., Trainer]
) -> None:
    trainer = alone(batch_tokens=1)
    assert_same_steps(told["takes_conversations_singly"], run(trainer, STOP))
    trainer.save(folder / "alone")
    for rank in range(WORKERS):
        assert largest_relative_gap(weights(folder / f"singly-{rank}"), weights(folder / "alone")) < 1e-5


class Idle(Workers):
    """One of so many workers that it has no conversation of any batch."""

    def share(self, items: Sequence[Item]) -> list[Item]:
        return []


def test_an_idle_worker_counts_no_row_and_has_a_gradient_of_zeros(tiny_store: FeatureStore) -> None:
    trainer = trainer_of(tiny_store, Idle())
    batch = trainer._read_share(everything(tiny_store))
    assert len(batch.documents) == 1
    assert batch.real_tokens == 0
    loss, step_kl = trainer.loss(batch)
    assert loss == 0
    assert not step_kl.any()
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = [parameter.grad for parameter in trainer.draft.trainable_parameters()]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)


def test_a_checkpoint_of_one_worker_serves_two(told: dict[str, list[Told]], alone: Callable[..., Trainer]) -> None:
    trainer = alone()
    run(trainer, STOP)
    assert_same_steps(told["stops_and_goes_on"], run(trainer, TOKENS))


def test_a_checkpoint_of_two_workers_serves_one(folder: Path, alone: Callable[..., Trainer]) -> None:
    resumed, straight = alone(), alone()
    resumed.load(folder / "of two")
    run(straight, STOP)
    assert (resumed.progress.tokens, resumed.progress.batch) == (straight.progress.tokens, straight.progress.batch)
    ours, wanted = (torch.tensor(reported(run(trainer, TOKENS))) for trainer in (resumed, straight))
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)


def test_all_diverge_in_the_step_in_which_one_does(told: dict[str, list[Told]]) -> None:
    ours, theirs = told["goes_wrong_on_one"]
    assert ours == theirs == {"error": "DivergedError: loss nan and gradient norm nan at step 2", "step": 2}


def test_workers_that_start_differently_are_told(told: dict[str, list[Told]]) -> None:
    ours, theirs = told["differs_on_one"]
    assert ours == theirs
    rule = "all nodes must see the same run folder and the same feature store"
    assert (
        ours["error"] == f"ArchspecError: the workers of a trial differ in seed: 0 on worker 0, 1 on worker 1; {rule}"
    )


def test_all_start_from_the_weights_of_the_first(told: dict[str, list[Told]], alone: Callable[..., Trainer]) -> None:
    assert_same_steps(told["starts_a_little_differently"], run(alone(), STOP))


def test_what_one_worker_lacks_ends_all(told: dict[str, list[Told]]) -> None:
    ours, theirs = told["lacks_a_store_on_one"]
    assert ours == theirs
    assert "not seen from here: holds no feature store" in ours["error"]
    assert ours["error"].startswith("ArchspecError")
    ours, theirs = told["finds_another_draft"]
    assert ours == theirs
    assert "trial: holds the measurements of another draft or seed" in ours["error"]


def test_what_the_first_cannot_write_ends_all(told: dict[str, list[Told]]) -> None:
    ours, theirs = told["cannot_write"]
    assert ours["error"].startswith("NotADirectoryError")
    assert theirs["error"] == f"RuntimeError: {ours['error']}"


def test_a_rung_on_two_workers_is_measured_and_written_once(
    told: dict[str, list[Told]], tiny_store: FeatureStore, folder: Path, tmp_path: Path
) -> None:
    ours, theirs = told["runs_rungs"]
    assert ours["measurements"] == theirs["measurements"]
    assert theirs["steps"] == []  # the first alone is told of steps
    steps: list[StepReport] = []
    for rung in (0, 1):
        wanted = run_rung(rung_task(tiny_store, tmp_path, rung=rung), steps.append)
        found = Measurement(**ours["measurements"][rung])
        assert found.loss == pytest.approx(wanted.loss, rel=1e-5)
        assert comparable(found) == comparable(wanted)
    torch.testing.assert_close(torch.tensor(ours["steps"]), torch.tensor(reported(steps)), rtol=1e-5, atol=1e-5)
    assert [one.as_dict() for one in read_metrics(folder / "trial")] == ours["measurements"][:2]
    assert ours["measurements"][2] == ours["measurements"][0]
    files = {path.name for path in tmp_path.iterdir()}
    assert {path.name for path in (folder / "trial").iterdir()} == files == {"draft", CHECKPOINT_FILE, METRICS_FILE}
    assert largest_relative_gap(weights(folder / "trial" / CHECKPOINT_FILE), weights(tmp_path / CHECKPOINT_FILE)) < 1e-5


def comparable(measurement: Measurement) -> Measurement:
    """Without times, and what rounding may touch."""
    return replace(measurement, seconds=0, tokens_per_second=0, peak_memory=0, loss=0)


def test_one_worker_alone_has_everything_and_waits_for_nobody() -> None:
    assert ALONE.first
    assert ALONE.share([3, 1, 2]) == ALONE.gather([3, 1, 2]) == [3, 1, 2]
    assert ALONE.ask_first(lambda: 4) == 4
    tensor = torch.ones(2)
    ALONE.add(tensor)
    ALONE.copy_first([tensor])
    ALONE.require_same({"seed": 1})
    with ALONE.together():
        assert torch.equal(tensor, torch.ones(2))
