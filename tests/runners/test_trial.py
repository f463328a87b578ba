"""One trial: rungs are answered from their record, and neither a stop nor a kill changes what comes after."""

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from archspec.errors import ArchspecError
from archspec.vocabulary import choose_vocabulary
from archspec.weights import load_draft
from runners.features.store import FeatureStore
from runners.training.acceptance import measure_acceptance
from runners.training.trainer import StepReport
from runners.training.trial import (
    CHECKPOINT_FILE,
    METRICS_FILE,
    WEIGHTS_FOLDER,
    Measurement,
    make_draft,
    read_metrics,
    run_rung,
)
from tests.runners.drafts import everything, largest_gap, single_thread, tiny_spec
from tests.runners.tasks import HOLDOUT, RUNGS, rung_task


@pytest.fixture(autouse=True)
def one_thread() -> None:
    single_thread()


def without_time(measurement: Measurement) -> Measurement:
    return replace(measurement, seconds=0, tokens_per_second=0, peak_memory=0)


def test_a_rung_leaves_its_metrics_weights_and_checkpoint(tiny_store: FeatureStore, tmp_path: Path) -> None:
    task = rung_task(tiny_store, tmp_path)
    measurement = run_rung(task)
    assert read_metrics(tmp_path) == [measurement]
    assert measurement.rung == 0
    assert RUNGS[0] <= measurement.tokens < RUNGS[0] + task.train.batch_tokens
    assert measurement.seconds > 0
    assert measurement.tokens / measurement.tokens_per_second == pytest.approx(measurement.seconds, abs=0.006)
    assert measurement.peak_memory > 10 << 20
    assert 0 < measurement.loss < 20
    draft = load_draft(tmp_path / WEIGHTS_FOLDER, tiny_store.weights())
    _, heldout = tiny_store.split(HOLDOUT)
    assert measure_acceptance(draft, tiny_store, heldout, task.evaluate).as_dict() == measurement.acceptance
    assert measurement.length == measurement.acceptance["length"] >= 1
    assert (tmp_path / CHECKPOINT_FILE).exists()


def test_running_a_rung_again_answers_from_its_record(tiny_store: FeatureStore, tmp_path: Path) -> None:
    task = rung_task(tiny_store, tmp_path)
    first = run_rung(task)
    steps: list[StepReport] = []
    gone = replace(task, features=tmp_path / "no store here")  # not even opened
    assert run_rung(gone, steps.append) == first
    assert steps == []
    second = run_rung(task.at(1))
    assert run_rung(gone) == first
    assert run_rung(gone.at(1)) == second
    assert read_metrics(tmp_path) == [first, second]


def test_rung_after_rung_trains_as_straight_through(tiny_store: FeatureStore, tmp_path: Path) -> None:
    steps: dict[str, list[StepReport]] = {"rungs": [], "straight": []}
    for rung in (0, 1):
        stopped = run_rung(rung_task(tiny_store, tmp_path / "rungs", rung=rung), steps["rungs"].append)
    straight = run_rung(rung_task(tiny_store, tmp_path / "straight", rung=1), steps["straight"].append)
    assert steps["rungs"] == steps["straight"]
    assert without_time(stopped) == without_time(straight)
    weights = [load_file(tmp_path / name / CHECKPOINT_FILE) for name in steps]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


def test_a_rung_run_straight_is_answered_from_its_record_too(tiny_store: FeatureStore, tmp_path: Path) -> None:
    straight = run_rung(rung_task(tiny_store, tmp_path, rung=1))
    steps: list[StepReport] = []
    assert run_rung(rung_task(tiny_store, tmp_path, rung=1), steps.append) == straight
    assert steps == []
    assert read_metrics(tmp_path) == [straight]


def test_a_rung_that_the_one_before_overshot_still_has_a_loss(tiny_store: FeatureStore, tmp_path: Path) -> None:
    first = run_rung(rung_task(tiny_store, tmp_path, rungs=(600, 601)))
    second = run_rung(rung_task(tiny_store, tmp_path, rungs=(600, 601), rung=1))
    assert second.tokens == first.tokens
    assert second.loss == first.loss > 0
    json.dumps(second.loss, allow_nan=False)


KILLED_SCRIPT = """
import json, os, signal, sys
from pathlib import Path
from runners.training import trial
from runners.features.store import FeatureStore
from tests.runners.drafts import single_thread
from tests.runners.tasks import rung_task

single_thread()
trial.CHECKPOINT_SECONDS = 0.0
def on_step(report):
    print(report.step, report.loss, flush=True)
    if report.step == 2:
        os.kill(os.getpid(), signal.SIGKILL)

trial.run_rung(rung_task(FeatureStore.open(Path(sys.argv[1])), Path(sys.argv[2])), on_step)
"""


def test_a_trial_killed_in_a_rung_goes_on_from_its_checkpoint(tiny_store: FeatureStore, tmp_path: Path) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_SCRIPT, str(tiny_store.path), str(tmp_path / "killed")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "killed" / METRICS_FILE).exists()
    steps: dict[str, list[StepReport]] = {"killed": [], "whole": []}
    results = {name: run_rung(rung_task(tiny_store, tmp_path / name), steps[name].append) for name in steps}
    told = [(int(step), float(loss)) for step, loss in map(str.split, killed.stdout.splitlines())]
    assert told + [(report.step, report.loss) for report in steps["killed"]] == [
        (report.step, report.loss) for report in steps["whole"]
    ]
    assert [report.step for report in steps["killed"]] == [3]
    assert without_time(results["killed"]) == without_time(results["whole"])
    assert results["killed"].seconds > 0


def test_a_trial_killed_while_it_was_evaluated_still_knows_its_loss(tiny_store: FeatureStore, tmp_path: Path) -> None:
    whole = run_rung(rung_task(tiny_store, tmp_path))
    (tmp_path / METRICS_FILE).unlink()
    again = run_rung(rung_task(tiny_store, tmp_path))
    assert replace(again, peak_memory=0) == replace(whole, peak_memory=0)


def test_the_vocabulary_comes_from_the_training_documents_and_is_kept_with_the_weights(
    tiny_store: FeatureStore, tmp_path: Path
) -> None:
    spec = tiny_spec(tiny_store.facts, changes={"head.vocab_size": 40})
    run_rung(rung_task(tiny_store, tmp_path, spec=spec))
    train, _ = tiny_store.split(HOLDOUT)
    eos = frozenset(tiny_store.manifest.eos_token_ids)
    wanted = choose_vocabulary(tiny_store.count_tokens(train), 40, eos)
    draft = load_draft(tmp_path / WEIGHTS_FOLDER, tiny_store.weights())
    assert torch.equal(draft.vocab_ids, wanted)
    assert draft.t2d is not None
    assert torch.equal(draft.t2d.nonzero().squeeze(-1), wanted)
    assert eos <= set(wanted.tolist())
    everywhere = choose_vocabulary(tiny_store.count_tokens(everything(tiny_store)), 40, eos)
    assert not torch.equal(wanted, everywhere)


def test_the_seed_alone_decides_the_first_weights(tiny_store: FeatureStore) -> None:
    spec, train = tiny_spec(tiny_store.facts), everything(tiny_store)
    drafts = [make_draft(spec, tiny_store, train, seed) for seed in (5, 5, 6)]
    assert largest_gap(drafts[0], drafts[1]) == 0
    assert largest_gap(drafts[0], drafts[2]) > 0


def test_other_seeds_are_other_trials(tiny_store: FeatureStore, tmp_path: Path) -> None:
    first, second = (run_rung(rung_task(tiny_store, tmp_path / str(seed), seed=seed)) for seed in (0, 1))
    assert (first.seed, second.seed) == (0, 1)
    assert first.loss != second.loss


def test_a_store_without_a_layer_that_the_draft_reads_is_told(tiny_store: FeatureStore, tmp_path: Path) -> None:
    manifest = tiny_store.path / "manifest.json"
    copy = tmp_path / "store"
    copy.mkdir()
    for file in tiny_store.path.iterdir():
        (copy / file.name).symlink_to(file)
    (copy / "manifest.json").unlink()
    data = json.loads(manifest.read_text(encoding="utf-8")) | {"layer_ids": [0, 2, 3]}
    (copy / "manifest.json").write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(ArchspecError, match=r"store: the store lacks layer 1; it has 0, 2, 3"):
        run_rung(rung_task(tiny_store, tmp_path / "trial", features=copy))
