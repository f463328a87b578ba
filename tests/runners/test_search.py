"""Whole searches in under a second each: rungs, finalists, failures, time, and kills at any moment."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from archspec.errors import ArchspecError
from runners.features.store import FeatureStore
from runners.search import study as study_module
from runners.search.driver import Search
from runners.search.executor import Event, Failure, Finished
from runners.search.run_folder import RunFolder
from runners.search.search_file import SearchFile
from runners.training.trial import RungTask, read_metrics, write_metrics
from tests.runners.drafts import SETTINGS
from tests.runners.replay import SPACE, Answer, ReplayExecutor, by_formula, measured, new_folder, search_file


class Silent:
    """A watcher that keeps the events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def began(self, search: Search) -> None:
        pass

    def changed(self, search: Search, event: Event) -> None:
        self.events.append(event)


class Interrupted(BaseException):
    """What a kill looks like from inside: nothing after it runs."""


SMALL_SPACE = {"base": "eagle3", "choices": {"depth": {"low": 1, "high": 2}, "layers.0.fusion": ["concat", "add"]}}


@pytest.fixture
def soon_exhausted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty draws in a row without anything new are enough to call a space of a few drafts exhausted."""
    monkeypatch.setattr(study_module, "MAX_REPEATS", 40)


@pytest.fixture
def run(tiny_store: FeatureStore, tmp_path: Path) -> Callable[..., Search]:
    """A search in a folder of its own; ``execute`` it."""

    def make(
        answer: Answer = by_formula, file: SearchFile | None = None, capacity: int = 1, name: str = "run"
    ) -> Search:
        file = file or search_file(tiny_store)
        path = tmp_path / name
        folder = RunFolder(path) if path.exists() else new_folder(path, file)
        return Search(folder, file, tiny_store, ReplayExecutor(answer, capacity), Silent())

    return make


def kinds(search: Search) -> dict[str, int]:
    states = [record.state for record in search.study.records.values()]
    return {state: states.count(state) for state in set(states)}


def submitted(search: Search) -> list[RungTask]:
    assert isinstance(search.executor, ReplayExecutor)
    return search.executor.submitted


def test_a_search_finds_the_best_of_the_formula(run: Callable[..., Search]) -> None:
    search = run()
    ranked = search.execute()
    assert len(search.study.records) == 8
    assert [search.gain(record) for record in ranked] == sorted(map(search.gain, ranked), reverse=True)
    assert kinds(search)["complete"] == len(ranked) >= 2
    assert kinds(search)["pruned"] >= 2
    for record in search.study.records.values():
        assert len(record.measurements) == 3 if record.state == "complete" else 0 < len(record.measurements) < 3
        assert read_metrics(search.folder.trial(record.number)) == record.measurements
    tasks = submitted(search)
    assert len({(task.number, task.rung, task.seed) for task in tasks}) == len(tasks)
    assert isinstance(search.executor, ReplayExecutor)
    assert search.executor.shutdowns == 1


@pytest.mark.usefixtures("soon_exhausted")
def test_a_search_ends_when_it_has_seen_all_of_a_small_space(
    run: Callable[..., Search], tiny_store: FeatureStore
) -> None:
    search = run(file=search_file(tiny_store, {"trials": 100}, space=SMALL_SPACE, baselines=["eagle3"]), capacity=2)
    ranked = search.execute()
    assert len(search.study.records) == 4
    assert search.exhausted
    assert [layer.fusion for layer in ranked[0].spec.layers] == ["concat", "concat"]


def test_capacity_is_used_and_never_passed(run: Callable[..., Search]) -> None:
    search = run(capacity=3)
    search.execute()
    assert isinstance(search.executor, ReplayExecutor)
    assert search.executor.most_at_once == 3
    assert len(search.study.records) == 8


def test_finalists_are_repeated_with_more_seeds_at_the_full_budget(
    run: Callable[..., Search], tiny_store: FeatureStore
) -> None:
    search = run(file=search_file(tiny_store, {"seeds": 3, "finalists": 2}, seed=6))
    ranked = search.execute()
    for record in ranked[:2]:
        assert [m.seed for m in (record.measurements[-1], *record.repeats)] == [6, 7, 8]
        assert {m.tokens for m in record.repeats} == {400}
    assert all(not record.repeats for record in ranked[2:])
    again = run(file=search_file(tiny_store, {"seeds": 3, "finalists": 2}, seed=6))
    assert [record.repeats for record in again.execute()] == [record.repeats for record in ranked]
    assert submitted(again) == []


def test_a_seed_that_failed_is_tried_again_on_a_resume(run: Callable[..., Search], tiny_store: FeatureStore) -> None:
    """And is no failed one any more, in this process as in the next."""
    file = search_file(tiny_store, {"seeds": 2})

    def failing_seed(task: RungTask) -> Any:
        return Failure("diverged", "loss nan") if task.seed else by_formula(task)

    number = run(failing_seed, file).execute()[0].number
    again = run(file=file)
    assert again.study.records[number].failed_repeats == {1: Failure("diverged", "loss nan")}
    again.execute()
    for search in (again, run(file=file)):
        record = search.study.records[number]
        assert (record.failed_repeats, len(record.repeats)) == ({}, 1)


def test_the_winner_is_one_that_was_repeated(run: Callable[..., Search], tiny_store: FeatureStore) -> None:
    """A finalist's mean over seeds must not lose to a lucky single seed that nobody repeated."""

    def lucky_first_seed(task: RungTask) -> Any:
        return measured(task, by_formula(task).length - (0.2 if task.seed else 0.0))

    baselines = ["eagle3", "eagle3-deep-fused-once", "eagle3-deep-fused-every-layer"]
    file = search_file(tiny_store, {"seeds": 2, "finalists": 2, "trials": 6}, baselines=baselines)
    search = run(lucky_first_seed, file)
    ranked = search.execute()
    assert len(ranked) > 2
    assert [bool(record.repeats) for record in ranked[:2]] == [True, True]


def test_a_failure_is_recorded_and_the_search_goes_on(run: Callable[..., Search]) -> None:
    def sometimes(task: RungTask) -> Any:
        if task.number == 2:
            return Failure("diverged", "loss nan")
        return by_formula(task)

    search = run(sometimes)
    search.execute()
    assert search.study.records[2].failure == Failure("diverged", "loss nan")
    assert kinds(search)["failed"] == 1
    assert len(search.study.records) == 8


def test_a_crash_is_tried_again_and_no_more_often_than_told(
    run: Callable[..., Search], tiny_store: FeatureStore
) -> None:
    crashes: list[RungTask] = []

    def crashing(task: RungTask) -> Any:
        if (task.number == 0 and not crashes) or task.number == 1:
            crashes.append(task)
            return Failure("crashed", "ended by SIGKILL", retry=True)
        return by_formula(task)

    search = run(crashing, search_file(tiny_store, {"retries": 2}))
    search.execute()
    assert search.study.records[0].state == "complete"
    assert [task.number for task in crashes] == [0, 1, 1, 1]
    assert search.study.records[1].state == "failed"


def test_too_many_failures_in_a_row_end_the_search(run: Callable[..., Search], tiny_store: FeatureStore) -> None:
    def failing(task: RungTask) -> Any:
        return by_formula(task) if task.number == 0 else Failure("error", "no such layer")

    search = run(failing, search_file(tiny_store, {"max_failures_in_a_row": 3}))
    with pytest.raises(
        ArchspecError, match=r"run: 3 trials failed one after another, the last as error: no such layer"
    ):
        search.execute()
    assert isinstance(search.executor, ReplayExecutor)
    assert search.executor.shutdowns == 1
    mended = run(file=search_file(tiny_store))
    assert len(mended.execute()) >= 1
    assert len(mended.study.records) == 8


def test_a_success_between_failures_starts_the_count_anew(run: Callable[..., Search], tiny_store: FeatureStore) -> None:
    numbers: list[int] = []

    def every_second(task: RungTask) -> Any:
        numbers.extend([task.number] if task.number not in numbers else [])
        return Failure("diverged", "loss nan") if numbers.index(task.number) % 2 else by_formula(task)

    search = run(every_second, search_file(tiny_store, {"max_failures_in_a_row": 2}))
    search.execute()
    assert kinds(search)["failed"] >= 3


def test_a_search_without_any_result_says_why(run: Callable[..., Search], tiny_store: FeatureStore) -> None:
    search = run(lambda task: Failure("error", "disk full"), search_file(tiny_store, {"trials": 2}))
    with pytest.raises(ArchspecError, match="run: no trial reached the last rung; failures: disk full"):
        search.execute()


def test_no_trial_begins_after_the_hours_are_over(run: Callable[..., Search], tiny_store: FeatureStore) -> None:
    search = run(file=search_file(tiny_store, {"hours": 1.0}))

    def an_hour_later(task: RungTask) -> Any:
        if task.number == 1:
            search.started -= 3600
        return by_formula(task)

    search.executor = ReplayExecutor(an_hour_later)
    ranked = search.execute()
    assert len(search.study.records) == 2
    assert len(ranked) == 2  # what had begun was finished


@pytest.mark.parametrize("at", range(1, 14, 2))
@pytest.mark.parametrize("measured_first", [False, True], ids=["before", "after its metrics were written"])
def test_a_killed_search_goes_on_and_ends_as_if_nothing_had_happened(
    run: Callable[..., Search], tiny_store: FeatureStore, at: int, measured_first: bool
) -> None:
    """Killed at the end of the ``at``-th task, whose trial may or may not have written its measurement."""
    file = search_file(tiny_store, {"trials": 5, "seeds": 2, "finalists": 1})
    count = 0

    def killing(task: RungTask) -> Any:
        nonlocal count
        count += 1
        if count == at:
            if measured_first:
                write_metrics(task.directory, [*read_metrics(task.directory), by_formula(task)])
            raise Interrupted
        return by_formula(task)

    first = run(killing, file)
    try:
        first.execute()
    except Interrupted:
        pass
    else:
        pytest.skip(f"the search has fewer than {at} tasks")
    before = [record.candidate.hash for record in first.study.records.values()]
    resumed = run(file=file)
    ranked = resumed.execute()
    records = resumed.study.records.values()
    assert [record.candidate.hash for record in records][: len(before)] == before
    assert len(records) == 5
    assert all(record.state in ("complete", "pruned") for record in records)
    assert ranked[0].repeats
    for record in records:
        assert [m.rung for m in record.measurements] == list(range(len(record.measurements)))
        values = resumed.study._study.trials[record.number].intermediate_values
        assert list(values.values()) == [m.length for m in record.measurements]


def test_a_finished_search_has_nothing_left_to_do_and_a_larger_budget_goes_on(
    run: Callable[..., Search], tiny_store: FeatureStore
) -> None:
    ranked = run().execute()
    again = run()
    assert [record.number for record in again.execute()] == [record.number for record in ranked]
    assert submitted(again) == []
    larger = run(file=search_file(tiny_store, {"trials": 10}))
    larger.execute()
    assert len(larger.study.records) == 10
    assert {task.number for task in submitted(larger)}.isdisjoint(again.study.records)


def test_the_watcher_sees_every_event(run: Callable[..., Search]) -> None:
    search = run()
    search.execute()
    watcher = search._watcher
    assert isinstance(watcher, Silent)
    ends = [event for event in watcher.events if isinstance(event, Finished)]
    assert [event.task for event in ends] == submitted(search)


def test_training_settings_of_the_space_reach_the_task(run: Callable[..., Search], tiny_store: FeatureStore) -> None:
    choices = {**SPACE["choices"], "train.learning_rate": {"low": 1e-4, "high": 1e-2, "log": True}}
    search = run(file=search_file(tiny_store, space={"base": "eagle3", "choices": choices}))
    search.execute()
    for task in submitted(search):
        record = search.study.records[task.number]
        assert task.train.learning_rate == record.candidate.train.get("learning_rate", SETTINGS.learning_rate)
    assert len({task.train.learning_rate for task in submitted(search)}) > 3
