"""One draft by itself: trained without a search, and loaded back."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from archspec.errors import ArchspecError
from archspec.files import write_json
from archspec.modules import Draft
from archspec.resolve import resolve
from archspec.schema import Document
from archspec.spec import DraftSpec
from archspec.weights import SPEC_FILE, WEIGHTS_FILE, load_draft
from runners.features.store import FeatureStore
from runners.progress import Meter
from runners.training.device import pick_device
from runners.training.settings import EvalSettings, TrainSettings
from runners.training.trainer import DivergedError, StepReport
from runners.training.trial import ORIGIN_FILE, WEIGHTS_FOLDER, Measurement, RungTask, run_rung

SETTINGS_FILE = "train.json"
DEFAULT_HOLDOUT = 0.1


@dataclass(frozen=True)
class Training:
    """How one draft is trained: everything that a resume must find unchanged."""

    rungs: tuple[int, ...]
    train: TrainSettings
    evaluate: EvalSettings
    holdout: float
    seed: int

    @classmethod
    def of(
        cls, rungs: Sequence[int], settings: Mapping[str, Any], draft_length: int, holdout: float, seed: int
    ) -> "Training":
        """From plain values.

        Raises:
            ArchspecError: a setting is out of its range, or the rungs do not rise.
        """
        if list(rungs) != sorted(set(rungs)):
            raise ArchspecError(f"rungs must rise, for example 20e3,60e3,180e3, but are {', '.join(map(str, rungs))}")
        train = Document(dict(settings), "train").validate(TrainSettings)
        return cls(tuple(rungs), train, EvalSettings(draft_length=draft_length), holdout, seed)


def begin_training(written: Document, store: FeatureStore, out: Path, training: Training) -> RungTask:
    """The first rung's task for the spec ``written``, in folder ``out``, which is new or holds the same training.

    Raises:
        ArchspecError: ``written`` is no spec or does not fit the store's target, the store lacks a layer, or ``out``
            holds other things.
    """
    resolved = resolve(written.validate(DraftSpec), store.facts, written)
    store.require(resolved.inputs.aux_layers)
    store.split(training.holdout)
    pick_device(training.train.device)
    record = {
        "spec": resolved.model_dump(mode="json"),
        "features": store.fingerprint,
        "rungs": list(training.rungs),
        "train": training.train.model_dump(mode="json", exclude={"threads", "device"}),
        "evaluate": training.evaluate.model_dump(mode="json", exclude_none=True),
        "holdout": training.holdout,
        "seed": training.seed,
    }
    _require_same(out, record)
    write_json(out / SETTINGS_FILE, record)
    return RungTask(
        number=0,
        directory=out,
        spec=resolved,
        features=store.path,
        holdout=training.holdout,
        train=training.train,
        evaluate=training.evaluate,
        rungs=training.rungs,
        rung=0,
        seed=training.seed,
    )


def run_rungs(task: RungTask, on_step: Callable[[StepReport], None]) -> Iterator[Measurement]:
    """Train rung after rung; those that were measured before are answered from the record.

    Raises:
        ArchspecError: training diverged, or the store does not fit.
    """
    for rung in range(len(task.rungs)):
        try:
            yield run_rung(task.at(rung), on_step)
        except DivergedError as error:
            raise ArchspecError(f"{task.directory}: training diverged: {error}; use a lower learning rate") from None


def shown(meter: Meter, total: int) -> Callable[[StepReport], None]:
    """A callback for ``run_rungs`` that moves ``meter`` towards ``total`` tokens."""

    def on_step(report: StepReport) -> None:
        meter.note = f"loss {report.loss:.3f}, learning rate {report.learning_rate:.1e}"
        meter(min(report.tokens, total), total)

    return on_step


def find_draft(path: Path) -> Path:
    """The folder that holds the draft meant by ``path``: itself, a trial's ``draft``, or a run's ``best``.

    Raises:
        ArchspecError: there is no draft.
    """
    for folder in (path, path / WEIGHTS_FOLDER, path / "best"):
        if (folder / WEIGHTS_FILE).is_file():
            return folder
    if (path / "config.json").is_file():
        raise ArchspecError(f"{path}: is a checkpoint of another project; make a draft of it with archspec import")
    raise ArchspecError(
        f"{path}: holds no draft ({SPEC_FILE} and {WEIGHTS_FILE}); give a run, a trial or its draft folder"
    )


def open_draft(path: Path, store: FeatureStore) -> Draft:
    """The draft meant by ``path`` with its target's tensors from ``store``.

    Raises:
        ArchspecError: there is none, or it was made for another target, or reads a layer that the store lacks.
    """
    folder = find_draft(path)
    require_target(folder, store.manifest.key.target, f"the target of {store.path}")
    draft = load_draft(folder, store.weights())
    if draft.spec.target != store.facts:
        raise ArchspecError(f"{folder}: the draft is for a target of other dimensions than that of {store.path}")
    store.require(draft.spec.inputs.aux_layers)
    return draft


def heldout(path: Path, store: FeatureStore, holdout: float | None) -> list[int]:
    """Conversations of ``store`` that the draft meant by ``path`` was not trained on; by default its own holdout.

    Which side a conversation is on depends on its id alone, so the draft's holdout is right for any store.

    Raises:
        ArchspecError: ``holdout`` is larger than the share that was held out when the draft was trained.
    """
    own = origin_of(find_draft(path)).get("holdout", DEFAULT_HOLDOUT)
    if holdout is not None and holdout > own:
        rule = f"the draft was trained with a holdout of {own:g}"
        raise ArchspecError(f"holdout={holdout:g}: {rule}; a larger one would measure on conversations it has seen")
    return store.split(own if holdout is None else holdout)[1]


def origin_of(folder: Path) -> dict[str, Any]:
    """What the draft in ``folder`` was trained on, as far as it says."""
    file = folder / ORIGIN_FILE
    data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return data


def require_target(folder: Path, fingerprint: str, name: str) -> None:
    """Two models of equal sizes are two targets: a draft joined to the wrong one loads, and nothing is accepted."""
    own = origin_of(folder).get("target", fingerprint)
    if own != fingerprint:
        raise ArchspecError(f"{folder}: the draft was trained for target {own}, but {name} is target {fingerprint}")


def _require_same(out: Path, record: dict[str, Any]) -> None:
    file = out / SETTINGS_FILE
    if not file.is_file():
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ArchspecError(f"{out}: exists and holds no training of one draft; choose another with --out")
        return
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ArchspecError(f"{file}: not valid JSON ({error})") from None
    changed = [key for key, value in record.items() if before.get(key) != value]
    if changed:
        raise ArchspecError(
            f"{out}: holds a training with other values of {', '.join(changed)} (see {file}); choose another with --out"
        )
