"""A search as a user meets it: from file to best draft, through Ctrl-C and killed processes."""

import csv
import json
import os
import signal
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import pytest

from cli import app
from runners.display.live import PlainLines
from runners.search.driver import Search
from runners.search.executor import Event, Failure, Finished, Started
from runners.search.local import LocalExecutor
from tests.commands import World, answered, archspec, refused


def rungs_begun(run: Path) -> dict[str, list[str]]:
    """Which rungs every trial's processes began, from their logs."""
    logs = sorted(run.glob("trials/*/log.txt"))
    return {
        log.parent.name: [line.split()[1] for line in log.read_text().splitlines() if line.startswith("rung ")]
        for log in logs
    }


def test_search_end_to_end(world: World, tmp_path: Path) -> None:
    search, run = world.search_file(tmp_path / "search.yaml"), tmp_path / "run"
    told = answered("search", search, "--out", run)
    assert "trial 0 eagle3: rung 1 of 2, acceptance length 1." in told
    assert "leads" in told
    best = json.loads((run / "best-config.json").read_text())
    assert best["data"]["text_origin"] == "own"
    assert best["baselines"][0]["name"] == "eagle3"
    files = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    assert files >= {"search.yaml", "study.log", "leaderboard.csv", "provenance.json", "best/draft.safetensors"}
    trials = {path.name for path in (run / "trials").iterdir()}
    assert len(trials) > 1
    assert files >= {f"trials/{trial}/{name}" for trial in trials for name in ("spec.yaml", "metrics.jsonl", "log.txt")}
    assert json.loads(answered("validate", run / "best-config.json", run / "best/spec.yaml", "--json"))
    assert best["servable"]["vllm"]["servable"] == "yes"
    answered("validate", run / "best-config.json", run / "best/spec.yaml", "--engine", "vllm")
    best["spec"]["layers"][0]["stream"] = "2h"
    other = tmp_path / "other-best.json"
    other.write_text(json.dumps(best, indent=2))
    line = 1 + other.read_text()[: other.read_text().index('"stream": "2h"')].count("\n")
    told = refused("validate", other, "--engine", "vllm")
    assert f"{other}:{line}: vllm cannot serve layers.0.stream = 2h: use h (vLLM 0.32.0)" in told
    status = json.loads(answered("status", run, "--json"))
    assert (status["state"], status["trials"]) == ("finished", {"ended": 2, "planned": 2})
    assert (status["proxy"], status["proxy_reason"]) == (False, "")
    assert "2 of 2 trials" in answered("status", run)
    answered("export", run, "-f", world.features, "-o", tmp_path / "draft")

    before = rungs_begun(run)
    assert before == {trial: ["0", "1"] for trial in trials}
    answered("search", "--resume", "--out", run)
    assert rungs_begun(run) == before
    larger = world.search_file(tmp_path / "other.yaml", train={"ttt_steps": 3, "batch_tokens": 256})
    assert "other values of train" in refused("search", larger, "--out", run, "--resume")


@pytest.fixture
def on_event(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Search, Event], None]], None]:
    """Let a function see every event of the searches of this test, in the search's own process."""

    def see(look: Callable[[Search, Event], None]) -> None:
        show = PlainLines.show

        def both(lines: PlainLines, search: Search, event: Event) -> None:
            show(lines, search, event)
            look(search, event)

        monkeypatch.setattr(PlainLines, "show", both)

    return see


Hook = Callable[[Callable[[Search, Event], None]], None]


@pytest.mark.skipif(signal.getsignal(signal.SIGINT) is signal.SIG_IGN, reason="begun where Ctrl-C is ignored")
def test_ctrl_c_in_the_middle_and_resume(world: World, tmp_path: Path, on_event: Hook) -> None:
    search, run = world.search_file(tmp_path / "search.yaml"), tmp_path / "run"
    fired: list[Event] = []

    def interrupt(_: Search, event: Event) -> None:
        if isinstance(event, Started) and event.task.rung == 1 and not fired:
            fired.append(event)
            signal.raise_signal(signal.SIGINT)

    on_event(interrupt)
    result = archspec("search", search, "--out", run)
    assert result.exit_code == 130, result.output
    assert f"go on with: archspec search --resume --out {run}" in result.stderr
    assert json.loads(answered("status", run, "--json"))["state"] == "stopped"
    answered("search", "--resume", "--out", run)
    assert rungs_begun(run)["0000"][0] == "0"
    assert rungs_begun(run)["0000"].count("0") == 1
    assert json.loads(answered("status", run, "--json"))["state"] == "finished"


def test_a_killed_worker_is_run_again(world: World, tmp_path: Path, on_event: Hook) -> None:
    search, run = world.search_file(tmp_path / "search.yaml"), tmp_path / "run"
    events: list[Event] = []

    def kill(search: Search, event: Event) -> None:
        if isinstance(event, Started) and not events:
            assert isinstance(search.executor, LocalExecutor)
            os.kill(search.executor._running[0].process.pid or 0, signal.SIGKILL)
        events.append(event)

    on_event(kill)
    told = answered("search", search, "--out", run)
    failures = [e.result for e in events if isinstance(e, Finished) and isinstance(e.result, Failure)]
    assert [failure.kind for failure in failures] == ["crashed"]
    assert "ended by SIGKILL" in told
    assert "running it again" in told
    assert json.loads(answered("status", run, "--json"))["trials"]["ended"] == 2


def _drive(words: list[str]) -> None:
    app(words)


def test_a_killed_driver_loses_at_most_the_trial_in_flight(world: World, tmp_path: Path) -> None:
    search, run = world.search_file(tmp_path / "search.yaml"), tmp_path / "run"
    driver = get_context("forkserver").Process(target=_drive, args=(["search", str(search), "--out", str(run)],))
    driver.start()
    measured = run / "trials/0000/metrics.jsonl"
    deadline = time.monotonic() + 120
    while not measured.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert driver.pid is not None
    os.kill(driver.pid, signal.SIGKILL)
    driver.join()
    first = measured.read_text().splitlines()[0]
    answered("search", "--resume", "--out", run)
    assert measured.read_text().splitlines()[0] == first  # seconds and all: not trained again
    assert rungs_begun(run)["0000"].count("0") == 1
    assert json.loads(answered("status", run, "--json"))["state"] == "finished"


def test_text_that_is_served_otherwise_than_sampled_is_called_a_proxy(world: World, tmp_path: Path) -> None:
    run, budget = tmp_path / "run", {"trials": 1, "rungs": [300]}
    objective = {"draft_length": 3, "temperature": 0.8}
    told = answered("search", world.search_file(tmp_path / "s.yaml", objective=objective, budget=budget), "--out", run)
    reason = "the text was sampled at temperature 0, but is served at temperature 0.8"
    assert "rung 1 of 1, acceptance length (proxy) 1." in told
    assert f"proxy: {reason}, so acceptance is only an indication" in " ".join(told.split())
    with (run / "leaderboard.csv").open(encoding="utf-8") as file:
        (row,) = csv.DictReader(file)
    assert (row["own_text"], row["proxy"]) == ("True", reason)
    status = json.loads(answered("status", run, "--json"))
    assert (status["proxy"], status["proxy_reason"]) == (True, reason)
    best = json.loads((run / "best-config.json").read_text(encoding="utf-8"))
    assert best["metrics"]["acceptance"]["proxy"] == reason


def test_foreign_text_is_called_a_proxy(world: World, tmp_path: Path) -> None:
    given = [json.loads(line) for line in world.text.read_text().splitlines()]
    text = tmp_path / "foreign.jsonl"
    text.write_text("".join(json.dumps({**row, "generation": None}) + "\n" for row in given))
    search = world.search_file(
        tmp_path / "search.yaml",
        data={"conversations": [str(text)], "max_length": 256, "holdout": 0.3},
        features=str(tmp_path / "features"),
        budget={"trials": 1, "rungs": [300]},
    )
    told = answered("search", search, "--out", tmp_path / "run")
    assert "acceptance length (proxy)" in told
    assert "proxy: the text was not written by the target" in told
    assert "proxy:" in answered("status", tmp_path / "run")
