"""The search: draw, submit, report, stop the weak, repeat the finalists with more seeds, write what was found."""

import statistics
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from archspec.errors import ArchspecError
from archspec.speedup import Times
from runners.features.store import FeatureStore
from runners.search.executor import Event, Executor, Failure, Finished, Progress
from runners.search.record import Record
from runners.search.run_folder import RunFolder
from runners.search.search_file import SearchFile
from runners.search.study import Study
from runners.training.trial import Measurement, RungTask, read_metrics

POLL_SECONDS = 0.5


class Watcher(Protocol):
    """Whoever wants to see a search happen; the command line's table is one."""

    def began(self, search: "Search") -> None:
        """The search has read what earlier processes left; nothing may be left to train, and no event come."""
        ...

    def changed(self, search: "Search", event: Event) -> None:
        """An event was dealt with; ``search.study.records`` are up to date."""
        ...


class Search:
    """One run: its study, its executor, and which trials are in flight.

    ``execute`` may be interrupted at any moment and called again in a new process on the same folder.
    """

    def __init__(
        self,
        folder: RunFolder,
        file: SearchFile,
        store: FeatureStore,
        executor: Executor,
        watcher: Watcher,
        times: Times | None = None,
    ) -> None:
        self.folder, self.file, self.store, self.executor = folder, file, store, executor
        self.study = Study(folder, file, store.facts, times)
        self.started = time.monotonic()
        self.in_flight: dict[tuple[int, int], RungTask] = {}
        self.waiting: deque[RungTask] = deque()
        self.progress: dict[tuple[int, int], Progress] = {}
        self.exhausted = False
        self._watcher = watcher
        self._attempts: dict[tuple[int, int, int], int] = {}
        self._failures_in_a_row = 0

    def execute(self) -> list[Record]:
        """Search, then repeat the finalists; returns all records, best first.

        Raises:
            ArchspecError: too many trials failed one after another, or no trial came to an end with a result.
        """
        try:
            for record in self.study.adopt():
                self._go_on(record)
            self._watcher.began(self)
            while self._fill() or self._promote():
                self._pump()
            self._repeat_finalists()
        finally:
            self.executor.shutdown()
        ranked = self.ranking()
        if not ranked:
            reasons = {r.failure.reason for r in self.study.records.values() if r.failure}
            raise ArchspecError(
                f"{self.folder.path}: no trial reached the last rung; failures: {'; '.join(sorted(reasons)) or 'none'}"
            )
        return ranked

    def ranking(self) -> list[Record]:
        """Completed records, best mean over seeds first.

        Those that break a bound on what was measured stand last. Before them, records with repeats stand before those
        without: a lucky single seed does not beat a mean over several.
        """
        meets = self.study.scorer.meets
        return sorted(self._complete(), key=lambda r: (meets(r), bool(r.repeats), self.gain(r)), reverse=True)

    def _complete(self) -> list[Record]:
        return [record for record in self.study.records.values() if record.state == "complete"]

    def gain(self, record: Record) -> float:
        """The mean of the followed objective over a record's seeds, turned so that more is better."""
        return statistics.fmean(self.study.scorer.gains(record))

    def _promote(self) -> bool:
        """Send a funnel's next stage off; whether there is any."""
        while promoted := self.study.promote():
            self.waiting.extend(self._task(record, len(record.measurements)) for record in promoted)
            self._begin_waiting()
            if self.waiting or self.in_flight:
                return True
        return False

    def _fill(self) -> bool:
        """Begin what waits and then new trials, as long as there is room; whether any is in flight or waits.

        What waits goes first, so that a large trial is not kept from its room by smaller ones.
        """
        self._begin_waiting()
        while not self.waiting and not self.executor.full and self._may_begin():
            record = self.study.draw()
            if record is None:
                self.exhausted = True
                break
            self.waiting.append(self._task(record, 0))
            self._begin_waiting()
        return bool(self.in_flight or self.waiting)

    def _begin_waiting(self) -> None:
        """Submit what waits, in order, up to the first that does not fit now; what never fits ends as its failure."""
        while self.waiting:
            refusal = self.executor.refusal(self.waiting[0])
            if refusal is not None:
                self._end(Finished(self.waiting.popleft(), refusal))
            elif self.executor.fits(self.waiting[0]):
                task = self.waiting.popleft()
                self.in_flight[task.number, task.seed] = task
                self.executor.submit(task)
            else:
                return

    def _go_on(self, record: Record) -> None:
        """Take up a trial of an earlier process, whose last measurement may be on disk but not in the study."""
        if not record.measurements or self.study.report(record, record.measurements[-1]):
            self.waiting.append(self._task(record, len(record.measurements)))

    def goes_on(self, task: RungTask) -> bool:
        """Whether the trial of ``task`` is in flight or waits to be."""
        return (task.number, task.seed) in self.in_flight or any(
            (other.number, other.seed) == (task.number, task.seed) for other in self.waiting
        )

    def _may_begin(self) -> bool:
        hours = self.file.budget.hours
        in_time = hours is None or time.monotonic() - self.started < hours * 3600
        return not self.exhausted and in_time and len(self.study.records) < self.file.plan.trials

    def _pump(self) -> None:
        for event in self.executor.wait(POLL_SECONDS):
            if isinstance(event, Finished):
                del self.in_flight[event.task.number, event.task.seed]
                self._end(event)
                continue
            if isinstance(event, Progress):
                self.progress[event.task.number, event.task.seed] = event
            self._watcher.changed(self, event)

    def _end(self, event: Finished) -> None:
        """Take a task's end; what follows from it waits before all else, since its room has just become free."""
        self.progress.pop((event.task.number, event.task.seed), None)
        self._finished(event.task, event.result)
        self._watcher.changed(self, event)

    def _finished(self, task: RungTask, result: Measurement | Failure) -> None:
        record = self.study.records[task.number]
        if isinstance(result, Failure):
            if result.retry and self._may_retry(task):
                self.waiting.appendleft(task)
                return
            if task.seed == self.file.seed:
                self.study.fail(record, result)
            else:
                self.study.fail_repeat(record, task, result)
            self._count_failure(result)
        elif task.seed != self.file.seed:
            record.failed_repeats.pop(task.seed, None)  # of an earlier process
            record.repeats = sorted([*record.repeats, result], key=lambda m: m.seed)  # as a new process reads them
        else:
            self._failures_in_a_row = 0
            if self.study.report(record, result):
                self.waiting.appendleft(task.at(task.rung + 1))

    def _may_retry(self, task: RungTask) -> bool:
        key = (task.number, task.seed, task.rung)
        self._attempts[key] = self._attempts.get(key, 0) + 1
        return self._attempts[key] <= self.file.budget.retries

    def _count_failure(self, failure: Failure) -> None:
        self._failures_in_a_row += 1
        limit = self.file.budget.max_failures_in_a_row
        if self._failures_in_a_row >= limit:
            raise ArchspecError(
                f"{self.folder.path}: {limit} trials failed one after another, the last as {failure.kind}: "
                f"{failure.reason}; mend the cause and go on with --resume"
            )

    def _repeat_finalists(self) -> None:
        """Train the best again with other seeds, at the full budget, so that seed noise is known."""
        self.waiting.extend(
            self._repeat_task(record, offset)
            for record in self._finalists()
            for offset in range(1, self.file.plan.seeds)
            if not read_metrics(self.folder.trial(record.number, offset))
        )
        while self.in_flight or self.waiting:
            self._begin_waiting()
            self._pump()

    def _finalists(self) -> list[Record]:
        """The best by the search's own seed alone, so that repeats do not change who is repeated.

        The best baseline is always among them: a mean over seeds is not to be compared with a single lucky run.
        """
        scorer = self.study.scorer
        ordered = sorted(self._complete(), key=lambda r: scorer.merit(r, r.measurements[-1]), reverse=True)
        finalists = ordered[: self.file.plan.finalists]
        if not any(record.baseline for record in finalists):
            finalists += [record for record in ordered if record.baseline][:1]
        return finalists

    def _task(self, record: Record, rung: int) -> RungTask:
        return RungTask(
            number=record.number,
            directory=self.folder.trial(record.number),
            spec=record.spec,
            features=Path(self.store.path),
            holdout=self.file.data.holdout,
            train=self.file.train.model_copy(update=record.candidate.train),
            evaluate=self.file.objective,
            rungs=self.file.plan.rungs,
            rung=rung,
            seed=self.file.seed,
        )

    def _repeat_task(self, record: Record, offset: int) -> RungTask:
        total = self.file.plan.rungs[-1]
        directory = self.folder.trial(record.number, offset)
        return replace(self._task(record, 0), directory=directory, rungs=(total,), seed=self.file.seed + offset)
