"""A funnel of stages: who goes on and from where, what fails and stops, and that kills change nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState

from archspec.errors import ArchspecError
from runners.features.store import FeatureStore
from runners.search import study as study_module
from runners.search.driver import Search
from runners.search.executor import Failure, Finished, Started
from runners.search.leaderboard import leaderboard_rows
from runners.search.search_file import SearchFile
from runners.training.trial import RungTask
from tests.runners.interrupted import Runs, events, outcome, stopping_at_write, submitted
from tests.runners.replay import ReplayExecutor, by_formula, measured, search_file

STAGES = [
    {"candidates": 7, "tokens": 100},
    {"candidates": 3, "tokens": 200},
    {"candidates": 2, "tokens": 400, "seeds": 3},
]
SMALL_SPACE = {"base": "eagle3", "choices": {"depth": {"low": 1, "high": 2}, "layers.0.fusion": ["concat", "add"]}}


def funnel(store: FeatureStore, *candidates: int, **changes: Any) -> SearchFile:
    """The stages above, with other numbers of candidates if any are given."""
    numbers = candidates or (7, 3, 2)
    stages = [stage | {"candidates": number} for stage, number in zip(STAGES, numbers, strict=True)]
    return search_file(store, stages=stages, **changes)


@pytest.fixture
def runs(tiny_store: FeatureStore, tmp_path: Path) -> Callable[..., Runs]:
    def make(*candidates: int, **changes: Any) -> Runs:
        return Runs(tmp_path, tiny_store, funnel(tiny_store, *candidates, **changes))

    return make


@pytest.fixture
def soon_exhausted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty draws in a row without anything new are enough to call a space of a few drafts exhausted."""
    monkeypatch.setattr(study_module, "MAX_REPEATS", 40)


def at_stage(search: Search, rung: int) -> list[int]:
    """Who was trained to a stage, by the search's own seed."""
    own = search.file.seed
    return [task.number for task in submitted(search) if task.seed == own and task.rung == rung]


def best_at(search: Search, rung: int, count: int) -> set[int]:
    there = [record for record in search.study.records.values() if len(record.measurements) > rung]
    there.sort(key=lambda record: record.measurements[rung].length, reverse=True)
    return {record.number for record in there[:count]}


# Who goes on


@pytest.mark.parametrize("capacity", [1, 3])
def test_the_best_of_a_stage_go_on_and_baselines_always(runs: Callable[..., Runs], capacity: int) -> None:
    search = runs().search(capacity=capacity)
    ranked = search.execute()
    assert len(search.study.records) == 7
    assert at_stage(search, 0) == list(search.study.records)
    assert set(at_stage(search, 1)) == best_at(search, 0, 3) | {0, 1}
    assert set(at_stage(search, 2)) == best_at(search, 1, 2) | {0, 1}
    assert {record.number for record in ranked} == set(at_stage(search, 2))
    states = {record.number: record.state for record in search.study.records.values()}
    assert {number for number, state in states.items() if state == "pruned"} == set(states) - set(at_stage(search, 2))


def test_a_baseline_that_is_weak_takes_no_place_of_others(runs: Callable[..., Runs]) -> None:
    search = runs().search()
    search.execute()
    assert 0 not in best_at(search, 0, 3)
    assert len(at_stage(search, 1)) == 4


@pytest.mark.parametrize("capacity", [1, 3])
def test_a_stage_ends_before_the_next_begins(runs: Callable[..., Runs], capacity: int) -> None:
    search = runs().search(capacity=capacity)
    search.execute()
    ended = [event.task for event in events(search) if isinstance(event, Finished)]
    for index, event in enumerate(events(search)):
        if isinstance(event, Started):
            before = [e.task for e in events(search)[:index] if isinstance(e, Finished)]
            stage = (event.task.seed != 0, event.task.rung)
            assert [t for t in ended if (t.seed != 0, t.rung) < stage] == [
                t for t in before if (t.seed != 0, t.rung) < stage
            ]


def test_a_candidate_goes_on_in_its_own_folder_and_nothing_runs_twice(runs: Callable[..., Runs]) -> None:
    search = runs().search(capacity=2)
    search.execute()
    tasks = submitted(search)
    assert len({(task.number, task.seed, task.rung) for task in tasks}) == len(tasks)
    for number in search.study.records:
        own = [task for task in tasks if task.number == number and task.seed == 0]
        assert [task.rung for task in own] == list(range(len(own)))
        assert {task.directory for task in own} == {search.folder.trial(number)}
        assert {task.rungs for task in own} == {(100, 200, 400)}


def test_the_finalists_have_the_last_stages_seeds(runs: Callable[..., Runs]) -> None:
    search = runs(seed=5).search()
    ranked = search.execute()
    for record in ranked[:2]:
        assert [m.seed for m in record.final] == [5, 6, 7]
        assert {m.tokens for m in record.final} == {400}
    others = [task for task in submitted(search) if task.seed != 5]
    assert {task.rungs for task in others} == {(400,)}
    assert {task.directory.name for task in others} == {"seed-1", "seed-2"}
    assert not {task.number for task in others} & {r.number for r in ranked if not r.baseline and r not in ranked[:2]}


def test_one_stage_is_a_search_without_stops(tiny_store: FeatureStore, tmp_path: Path) -> None:
    file = search_file(tiny_store, stages=[{"candidates": 4, "tokens": 100, "seeds": 2}])
    search = Runs(tmp_path, tiny_store, file).search()
    ranked = search.execute()
    assert len(ranked) == 4
    assert all(len(record.final) == 2 for record in ranked)
    assert {task.rung for task in submitted(search)} == {0}


def test_who_waits_is_told_so(runs: Callable[..., Runs]) -> None:
    assert runs().stopped("run", 4)
    search = runs().search()
    assert [(row["state"], row["rungs"], row["rank"]) for row in leaderboard_rows(search)] == [("running", 1, "")] * 2


# What the study learns


def test_the_study_learns_from_the_first_stage_alone(runs: Callable[..., Runs]) -> None:
    """A funnel's later stages know few, at another budget: beside the first stage's values they would mislead."""
    search = runs().search()
    search.execute()
    trials = search.study._study.trials
    for record in search.study.records.values():
        trial = trials[record.number]
        assert (trial.state, trial.values) == (TrialState.COMPLETE, [record.measurements[0].length])
        assert trial.intermediate_values == {}


@pytest.mark.usefixtures("soon_exhausted")
def test_a_twin_is_told_the_first_stage_and_a_small_space_ends(runs: Callable[..., Runs]) -> None:
    search = runs(30, 3, 2, space=SMALL_SPACE, baselines=["eagle3"]).search()
    search.execute()
    assert search.exhausted
    assert len(search.study.records) == 4
    assert len(at_stage(search, 1)) in (3, 4)
    twins = [trial for trial in search.study._study.trials if "repeat_of" in trial.user_attrs]
    assert twins
    for trial in twins:
        first = search.study.records[trial.user_attrs["repeat_of"]].measurements[0]
        assert (trial.state, trial.values) == (TrialState.COMPLETE, [first.length])


@pytest.mark.usefixtures("soon_exhausted")
def test_a_twin_of_one_that_came_further_is_told_the_first_stage_all_the_same(runs: Callable[..., Runs]) -> None:
    small = {"space": SMALL_SPACE, "baselines": ["eagle3"]}
    runs(2, 2, 1, **small).search().execute()
    search = runs(30, 2, 1, **small).search()
    search.execute()
    trials = search.study._study.trials
    told = [(t, search.study.records[t.user_attrs["repeat_of"]]) for t in trials if "repeat_of" in t.user_attrs]
    assert any(len(record.measurements) > 1 for _, record in told)
    assert all(trial.values == [record.measurements[0].length] for trial, record in told)


def test_a_stage_with_more_places_than_candidates_lets_all_pass(runs: Callable[..., Runs]) -> None:
    """Three of four fail at the start: the next stage has a place for each that is left."""

    def failing(task: RungTask) -> Any:
        return Failure("diverged", "loss nan") if task.number in (2, 3, 4) else by_formula(task)

    search = runs(5, 4, 3).search(answer=failing)
    ranked = search.execute()
    assert at_stage(search, 1) == at_stage(search, 2) == [0, 1]
    assert {record.number for record in ranked} == {0, 1}


def test_equal_candidates_go_on_by_number(runs: Callable[..., Runs]) -> None:
    search = runs(baselines=["eagle3"]).search(answer=lambda task: measured(task, 1.5))
    search.execute()
    assert (at_stage(search, 1), at_stage(search, 2)) == ([0, 1, 2], [0, 1])


def test_when_the_hours_are_over_stages_go_on_with_who_was_measured(tiny_store: FeatureStore, tmp_path: Path) -> None:
    runs = Runs(tmp_path, tiny_store, funnel(tiny_store).model_copy(deep=True))
    file = runs.file.model_copy(update={"budget": runs.file.budget.model_copy(update={"hours": 1.0})})

    def an_hour_later(task: RungTask) -> Any:
        if task.number == 2:
            search.started -= 3600
        return by_formula(task)

    search = runs.search(answer=an_hour_later, file=file)
    search.execute()
    assert len(search.study.records) == 3
    assert len(at_stage(search, 1)) == 3
    again = runs.search(file=file)  # the hours begin anew
    again.execute()
    assert len(again.study.records) == 7
    assert at_stage(again, 0) == list(again.study.records)[3:]


# Failures


@pytest.mark.parametrize("rung", [0, 1, 2])
def test_a_failure_ends_one_candidate_at_whatever_stage(runs: Callable[..., Runs], rung: int) -> None:
    def failing(task: RungTask) -> Any:
        return Failure("diverged", "loss nan") if (task.number, task.rung) == (1, rung) else by_formula(task)

    search = runs().search(answer=failing)
    ranked = search.execute()
    for one in (search, runs().search()):  # in this process and in the next
        record = one.study.records[1]
        assert (record.state, record.failure) == ("failed", Failure("diverged", "loss nan"))
        assert len(record.measurements) == rung
    assert 1 not in {record.number for record in ranked}
    again = runs().search()
    assert [record.number for record in again.execute()] == [record.number for record in ranked]
    assert submitted(again) == []
    assert outcome(again) == outcome(search)


def test_a_crash_at_a_later_stage_is_tried_again(runs: Callable[..., Runs]) -> None:
    crashes: list[RungTask] = []

    def crashing(task: RungTask) -> Any:
        if (task.number, task.rung) == (1, 1) and not crashes:
            crashes.append(task)
            return Failure("crashed", "ended by SIGKILL", retry=True)
        return by_formula(task)

    search = runs().search(answer=crashing)
    search.execute()
    assert search.study.records[1].state == "complete"
    assert at_stage(search, 1).count(1) == 2


def test_a_failed_seed_of_a_finalist_is_kept_and_tried_again(runs: Callable[..., Runs]) -> None:
    def failing(task: RungTask) -> Any:
        return Failure("diverged", "loss nan") if task.seed == 1 else by_formula(task)

    winner = runs().search(answer=failing).execute()[0]
    assert [m.seed for m in winner.final] == [0, 2]
    again = runs().search()
    assert again.study.records[winner.number].failed_repeats == {1: Failure("diverged", "loss nan")}
    again.execute()
    assert [m.seed for m in again.study.records[winner.number].final] == [0, 1, 2]
    assert {task.seed for task in submitted(again)} == {1}


def test_a_stage_that_all_fail_ends_the_search_with_the_reason(runs: Callable[..., Runs]) -> None:
    def failing(task: RungTask) -> Any:
        return Failure("out_of_memory", "16 GiB wanted") if task.rung == 1 else by_formula(task)

    told = "5 trials failed one after another, the last as out_of_memory: 16 GiB wanted"
    with pytest.raises(ArchspecError, match=told):
        runs().search(answer=failing).execute()
    with pytest.raises(ArchspecError, match="run: no trial reached the last rung; failures: 16 GiB wanted"):
        runs(4, 2, 1).search(answer=failing).execute()


def test_the_place_of_one_that_failed_falls_to_the_next_best(runs: Callable[..., Runs]) -> None:
    """Of six, the two that are promoted diverge, and the next two take their places."""
    lengths, order = [1.1, 1.5, 1.2, 1.4, 1.3, 1.0], list[int]()

    def failing(task: RungTask) -> Any:
        if task.number not in order:
            order.append(task.number)
        place = order.index(task.number)
        if task.rung == 1 and place in (1, 3):
            return Failure("diverged", "loss nan")
        return measured(task, lengths[place] + 0.01 * task.rung)

    search = runs(6, 2, 1, baselines=[]).search(answer=failing)
    ranked = search.execute()
    assert [order.index(number) for number in at_stage(search, 1)] == [1, 3, 2, 4]
    assert [record.number for record in ranked] == at_stage(search, 2)[:1] == [order[4]]
    states = [search.study.records[number].state for number in order]
    assert states == ["pruned", "failed", "pruned", "failed", "complete", "pruned"]


def test_who_keeps_the_bounds_on_what_is_measured_goes_on_first(runs: Callable[..., Runs]) -> None:
    """The smallest are followed, and break the bound."""
    bound = {"acceptance_length": {"min": 1.3}}
    objective = {"draft_length": 3, "minimize": "params", "maximize": "acceptance_length", "follow": "params"}
    search = runs(8, 2, 1, baselines=[], constraints=bound, objective=objective).search(
        answer=lambda task: measured(task, 1.0 + 0.2 * len(task.spec.layers))
    )
    (best,) = search.execute()
    keeping = [r for r in search.study.records.values() if r.measurements[0].length >= 1.3]
    least = sorted(record.columns["params"] for record in keeping)
    assert {search.study.records[n].columns["params"] for n in at_stage(search, 1)} == set(least[:2])
    assert best.columns["params"] == least[0]


class Refusing(ReplayExecutor):
    """Has room for the first stage alone."""

    def refusal(self, task: RungTask) -> Failure | None:
        """See ``Executor``."""
        return Failure("error", "no node has so much memory") if task.rung else None


def test_a_stage_that_never_fits_ends_the_search_with_the_reason(runs: Callable[..., Runs]) -> None:
    search = runs().search()
    search.executor = Refusing(by_formula)
    told = "5 trials failed one after another, the last as error: no node has so much memory"
    with pytest.raises(ArchspecError, match=told):
        search.execute()
    states = [record.state for record in search.study.records.values()]
    assert (states.count("failed"), states.count("complete")) == (5, 0)


def test_too_many_failures_in_a_row_stop_a_stage_which_goes_on_later(runs: Callable[..., Runs]) -> None:
    def failing(task: RungTask) -> Any:
        return Failure("error", "disk full") if task.rung == 1 else by_formula(task)

    many = runs(9, 6, 3)
    with pytest.raises(ArchspecError, match="5 trials failed one after another, the last as error: disk full"):
        many.search(answer=failing).execute()
    again = many.search()
    ranked = again.execute()
    assert ranked
    assert sum(record.state == "failed" for record in again.study.records.values()) == 5
    assert at_stage(again, 0) == []


# Kills


@pytest.mark.parametrize("part", range(4))
def test_a_search_that_is_stopped_at_any_event_ends_as_one_that_was_not(runs: Callable[..., Runs], part: int) -> None:
    one = runs(5, 3, 2)
    whole = one.search("whole")
    whole.execute()
    for at in range(1 + part, len(events(whole)) + 1, 4):
        assert one.stopped(f"at {at}", at)
        one.ends_like(whole, f"at {at}")


@pytest.mark.parametrize("part", range(2))
def test_a_search_that_is_stopped_between_two_writes_ends_as_one_that_was_not(
    runs: Callable[..., Runs], monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    """Each of a trial's attributes and values is a write of its own."""
    one = runs(4, 2, 1, constraints={"params": {"max": 44e3}, "acceptance_length": {"min": 1.3}})
    with stopping_at_write(monkeypatch, 0) as writes:
        whole = one.search("whole")
        whole.execute()
    for at in range(2 + 5 * part, writes[0], 10):  # the first makes the study; all of them take half a minute
        with stopping_at_write(monkeypatch, at):
            assert one.stopped(f"at {at}")
        one.ends_like(whole, f"at {at}")


@pytest.mark.parametrize("at", [9, 17, 23, 26])
def test_what_is_in_flight_together_is_taken_up_again(runs: Callable[..., Runs], at: int) -> None:
    """The order of results, and so what is drawn, is another one then; the stages are kept all the same."""
    one = runs()
    assert one.stopped("run", at, capacity=3)
    search = one.search(capacity=3)
    search.execute()
    assert len(search.study.records) == 7
    for rung, places in ((0, 3), (1, 2)):
        on = {r.number for r in search.study.records.values() if len(r.measurements) > rung + 1}
        assert on == best_at(search, rung, places) | {0, 1}
    assert all(record.state in ("complete", "pruned") for record in search.study.records.values())


def test_a_wider_funnel_goes_on_with_more_candidates(runs: Callable[..., Runs]) -> None:
    narrow, wide = runs(5, 3, 1), runs(8, 5, 2)
    narrow.search().execute()
    search = wide.search()
    search.execute()
    assert at_stage(search, 0) == list(search.study.records)[5:]
    assert len(search.study.records) == 8
    on = {r.number for r in search.study.records.values() if len(r.measurements) > 1}
    assert best_at(search, 0, 5) <= on
    assert {r.state for r in search.study.records.values() if len(r.measurements) == 1} == {"pruned"}


def test_a_finished_funnel_has_nothing_left_to_do(runs: Callable[..., Runs]) -> None:
    whole = runs().search()
    whole.execute()
    again = runs().search()
    again.execute()
    assert submitted(again) == []
    assert outcome(again) == outcome(whole)
