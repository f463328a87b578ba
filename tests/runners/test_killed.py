"""The driver is killed with SIGKILL at every kind of moment; a resumed search ends as one that nothing disturbed.

Trials are answered from a formula, so that every moment can be tried; ``test_ray_faults.py`` does the same with trials
that train. One trial at a time: with more, the order of results, and so what TPE draws, would depend on the clock.
"""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runners.features.conversations import Conversation
from runners.features.store import FeatureStore
from runners.search.executor import Event
from runners.search.run_folder import RunFolder
from runners.search.search_file import SearchFile
from runners.search.session import Prepared, execute
from runners.search.study import Study
from runners.training.trial import RungTask, read_metrics
from tests.runners.driver_process import POINTS, Drivers, driver_server, real_files, with_draft
from tests.runners.executor_contract import wait_for_end
from tests.runners.replay import Answer, ReplayExecutor, search_file
from tests.runners.watched import attempts, hold, release, require_no_step_twice


class Silent:
    def began(self, search: Any) -> None:
        pass

    def changed(self, search: Any, event: Event) -> None:
        pass


@pytest.fixture(scope="module")
def drivers() -> Iterator[Drivers]:
    with driver_server() as drivers:
        yield drivers


@pytest.fixture(scope="module")
def file(
    tiny_store: FeatureStore, own_text: list[Conversation], tmp_path_factory: pytest.TempPathFactory
) -> SearchFile:
    """A search over real files, of which the first driver captures the features."""
    folder = tmp_path_factory.mktemp("search")
    changes = {"constraints": {"params": {"max": 44e3}}, "sampler": {"startup_trials": 5}, "seed": 3}
    return search_file(tiny_store, {"trials": 7, "seeds": 2, "finalists": 1}, **real_files(folder, own_text), **changes)


def search(folder: RunFolder, file: SearchFile, answer: Answer = with_draft) -> list[RungTask]:
    """Go on in this process to the end; returns what was trained."""
    executor = ReplayExecutor(answer)
    execute(Prepared(folder, file, FeatureStore.open(file.features.path)), Silent(), executor)
    return executor.submitted


def rows(folder: Path, *left_out: str) -> list[dict[str, str]]:
    """The leaderboard, apart from what differs without meaning anything."""
    with (folder / "leaderboard.csv").open(encoding="utf-8") as lines:
        return [{name: row[name] for name in row if name not in left_out} for row in csv.DictReader(lines)]


def done(folder: Path) -> set[tuple[str, int, int]]:
    """Every (folder, rung, seed) that was measured."""
    trials = [path.parent for path in folder.glob("trials/**/metrics.jsonl")]
    return {(str(path.relative_to(folder)), m.rung, m.seed) for path in trials for m in read_metrics(path)}


@pytest.fixture(scope="module")
def undisturbed(drivers: Drivers, file: SearchFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "search.yaml").write_text(file.dump(), encoding="utf-8")
    ended = drivers.run(folder / "run", file=str(folder / "search.yaml"), replay=True)
    assert ended.code == 0, ended.said
    return folder / "run"


TIMES = {
    "asked": 2,  # the second baseline, whose parameters wait in the journal
    "drawn": 4,
    "half written": 5,
    "written": 5,
    "infeasible": 1,
    "submitted": 7,
    "measured": 5,
    "reported": 3,  # one that is stopped
    "told": 5,
    "leaderboard": 9,
    "seed measured": 1,
    "results": 1,
}
BURNT = {"drawn", "half written"}  # an Optuna trial was begun that no candidate ever had


@pytest.mark.parametrize(("point", "count"), TIMES.items(), ids=TIMES)
def test_a_driver_killed_at_any_moment_loses_nothing_and_repeats_nothing(
    drivers: Drivers, file: SearchFile, undisturbed: Path, tmp_path: Path, point: str, count: int
) -> None:
    (tmp_path / "search.yaml").write_text(file.dump(), encoding="utf-8")
    run = tmp_path / "run"
    ended = drivers.run(run, file=str(tmp_path / "search.yaml"), replay=True, point=point, count=count)
    assert ended.killed, ended.said
    finished, before = done(run), Study(RunFolder(run), file, FeatureStore.open(file.features.path).facts).records
    trained = search(*RunFolder.resume(run, None))
    again = {(str(task.directory.relative_to(run)), task.rung, task.seed) for task in trained}
    assert len(again) == len(trained)
    assert not again & finished
    assert again | finished == done(run) == done(undisturbed) or point in BURNT
    after = Study(RunFolder(run), file, FeatureStore.open(file.features.path).facts).records
    assert {number: record.candidate.hash for number, record in before.items()}.items() <= {
        number: record.candidate.hash for number, record in after.items()
    }.items()
    for record in after.values():
        assert (run / "trials" / f"{record.number:04d}" / "spec.yaml").is_file()
    left_out = ("trial",) if point in BURNT else ()
    assert rows(run, *left_out) == rows(undisturbed, *left_out)
    assert (run / "best-config.json").is_file()


def test_every_point_is_tried() -> None:
    on_ray = {"submitted to Ray", "training"}
    assert POINTS.keys() == TIMES.keys() | on_ray


def test_what_a_killed_local_search_ran_ends_with_it_and_goes_on_from_its_checkpoint(
    drivers: Drivers, file: SearchFile, undisturbed: Path, tmp_path: Path
) -> None:
    """Held in the middle of a rung, so that it would be there for ever."""
    budget = file.budget.model_copy(update={"trials": 2, "rungs": (1200,), "seeds": 1})
    file = file.model_copy(update={"budget": budget})
    (tmp_path / "search.yaml").write_text(file.dump(), encoding="utf-8")
    run, control = tmp_path / "run", tmp_path / "hold"
    hold(control, "0000", 1)
    order = {"file": str(tmp_path / "search.yaml"), "watched": str(control), "point": "training"}
    ended = drivers.run(run, **order)
    assert ended.killed, ended.said
    (before,) = attempts(run / "trials" / "0000")
    wait_for_end(before.process)
    release(control, "0000")
    ended = drivers.run(run, watched=str(control))
    assert ended.code == 0, ended.said
    told = attempts(run / "trials" / "0000")
    assert len(told) == 2
    assert told[0].steps
    require_no_step_twice(told)
