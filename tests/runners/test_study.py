"""The study: what is drawn, stopped and repeated, and that a new process finds all of it again."""

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from archspec.errors import ArchspecError
from runners.features.store import FeatureStore
from runners.search import study as study_module
from runners.search.checks import require_baselines
from runners.search.executor import Failure
from runners.search.record import Record
from runners.search.run_folder import RunFolder
from runners.search.sampler import make_sampler
from runners.search.search_file import SamplerSettings, SearchFile
from runners.search.study import Study
from runners.training.trial import RungTask, write_metrics
from tests.runners.drafts import SETTINGS
from tests.runners.replay import measured, new_folder, search_file

SMALL_SPACE = {"base": "eagle3", "choices": {"depth": {"low": 1, "high": 2}, "layers.0.fusion": ["concat", "add"]}}


@pytest.fixture
def soon_exhausted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty draws in a row without anything new are enough to call a space of a few drafts exhausted."""
    monkeypatch.setattr(study_module, "MAX_REPEATS", 40)


def study(tiny_store: FeatureStore, path: Path, file: SearchFile | None = None) -> Study:
    file = file or search_file(tiny_store)
    return Study(RunFolder(path) if path.exists() else new_folder(path, file), file, tiny_store.facts)


def task_of(record: Record, folder: RunFolder, store: FeatureStore, rung: int, seed: int = 0) -> RungTask:
    file = search_file(store)
    return RungTask(
        number=record.number,
        directory=folder.trial(record.number),
        spec=record.spec,
        features=store.path,
        holdout=0.3,
        train=file.train,
        evaluate=file.objective,
        rungs=file.budget.rungs,
        rung=rung,
        seed=seed,
    )


def tell(one: Study, record: Record, folder: RunFolder, store: FeatureStore, rung: int, length: float) -> bool:
    """Measure a rung as a trial would: first on disk, then to the study."""
    measurement = measured(task_of(record, folder, store, rung), length)
    write_metrics(folder.trial(record.number), [*record.measurements[:rung], measurement])
    return one.report(record, measurement)


def draw(one: Study) -> Record:
    record = one.draw()
    assert record is not None
    return record


# What is drawn


def test_baselines_come_first_and_only_once(tiny_store: FeatureStore, tmp_path: Path) -> None:
    one = study(tiny_store, tmp_path / "run")
    records = [draw(one) for _ in range(5)]
    assert [record.baseline for record in records] == ["eagle3", "eagle3-deep-fused-once", None, None, None]
    assert [record.name for record in records[:2]] == ["eagle3", "eagle3-deep-fused-once"]
    assert len({record.candidate.hash for record in records}) == 5
    assert [len(record.spec.layers) for record in records[:2]] == [1, 3]


def test_a_baseline_that_the_space_can_draw_is_a_point_of_the_study(tiny_store: FeatureStore, tmp_path: Path) -> None:
    """So that the sampler learns from it."""
    one = study(tiny_store, tmp_path / "run")
    draw(one)
    assert one._study.trials[0].params == {"depth": 1, "layers.0.fusion": "concat"}


def test_a_baseline_outside_the_space_is_trained_all_the_same(tiny_store: FeatureStore, tmp_path: Path) -> None:
    one = study(tiny_store, tmp_path / "run", search_file(tiny_store, baselines=["eagle3-wide-stream"]))
    record = draw(one)
    assert record.baseline == "eagle3-wide-stream"
    assert record.spec.layers[0].stream == "2h"
    assert one._study.trials[0].params == {}
    assert draw(one).baseline is None


@pytest.mark.usefixtures("soon_exhausted")
def test_a_drawn_baseline_has_the_training_settings_that_the_space_would_draw(
    tiny_store: FeatureStore, tmp_path: Path
) -> None:
    """Else the same draft with the same rate would be trained a second time under another hash."""
    space = {"base": "eagle3", "choices": {"train.learning_rate": [SETTINGS.learning_rate]}}
    one = study(tiny_store, tmp_path / "run", search_file(tiny_store, space=space, baselines=["eagle3"]))
    assert draw(one).candidate.train == {"learning_rate": SETTINGS.learning_rate}
    assert one.draw() is None


@pytest.mark.usefixtures("soon_exhausted")
def test_no_architecture_is_drawn_twice_and_a_small_space_ends(tiny_store: FeatureStore, tmp_path: Path) -> None:
    one = study(tiny_store, tmp_path / "run", search_file(tiny_store, space=SMALL_SPACE, baselines=["eagle3"]))
    folder = RunFolder(tmp_path / "run")
    hashes = []
    while (record := one.draw()) is not None:
        hashes.append(record.candidate.hash)
        for rung in range(3):
            if not tell(one, record, folder, tiny_store, rung, 1.2 + 0.01 * len(hashes)):
                break
        assert len(hashes) <= 4
    assert len(hashes) == len(set(hashes)) == 4


def test_a_kill_does_not_change_when_repeats_are_drawn_at_random(
    tiny_store: FeatureStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every sixth of those in a row, whichever process drew them; a draw that was cut off is none."""
    at_random: list[bool] = []

    def noted(settings: SamplerSettings, seed: int, draws: int, random: bool) -> optuna.samplers.BaseSampler:
        at_random.append(random)
        return make_sampler(settings, seed, draws, random)

    monkeypatch.setattr(study_module, "make_sampler", noted)
    space = {"base": "eagle3", "choices": {"layers.0.fusion": ["concat"]}}
    file = search_file(tiny_store, space=space, baselines=["eagle3"])
    one = study(tiny_store, tmp_path / "run", file)
    draw(one)
    monkeypatch.setattr(study_module, "MAX_REPEATS", 4)
    assert one.draw() is None
    one._study.ask()
    again = study(tiny_store, tmp_path / "run", file)
    again.adopt()
    monkeypatch.setattr(study_module, "MAX_REPEATS", 12)
    assert again.draw() is None
    assert at_random == [index in (5, 11) for index in range(12)]


@pytest.mark.usefixtures("soon_exhausted")
def test_a_repeat_is_told_what_the_first_was_worth(tiny_store: FeatureStore, tmp_path: Path) -> None:
    space = {"base": "eagle3", "choices": {"layers.0.fusion": ["concat", "add"]}}
    one = study(tiny_store, tmp_path / "run", search_file(tiny_store, space=space, baselines=["eagle3"]))
    folder = RunFolder(tmp_path / "run")
    baseline = draw(one)
    for rung in range(3):
        tell(one, baseline, folder, tiny_store, rung, (1.25, 1.375, 1.5)[rung])
    other = draw(one)
    one.fail(other, Failure("diverged", "loss nan"))
    assert one.draw() is None
    repeats = [trial for trial in one._study.trials if "repeat_of" in trial.user_attrs]
    by_first = {number: [t for t in repeats if t.user_attrs["repeat_of"] == number] for number in (0, other.number)}
    assert by_first[0]
    assert all(trial.state == TrialState.COMPLETE and trial.value == 1.5 for trial in by_first[0])
    assert all(trial.intermediate_values == {1: 1.25, 3: 1.375, 9: 1.5} for trial in by_first[0])
    assert all(trial.state == TrialState.FAIL for trial in by_first[other.number])
    assert len(one.records) == 2


@pytest.mark.usefixtures("soon_exhausted")
def test_infeasible_draws_are_told_their_violation(tiny_store: FeatureStore, tmp_path: Path) -> None:
    file = search_file(tiny_store, constraints={"params": {"max": 30e3}}, baselines=["eagle3"], space=SMALL_SPACE)
    one = study(tiny_store, tmp_path / "run", file)
    records: list[Record] = []
    while (record := one.draw()) is not None:
        records.append(record)
    feasible = {record.number for record in records}
    assert [len(record.spec.layers) for record in records] == [1, 1]
    told = [trial for trial in one._study.trials if "infeasible" in trial.user_attrs]
    assert len(told) == one.turned_away["params"] > 0
    assert not feasible & {trial.number for trial in told}
    assert all("params: " in trial.user_attrs["infeasible"] for trial in told)
    assert all(trial.state == TrialState.PRUNED for trial in told)
    assert all(trial.constraints["params"] > 0 for trial in told)
    drawn = [one._study.trials[record.number] for record in records if record.baseline is None]
    assert all(trial.constraints["params"] <= 0 for trial in drawn)


def test_the_seed_decides_what_is_drawn(tiny_store: FeatureStore, tmp_path: Path) -> None:
    def drawn(name: str, seed: int) -> list[str]:
        one = study(tiny_store, tmp_path / name, search_file(tiny_store, seed=seed))
        folder, hashes = RunFolder(tmp_path / name), []
        for _ in range(9):
            record = draw(one)
            hashes.append(record.candidate.hash)
            tell(one, record, folder, tiny_store, 0, 1.2 + 0.1 * len(record.spec.layers))
        return hashes

    assert drawn("a", 3) == drawn("b", 3)
    assert drawn("a2", 3) != drawn("c", 4)


# What is stopped


def test_rungs_stop_the_weak_by_recorded_values_and_never_a_baseline(tiny_store: FeatureStore, tmp_path: Path) -> None:
    one = study(tiny_store, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    for record in (draw(one), draw(one)):  # the baselines, weak as they are
        weaker = 1.1 - 0.05 * record.number
        assert [tell(one, record, folder, tiny_store, rung, weaker) for rung in range(3)] == [True, True, False]
        assert record.state == "complete"
    assert not tell(one, draw(one), folder, tiny_store, 0, 1.02)  # weaker than both
    strong = draw(one)
    assert tell(one, strong, folder, tiny_store, 0, 1.5)
    weak = draw(one)
    assert not tell(one, weak, folder, tiny_store, 0, 1.2)
    assert (weak.state, len(weak.measurements)) == ("pruned", 1)
    best = draw(one)
    assert tell(one, best, folder, tiny_store, 0, 1.6)
    trial = one._study.trials[weak.number]
    assert (trial.state, trial.value, trial.intermediate_values) == (TrialState.PRUNED, 1.2, {1: 1.2})
    assert tell(one, strong, folder, tiny_store, 1, 1.55)
    assert not tell(one, strong, folder, tiny_store, 2, 1.58)
    assert (strong.state, one._study.trials[strong.number].value) == ("complete", 1.58)


def test_a_failure_keeps_its_kind_and_reason(tiny_store: FeatureStore, tmp_path: Path) -> None:
    one = study(tiny_store, tmp_path / "run")
    one.fail(draw(one), Failure("out_of_memory", "16 GiB wanted"))
    again = study(tiny_store, tmp_path / "run")
    record = again.records[0]
    assert (record.state, record.failure) == ("failed", Failure("out_of_memory", "16 GiB wanted"))
    assert again._study.trials[0].state == TrialState.FAIL


def test_a_failure_that_a_kill_kept_from_being_told_is_told_then(tiny_store: FeatureStore, tmp_path: Path) -> None:
    """Its kind and reason are written before its end; else it would be trained again and keep the reason for good."""
    one = study(tiny_store, tmp_path / "run")
    record = draw(one)
    one._trial(record).set_user_attr("failure", {"kind": "diverged", "reason": "loss nan"})
    again = study(tiny_store, tmp_path / "run")
    assert again.adopt() == []
    assert (again.records[0].state, again._study.trials[0].state) == ("failed", TrialState.FAIL)
    assert again.records[0].failure == Failure("diverged", "loss nan")


# What is found again


def test_a_new_study_on_the_same_journal_knows_everything(tiny_store: FeatureStore, tmp_path: Path) -> None:
    one, folder = study(tiny_store, tmp_path / "run"), RunFolder(tmp_path / "run")
    done, flying, started = draw(one), draw(one), draw(one)
    for rung in range(3):
        tell(one, done, folder, tiny_store, rung, 1.3)
    tell(one, flying, folder, tiny_store, 0, 1.4)
    one._study.ask()  # killed before its candidate was written down
    again = study(tiny_store, tmp_path / "run")
    assert again.records == one.records
    adopted = again.adopt()
    assert [record.number for record in adopted] == [flying.number, started.number]
    assert again._study.trials[3].state == TrialState.FAIL
    assert tell(again, adopted[0], folder, tiny_store, 1, 1.45)
    assert not tell(again, adopted[0], folder, tiny_store, 2, 1.5)
    assert again._study.trials[flying.number].value == 1.5
    assert draw(again).candidate.hash not in {record.candidate.hash for record in one.records.values()}


@pytest.mark.parametrize("cut", [1, 7])
def test_a_torn_last_line_is_dropped_and_the_journal_goes_on(
    tiny_store: FeatureStore, tmp_path: Path, cut: int
) -> None:
    one, folder = study(tiny_store, tmp_path / "run"), RunFolder(tmp_path / "run")
    first = draw(one)
    whole = folder.study.read_bytes()
    draw(one)
    longer = folder.study.read_bytes()
    end = longer.index(b"\n", len(whole)) + 1
    folder.study.write_bytes(longer[: end - cut])
    again = study(tiny_store, tmp_path / "run")
    assert list(again.records) == [first.number]
    again.adopt()
    assert tell(again, again.records[first.number], folder, tiny_store, 0, 1.3)
    draw(again)
    lines = folder.study.read_text(encoding="utf-8").splitlines()
    assert all(isinstance(json.loads(line), dict) for line in lines)
    third = study(tiny_store, tmp_path / "run")
    assert third.records == again.records


def test_a_lock_that_a_killed_search_held_does_not_hold_up_the_next(tiny_store: FeatureStore, tmp_path: Path) -> None:
    one, folder = study(tiny_store, tmp_path / "run"), RunFolder(tmp_path / "run")
    draw(one)
    folder.study.with_name("study.log.lock").touch()
    start = time.monotonic()
    draw(study(tiny_store, tmp_path / "run"))
    assert time.monotonic() - start < 10


def test_the_folder_may_be_moved(tiny_store: FeatureStore, tmp_path: Path) -> None:
    one, folder = study(tiny_store, tmp_path / "run"), RunFolder(tmp_path / "run")
    tell(one, draw(one), folder, tiny_store, 0, 1.3)
    shutil.move(tmp_path / "run", tmp_path / "elsewhere")
    assert study(tiny_store, tmp_path / "elsewhere").records == one.records


def test_optuna_gives_a_handle_on_a_trial_of_another_process(tiny_store: FeatureStore, tmp_path: Path) -> None:
    """``Study`` leans on this constructor, which optuna does not promise; a new optuna that changes it fails here."""
    draw(study(tiny_store, tmp_path / "run"))
    again = study(tiny_store, tmp_path / "run")
    frozen = again._study.trials[0]
    trial = optuna.Trial(again._study, frozen._trial_id)
    trial.report(1.25, step=1)
    assert again._study.trials[0].intermediate_values == {1: 1.25}
    assert isinstance(trial.should_prune(), bool)


def test_a_baseline_that_does_not_fit_is_told_before_anything_is_trained(tiny_store: FeatureStore) -> None:
    file = search_file(tiny_store, fixed={"inputs.aux_layers": [1, 2, 9]})
    with pytest.raises(
        ArchspecError,
        match=r"baseline eagle3 with fixed: inputs.aux_layers: layer 9 is beyond the target, whose layers are 1 to 3",
    ):
        require_baselines(file, tiny_store.facts)


def test_a_lost_journal_does_not_begin_a_new_study_over_old_trials(tiny_store: FeatureStore, tmp_path: Path) -> None:
    """Trial numbers would start at 0 again, and a new draft be answered with an old one's figures."""
    one, folder = study(tiny_store, tmp_path / "run"), RunFolder(tmp_path / "run")
    tell(one, draw(one), folder, tiny_store, 0, 1.3)
    folder.study.unlink()
    with pytest.raises(ArchspecError, match=r"study.log: its trials are there but the study's journal is empty"):
        study(tiny_store, tmp_path / "run")


def test_measurements_that_are_gone_are_named(tiny_store: FeatureStore, tmp_path: Path) -> None:
    one, folder = study(tiny_store, tmp_path / "run"), RunFolder(tmp_path / "run")
    record = draw(one)
    for rung in range(3):
        tell(one, record, folder, tiny_store, rung, 1.3)
    (folder.trial(record.number) / "metrics.jsonl").unlink()
    with pytest.raises(ArchspecError, match=r"0000/metrics.jsonl: the trial's measurements are gone"):
        study(tiny_store, tmp_path / "run")


def test_a_failed_repeat_stays_on_record(tiny_store: FeatureStore, tmp_path: Path) -> None:
    file = search_file(tiny_store, {"seeds": 3})
    one, folder = study(tiny_store, tmp_path / "run", file), RunFolder(tmp_path / "run")
    record = draw(one)
    task = replace(task_of(record, folder, tiny_store, 0, seed=1), directory=folder.trial(record.number, 1))
    one.fail_repeat(record, task, Failure("diverged", "loss nan"))
    again = study(tiny_store, tmp_path / "run", file).records[record.number]
    assert again.failed_repeats == {1: Failure("diverged", "loss nan")}
    assert again.repeats == []
