"""How long a piece of work takes: processor or wall time on a CPU, CUDA graphs between events on a GPU."""

from collections.abc import Callable
from typing import Protocol

import torch

from runners.clock import now
from runners.speed.work import Work

WARM_UPS = 3
REPLAYS = 10


class Clock(Protocol):
    """Times one piece of work."""

    def sample(self) -> float:
        """Milliseconds of one run."""
        ...


class CpuClock:
    """One run between two readings of ``now``; putting things back is not counted.

    With ``warm`` another run comes right before, so that the processor's caches hold what they can.
    """

    def __init__(self, work: Work, warm: bool = False) -> None:
        self._work, self._warm = work, warm

    def sample(self) -> float:
        """See ``Clock``."""
        if self._warm:
            self._work()
            self._work.reset()
        before = now()
        self._work()
        taken = now() - before
        self._work.reset()
        return taken * 1e3


class GraphClock:
    """Replays of a captured CUDA graph between two events, so that launching from Python does not count.

    Raises:
        RuntimeError: the work cannot be captured.
    """

    def __init__(self, work: Work) -> None:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                work()
                work.reset()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(self._graph):
                self._out = work()  # the graph writes into it, so it must not be freed
        finally:
            work.reset()

    def sample(self) -> float:
        """See ``Clock``."""
        return _between_events(self._graph.replay)


class EventClock:
    """Runs from Python between two events: where a graph cannot be captured."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def sample(self) -> float:
        """See ``Clock``."""

        def once() -> None:
            self._work()
            self._work.reset()

        return _between_events(once)


def _between_events(run: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(REPLAYS):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / REPLAYS


def clock_for(work: Work, device: torch.device, notes: set[str], *, warm: bool = False) -> Clock:
    """The clock of a device; ``notes`` gets a line where a graph could not be captured. For ``warm`` see ``CpuClock``.

    Replays of a graph follow one another, and so are warm in any case.
    """
    if device.type != "cuda":
        return CpuClock(work, warm)
    try:
        return GraphClock(work)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        notes.add(f"{type(work).__name__} was not captured as a CUDA graph and ran from Python ({reason})")
        return EventClock(work)
