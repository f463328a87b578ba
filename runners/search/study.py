"""The search's memory: an Optuna study in a journal that this process alone writes, and one record per architecture."""

import json
import warnings
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import TrialState

from archspec.cost import draft_params, flops_per_token, trainable_params
from archspec.errors import ArchspecError
from archspec.facts import TargetFacts
from archspec.files import write_json, write_text
from archspec.presets import load_spec
from archspec.resolve import ResolvedSpec, resolve
from archspec.servable import servable_by
from archspec.spec import DraftSpec
from archspec.weights import SPEC_FILE
from runners.search.executor import Failure
from runners.search.run_folder import RunFolder
from runners.search.search_file import SearchFile
from runners.training.trial import METRICS_FILE, Measurement, RungTask, read_metrics
from search_spaces import Candidate, Infeasible, apply_overrides, locate, sample

MAX_REPEATS = 60  # draws in a row that bring nothing new before the space counts as exhausted
REPEATS_BEFORE_RANDOM = 5
FAILURE_FILE = "failure.json"

State = Literal["running", "complete", "pruned", "failed"]
_STATES: dict[TrialState, State] = {
    TrialState.RUNNING: "running",
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}


@dataclass
class Record:
    """One architecture that is or was trained.

    ``measurements`` are its rungs, ``repeats`` its other seeds at the full budget, ``failed_repeats`` those without a
    result, by seed.
    """

    number: int
    candidate: Candidate
    baseline: str | None
    state: State = "running"
    failure: Failure | None = None
    measurements: list[Measurement] = field(default_factory=list)
    repeats: list[Measurement] = field(default_factory=list)
    failed_repeats: dict[int, Failure] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What tables call it: the baseline's name, or one made of the chosen values."""
        return self.baseline or self.candidate.written.name

    @property
    def spec(self) -> ResolvedSpec:
        """The resolved architecture."""
        return self.candidate.spec

    @cached_property
    def hash(self) -> str:
        """The candidate's hash; computed once, since every draw compares it with its own."""
        return self.candidate.hash

    @cached_property
    def columns(self) -> dict[str, Any]:
        """What a leaderboard says of the architecture itself; computed once, since leaderboards are written often."""
        return {
            "params": draft_params(self.spec),
            "trainable_params": trainable_params(self.spec),
            "flops_per_token": flops_per_token(self.spec),
            "servable_by": " ".join(servable_by(self.spec)),
        }


class Study:
    """Asks Optuna for candidates and tells it how they did. Every method leaves the journal whole.

    Raises:
        ArchspecError: the folder's journal and its trials do not belong together, or a trial's measurements are gone.
    """

    def __init__(self, folder: RunFolder, file: SearchFile, facts: TargetFacts) -> None:
        self._folder, self._file, self._facts = folder, file, facts
        folder.mend_journal()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            lock = JournalFileOpenLock(str(folder.study))
            storage = JournalStorage(JournalFileBackend(str(folder.study), lock_obj=lock))
            self._study = optuna.create_study(
                study_name="drafts",
                storage=storage,
                direction="maximize",
                load_if_exists=True,
            )
        if not self._study.trials and any(folder.path.glob("trials/*")):
            rule = "its trials are there but the study's journal is empty or lost; begin a new run with --out"
            raise ArchspecError(f"{folder.study}: {rule}")
        self.records: dict[int, Record] = {}
        self.infeasible: int = 0
        for frozen in self._study.trials:
            self._remember(frozen)

    def adopt(self) -> list[Record]:
        """Records that were in flight when the search stopped; trials that never got a candidate are closed."""
        for frozen in self._study.get_trials(states=(TrialState.RUNNING,)):
            if frozen.number not in self.records:
                self._close_draw(frozen)
        return [record for record in self.records.values() if record.state == "running"]

    def draw(self) -> Record | None:
        """The next architecture to train: the baselines first, then what the sampler asks for; None if none is new.

        Repeats are told their known result, infeasible draws their violation; neither is returned.
        """
        for baseline in self._file.baselines:
            record = self._draw_baseline(baseline)
            if record is not None:
                return record
        for repeats in range(MAX_REPEATS):
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
        """Take a rung's measurement; returns whether the trial should go on to the next rung.

        Baselines always go on. The last rung completes the trial.
        """
        record.measurements = [*record.measurements[: measurement.rung], measurement]
        trial, step = self._trial(record), self._step(measurement.rung)
        value = self._file.objective.value(measurement.acceptance)
        if step not in self._frozen(record).intermediate_values:
            trial.report(value, step=step)
        if measurement.rung == len(self._file.budget.rungs) - 1:
            self._close(record, "complete", value)
            return False
        if record.baseline is None and self._is_weak(value, step):
            self._close(record, "pruned", value)
            return False
        return True

    def fail(self, record: Record, failure: Failure) -> None:
        """Close a trial that has no result; its kind and reason stay with it."""
        record.failure = failure
        self._trial(record).set_user_attr("failure", {"kind": failure.kind, "reason": failure.reason})
        self._close(record, "failed", None)

    def fail_repeat(self, record: Record, task: RungTask, failure: Failure) -> None:
        """Keep why a finalist has no result for a seed; a resume tries that seed again."""
        record.failed_repeats[task.seed] = failure
        write_json(task.directory / FAILURE_FILE, {"seed": task.seed, "kind": failure.kind, "reason": failure.reason})

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
            margins, reason = (
                self._file.constraints.margins(candidate.spec),
                self._file.constraints.reason(candidate.spec),
            )
        except Infeasible as error:
            margins, reason = {"valid": 1.0}, error.reason
        for name, margin in margins.items():
            trial.set_constraint(name, margin)
        if reason is None:
            return candidate
        self.infeasible += 1
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
        trial.set_user_attr("repeat_of", twin.number)
        values = [self._file.objective.value(m.acceptance) for m in twin.measurements]
        told = self._study.get_trials(deepcopy=False)[trial.number].intermediate_values
        for rung, value in enumerate(values):
            if self._step(rung) not in told:
                trial.report(value, step=self._step(rung))
        if twin.state == "complete":
            self._study.tell(trial, values[-1])
        else:
            self._study.tell(trial, state=TrialState.PRUNED if values else TrialState.FAIL)

    def _close(self, record: Record, state: State, value: float | None) -> None:
        record.state = state
        told = {"complete": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}[state]
        values = value if state == "complete" else None
        self._study.tell(record.number, values, state=told, skip_if_finished=True)

    def _remember(self, frozen: optuna.trial.FrozenTrial) -> None:
        attributes = frozen.user_attrs
        self.infeasible += "infeasible" in attributes
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
        for offset in range(1, self._file.budget.seeds):
            self._remember_repeat(record, self._folder.trial(frozen.number, offset))
        self.records[frozen.number] = record

    def _remember_repeat(self, record: Record, directory: Path) -> None:
        measured, failure = read_metrics(directory), directory / FAILURE_FILE
        record.repeats += measured
        if not measured and failure.exists():
            told = json.loads(failure.read_text(encoding="utf-8"))
            record.failed_repeats[told["seed"]] = Failure(told["kind"], told["reason"])

    def _trial(self, record: Record) -> optuna.Trial:
        """Optuna's handle on a trial of this or an earlier process."""
        return optuna.Trial(self._study, self._frozen(record)._trial_id)

    def _frozen(self, record: Record) -> optuna.trial.FrozenTrial:
        """What the study knows of a trial, to be read only; ``Study.trials`` would copy all of them."""
        return self._study.get_trials(deepcopy=False)[record.number]

    def _step(self, rung: int) -> int:
        """Successive halving compares at powers of its reduction factor; rung r is the r-th power."""
        return int(self._file.budget.reduction**rung)

    def _is_weak(self, value: float, step: int) -> bool:
        """Whether ``value`` is outside the best 1 / ``reduction`` of those reported at ``step``, itself included.

        As optuna's ``SuccessiveHalvingPruner`` with ``min_resource`` 1 has it, but from reported values alone: that one
        notes on the trial that it was asked, and would let a trial pass whose search was killed before it was told.
        """
        trials = self._study.get_trials(deepcopy=False)
        reported = (t.intermediate_values.get(step) for t in trials if "repeat_of" not in t.user_attrs)
        values = sorted((other for other in reported if other is not None), reverse=True)
        return value < values[max(1, len(values) // self._file.budget.reduction) - 1]

    def _make_sampler(self, at_random: bool = False) -> optuna.samplers.BaseSampler:
        """A sampler for the next draw, seeded by the draws so far: a search that was resumed draws the same as another.

        Trials that a kill left without a candidate do not count.
        """
        trials = self._study.get_trials(deepcopy=False)
        draws = sum(not {"spec", "infeasible", "repeat_of"}.isdisjoint(trial.user_attrs) for trial in trials)
        seed = int(np.random.SeedSequence([self._file.seed, draws]).generate_state(1)[0])
        if at_random or self._file.sampler.kind == "random":
            return optuna.samplers.RandomSampler(seed=seed)
        startup = self._file.sampler.startup_trials
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # of group
            return optuna.samplers.TPESampler(multivariate=True, group=True, seed=seed, n_startup_trials=startup)
