"""What every runner does in the process that runs a task: output into the trial's log, and failures sorted by kind."""

import contextlib
import os
import time
import traceback
from collections.abc import Callable

import torch

from archspec.errors import ArchspecError
from runners.search.executor import Failure
from runners.training.trainer import DivergedError, StepReport
from runners.training.trial import LOG_FILE, Measurement, RungTask, run_rung

OnStep = Callable[[StepReport], None]
RunRung = Callable[[RungTask, OnStep], Measurement]


def run_in_log(
    task: RungTask, threads: int, on_step: OnStep, where: str = "", run: RunRung = run_rung
) -> Measurement | Failure:
    """Run one task by ``run`` with its output in the trial's log; ``where`` is said in the log's first line."""
    torch.set_num_threads(threads)
    with (
        (task.directory / LOG_FILE).open("a", encoding="utf-8", buffering=1) as log,  # line by line: a kill loses none
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        place = f" on {where}" if where else ""
        rung = f"rung {task.rung} of {len(task.rungs)}, seed {task.seed}{place}"
        print(f"{rung}, process {os.getpid()}, {threads} threads")
        result = outcome_of(task, on_step, run)
        print(f"ended with {result}")
    return result


def outcome_of(task: RungTask, on_step: OnStep, run: RunRung = run_rung) -> Measurement | Failure:
    """Run a task and sort what can go wrong into kinds; the traceback goes to standard error."""
    try:
        return run(task, on_step)
    except DivergedError as error:
        return Failure("diverged", str(error))
    except (MemoryError, torch.OutOfMemoryError) as error:
        traceback.print_exc()
        return Failure("out_of_memory", str(error) or "out of memory")
    except ArchspecError as error:
        return Failure("error", str(error))
    except Exception as error:
        traceback.print_exc()
        no_memory = "can't allocate memory" in str(error)  # torch's CPU allocator raises a plain RuntimeError
        return Failure("out_of_memory" if no_memory else "error", f"{type(error).__name__}: {error}")


def now_and_then(send: OnStep, seconds: float) -> OnStep:
    """``send`` for the first report and then at most once in so many ``seconds``."""
    last_sent = float("-inf")

    def on_step(report: StepReport) -> None:
        nonlocal last_sent
        if time.monotonic() - last_sent > seconds:
            last_sent = time.monotonic()
            send(report)

    return on_step
