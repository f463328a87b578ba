"""Several objectives at once: what the study is told, rungs of their own, kills, and what it comes to beside chance."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from optuna.study import StudyDirection
from optuna.trial import TrialState

from archspec.cost import draft_params
from runners.features.store import FeatureStore
from runners.search import study as study_module
from runners.search.executor import Failure, Finished
from runners.search.front import front_of
from runners.search.pareto import Direction, hypervolume, weak
from runners.search.record import Record
from runners.search.report import best_config
from runners.training.trial import RungTask
from tests.runners.interrupted import Runs, events, outcome, stopping_at_write, submitted
from tests.runners.replay import K, ToyTimes, by_formula, measured, search_file

LONG_AND_SMALL: dict[str, Any] = {
    "draft_length": K,
    "maximize": "acceptance_length",
    "minimize": "params",
    "mode": "multi",
}
DIRECTIONS: list[Direction] = ["maximize", "minimize"]
SIZES = {
    "base": "eagle3",
    "choices": {
        "depth": {"low": 1, "high": 3},
        "layers.*.mlp.intermediate_size": {"low": 8, "high": 96, "step": 8},
        "layers.0.fusion": ["concat", "project", "add"],
    },
}


@pytest.fixture
def runs(tiny_store: FeatureStore, tmp_path: Path) -> Callable[..., Runs]:
    def make(budget: dict[str, Any] | None = None, objective: dict[str, Any] | None = None, **changes: Any) -> Runs:
        file = search_file(tiny_store, budget, objective={**LONG_AND_SMALL, **(objective or {})}, **changes)
        return Runs(tmp_path, tiny_store, file, ToyTimes())

    return make


def point(record: Record, rung: int) -> list[float]:
    """What a trial is judged by: its length, and the size of its draft as a ratio."""
    return [record.measurements[rung].length, math.log10(draft_params(record.spec))]


def test_the_study_has_every_objective_with_its_direction(runs: Callable[..., Runs]) -> None:
    search = runs().search()
    search.execute()
    study = search.study._study
    assert study.directions == [StudyDirection.MAXIMIZE, StudyDirection.MINIMIZE]
    assert len(search.study.records) == 8
    for record in search.study.records.values():
        trial = study.trials[record.number]
        assert trial.state == TrialState.COMPLETE
        assert trial.values == pytest.approx(point(record, -1))


def test_rungs_stop_who_is_outside_the_best_third_of_both(runs: Callable[..., Runs]) -> None:
    """As ``weak`` has it of all that were measured at the rung by then, baselines among them but never stopped."""
    search = runs({"trials": 15}, space=SIZES).search()
    search.execute()
    records, stopped, smaller = search.study.records, 0, 0
    there: dict[int, list[list[float]]] = {0: [], 1: [], 2: []}
    for event in events(search):
        if not isinstance(event, Finished):
            continue
        record, rung = records[event.task.number], event.task.rung
        own = point(record, rung)
        went_on = len(record.measurements) > rung + 1
        if rung < 2:
            places = max(1, (len(there[rung]) + 1) // 3)
            fails = weak(own, there[rung], DIRECTIONS, places) and not record.baseline
            assert went_on is not fails
            stopped += fails
            smaller += went_on and own[0] < max([length for length, _ in there[rung]], default=0)
        there[rung].append(own)
    assert stopped > 3
    assert smaller > 0  # one that accepts less than another goes on, as it is smaller


def test_what_was_stopped_is_still_so_in_a_new_process(runs: Callable[..., Runs]) -> None:
    whole = runs({"trials": 12}, space=SIZES).search()
    ranked = whole.execute()
    again = runs({"trials": 12}, space=SIZES).search()
    assert outcome(again) == outcome(whole)
    assert [record.number for record in again.execute()] == [record.number for record in ranked]
    assert submitted(again) == []
    assert {record.state for record in again.study.records.values()} == {"complete", "pruned"}


def test_the_best_is_ranked_by_the_first_objective_and_the_knee_is_recommended(runs: Callable[..., Runs]) -> None:
    search = runs({"trials": 12, "seeds": 2, "finalists": 2}, space=SIZES).search()
    ranked = search.execute()
    assert [len(record.final) for record in ranked[:2]] == [2, 2]
    assert search.gain(ranked[0]) >= search.gain(ranked[1])
    best = best_config(search, ranked)
    assert best.objectives == {"acceptance_length": "maximize", "params": "minimize"}
    assert best.recommended.why == "the knee of the Pareto set over acceptance_length and params"
    on = {record.number for record in front_of(search)}
    assert len(on) > 2
    points = {number: (search.gain(r), draft_params(r.spec)) for number, r in search.study.records.items()}
    for number, (gain, size) in points.items():
        better = any(g >= gain and s <= size and (g, s) != (gain, size) for g, s in points.values())
        assert (number in on) is not better


def test_speed_up_may_be_one_of_several(runs: Callable[..., Runs]) -> None:
    objective = {"maximize": ["acceptance_rate", "speedup"], "minimize": ["draft_ms", "params"]}
    speed = {"accelerator": "H100-SXM", "draft_lengths": [1, K]}
    search = runs({"trials": 6}, objective, speed=speed).search()
    ranked = search.execute()
    trial = search.study._study.trials[ranked[0].number]
    values = search.study.scorer.values(ranked[0], ranked[0].measurements[-1])
    sizes = [math.log10(values["draft_ms"]), math.log10(values["params"])]
    assert trial.values == pytest.approx([values["acceptance_rate"], values["speedup"], *sizes])
    assert search.study.scorer.followed == "speedup"


def test_failures_are_told_and_the_search_goes_on(runs: Callable[..., Runs]) -> None:
    def failing(task: RungTask) -> Any:
        return Failure("diverged", "loss nan") if (task.number, task.rung) in ((1, 1), (3, 0)) else by_formula(task)

    search = runs().search(answer=failing)
    search.execute()
    trials = search.study._study.trials
    assert [trials[number].state for number in (1, 3)] == [TrialState.FAIL, TrialState.FAIL]
    again = runs().search()
    assert again.study.records == search.study.records
    again.execute()
    assert submitted(again) == []


def test_twins_are_told_what_the_first_was_worth(runs: Callable[..., Runs], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study_module, "MAX_REPEATS", 40)
    space = {"base": "eagle3", "choices": {"depth": {"low": 1, "high": 2}, "layers.0.fusion": ["concat", "add"]}}
    search = runs({"trials": 30}, space=space, baselines=["eagle3"]).search()
    search.execute()
    assert search.exhausted
    assert len(search.study.records) == 4
    twins = [trial for trial in search.study._study.trials if "repeat_of" in trial.user_attrs]
    assert twins
    for trial in twins:
        assert trial.state == TrialState.COMPLETE
        assert trial.values == pytest.approx(point(search.study.records[trial.user_attrs["repeat_of"]], -1))


@pytest.mark.parametrize("part", range(2))
def test_a_search_that_is_stopped_between_two_writes_ends_as_one_that_was_not(
    runs: Callable[..., Runs], monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    budget = {"trials": 5, "rungs": [100, 400], "seeds": 2}
    one = runs(budget, constraints={"params": {"max": 44e3}, "acceptance_length": {"min": 1.25}})
    with stopping_at_write(monkeypatch, 0) as writes:
        whole = one.search("whole")
        whole.execute()
    for at in range(2 + 5 * part, writes[0], 10):  # the first makes the study; all of them take half a minute
        with stopping_at_write(monkeypatch, at):
            assert one.stopped(f"at {at}")
        one.ends_like(whole, f"at {at}")


def test_it_covers_more_than_chance_does(tiny_store: FeatureStore, tmp_path: Path) -> None:
    """On a formula in which width pays less and less; the same number of trials, all of them trained to the end.

    Seven of the seeds 0 to 7 show it.
    """

    def formula(task: RungTask) -> Any:
        widths = [layer.mlp.intermediate_size for layer in task.spec.layers]
        fused = 0.1 * (task.spec.layers[0].fusion == "concat")
        return measured(task, 1.1 + fused + sum(0.25 * width / (width + 24) for width in widths))

    def covered(kind: str, seed: int) -> float:
        changes = {"objective": LONG_AND_SMALL, "space": SIZES, "sampler": {"kind": kind}, "seed": seed}
        file = search_file(tiny_store, {"trials": 32, "rungs": [100]}, baselines=["eagle3"], **changes)
        search = Runs(tmp_path, tiny_store, file).search(f"{kind} {seed}", answer=formula)
        search.execute()
        points = [point(record, -1) for record in search.study.records.values()]
        return hypervolume(points, DIRECTIONS, [1.0, 5.0])

    assert covered("tpe", 0) > covered("random", 0)
