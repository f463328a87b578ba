"""What a search says while it runs and when it ends: lines for events, the time that is left, and the outcome."""

import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from archspec.files import write_json
from runners.display.live import LiveTable, Pace, PlainLines, describe, summary, view_of
from runners.display.outcome import decoded_notes, decoded_table, outcome
from runners.display.status import read_status
from runners.display.view import render
from runners.features.store import FeatureStore
from runners.search.driver import Search
from runners.search.executor import Failure, Finished, Started
from runners.search.leaderboard import write_leaderboard
from runners.search.report import best_config
from runners.search.result import BestConfig, Decoded
from runners.training.trial import RungTask
from tests.runners.interrupted import Interrupted, Runs, events
from tests.runners.replay import K, ToyTimes, by_formula, measured, search_file

STAGES = [{"candidates": 5, "tokens": 100}, {"candidates": 2, "tokens": 300, "seeds": 2}]
SPEED = {"accelerator": "H100-SXM", "draft_lengths": [1, K]}


@pytest.fixture
def runs(tiny_store: FeatureStore, tmp_path: Path) -> Callable[..., Runs]:
    def make(budget: dict[str, Any] | None = None, **changes: Any) -> Runs:
        file = search_file(tiny_store, budget, **{"speed": SPEED, "objective": {"draft_length": K}, **changes})
        return Runs(tmp_path, tiny_store, file, ToyTimes())

    return make


def shown(parts: Any, width: int = 400) -> str:
    console = Console(width=width, file=StringIO(), record=True, color_system=None)
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in console.export_text().splitlines())


class Lines:
    """A watcher that keeps what ``describe`` says of each event."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def began(self, search: Search) -> None:
        pass

    def changed(self, search: Search, event: Any) -> None:
        self.told.append(describe(search, search.study.records[event.task.number], event))


def told_by(search: Search) -> list[str]:
    lines = Lines()
    search._watcher = lines
    search.execute()
    return lines.told


def test_a_line_tells_speed_up_and_what_becomes_of_a_candidate(runs: Callable[..., Runs]) -> None:
    told = told_by(runs(stages=STAGES).search())
    assert told[0] == "trial 0 eagle3: rung 1 of 2 begins, to 100 tokens"
    assert told[1].startswith("trial 0 eagle3: rung 1 of 2, acceptance length 1.")
    assert ", speed-up 1." in told[1]
    assert " at k = " in told[1]
    assert told[1].endswith(" tokens/s; waits for its stage to end")
    assert [line.rsplit("; ")[-1] for line in told if "rung 2 of 2, acc" in line] == ["done"] * 3
    assert sum(", seed 2: rung 1 of 1, acceptance length" in line for line in told) == 2


def test_a_line_tells_who_is_stopped_and_who_goes_on(runs: Callable[..., Runs]) -> None:
    told = told_by(runs().search())
    assert any(line.endswith("; stopped") for line in told)
    assert any(line.endswith("tokens/s") and "rung 1 of 3" in line for line in told)
    assert not any("waits for" in line for line in told)


def test_a_line_tells_a_failure_and_that_it_is_run_again(runs: Callable[..., Runs]) -> None:
    crashed: list[int] = []

    def crashing(task: RungTask) -> Any:
        if not crashed:
            crashed.append(task.number)
            return Failure("crashed", "ended by SIGKILL", retry=True)
        return by_formula(task)

    told = told_by(runs().search(answer=crashing))
    assert told[1] == "trial 0 eagle3: rung 1 of 3 crashed: ended by SIGKILL; running it again"


# The time that is left


def seconds_left(search: Search, monkeypatch: pytest.MonkeyPatch, elapsed: float = 10.0) -> list[float | None]:
    """At every end of a rung, as if each had taken ``elapsed`` seconds."""
    now = [1000.0]
    monkeypatch.setattr("runners.display.live.time.monotonic", lambda: now[0])
    pace, left = Pace(), []

    class Asking:
        def began(self, search: Search) -> None:
            pass

        def changed(self, search: Search, event: Any) -> None:
            now[0] += elapsed * isinstance(event, Finished)
            pace.take(event, search.file.seed)
            if isinstance(event, Finished):
                left.append(pace.left(search))

    search._watcher = Asking()
    search.execute()
    return left


def test_what_is_left_of_a_funnel_is_what_its_stages_still_train(
    runs: Callable[..., Runs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten seconds for 100 tokens of the first stage: 400 more there, 2 * 200 then, and 2 * 300 with another seed."""
    search = runs(stages=STAGES, baselines=["eagle3-deep-fused-once"]).search()
    left = seconds_left(search, monkeypatch)
    assert left[0] == pytest.approx((4 * 100 + 2 * 200 + 2 * 300) / 10)
    assert left[4] == pytest.approx((2 * 200 + 2 * 300) / 10)
    assert left[-1] == 0


def test_the_hours_end_a_funnels_first_stage_alone(runs: Callable[..., Runs], monkeypatch: pytest.MonkeyPatch) -> None:
    one = runs({"hours": 10 / 3600}, stages=STAGES, baselines=["eagle3-deep-fused-once"])
    left = seconds_left(one.search(), monkeypatch)
    assert left[0] == pytest.approx((2 * 200 + 2 * 300) / 10)


# Other views


def test_a_waiting_candidate_is_shown_so(runs: Callable[..., Runs], monkeypatch: pytest.MonkeyPatch) -> None:
    one = runs(stages=STAGES)
    assert one.stopped("run", 6)
    search = one.search()
    assert "waiting 1/2" in shown(summary_rows(search))
    assert view_of(search, Pace()).best is not None


def summary_rows(search: Search) -> list[Any]:
    return [render(view_of(search, Pace()), 140)]


def test_status_reads_the_same_as_the_search_shows(runs: Callable[..., Runs]) -> None:
    objective = {"draft_length": K, "maximize": "speedup", "minimize": "params"}
    search = runs(stages=STAGES, objective=objective).search()
    with PlainLines(Console(quiet=True)) as watcher:
        search._watcher = watcher
        search.execute()
    write_leaderboard(search)
    view, data = read_status(search.folder.path)
    own = view_of(search, Pace())
    assert (view.rows, view.followed, view.rungs, dict(view.objectives)) == (
        own.rows,
        own.followed,
        own.rungs,
        dict(own.objectives),
    )
    assert data["state"] == "finished"
    assert data["best"]["speedup"] == own.best.speedup if own.best else False


# The outcome


def decoded(**changes: Any) -> Decoded:
    told = {
        "name": "d2",
        "hash": "0" * 12,
        "draft": "chain k=3",
        "predicted": 1.5,
        "measured": 1.44,
        "low": 1.4,
        "high": 1.5,
        "length": 2.1,
        "expected_length": 2.2,
        "same_text": 8,
        "responses": 8,
        "incomparable": "",
        "plain_ms": 10.0,
        "profiled_ms": 10.0,
    }
    return Decoded(**{**told, **changes})


@pytest.fixture
def best(runs: Callable[..., Runs]) -> BestConfig:
    objective = {"draft_length": K, "maximize": "speedup", "minimize": "params"}
    constraints = {"draft_ms": {"max": 0.4}}
    search = runs(stages=STAGES, objective=objective, constraints=constraints, baselines=["eagle3"]).search()
    ranked = search.execute()
    assert search.study.turned_away["draft_ms"] > 0
    return best_config(search, ranked)


def test_the_outcome_says_what_it_rests_on(best: BestConfig) -> None:
    text = shown(outcome(best, 400))
    assert "speed-up predicted from the toy times" in text
    assert f"draws turned away before training, by constraint: draft_ms {best.turned_away['draft_ms']}" in text
    assert "100 -> 300 tokens: no correlation over 3 of 5 candidates: fewer than 4 say nothing" in text
    assert "seed spread " in text
    assert best.verdict.text in text
    assert f"recommended: {best.recommended.name}, the knee of the Pareto set over speedup and params" in text


def test_predicted_stands_beside_measured(best: BestConfig) -> None:
    elsewhere = decoded(incomparable="measured elsewhere", plain_ms=99.0)
    rows = [decoded(), decoded(draft="tree 8", predicted=None, expected_length=None), elsewhere, elsewhere]
    lines = shown(outcome(best.model_copy(update={"decoded": rows}), 400)).splitlines()[-6:]
    assert lines[0].split("  ")[0] == "decoded for real"
    assert lines[1].split() == [
        "d2",
        "chain",
        "k=3",
        "1.500",
        "1.440",
        "[1.400,",
        "1.500]",
        "-4.0%",
        "2.1000",
        "2.2000",
        "8",
        "of",
        "8",
    ]
    assert lines[2].split() == ["d2", "tree", "8", "1.440", "[1.400,", "1.500]", "2.1000", "8", "of", "8"]
    assert "%" not in lines[3] + lines[4]
    assert lines[5] == "not comparable: measured elsewhere"  # once, and nothing of the machine's speed


@pytest.mark.parametrize(("plain_ms", "told"), [(11.4, None), (8.6, None), (11.6, "+16%"), (8.0, "-20%")])
def test_a_machine_that_is_not_as_it_was_when_profiled_is_told(plain_ms: float, told: str | None) -> None:
    notes = list(decoded_notes([decoded(), decoded(plain_ms=plain_ms)]))
    slow = f"plain decoding took {plain_ms:.2f} ms a token, {told} beside the profile's 10.00"
    assert notes == ([] if told is None else [f"the machine was not as it was when profiled: {slow}"])


@pytest.mark.parametrize("width", [80, 100, 120])
def test_no_figure_of_real_decoding_is_cut(width: int) -> None:
    long = decoded(name="eagle3-deep-fused-once-of-a-long-name", draft="tree 4,4,16", measured=10.25, low=10.1, high=11)
    lines = shown([decoded_table([long, decoded(responses=128, same_text=126)], width)], width).splitlines()
    assert len(lines) == 3
    assert [line.count("…") for line in lines] == [0, 1, 0]  # the name
    assert lines[1].startswith("eagle3-deep")
    for figure in ("tree 4,4,16", "1.500", "10.250", "[10.100, 11.000]", "+583.3%"):
        assert re.search(rf"(^|  ){re.escape(figure)}(  |$)", lines[1])
    heads = [head for head in ("length", "expected", "same text") if head in lines[0]]
    assert heads == {80: [], 100: ["length", "expected"], 120: ["length", "expected", "same text"]}[width]
    told = {"length": "2.1000", "expected": "2.2000", "same text": "126 of 128"}
    assert all(told[head] in lines[2] for head in heads)


def test_one_objective_that_is_the_winner_needs_no_recommendation(tiny_store: FeatureStore, tmp_path: Path) -> None:
    search = Runs(tmp_path, tiny_store, search_file(tiny_store)).search()
    best = best_config(search, search.execute())
    text = shown(outcome(best, 400))
    assert "recommended" not in text
    assert "speed-up" not in text
    slower = f"{best.recommended.why}; it is predicted to make serving slower than without a draft"
    warned = best.model_copy(update={"recommended": best.recommended.model_copy(update={"why": slower})})
    assert f"recommended: {best.recommended.name}, {slower}" in shown(outcome(warned, 400))


def test_status_names_times_and_the_recommended_draft(runs: Callable[..., Runs]) -> None:
    search = runs({"trials": 3}).search()
    with PlainLines(Console(quiet=True)) as watcher:
        search._watcher = watcher
        ranked = search.execute()
    view, data = read_status(search.folder.path)
    assert (data["times"], data["recommended"], view.closing) == (None, None, ())
    best = best_config(search, ranked)
    write_json(search.folder.best_config, best.model_dump(mode="json"))
    view, data = read_status(search.folder.path)
    assert (data["times"], data["recommended"]) == ("toy times", best.recommended.model_dump())
    lines = shown([render(view, 200)]).splitlines()
    assert lines[-3:] == ["", "speed-up predicted from the toy times", f"recommended: {best.name}, the best speedup"]


def stopped_after(search: Search) -> None:
    """Execute it, and stop while its finalists would be decoded."""
    with PlainLines(Console(quiet=True)) as watcher:
        search._watcher = watcher
        search.execute()
        raise Interrupted


def test_a_search_with_nothing_left_to_train_is_running_until_it_has_decoded(runs: Callable[..., Runs]) -> None:
    """After training, and after a resume, no event comes while finalists are decoded."""
    one = runs({"trials": 2})
    first = one.search()
    with pytest.raises(Interrupted):
        stopped_after(first)
    assert read_status(first.folder.path)[1]["state"] == "stopped"
    again = one.search()
    with PlainLines(Console(quiet=True)) as watcher:
        again._watcher = watcher
        again.execute()
        assert read_status(again.folder.path)[1]["state"] == "running"
    assert read_status(again.folder.path)[1]["state"] == "finished"


def test_the_table_shows_at_once_what_a_resume_finds(runs: Callable[..., Runs]) -> None:
    one = runs({"trials": 2})
    one.search().execute()
    again, table = one.search(), LiveTable(Console(quiet=True))
    assert "the first trial begins" in shown([table._render()])
    again._watcher = table
    again.execute()
    assert "2 of 2 trials" in shown([table._render()])


def test_the_summary_names_the_files(runs: Callable[..., Runs], best: BestConfig) -> None:
    search = runs({"trials": 3}).search("other", answer=lambda task: measured(task, 1.4))
    search.execute()
    assert isinstance(events(search)[0], Started)
    text = shown(summary(search, best, 140))
    for name in ("best-config.json", "best", "leaderboard.csv", "pareto.json"):
        assert str(search.folder.path / name) in text
