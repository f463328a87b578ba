"""The table of a search, read as the text that a terminal shows."""

import json
import re
import time
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from archspec.errors import ArchspecError
from runners.display.status import PROGRESS_FILE, SILENT_SECONDS, read_status
from runners.display.view import Row, Running, View, clock, count, proxy_of_rows, render, table
from runners.search.objective import Direction, ObjectiveName
from runners.training.proxy import FOREIGN


def row(trial: int, name: str, state: str = "complete", **values: object) -> Row:
    told = {
        "rank": "",
        "baseline": "False",
        "rungs": 3,
        "train_tokens": 180_002,
        "value": 1.3,
        "speedup": "",
        "best_k": "",
        "pareto": "False",
        "acceptance_length": 1.3,
        "low": 1.28,
        "high": 1.32,
        "seeds": 1,
        "params": 21_312_000,
        "tokens_per_second": 412.0,
        "failure_kind": "",
        "failure": "",
    }
    if "acceptance_length" in values:
        values.setdefault("value", values["acceptance_length"])
    running = values.pop("running", None)
    assert running is None or isinstance(running, Running)
    return Row.of(told | {"trial": trial, "name": name, "state": state} | values, running)


ROWS = (
    row(4, "d2-none", rank=1),
    row(0, "eagle3", rank=2, acceptance_length=1.25),
    row(2, "d1-project", "pruned", rungs=1, train_tokens=20_000, acceptance_length=1.1),
    row(
        3,
        "d3-add",
        "failed",
        rungs=0,
        acceptance_length="",
        low="",
        high="",
        seeds=0,
        failure_kind="diverged",
        failure="loss nan",
    ),
    row(6, "d3-a-name-that-is-far-too-long-for-its-column", "running", running=Running(6, 0, 1, 30_000, 60_000, 251.0)),
)


def view(
    proxy: str = "",
    rows: tuple[Row, ...] = ROWS,
    followed: ObjectiveName = "acceptance_length",
    objectives: dict[ObjectiveName, Direction] | None = None,
) -> View:
    objectives = objectives or {followed: "maximize"}
    rungs = (20_000, 60_000, 180_000)
    return View("runs/x", rows, 24, rungs, 0.95, proxy, followed, objectives, elapsed=1234, left=5000)


def text(shown: RenderableType, width: int) -> list[str]:
    console = Console(width=width, force_terminal=True, color_system=None, markup=False, record=True, file=StringIO())
    console.print(shown)
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_header_tells_how_far_the_search_is() -> None:
    first, second, *_ = text(render(view(), 120), 120)
    assert first == "runs/x  ·  4 of 24 trials  ·  20:34 elapsed  ·  about 1:23:20 left"
    assert second == "best so far  d2-none  1.3000 [1.2800, 1.3200]"


def test_every_row_is_one_line_with_what_runs_first() -> None:
    lines = text(render(view(), 120), 120)[3:]
    assert lines[0].split() == [
        "#",
        "trial",
        "draft",
        "state",
        "tokens",
        "length",
        "95%",
        "interval",
        "params",
        "tok/s",
    ]
    assert "rung 2/3 ━━━━────" in lines[1]
    assert "…" in lines[1]
    assert lines[2].split()[:4] == ["1", "4", "d2-none", "done"]
    assert "stopped 1/3" in lines[4]
    assert "failed: diverged" in lines[5]
    assert len(lines) == 6
    assert max(map(len, lines)) <= 120


def test_narrow_terminals_lose_columns_and_short_ones_rows() -> None:
    lines = text(render(view(), 90, height=11), 90)
    assert "params" not in lines[3]
    assert max(map(len, lines)) <= 90
    assert lines[-1] == "  … and 2 more in leaderboard.csv"


@pytest.mark.parametrize("proxy", ["", FOREIGN])
@pytest.mark.parametrize("width", [80, 100, 120])
def test_no_figure_is_cut(width: int, proxy: str) -> None:
    """The speed-up stays at every width; what else has no room goes as a whole column."""
    name = "eagle3-deep-fused-once-of-a-long-name"
    figures: dict[str, Any] = {
        "speedup": 11.523,
        "best_k": 12,
        "pareto": "True",
        "seeds": 3,
        "train_tokens": 1_200_000_000,
    }
    long = row(123, name, rank=12, acceptance_length=10.25, low=10.1, high=11.5, tokens_per_second=12_345.0, **figures)
    live = row(124, "d1", "running", running=Running(124, 0, 1, 20_000_000, 60_000_000, 12_345.0))
    shown = table(view(proxy, (long, live), "speedup", FAST_AND_SMALL), (long, live), width)
    head, told, _ = text(shown, width)
    length = "length (proxy)" if proxy else "length"
    wanted = {"speed-up": "11.523 k=12", length: "10.2500", "trial": "123", "#": "12*"}
    more = {"tokens": "1,200,000,000", "interval": "[10.1000, 11.5000]", "params": "21.3M", "tok/s": "12,345"}
    wanted |= {name: figure for name, figure in more.items() if name in head}
    for figure in wanted.values():
        assert re.search(rf"(^|  ){re.escape(figure)}(  |$)", told), figure
    assert all(name in head for name in wanted)
    assert told.count("…") == 1
    assert re.search(r"  eagle3-deep-f\S*…  done", told)
    assert ("tokens" in head, "interval" in head) == (width > 80, width > 100)


def test_a_cluster_shows_where_trials_run() -> None:
    there = row(7, "d1-add", "running", running=Running(7, 0, 0, 10, 20, None, "gpu-node-3 gpu 1"))
    far = row(8, "d1-none", "running", running=Running(8, 0, 0, 10, 20, None, "a-node-with-a-long-name gpu 1"))
    for width in (120, 100):
        lines = text(render(view(rows=(*ROWS, there, far)), width), width)[3:]
        begins = lines[0].index("where")
        assert [line[begins : begins + 20].rstrip() for line in lines[2:5]] == [
            "gpu-node-3 gpu 1",
            "a-node-with-a-long-…",
            "",
        ]
        assert max(map(len, lines)) <= width
    for rows, width in (((*ROWS, there), 90), (ROWS, 120)):  # too narrow, and all on this machine
        assert not any("where" in line for line in text(render(view(rows=rows), width), width))


SPEEDS = (
    row(1, "d1-add", rank=1, value=1.82, speedup=1.82, best_k=3, pareto="True"),
    row(0, "eagle3", rank=2, value=1.8, speedup=1.8, best_k=4),
    row(2, "d2-none", "running", rungs=1, value=1.9, speedup=1.9, best_k=3),
)
FAST_AND_SMALL: dict[ObjectiveName, Direction] = {"speedup": "maximize", "params": "minimize"}


def test_speed_up_has_a_column_and_the_pareto_set_a_star() -> None:
    lines = text(render(view(rows=SPEEDS, followed="speedup", objectives=FAST_AND_SMALL), 120), 120)
    assert lines[1] == "best so far  d1-add  speed-up 1.820 at k = 3, length 1.3000 [1.2800, 1.3200]"
    assert lines[3].split()[:7] == ["#", "trial", "draft", "state", "tokens", "speed-up", "length"]
    assert lines[4].split()[:7] == ["1*", "1", "d1-add", "done", "180,002", "1.820", "k=3"]
    assert lines[5].split()[:7] == ["2", "0", "eagle3", "done", "180,002", "1.800", "k=4"]
    assert "waiting 1/3" in lines[6]
    assert lines[7] == "  * on the Pareto set over speedup, params"
    assert max(map(len, lines)) <= 120
    assert max(map(len, text(render(view(rows=SPEEDS, followed="speedup", objectives=FAST_AND_SMALL), 90), 90))) <= 90


def test_one_objective_has_no_pareto_set_to_show() -> None:
    lines = text(render(view(rows=SPEEDS, followed="speedup"), 120), 120)
    assert not any("*" in line for line in lines)


@pytest.mark.parametrize(("direction", "best"), [("maximize", "d3"), ("minimize", "d1")])
def test_before_any_end_the_best_at_the_highest_rung_leads(direction: Direction, best: str) -> None:
    rows = (
        row(0, "d1", "pruned", rungs=2, value=10),
        row(1, "d3", "running", rungs=2, value=30),
        row(2, "d9", "pruned", rungs=1, value=90 if direction == "maximize" else 1),
    )
    seen = view(rows=rows, followed="params", objectives={"params": direction}).best
    assert seen is not None
    assert seen.name == best


def test_foreign_text_is_called_a_proxy() -> None:
    lines = text(render(view(proxy=FOREIGN), 120), 120)
    assert lines[2] == "proxy: the text was not written by the target, so acceptance is only an indication"
    assert "length (proxy)" in lines[4]


def board(*rows: tuple[int, str | None], own: bool = True) -> list[dict[str, str]]:
    """Rows of a leaderboard by rungs reached and reason, which old files lack."""
    told = [{"rungs": str(rungs), "own_text": str(own)} for rungs, _ in rows]
    return [row if reason is None else row | {"proxy": reason} for row, (_, reason) in zip(told, rows, strict=True)]


SERVED = "the text was sampled at temperature 0, but is served at temperature 0.8"


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (board((2, ""), (0, "")), ""),
        (board((0, ""), (1, SERVED)), SERVED),
        (board((0, ""), (0, ""), own=False), FOREIGN),
        (board((1, ""), (0, ""), own=False), ""),  # all that is held out is the target's own
        (board((1, None), own=False), FOREIGN),
        (board((1, None)), ""),
        ([], ""),
    ],
)
def test_what_was_measured_says_why_it_is_a_proxy(rows: list[dict[str, str]], reason: str) -> None:
    assert proxy_of_rows(rows) == reason


def test_before_the_first_measurement_nothing_is_best() -> None:
    new = row(
        0,
        "eagle3",
        "running",
        rungs=0,
        acceptance_length="",
        low="",
        high="",
        running=Running(0, 0, 0, 0, 20_000, None),
    )
    lines = text(render(view(rows=(new,)), 120), 120)
    assert not any("best" in line for line in lines)
    assert "rung 1/3 ────────" in lines[3]


def test_numbers_for_people() -> None:
    assert [clock(7), clock(247.4), clock(3753)] == ["0:07", "4:07", "1:02:33"]
    assert [count(512), count(18_560), count(21_312_000), count(1_200_000_000)] == ["512", "18.6k", "21.3M", "1.2B"]


@pytest.mark.parametrize(
    ("age", "ended", "state", "note"),
    [
        (None, None, "new", "no trial has begun yet"),
        (0, None, "running", ""),
        (2 * SILENT_SECONDS, None, "silent", "no sign of the search for 4:"),
        (60, "stopped", "stopped", "go on with: archspec search --resume --out"),
        (0, "finished", "finished", ""),
    ],
)
def test_status_tells_a_live_search_from_a_dead_one(
    tmp_path: Path, age: float | None, ended: str | None, state: str, note: str
) -> None:
    """``age`` is how many seconds ago the search last wrote its progress; None: never."""
    search = "target: {model: m}\ndata: {conversations: [t.jsonl]}\nfeatures: f\nspace: norms\n"
    (tmp_path / "search.yaml").write_text(f"{search}budget: {{trials: 1, rungs: [9]}}\n")
    if age is not None:
        progress = {"running": [], "elapsed": 1.0, "left": None, "updated": time.time() - age, "ended": ended}
        (tmp_path / PROGRESS_FILE).write_text(json.dumps(progress))
    seen, data = read_status(tmp_path)
    assert data["state"] == state
    assert note in seen.note


def test_status_reads_a_leaderboard_of_before_there_were_speed_ups(tmp_path: Path) -> None:
    search = "target: {model: m}\ndata: {conversations: [t.jsonl]}\nfeatures: f\nspace: norms\n"
    (tmp_path / "search.yaml").write_text(f"{search}budget: {{trials: 2, rungs: [9]}}\n")
    head = "rank,trial,name,baseline,state,rungs,train_tokens,acceptance_length,low,high,seeds,params,tokens_per_second"
    rows = ("1,1,d2,False,complete,1,9,1.5,1.4,1.6,1,2000,40,,True", ",0,d1,True,failed,0,0,,,,0,1000,,error,True")
    lines = [f"{head},failure_kind,own_text", *rows]
    (tmp_path / "leaderboard.csv").write_text("\n".join(lines) + "\n")
    seen, data = read_status(tmp_path)
    assert [(one.value, one.speedup, one.best_k, one.pareto) for one in seen.rows] == [
        (1.5, None, None, False),
        (None, None, None, False),
    ]
    assert data["best"]["name"] == "d2"
    assert any("d2  1.5000 [1.4000, 1.6000]" in line for line in text(render(seen, 120), 120))


def test_status_names_a_column_that_is_missing(tmp_path: Path) -> None:
    search = "target: {model: m}\ndata: {conversations: [t.jsonl]}\nfeatures: f\nspace: norms\n"
    (tmp_path / "search.yaml").write_text(f"{search}budget: {{trials: 1, rungs: [9]}}\n")
    (tmp_path / "leaderboard.csv").write_text("rank,trial\n1,0\n")
    with pytest.raises(ArchspecError, match=r"leaderboard.csv: column acceptance_length is missing; it was written by"):
        read_status(tmp_path)
