"""A search driven from a process of its own, which may kill itself with SIGKILL at a named point.

The product has no hooks for it: the process wraps methods of its own copy. Drivers are forked from one server that has
imported everything, since each would take seconds for it otherwise.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import optuna
from rich.console import Console

from archspec.files import write_text
from archspec.weights import SPEC_FILE
from runners.display.live import PlainLines
from runners.features.conversations import Conversation
from runners.search import session
from runners.search.driver import Search
from runners.search.executor import Event, Progress
from runners.search.record import Record
from runners.search.search_file import SearchFile
from runners.search.study import Study
from runners.training.trial import WEIGHTS_FOLDER, Measurement, RungTask
from tests.runners.replay import ReplayExecutor, by_formula
from tests.runners.tiny import save_tiny, tiny_target
from tests.runners.watched import Watched

ROOT = Path(__file__).parents[2]
LOG = "driver.log"


@dataclass(frozen=True)
class Order:
    """A driver: the search in ``folder``, begun from ``file`` or resumed, killed at the ``count``-th time at ``point``.

    ``replay`` answers from a formula; else the file's own runner trains, with its trials watched and held as
    ``watched`` says. Without ``look`` no node is looked at.
    """

    folder: str
    file: str | None = None
    point: str | None = None
    count: int = 1
    replay: bool = False
    watched: str | None = None
    look: bool = True
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """How a driver ended: its exit code, negative for a signal, and what it said."""

    pid: int
    code: int
    said: str

    @property
    def killed(self) -> bool:
        """Whether it came to the point where it was to be killed."""
        return self.code == -signal.SIGKILL


class Drivers:
    """Runs drivers one after another; see ``driver_server``."""

    def __init__(self, server: "subprocess.Popen[str]") -> None:
        self._server = server

    def run(self, folder: Path, **order: Any) -> Ended:
        """One driver, until it ends in whatever way."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(json.dumps(asdict(Order(str(folder), **order))), file=self._server.stdin, flush=True)
        told = json.loads(self._server.stdout.readline())
        log = folder.with_name(LOG)
        return Ended(told["pid"], told["code"], log.read_text(encoding="utf-8"))


@contextmanager
def driver_server() -> Iterator[Drivers]:
    """A process from which drivers are forked."""
    command = [sys.executable, "-m", "tests.runners.driver_process"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        yield Drivers(server)


def real_files(folder: Path, text: list[Conversation]) -> dict[str, Any]:
    """A target and a text for a search file; the features are the first driver's to capture."""
    save_tiny(folder / "target")
    lines = [json.dumps({"messages": [m.model_dump() for m in one.messages]}) for one in text]
    (folder / "text.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return {
        "target": {"model": str(folder / "target"), "device": "cpu"},
        "data": {"conversations": [str(folder / "text.jsonl")], "holdout": 0.3, "max_length": 256},
        "features": str(folder / "features"),
    }


# In the driver


@dataclass(frozen=True)
class Point:
    """Where a driver may be killed: before or ``after`` a call of ``method``, of those with arguments that ``fit``."""

    owner: Any
    method: str
    after: bool = False
    fit: Callable[..., bool] = lambda *_: True


def _other_seed(search: Search, task: RungTask, _result: Any) -> bool:
    return task.seed != search.file.seed


def _trains(_watcher: Any, _search: Search, event: Event) -> bool:
    return isinstance(event, Progress)


def _draw_that_is_none(_study: Any, trial: Any, *_: Any, **__: Any) -> bool:
    return isinstance(trial, optuna.Trial)


def _names_spec(_trial: Any, key: str, _value: Any) -> bool:
    return key == "spec"


def _is_leaderboard(_part: Path, target: Path) -> bool:
    return target.name == "leaderboard.csv"


POINTS = {
    "asked": Point(optuna.Study, "ask"),
    "drawn": Point(Study, "_begin"),
    "half written": Point(optuna.Trial, "set_user_attr", fit=_names_spec),
    "written": Point(Study, "draw", after=True),
    "infeasible": Point(optuna.Study, "tell", fit=_draw_that_is_none),
    "submitted": Point(ReplayExecutor, "submit", after=True),
    "submitted to Ray": Point(None, "submit", after=True),
    "training": Point(PlainLines, "changed", fit=_trains),
    "measured": Point(Study, "report"),
    "reported": Point(Study, "_close"),
    "told": Point(Study, "report", after=True),
    "leaderboard": Point(Path, "replace", fit=_is_leaderboard),
    "seed measured": Point(Search, "_finished", fit=_other_seed),
    "results": Point(session, "write_results"),
}


def kill_at(name: str, count: int) -> None:
    """Let this process be killed when it comes to a point for the ``count``-th time."""
    point, left = POINTS[name], count
    owner = point.owner or _ray_executor()
    method = getattr(owner, point.method)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= point.fit(*args, **kwargs)
        here = left == 0 and point.fit(*args, **kwargs)
        if here and not point.after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = method(*args, **kwargs)
        if here:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, point.method, wrapped)


def _ray_executor() -> Any:
    from runners.search.ray_runner import RayExecutor

    return RayExecutor


def watch_trials(control: Path) -> None:
    """Let trials write every step into their logs and be held by files in ``control``."""
    make = Search._task

    def watched(self: Search, record: Record, rung: int) -> RungTask:
        task = make(self, record, rung)
        return replace(task, features=Watched(task.features).held_by(control))

    Search._task = watched  # type: ignore[method-assign]


def drive(order: Order) -> None:
    """The search, as the command does it."""
    os.environ.update(order.environment)
    if order.point:
        kill_at(order.point, order.count)
    if order.watched:
        watch_trials(Path(order.watched))
    file = SearchFile.load(Path(order.file)) if order.file else None
    prepared = session.prepare(Path(order.folder), file, file is None, print)
    executor: Any = None
    if order.replay:
        executor = ReplayExecutor(with_draft)
    elif not order.look:
        from tests.runners.ray_cluster import small

        executor = _ray_executor()(prepared.file.runner, small)
    with PlainLines(Console()) as watcher:
        session.execute(prepared, watcher, executor)


def with_draft(task: RungTask) -> Measurement:
    """A measurement by the formula, and the folder of weights that the results are copied from."""
    write_text(task.directory / WEIGHTS_FOLDER / SPEC_FILE, "")
    return by_formula(task)


def _in_child(order: Order) -> None:
    log = os.open(Path(order.folder).with_name(LOG), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    drive(order)


def serve() -> None:
    """Fork a driver for every line; what a target needs is imported once."""
    tiny_target()
    while line := sys.stdin.readline():
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                _in_child(Order(**json.loads(line)))
                code = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stdout.flush()
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"pid": pid, "code": os.waitstatus_to_exitcode(status)}), flush=True)


if __name__ == "__main__":
    serve()
