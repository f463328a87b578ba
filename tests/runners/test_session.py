"""What is checked before a search begins, and who may search in a folder."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from archspec.errors import ArchspecError
from archspec.facts import TargetFacts
from archspec.schema import Document
from runners.display.live import Pace, PlainLines, describe, view_of
from runners.display.status import read_status
from runners.features.store import FeatureStore
from runners.search import session
from runners.search.checks import check_fit, require_train_choices
from runners.search.driver import Search
from runners.search.executor import Event, Finished, Started
from runners.search.objective import DecodeSettings
from runners.search.run_folder import RunFolder
from runners.search.search_file import SearchFile
from runners.search.session import Prepared, aux_layers, execute, open_features
from runners.training.trainer import StepReport
from runners.training.trial import Measurement, RungTask

FACTS = TargetFacts(
    model_type="llama",
    hidden_size=32,
    num_layers=12,
    vocab_size=40000,
    heads=4,
    kv_heads=2,
    head_dim=8,
    intermediate_size=64,
)


def search_file(**changes: Any) -> SearchFile:
    data = {
        "target": {"model": "nowhere"},
        "data": {"conversations": ["text.jsonl"]},
        "features": "features",
        "space": {"base": "eagle3", "choices": {"depth": [1, 2]}},
        "budget": {"trials": 2, "rungs": [100, 200], "seeds": 2, "finalists": 1},
    }
    return Document(data | changes, "search").validate(SearchFile)


def test_a_search_file_survives_its_dump() -> None:
    file = search_file(space="eagle-family", constraints={"params": {"max": 40e6}})
    assert Document.parse(file.dump(), "dump").validate(SearchFile) == file


def test_aux_layers_are_the_union_over_space_baselines_and_fixed() -> None:
    options = {"a": ["low", "last"], "b": [0, 7], "beyond": [2, 99]}
    space = {"base": "eagle3", "choices": {"inputs.aux_layers": {"options": options}}}
    assert aux_layers(search_file(space=space), FACTS) == [0, 2, 6, 7, 9, 12]  # eagle3 itself reads 2, 6, 9
    assert aux_layers(search_file(fixed={"inputs.aux_layers": [3, 5]}), FACTS) == [3, 5]
    assert aux_layers(search_file(baselines=["eagle1"], space=space), FACTS) == [0, 2, 7, 12]


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"train.learning_rat": [1e-3]}, "did you mean 'train.learning_rate'?"),
        ({"train.learning_rate": [1e-3, -1]}, "learning_rate = -1: input should be greater than 0"),
        ({"train.ttt_steps": {"low": 0, "high": 3}}, "ttt_steps = 0: input should be greater than 0"),
        ({"train.betas.first": [0.9]}, "no such setting"),
    ],
)
def test_training_choices_must_be_settings(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(ArchspecError, match=r"space: choices\.train") as caught:
        require_train_choices(search_file(space={"base": "eagle3", "choices": choices}))
    assert message in str(caught.value)


def test_a_space_without_feasible_drafts_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ArchspecError, match="of 2 drawn, 2 break the constraints, the nearest one as params"):
        check_fit(search_file(constraints={"params": {"max": 1000}}), FACTS)
    check_fit(search_file(), FACTS)


def test_a_resumed_run_wants_the_store_that_it_began_with(tiny_store: FeatureStore, tmp_path: Path) -> None:
    fixed = {"inputs.aux_layers": [1, 2], "head.vocab_size": 128}
    file = search_file(features=str(tiny_store.path), fixed=fixed)
    folder = RunFolder(tmp_path)
    folder.provenance.write_text(json.dumps({"features": {"fingerprint": tiny_store.fingerprint}}))
    store = open_features(file, tiny_store.facts, folder, print, None)  # the target "nowhere" is not asked for
    assert store.fingerprint == tiny_store.fingerprint
    folder.provenance.write_text(json.dumps({"features": {"fingerprint": "other"}}))
    with pytest.raises(ArchspecError, match=r"is not the one that .* began with \(other\)"):
        open_features(file, tiny_store.facts, folder, print, None)


def test_a_resume_with_the_file_that_began_the_run_keeps_to_its_float_type(tmp_path: Path) -> None:
    """``train.dtype: auto`` is settled when a run begins, so that the file and the run's own differ in it."""
    file = search_file()
    assert file.train.dtype == "auto"
    RunFolder.begin(tmp_path, file.model_copy(update={"train": file.train.model_copy(update={"dtype": "float32"})}))
    larger = search_file(budget={"trials": 9, "rungs": [100, 200], "seeds": 2, "finalists": 1})
    _, resumed = RunFolder.resume(tmp_path, larger)
    assert (resumed.train.dtype, resumed.budget.trials) == ("float32", 9)
    with pytest.raises(ArchspecError, match="was made with other values of train "):
        RunFolder.resume(tmp_path, search_file(train={"dtype": "bfloat16"}))


# A whole search without training: the executor answers at once


class Oracle:
    """Measures every task as ``1 + depth / 10`` at once, in steps that a test can look at."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self.submitted: list[tuple[int, int, int]] = []

    @property
    def full(self) -> bool:
        return bool(self._events)

    def fits(self, task: RungTask) -> bool:
        return not self._events

    def refusal(self, task: RungTask) -> None:
        return None

    def submit(self, task: RungTask) -> None:
        self.submitted.append((task.number, task.rung, task.seed))
        length = 1.5 + len(task.spec.layers) / 10
        acceptance = {
            "length": length,
            "low": length - 0.01,
            "high": length + 0.01,
            "rate": 0.1,
            "conditional": [0.1] * 4,
            "own_text": True,
        }
        goal = task.rungs[task.rung]
        result = Measurement(
            task.spec.hash, "float32", task.rung, goal, task.seed, 1.0, acceptance, 1.0, float(goal), 0
        )
        if task.rung == len(task.rungs) - 1:
            draft = task.directory / "draft"
            draft.mkdir(parents=True, exist_ok=True)
            (draft / "spec.yaml").write_text("")
        self._events += [Started(task), Finished(task, result)]

    def wait(self, timeout: float) -> Sequence[Event]:
        return [self._events.pop(0)] if self._events else []

    def shutdown(self) -> None:
        self._events.clear()


class Silent:
    """Watches nothing."""

    def began(self, search: Search) -> None:
        pass

    def changed(self, search: Search, event: Event) -> None:
        pass


class Looking(PlainLines):
    """Keeps what ``status`` and the table would have shown after every event."""

    def __init__(self, console: Any) -> None:
        super().__init__(console)
        self.seen: list[tuple[str, str, int]] = []

    def show(self, search: Search, event: Event) -> None:
        view, data = read_status(search.folder.path)
        here = view_of(search, self.pace)
        assert [(row.trial, row.state, row.length) for row in view.rows] == [
            (row.trial, row.state, row.length if row.length is None else round(row.length, 5)) for row in here.rows
        ]
        self.seen.append((describe(search, search.study.records[event.task.number], event), data["state"], view.ended))


@pytest.fixture
def prepared(tiny_store: FeatureStore, tmp_path: Path) -> Prepared:
    fixed = {"inputs.aux_layers": [1, 2], "head.vocab_size": 128}
    file = search_file(fixed=fixed, features=str(tiny_store.path))
    return Prepared(RunFolder.begin(tmp_path / "run", file), file, tiny_store)


def test_a_search_is_seen_alike_from_inside_and_outside(prepared: Prepared) -> None:
    from rich.console import Console

    with Looking(Console(quiet=True)) as watcher:
        best, search = execute(prepared, watcher, Oracle())
    words = [line for line, _, _ in watcher.seen]
    assert words[0] == "trial 0 eagle3: rung 1 of 2 begins, to 100 tokens"
    assert words[3] == "trial 0 eagle3: rung 2 of 2, acceptance length 1.6000 [1.5900, 1.6100], 200 tokens/s; done"
    seed_2 = "seed 2: rung 1 of 1, acceptance length"  # the winner's, and the best baseline's beside it
    drawn = max(search.study.records)  # its repeats and what is not feasible have numbers too
    assert f"trial {drawn} d2, {seed_2} 1.7000 [1.6900, 1.7100], 200 tokens/s" in words
    assert words[-1] == f"trial 0 eagle3, {seed_2} 1.6000 [1.5900, 1.6100], 200 tokens/s"
    assert {state for _, state, _ in watcher.seen} == {"running"}
    assert best.name == "d2"
    view, data = read_status(prepared.folder.path)
    assert data["state"] == "finished"
    assert (view.ended, view.trials) == (2, 2)
    assert data["best"]["length"] == pytest.approx(1.7)


def test_what_was_measured_but_not_told_is_not_trained_again(prepared: Prepared) -> None:
    """A driver killed between a task's last write and its own: the measurement is on disk, the study does not know."""
    before = Search(prepared.folder, prepared.file, prepared.store, Oracle(), Silent())
    record = before.study.draw()
    assert record is not None
    for rung in (0, 1):
        before.executor.submit(before._task(record, rung))
    results = [event.result for _ in range(4) for event in before.executor.wait(0) if isinstance(event, Finished)]
    lines = [json.dumps(result.as_dict()) for result in results if isinstance(result, Measurement)]
    (prepared.folder.trial(0) / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    oracle = Oracle()
    after = Search(prepared.folder, prepared.file, prepared.store, oracle, Silent())
    after.execute()
    assert after.study.records[0].state == "complete"
    again = [number for number, _, seed in oracle.submitted if seed == prepared.file.seed]
    assert set(again) == after.study.records.keys() - {0}
    assert len(again) == len(prepared.file.budget.rungs)


def test_results_outlive_what_breaks_while_finalists_are_decoded(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: Any) -> list[Any]:
        raise MemoryError("no room for the target")

    monkeypatch.setattr(session, "decode_finalists", breaks)
    monkeypatch.setattr(session, "write_results", lambda search, _, decoded=(): seen.append(tuple(decoded)))
    seen: list[Any] = []
    file = prepared.file.model_copy(update={"decode": DecodeSettings()})
    with pytest.raises(MemoryError):
        session.execute(replace(prepared, file=file), Silent(), Oracle())
    assert seen == [()]


def test_time_left_follows_the_tokens_that_are_left(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("runners.display.live.time.monotonic", lambda: now[0])
    pace, search = Pace(), Search(prepared.folder, prepared.file, prepared.store, Oracle(), Silent())
    record = search.study.draw()
    assert record is not None
    task = search._task(record, 0)
    assert pace.left(search) is None
    pace.take(Started(task), 0)
    now[0] += 10
    pace.take(_progress(task, 50), 0)
    # 5 tokens a second; left are 150 of this trial, another trial of 200, and a repeat of 200
    assert pace.left(search) == pytest.approx((150 + 200 + 200) / 5)
    assert pace.running[0, 0].tokens_per_second == pytest.approx(5)


def _progress(task: RungTask, tokens: int) -> Event:
    from runners.search.executor import Progress

    return Progress(task, StepReport(1, tokens, 1e-3, 2.0, (0.1,), 1.0))
