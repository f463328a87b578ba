"""The search's memory: an Optuna study in a journal that this process alone writes, and one record per architecture."""

import json
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import TrialState

from archspec.errors import ArchspecError
from archspec.facts import TargetFacts
from archspec.files import write_json, write_text
from archspec.presets import load_spec
from archspec.resolve import ResolvedSpec, resolve
from archspec.spec import DraftSpec
from archspec.speedup import Times
from archspec.weights import SPEC_FILE
from runners.search.executor import Failure
from runners.search.pareto import weak
from runners.search.record import Record, State
from runners.search.run_folder import RunFolder
from runners.search.sampler import make_sampler
from runners.search.scores import Scorer
from runners.search.search_file import SearchFile
from runners.training.trial import METRICS_FILE, Measurement, RungTask, read_metrics
from search_spaces import Candidate, Infeasible, apply_overrides, locate, sample

MAX_REPEATS = 60  # draws in a row that bring nothing new before the space counts as exhausted
REPEATS_BEFORE_RANDOM = 5
FAILURE_FILE = "failure.json"
INVALID = "valid"  # the constraint that values drawn together make a draft

_STATES: dict[TrialState, State] = {
    TrialState.RUNNING: "running",
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}


class Study:
    """Asks Optuna for candidates and tells it how they did. Every method leaves the journal whole.

    Raises:
        ArchspecError: the folder's journal and its trials do not belong together, or a trial's measurements are gone.
    """

    def __init__(self, folder: RunFolder, file: SearchFile, facts: TargetFacts, times: Times | None = None) -> None:
        self._folder, self._file, self._facts, self._plan = folder, file, facts, file.plan
        self.scorer = Scorer(file, times)
        folder.mend_journal()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            lock = JournalFileOpenLock(str(folder.study))
            storage = JournalStorage(JournalFileBackend(str(folder.study), lock_obj=lock))
            self._study = optuna.create_study(
                study_name="drafts",
                storage=storage,
                directions=self.scorer.judged_directions,
                load_if_exists=True,
            )
        if not self._study.trials and any(folder.path.glob("trials/*")):
            rule = "its trials are there but the study's journal is empty or lost; begin a new run with --out"
            raise ArchspecError(f"{folder.study}: {rule}")
        self.records: dict[int, Record] = {}
        self.turned_away: Counter[str] = Counter()
        for frozen in self._study.trials:
            self._remember(frozen)

    def adopt(self) -> list[Record]:
        """Records that were in flight when the search stopped; what it was about to close is closed."""
        for frozen in self._study.get_trials(states=(TrialState.RUNNING,)):
            if frozen.number not in self.records:
                self._close_draw(frozen)
            elif self.records[frozen.number].failure is not None:
                self._close(self.records[frozen.number], "failed", None)
        return [record for record in self.records.values() if record.state == "running"]

    def draw(self) -> Record | None:
        """The next architecture to train: the baselines first, then what the sampler asks for; None if none is new.

        Repeats are told their known result, infeasible draws their violation; neither is returned.
        """
        for baseline in self._file.baselines:
            record = self._draw_baseline(baseline)
            if record is not None:
                return record
        for repeats in range(self._fruitless() % MAX_REPEATS, MAX_REPEATS):
            self._study.sampler = self._make_sampler(at_random=(repeats + 1) % (REPEATS_BEFORE_RANDOM + 1) == 0)
            trial = self._study.ask()
            candidate = self._feasible(trial)
            if candidate is None:
                continue
            drawn = candidate.hash
            twin = next((r for r in self.records.values() if r.hash == drawn), None)
            if twin is None:
                return self._begin(trial, candidate, None)
            self._tell_twin(trial, twin)
        return None

    def report(self, record: Record, measurement: Measurement) -> bool:
        """Take a rung's measurement; returns whether the trial should go on to the next rung now.

        Baselines always go on, the last rung completes the trial. In a funnel all wait for ``promote``.
        """
        record.measurements = [*record.measurements[: measurement.rung], measurement]
        values = self.scorer.judged(record, measurement)
        self._note(record, measurement, values)
        if measurement.rung == len(self._plan.rungs) - 1:
            self._close(record, "complete", values)
        elif self._plan.keep is not None:
            self._tell(record, "complete", values)  # what draws candidates learns from the first stage alone
        elif record.baseline is None and self._is_weak(record, values, measurement.rung):
            self._close(record, "pruned", values)
        else:
            return True
        return False

    def promote(self) -> list[Record]:
        """Records of a funnel that go on to their next stage, now that nothing is in flight; the others there stop.

        What was measured alone decides, so that a resumed search promotes what another would. Baselines always go on;
        the place of one that failed later falls to the next best, which had stopped.
        """
        for rung, places in enumerate((self._plan.keep or ())[1:]):
            there = [r for r in self.records.values() if r.state != "failed" and len(r.measurements) > rung]
            there.sort(key=lambda r: self.scorer.merit(r, r.measurements[rung]), reverse=True)
            waiting = [record for record in there if len(record.measurements) == rung + 1]
            chosen = {record.number for record in there[:places]}
            chosen |= {record.number for record in waiting if record.baseline}
            for record in waiting:
                record.state = "running" if record.number in chosen else "pruned"
            if going := [record for record in waiting if record.number in chosen]:
                return sorted(going, key=lambda record: record.number)
        return []

    def fail(self, record: Record, failure: Failure) -> None:
        """Close a trial that has no result; its kind and reason stay with it."""
        record.failure = failure
        if self._frozen(record).state.is_finished():  # a funnel's later stage
            self._write_failure(self._folder.trial(record.number), self._file.seed, failure)
        else:
            self._trial(record).set_user_attr("failure", {"kind": failure.kind, "reason": failure.reason})
        self._close(record, "failed", None)

    def fail_repeat(self, record: Record, task: RungTask, failure: Failure) -> None:
        """Keep why a finalist has no result for a seed; a resume tries that seed again."""
        record.failed_repeats[task.seed] = failure
        self._write_failure(task.directory, task.seed, failure)

    def _fruitless(self) -> int:
        """How many draws in a row have brought nothing new, those of an earlier process among them."""
        draws = 0
        for trial in reversed(self._study.get_trials(deepcopy=False)):
            if "spec" in trial.user_attrs:
                break
            draws += not {"infeasible", "repeat_of"}.isdisjoint(trial.user_attrs)
        return draws

    def _draw_baseline(self, name: str) -> Record | None:
        """Begin a baseline that has no record yet."""
        if any(record.baseline == name for record in self.records.values()):
            return None
        candidate, parameters = self._baseline(name)
        left = self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,))  # this one's, by a kill just here
        if parameters is not None and not left:
            self._study.enqueue_trial(parameters)
        trial = self._study.ask()
        if parameters is not None:
            sample(self._file.space, trial, self._facts, self._file.fixed)
        return self._begin(trial, candidate, name)

    def _baseline(self, name: str) -> tuple[Candidate, dict[str, Any] | None]:
        """The baseline as a candidate, and the parameters by which the space yields it (None if it does not)."""
        written = apply_overrides(load_spec(name), self._file.fixed, f"baseline {name} with fixed")
        spec = resolve(written, self._facts, f"baseline {name}")
        parameters = locate(self._file.space, written, self._facts, self._file.fixed, self._file.train.model_dump())
        if parameters is None:
            return Candidate(spec, written, {}), None
        drawn = sample(self._file.space, optuna.trial.FixedTrial(parameters), self._facts, self._file.fixed)
        return Candidate(spec, written, drawn.train), parameters

    def _begin(self, trial: optuna.Trial, candidate: Candidate, baseline: str | None) -> Record:
        """Write the candidate into the trial before anything is trained: a trial without one was never started."""
        record = Record(trial.number, candidate, baseline)
        trial.set_user_attr("baseline", baseline)
        trial.set_user_attr("train", candidate.train)
        trial.set_user_attr("written", candidate.written.model_dump(mode="json"))
        write_text(self._folder.trial(trial.number) / SPEC_FILE, candidate.written.dump())
        trial.set_user_attr("spec", candidate.spec.model_dump(mode="json"))  # last: it says that all is there
        self.records[trial.number] = record
        return record

    def _feasible(self, trial: optuna.Trial) -> Candidate | None:
        """Sample the trial's candidate; an infeasible one is told as such and gives None."""
        try:
            candidate = sample(self._file.space, trial, self._facts, self._file.fixed)
            constraints, times = self._file.constraints, self.scorer.times
            margins, reason = constraints.margins(candidate.spec, times), constraints.reason(candidate.spec, times)
        except Infeasible as error:
            margins, reason = {INVALID: 1.0}, error.reason
        for name, margin in margins.items():
            trial.set_constraint(name, margin)
        if reason is None:
            return candidate
        broken = [name for name, margin in margins.items() if margin > 0]
        self.turned_away.update(broken)
        trial.set_user_attr("broken", broken)
        trial.set_user_attr("infeasible", reason)
        self._study.tell(trial, state=TrialState.PRUNED)
        return None

    def _close_draw(self, frozen: optuna.trial.FrozenTrial) -> None:
        """Tell what an earlier process was about to tell of a draw that brought no record."""
        attributes = frozen.user_attrs
        if "repeat_of" in attributes:
            self._tell_twin(optuna.Trial(self._study, frozen._trial_id), self.records[attributes["repeat_of"]])
        else:
            state = TrialState.PRUNED if "infeasible" in attributes else TrialState.FAIL
            self._study.tell(frozen.number, state=state)

    def _tell_twin(self, trial: optuna.Trial, twin: Record) -> None:
        """Tell a draw of a known architecture what is known; nothing yet of one that is in training."""
        trial.set_user_attr("repeat_of", twin.number)
        known = [self.scorer.judged(twin, m) for m in twin.measurements]
        told = self._study.get_trials(deepcopy=False)[trial.number].intermediate_values
        for rung, values in enumerate(known if self._plan.keep is None else ()):
            if len(values) == 1 and self._step(rung) not in told:
                trial.report(values[0], step=self._step(rung))
        if known:
            last = twin.measurements[-1 if self._plan.keep is None else 0]
            self._set_measured_constraints(trial, twin, last)
        if known and self._plan.keep is not None:
            self._study.tell(trial, known[0])
        elif twin.state == "complete" or (twin.state == "pruned" and len(known[-1]) > 1):
            self._study.tell(trial, known[-1])
        else:
            self._study.tell(trial, state=TrialState.PRUNED if known else TrialState.FAIL)

    def _note(self, record: Record, measurement: Measurement, values: list[float]) -> None:
        """Write a rung's values into the study, once, and whether they keep the bounds on what was measured."""
        frozen, trial = self._frozen(record), self._trial(record)
        if frozen.state.is_finished() or _rung_key(measurement.rung) in frozen.user_attrs:
            return
        step = self._step(measurement.rung)
        if len(values) == 1 and self._plan.keep is None and step not in frozen.intermediate_values:
            trial.report(values[0], step=step)
        trial.set_user_attr(
            _rung_key(measurement.rung), {"values": values, "keeps": self.scorer.keeps(record, measurement)}
        )

    def _set_measured_constraints(self, trial: optuna.Trial, record: Record, measurement: Measurement) -> None:
        for name, margin in self.scorer.beyond(record, measurement).items():
            if name not in trial.constraints:  # by a process that was killed just here; optuna keeps the first value
                trial.set_constraint(name, margin)

    def _close(self, record: Record, state: State, values: list[float] | None) -> None:
        record.state = state
        self._tell(record, state, values)

    def _tell(self, record: Record, state: State, values: list[float] | None) -> None:
        """Tell a trial's end. With several objectives one that was stopped is told complete with what it was worth.

        Optuna 5 files a pruned trial without values as bad, and with several objectives it can have none.
        """
        told = {"complete": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}[state]
        if state == "pruned" and values is not None and len(values) > 1:
            told = TrialState.COMPLETE
        if record.measurements and not self._frozen(record).state.is_finished():
            self._set_measured_constraints(self._trial(record), record, record.measurements[-1])
        self._study.tell(
            record.number, values if told == TrialState.COMPLETE else None, state=told, skip_if_finished=True
        )

    def _remember(self, frozen: optuna.trial.FrozenTrial) -> None:
        attributes = frozen.user_attrs
        if "infeasible" in attributes:
            self.turned_away.update(attributes.get("broken", [INVALID]))
        if "spec" not in attributes:
            return
        candidate = Candidate(
            ResolvedSpec.model_validate(attributes["spec"]),
            DraftSpec.model_validate(attributes["written"]),
            attributes["train"],
        )
        failure = Failure(**attributes["failure"]) if "failure" in attributes else None
        record = Record(frozen.number, candidate, attributes["baseline"], _STATES[frozen.state], failure)
        record.measurements = read_metrics(self._folder.trial(frozen.number))
        if record.state in ("complete", "pruned") and not record.measurements:
            where = self._folder.trial(frozen.number) / METRICS_FILE
            raise ArchspecError(f"{where}: the trial's measurements are gone; begin a new run with --out")
        if record.state == "complete":
            self._remember_how_far(record)
        for offset in range(1, self._plan.seeds):
            self._remember_repeat(record, self._folder.trial(frozen.number, offset))
        self.records[frozen.number] = record

    def _remember_how_far(self, record: Record) -> None:
        """What the study calls complete may be a funnel's first stage, or stopped where objectives are several."""
        if (told := _read_failure(self._folder.trial(record.number))) is not None:
            record.state, record.failure = "failed", told[1]
        elif len(record.measurements) < len(self._plan.rungs):
            record.state = "pruned" if self._plan.keep is None else "running"

    def _remember_repeat(self, record: Record, directory: Path) -> None:
        measured = read_metrics(directory)
        record.repeats += measured
        if not measured and (told := _read_failure(directory)) is not None:
            record.failed_repeats[told[0]] = told[1]

    @staticmethod
    def _write_failure(directory: Path, seed: int, failure: Failure) -> None:
        write_json(directory / FAILURE_FILE, {"seed": seed, "kind": failure.kind, "reason": failure.reason})

    def _trial(self, record: Record) -> optuna.Trial:
        """Optuna's handle on a trial of this or an earlier process."""
        return optuna.Trial(self._study, self._frozen(record)._trial_id)

    def _frozen(self, record: Record) -> optuna.trial.FrozenTrial:
        """What the study knows of a trial, to be read only; ``Study.trials`` would copy all of them."""
        return self._study.get_trials(deepcopy=False)[record.number]

    def _step(self, rung: int) -> int:
        """Successive halving compares at powers of its reduction factor; rung r is the r-th power."""
        return int(self._file.budget.reduction**rung)

    def _is_weak(self, record: Record, values: list[float], rung: int) -> bool:
        """Whether a record's ``values`` are outside the best 1 / ``reduction`` of those reported at the rung.

        For one objective as optuna's ``SuccessiveHalvingPruner`` with ``min_resource`` 1 has it, but from reported
        values alone: that one notes on the trial that it was asked, and would let a trial pass whose search was killed
        before it was told. Optuna has no pruning for several.
        """
        trials = (trial for trial in self._study.get_trials(deepcopy=False) if trial.number != record.number)
        told = [trial.user_attrs[_rung_key(rung)] for trial in trials if _rung_key(rung) in trial.user_attrs]
        places = max(1, (len(told) + 1) // self._file.budget.reduction)
        keeps = self.scorer.keeps(record, record.measurements[rung])
        if not keeps:  # those that keep the bounds on what was measured come first
            places -= sum(other["keeps"] for other in told)
        others = [other["values"] for other in told if other["keeps"] == keeps]
        return places < 1 or weak(values, others, self.scorer.judged_directions, places)

    def _make_sampler(self, at_random: bool = False) -> optuna.samplers.BaseSampler:
        """A sampler for the next draw. Trials that a kill left without a candidate do not count as draws."""
        trials = self._study.get_trials(deepcopy=False)
        draws = sum(not {"spec", "infeasible", "repeat_of"}.isdisjoint(trial.user_attrs) for trial in trials)
        return make_sampler(self._file.sampler, self._file.seed, draws, at_random)


def _rung_key(rung: int) -> str:
    """The trial attribute that holds what the objectives were at a rung."""
    return f"rung_{rung}"


def _read_failure(directory: Path) -> tuple[int, Failure] | None:
    """The seed and the failure that a trial's folder tells of."""
    file = directory / FAILURE_FILE
    if not file.exists():
        return None
    told = json.loads(file.read_text(encoding="utf-8"))
    return told["seed"], Failure(told["kind"], told["reason"])
