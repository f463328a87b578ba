"""The local runner: a process for every task, so that a crash, a kill or a leak ends one trial and nothing else."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess

from runners.search.executor import Event, Failure, Finished, Progress, Started
from runners.search.outcome import now_and_then, run_in_log
from runners.training.trainer import StepReport
from runners.training.trial import Measurement, RungTask

PROGRESS_SECONDS = 0.5


@dataclass
class _Running:
    task: RungTask
    process: ForkServerProcess
    events: Connection
    deadline: float | None


class LocalExecutor:
    """Runs up to ``concurrent`` tasks at once, each in a process forked from a server that has torch loaded already.

    A task that takes longer than ``task_seconds`` is killed and ends as ``timed_out``.
    """

    def __init__(self, concurrent: int = 1, task_seconds: float | None = None) -> None:
        self._concurrent, self._task_seconds = concurrent, task_seconds
        self._context = multiprocessing.get_context("forkserver")
        # Every optimiser imports torch._dynamo when it is made, which takes a second: once here, not in each task.
        self._context.set_forkserver_preload(["runners.training.trial", "torch._dynamo"])
        self._running: list[_Running] = []
        self._started: list[Event] = []

    @property
    def full(self) -> bool:
        """See ``Executor``."""
        return len(self._running) >= self._concurrent

    def fits(self, _task: RungTask) -> bool:
        """See ``Executor``; tasks are counted, not measured."""
        return not self.full

    def refusal(self, _task: RungTask) -> Failure | None:
        """See ``Executor``; whether a task is too large for this machine shows when it runs."""
        return None

    def submit(self, task: RungTask) -> None:
        """See ``Executor``."""
        task.directory.mkdir(parents=True, exist_ok=True)
        here, there = self._context.Pipe(duplex=False)
        threads = task.train.threads or max(1, usable_cores() // self._concurrent)
        process = self._context.Process(target=_run_in_child, args=(task, there, threads), daemon=True)
        process.start()
        there.close()
        deadline = time.monotonic() + self._task_seconds if self._task_seconds else None
        self._running.append(_Running(task, process, here, deadline))
        self._started.append(Started(task))

    def wait(self, timeout: float) -> Sequence[Event]:
        """See ``Executor``."""
        events, self._started = self._started, []
        if events or not self._running:
            return events
        until_deadline = [running.deadline - time.monotonic() for running in self._running if running.deadline]
        ready = wait([running.events for running in self._running], max(0.0, min([timeout, *until_deadline])))
        for running in list(self._running):
            event = self._receive(running) if running.events in ready else None
            if event is not None:
                events.append(event)
            if not isinstance(event, Finished) and running.deadline and time.monotonic() >= running.deadline:
                events.append(self._end(running, Failure("timed_out", f"took longer than {self._task_seconds:g} s")))
        return events

    def shutdown(self) -> None:
        """See ``Executor``."""
        for running in self._running:
            running.process.kill()
            running.process.join()
            running.events.close()
        self._running.clear()
        self._started.clear()

    def _receive(self, running: _Running) -> Event:
        try:
            message = running.events.recv()
        except (EOFError, OSError):  # the second where a message was cut in the middle
            running.process.join()
            return self._end(running, _death(running.process.exitcode))
        if isinstance(message, StepReport):
            return Progress(running.task, message)
        return self._end(running, message)

    def _end(self, running: _Running, result: Measurement | Failure) -> Finished:
        self._running.remove(running)
        if isinstance(result, Failure):
            running.process.kill()
        running.process.join()
        running.events.close()
        return Finished(running.task, result)


def usable_cores() -> int:
    """Cores that this process may use, which a container or a batch system may limit."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _death(exitcode: int | None) -> Failure:
    if exitcode is not None and exitcode < 0:
        name = signal.Signals(-exitcode).name
        hint = ", perhaps by the kernel for want of memory" if name == "SIGKILL" else ""
        return Failure("crashed", f"the trial's process was ended by {name}{hint}", retry=True)
    return Failure("crashed", f"the trial's process exited with code {exitcode} without a result", retry=True)


def _run_in_child(task: RungTask, events: Connection, threads: int) -> None:
    """Run one task; send progress, then the result."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the search's to handle; it ends its children itself
    threading.Thread(target=_end_with_parent, daemon=True).start()
    events.send(run_in_log(task, threads, now_and_then(events.send, PROGRESS_SECONDS)))


def _end_with_parent() -> None:
    """A search that was killed ended nothing; what it ran must not go on beside one that is resumed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
