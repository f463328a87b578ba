"""A search for speed: what ranks, what leaderboard and best config tell, bounds on time and on what was measured."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState

from archspec.cost import draft_params
from archspec.speedup import speedup
from runners.features.store import FeatureStore
from runners.search import study as study_module
from runners.search.front import front_of, recommended, write_front
from runners.search.leaderboard import leaderboard_rows
from runners.search.record import Record
from runners.search.report import best_config, stage_agreement
from runners.training.trial import RungTask
from tests.runners.interrupted import Runs, outcome, submitted
from tests.runners.replay import K, ToyTimes, measured, search_file

SPEED = {"accelerator": "H100-SXM", "draft_lengths": [1, K]}
BOTH: dict[str, Any] = {"draft_length": K, "maximize": "speedup", "minimize": "params"}
SMALL_SPACE = {"base": "eagle3", "choices": {"depth": {"low": 1, "high": 2}, "layers.0.fusion": ["concat", "add"]}}


@pytest.fixture
def runs(tiny_store: FeatureStore, tmp_path: Path) -> Callable[..., Runs]:
    def make(budget: dict[str, Any] | None = None, objective: dict[str, Any] | None = None, **changes: Any) -> Runs:
        told = {"draft_length": K, **(objective or {})}
        file = search_file(tiny_store, budget, objective=told, speed=SPEED, **changes)
        return Runs(tmp_path, tiny_store, file, ToyTimes())

    return make


def by_hand(record: Record, at: int = -1) -> tuple[float, int]:
    """The speed-up at the best k, from the parts."""
    lengths, times, spec = record.measurements[at].acceptance["length_by_k"], ToyTimes(), record.spec
    by_k = {k: lengths[k - 1] * 10.1 / (10 + 0.1 * (k + 1) + k * times.draft_ms(spec) + 0.5) for k in range(1, K + 1)}
    best = max(by_k, key=lambda k: by_k[k])
    return by_k[best], best


def flat(task: RungTask) -> Any:
    """Depth hardly helps, so that the smaller draft is the faster one."""
    return measured(task, 1.5 + 0.001 * len(task.spec.layers) + 0.01 * task.rung)


# What ranks


def test_speed_up_ranks_and_not_acceptance(runs: Callable[..., Runs]) -> None:
    search = runs().search(answer=flat)
    ranked = search.execute()
    values = [by_hand(record)[0] for record in ranked]
    assert values == sorted(values, reverse=True)
    assert [search.gain(record) for record in ranked] == pytest.approx(values)
    lengths = [record.measurements[-1].length for record in ranked]
    assert lengths != sorted(lengths, reverse=True)
    trials = search.study._study.trials
    for record in ranked:
        assert trials[record.number].value == pytest.approx(by_hand(record)[0])
        steps = list(trials[record.number].intermediate_values.values())
        assert steps == pytest.approx([by_hand(record, rung)[0] for rung in range(3)])


def test_the_leaderboard_tells_speed_up_and_the_best_k_of_each(runs: Callable[..., Runs]) -> None:
    def long_and_short(task: RungTask) -> Any:
        return measured(task, 0.95 + 0.15 * len(task.spec.layers) + 0.01 * task.seed)

    search = runs({"seeds": 2, "rungs": [100]}).search(answer=long_and_short)
    ranked = search.execute()
    rows = leaderboard_rows(search)
    for record, row in zip(ranked, rows, strict=False):
        found = [speedup(m.acceptance["length_by_k"], record.spec, ToyTimes(), range(1, K + 1)) for m in record.final]
        mean = sum(one.value for one in found) / len(found)
        assert row["speedup"] == row["value"] == round(mean, 5)
        assert row["best_k"] == found[0].k
        assert row["draft_ms"] == round(draft_params(record.spec) / 100e3, 5)
        assert row["draft_ms_source"] == "measured"
    assert len({row["best_k"] for row in rows}) > 1
    first = best_config(search, ranked).metrics.predicted
    assert first is not None
    value, k = by_hand(ranked[0])
    assert first.k == k
    assert first.by_k[k] == pytest.approx(value)


def test_without_times_the_columns_of_speed_are_empty(tiny_store: FeatureStore, tmp_path: Path) -> None:
    search = Runs(tmp_path, tiny_store, search_file(tiny_store)).search()
    ranked = search.execute()
    rows = leaderboard_rows(search)
    assert {(row["speedup"], row["best_k"], row["draft_ms"], row["draft_ms_source"]) for row in rows} == {("",) * 4}
    best = best_config(search, ranked)
    assert (best.times, best.metrics.predicted) == (None, None)


def test_what_is_minimised_ranks_the_other_way_round(runs: Callable[..., Runs]) -> None:
    objective = {"minimize": "draft_ms", "maximize": "acceptance_length", "follow": "draft_ms"}
    search = runs({"trials": 9}, objective).search()
    ranked = search.execute()
    sizes = [draft_params(record.spec) for record in ranked]
    assert sizes == sorted(sizes)
    assert [row["value"] for row in leaderboard_rows(search)[: len(ranked)]] == [round(s / 100e3, 5) for s in sizes]
    stopped = [draft_params(r.spec) for r in search.study.records.values() if r.state == "pruned"]
    assert stopped
    assert min(stopped) > min(sizes)
    assert all(one.spearman is None or one.spearman.value == 1 for one in stage_agreement(search))


def test_a_funnel_for_speed_keeps_the_fastest(runs: Callable[..., Runs]) -> None:
    stages = [{"candidates": 7, "tokens": 100}, {"candidates": 2, "tokens": 200}]
    search = runs(stages=stages, baselines=["eagle3-deep-fused-once"]).search(answer=flat)
    search.execute()
    records = list(search.study.records.values())
    fastest = sorted(records, key=lambda record: by_hand(record, 0)[0], reverse=True)[:2]
    went_on = {record.number for record in records if len(record.measurements) == 2}
    assert went_on == {record.number for record in fastest} | {0}


# The Pareto set and the pick


def volume_of(told: dict[str, Any]) -> float:
    """The area between the members of a Pareto set over (speedup, params) and the reference, step by step."""
    reference = told["hypervolume"]["reference"]
    members = sorted((math.log10(member["params"]), member["speedup"]) for member in told["members"])
    ends = [size for size, _ in members[1:]] + [reference["params"]]
    slabs = zip(ends, members, strict=True)
    return math.fsum((end - size) * (fast - reference["speedup"]) for end, (size, fast) in slabs)


def test_the_pareto_set_counts_all_that_were_measured(runs: Callable[..., Runs]) -> None:
    search = runs({"trials": 10}, BOTH).search()
    search.execute()
    rows = leaderboard_rows(search)
    points = [(row["speedup"], row["params"]) for row in rows]
    for row, (fast, size) in zip(rows, points, strict=True):
        better = any(f >= fast and s <= size and (f, s) != (fast, size) for f, s in points)
        assert row["pareto"] is not better


@pytest.mark.parametrize(
    ("within", "why"),
    [
        ({"params": 34300}, "the best speedup with params <= 34,300"),
        ({"params": 22912}, "the best speedup with params <= 22,912"),
        ({"params": 22912, "speedup": 0.5}, "the best speedup with params <= 22,912 and speedup >= 0.5"),
        ({"params": 100}, "no architecture has params <= 100; this is the best speedup of the others"),
        ({"speedup": 9}, "no architecture has speedup >= 9; this is the best speedup of the others"),
    ],
)
def test_a_cap_decides_what_is_recommended(runs: Callable[..., Runs], within: dict[str, float], why: str) -> None:
    search = runs({"trials": 12, "reduction": 2}, {**BOTH, "within": within}).search()
    ranked = search.execute()
    pick = recommended(search, ranked)
    assert pick.why == why
    allowed = [
        record
        for record in ranked
        if draft_params(record.spec) <= within.get("params", 1e9) and by_hand(record)[0] >= within.get("speedup", 0)
    ]
    assert pick.trial == (allowed or ranked)[0].number


def test_the_knee_is_recommended_where_no_cap_is_given(runs: Callable[..., Runs]) -> None:
    """The third layer buys little: half of the sizes' ratio for a quarter of the speed."""

    def less_and_less(task: RungTask) -> Any:
        return measured(task, (1.4, 1.65, 1.74)[len(task.spec.layers) - 1])

    search = runs({"trials": 10, "rungs": [100]}, BOTH).search(answer=less_and_less)
    ranked = search.execute()
    pick = recommended(search, ranked)
    assert pick.why == "the knee of the Pareto set over speedup and params"
    assert len(ranked[0].spec.layers) == 3
    assert len(search.study.records[pick.trial].spec.layers) == 2
    best = best_config(search, ranked)
    assert (best.name, best.hash) == (pick.name, pick.hash)
    assert best.verdict.winner == ranked[0].name
    assert best.times == "toy times"


def test_the_pareto_file_has_the_set_the_pick_and_the_hypervolume_over_time(runs: Callable[..., Runs]) -> None:
    search = runs({"trials": 6, "seeds": 2, "finalists": 2}, BOTH).search()
    ranked = search.execute()
    write_front(search, ranked)
    told = json.loads(search.folder.pareto.read_text(encoding="utf-8"))
    assert told["objectives"] == {"speedup": "maximize", "params": "minimize"}
    assert [member["trial"] for member in told["members"]] == [record.number for record in front_of(search)]
    for member in told["members"]:
        record = search.study.records[member["trial"]]
        assert repr(member["params"]) == repr(draft_params(record.spec))
        assert member["speedup"] == pytest.approx(search.gain(record))
        assert (member["state"], member["seeds"]) == (record.state, len(record.final))
    assert told["recommended"]["trial"] == recommended(search, ranked).trial
    history = told["hypervolume"]
    assert history["logarithmic"] == ["params"]
    assert len(history["steps"]) == len(submitted(search))
    volumes = [step["hypervolume"] for step in history["steps"]]
    assert 0 < volumes[0] < volumes[-1]
    assert volumes[-1] == pytest.approx(volume_of(told))
    tokens = [step["tokens"] for step in history["steps"]]
    assert tokens == sorted(tokens)
    records = search.study.records.values()
    assert tokens[-1] == sum(m.tokens for record in records for m in record.final)


def test_the_hypervolume_is_that_of_the_set_as_it_was_after_each_measurement(runs: Callable[..., Runs]) -> None:
    """It falls where another seed, or more training, brings a candidate down, and counts none that breaks a bound."""

    def down(task: RungTask) -> Any:
        return measured(task, 1.5 + 0.05 * len(task.spec.layers) - 0.02 * task.rung - 0.03 * task.seed)

    bounds = {"acceptance_length": {"min": 1.5}}
    one = runs({"trials": 8, "seeds": 2, "finalists": 2}, BOTH, constraints=bounds)
    search = one.search("whole", answer=down)
    ranked = search.execute()
    write_front(search, ranked)
    told = json.loads(search.folder.pareto.read_text(encoding="utf-8"))
    volumes = [step["hypervolume"] for step in told["hypervolume"]["steps"]]
    assert volumes != sorted(volumes)
    assert volumes[-1] == pytest.approx(volume_of(told))
    records, steps = list(search.study.records.values()), told["hypervolume"]["steps"]
    everything = {(r.number, m.seed, m.rung): m for r in records for m in (*r.measurements, *r.repeats)}
    for at in range(1, len(steps) + 1):
        for record in records:
            known = [everything[record.number, s["seed"], s["rung"]] for s in steps[:at] if s["trial"] == record.number]
            record.measurements = [m for m in known if m.seed == 0]
            record.repeats = [m for m in known if m.seed]
        scorer = search.study.scorer
        members = [dict(zip(scorer.names, scorer.means(record), strict=True)) for record in front_of(search)]
        assert steps[at - 1]["hypervolume"] == pytest.approx(volume_of(told | {"members": members}), abs=1e-12)


def test_a_pick_that_makes_serving_slower_is_told(runs: Callable[..., Runs]) -> None:
    search = runs({"trials": 4}).search(answer=lambda task: measured(task, 1.01))
    pick = recommended(search, search.execute())
    value = by_hand(search.study.records[pick.trial])[0]
    assert value < 1
    slower = f"it is predicted to make serving slower than without a draft, {value:.3f} times as fast"
    assert pick.why == f"the best speedup; {slower}"


# Constraints


def test_a_bound_on_time_turns_away_before_training_and_is_told(
    runs: Callable[..., Runs], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study_module, "MAX_REPEATS", 40)
    constraints = {"draft_ms": {"max": 0.23}, "params": {"min": 22000}}
    one = runs({"trials": 30}, constraints=constraints, space=SMALL_SPACE, baselines=["eagle3"])
    search = one.search()
    search.execute()
    assert [draft_params(record.spec) / 100e3 for record in search.study.records.values()] == [pytest.approx(0.22912)]
    told = [trial for trial in search.study._study.trials if "infeasible" in trial.user_attrs]
    slow = [trial for trial in told if trial.constraints["draft_ms"] > 0]
    assert slow
    assert all("draft_ms: " in trial.user_attrs["infeasible"] for trial in slow)
    assert all(trial.state == TrialState.PRUNED for trial in told)
    assert all(trial.constraints["params"] > 0 for trial in told if trial not in slow)
    assert search.study.turned_away == {"draft_ms": len(slow), "params": len(told) - len(slow)}
    assert not {trial.number for trial in told} & {task.number for task in submitted(search)}
    assert one.search().study.turned_away == search.study.turned_away
    assert best_config(search, search.ranking()).turned_away == dict(search.study.turned_away)


def test_draws_that_make_no_draft_are_counted_apart(runs: Callable[..., Runs]) -> None:
    choices = {"depth": [1, 2], "layers.0.fusion": ["concat", "add"], "layers.0.attention.heads": [3, 4]}
    one = runs({"trials": 4}, space={"base": "eagle3", "choices": choices})
    search = one.search()
    search.execute()
    assert search.study.turned_away["valid"] > 0
    assert set(search.study.turned_away) == {"valid"}
    assert one.search().study.turned_away == search.study.turned_away


BOUND = {"acceptance_length": {"min": 1.4515}}


def small_is_fast(task: RungTask) -> Any:
    """And accepts too little."""
    return measured(task, 1.45 + 0.001 * len(task.spec.layers) + 0.01 * task.seed)


def test_a_bound_on_what_was_measured_is_told_and_who_breaks_it_ranks_last(runs: Callable[..., Runs]) -> None:
    search = runs({"trials": 8, "rungs": [100]}, BOTH, constraints=BOUND).search(answer=small_is_fast)
    ranked = search.execute()
    meets = [record.measurements[-1].length >= 1.4515 for record in ranked]
    assert meets == sorted(meets, reverse=True)
    assert set(meets) == {True, False}
    assert by_hand(ranked[-1])[0] > by_hand(ranked[0])[0]
    trials = search.study._study.trials
    for record, keeps in zip(ranked, meets, strict=True):
        assert (trials[record.number].constraints["acceptance_length"] <= 0) is keeps
        assert trials[record.number].state == TrialState.COMPLETE
    rows = leaderboard_rows(search)
    assert [row["meets"] for row in rows] == meets
    assert not any(row["pareto"] for row in rows if not row["meets"])
    kept = {record.number for record, keeps in zip(ranked, meets, strict=True) if keeps}
    assert recommended(search, ranked).trial in kept
    assert not search.study.turned_away
    best = best_config(search, ranked)
    broken = {record.name for record, keeps in zip(ranked, meets, strict=True) if not keeps}
    assert not broken & {rival.name for rival in best.verdict.inside}


def test_where_none_keeps_a_bound_the_best_is_named_with_a_warning(runs: Callable[..., Runs]) -> None:
    search = runs({"trials": 4}, BOTH, constraints={"speedup": {"min": 5}}).search()
    ranked = search.execute()
    pick = recommended(search, ranked)
    assert pick.trial == ranked[0].number
    assert pick.why == "no architecture keeps the constraints on what was measured; this is the best of the others"
    assert best_config(search, ranked).pareto == []


def test_what_measures_beyond_a_bound_is_the_same_after_a_resume(runs: Callable[..., Runs]) -> None:
    one = runs({"trials": 6, "seeds": 2, "finalists": 2}, BOTH, constraints=BOUND)
    whole = one.search("whole")
    whole.execute()
    for at in (3, 10, 17):
        assert one.stopped(f"at {at}", at)
        one.ends_like(whole, f"at {at}")
    assert outcome(one.search("whole")) == outcome(whole)


def test_finalists_are_those_that_keep_the_bounds(runs: Callable[..., Runs]) -> None:
    budget = {"trials": 8, "rungs": [100], "seeds": 2, "finalists": 2}
    search = runs(budget, BOTH, constraints=BOUND, baselines=["eagle3-deep-fused-once"]).search(answer=small_is_fast)
    search.execute()
    repeated = [record for record in search.study.records.values() if record.repeats]
    assert len(repeated) in (2, 3)
    assert all(record.measurements[-1].length >= 1.4515 for record in repeated)
