"""One trial is a plain function: train a draft to a rung, measure it, leave everything needed to go on."""

import json
import resource
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from archspec.builder import adopt_target, build_draft
from archspec.errors import ArchspecError
from archspec.files import write_json, write_text
from archspec.modules import Draft
from archspec.resolve import ResolvedSpec
from archspec.vocabulary import choose_vocabulary
from archspec.weights import save_draft
from runners.features.store import FeatureStore
from runners.training.acceptance import measure_acceptance
from runners.training.device import compute_dtype, pick_device
from runners.training.parallel import ALONE, Workers
from runners.training.settings import EvalSettings, TrainSettings
from runners.training.trainer import StepReport, Trainer

CHECKPOINT_SECONDS = 60.0
METRICS_FILE, CHECKPOINT_FILE, LOG_FILE, WEIGHTS_FOLDER = "metrics.jsonl", "checkpoint.safetensors", "log.txt", "draft"
ORIGIN_FILE = "origin.json"  # beside the weights: what they were trained on


@dataclass(frozen=True)
class RungTask:
    """All that one (trial, rung) needs, plain enough to be sent to another process or machine.

    ``rungs`` are the budgets in tokens; the schedule runs to the last, this task to ``rungs[rung]``. ``seed`` sets the
    draft's first weights and the order of the batches.
    """

    number: int
    directory: Path
    spec: ResolvedSpec
    features: Path
    holdout: float
    train: TrainSettings
    evaluate: EvalSettings
    rungs: tuple[int, ...]
    rung: int
    seed: int

    def at(self, rung: int) -> "RungTask":
        """The same trial at another rung."""
        return replace(self, rung=rung)


@dataclass(frozen=True)
class Measurement:
    """What a draft was worth at a rung: its acceptance, and what the training took.

    ``draft`` is the architecture's hash, ``dtype`` what training multiplied in. ``seconds`` is training time alone,
    ``peak_memory`` the process's peak bytes (see ``peak_memory``), with several workers that of the largest.
    ``finished`` is when it was measured, in seconds since 1970; 0 in records that do not tell.
    """

    draft: str
    dtype: str
    rung: int
    tokens: int
    seed: int
    loss: float
    acceptance: dict[str, Any]
    seconds: float
    tokens_per_second: float
    peak_memory: int
    finished: float = field(default=0.0, compare=False)

    @property
    def length(self) -> float:
        """Acceptance length, mean(a) + 1."""
        return float(self.acceptance["length"])

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def run_rung(
    task: RungTask, on_step: Callable[[StepReport], None] = lambda _: None, workers: Workers = ALONE
) -> Measurement:
    """Train to ``task``'s rung from the trial's own checkpoint, evaluate, write metrics and weights.

    May safely run twice: a rung that was measured is answered from its record. With several ``workers`` every one of
    them calls this, with the same task, and gets the same measurement; the first alone writes files and calls
    ``on_step``.

    Raises:
        DivergedError: the loss or a gradient is not finite; on every worker.
        ArchspecError: the store does not fit the spec, or the folder holds another draft's measurements; on every
            worker, whichever found it.
    """
    done = workers.ask_first(lambda: _own_metrics(task))
    for measurement in done:
        if measurement.rung == task.rung:
            return measurement
    with workers.together():
        store, trainer, heldout = _prepare(task, workers)
    checkpoint = task.directory / CHECKPOINT_FILE
    trainer.run(task.rungs[task.rung], _saving(trainer, checkpoint, on_step) if workers.first else lambda _: None)
    workers.ask_first(lambda: trainer.save(checkpoint))
    device = pick_device(task.train.device)
    acceptance = measure_acceptance(trainer.draft, store, heldout, task.evaluate, device, workers)
    progress = trainer.progress
    seconds = progress.seconds - sum(m.seconds for m in done)
    tokens = progress.tokens - sum(m.tokens for m in done[-1:])
    measurement = Measurement(
        draft=task.spec.hash,
        dtype=compute_dtype(task.train.dtype, device),
        rung=task.rung,
        tokens=progress.tokens,
        seed=task.seed,
        loss=progress.mean_loss,
        acceptance=acceptance.as_dict(),
        seconds=round(seconds, 2),
        tokens_per_second=round(tokens / max(seconds, 1e-9), 1),
        peak_memory=max(workers.gather([peak_memory(device)])),
        finished=workers.ask_first(time.time),
    )
    return workers.ask_first(lambda: _record(task, trainer.draft, store, [*done, measurement]))


def _own_metrics(task: RungTask) -> list[Measurement]:
    done = read_metrics(task.directory)
    for measurement in done:
        if (measurement.draft, measurement.seed) != (task.spec.hash, task.seed):
            raise ArchspecError(f"{task.directory}: holds the measurements of another draft or seed; clear the folder")
    return done


def _prepare(task: RungTask, workers: Workers) -> tuple[FeatureStore, Trainer, list[int]]:
    """The store, a trainer where the trial's checkpoint left it, and the documents that are held out."""
    _use_threads(task.train)
    store = FeatureStore.open(task.features)
    store.require(task.spec.inputs.aux_layers)
    train_indices, heldout = store.split(task.holdout)
    draft = make_draft(task.spec, store, train_indices, task.seed)
    trainer = Trainer(draft, store, train_indices, task.train, task.seed, task.rungs[-1], workers)
    checkpoint = task.directory / CHECKPOINT_FILE
    if checkpoint.exists():
        trainer.load(checkpoint)
    return store, trainer, heldout


def _record(task: RungTask, draft: Draft, store: FeatureStore, measurements: list[Measurement]) -> Measurement:
    """Write the draft, what it was trained on, and the measurements, of which the last is returned."""
    save_draft(draft, task.directory / WEIGHTS_FOLDER)
    origin = {
        "target": store.manifest.key.target,
        "features": store.fingerprint,
        "holdout": task.holdout,
        "seed": task.seed,
        "tokens": measurements[-1].tokens,
    }
    write_json(task.directory / WEIGHTS_FOLDER / ORIGIN_FILE, origin)
    write_metrics(task.directory, measurements)
    return measurements[-1]


def make_draft(spec: ResolvedSpec, store: FeatureStore, train_indices: Iterable[int], seed: int) -> Draft:
    """An untrained draft with the target's tensors.

    A reduced vocabulary is the one that was adopted with the features, if that has the size asked for, and is otherwise
    chosen from the training documents alone.
    """
    torch.manual_seed(seed)
    draft = build_draft(spec)
    weights = store.weights()
    vocab_ids: Tensor | None = store.vocabulary(spec.head.vocab_size) if spec.reduced_vocab else None
    if spec.reduced_vocab and vocab_ids is None:
        counts = store.count_tokens(train_indices)
        vocab_ids = choose_vocabulary(counts, spec.head.vocab_size, frozenset(store.manifest.eos_token_ids))
    adopt_target(draft, weights, vocab_ids)
    return draft


def read_metrics(directory: Path) -> list[Measurement]:
    """The rungs measured so far, in order; empty if there are none."""
    path = directory / METRICS_FILE
    if not path.exists():
        return []
    return [Measurement(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def write_metrics(directory: Path, measurements: list[Measurement]) -> None:
    """Write the rungs measured so far."""
    write_text(directory / METRICS_FILE, "".join(json.dumps(asdict(m)) + "\n" for m in measurements))


def _saving(trainer: Trainer, checkpoint: Path, on_step: Callable[[StepReport], None]) -> Callable[[StepReport], None]:
    """``on_step`` with a checkpoint before it now and then."""
    saved = time.monotonic()

    def step(report: StepReport) -> None:
        nonlocal saved
        if time.monotonic() - saved > CHECKPOINT_SECONDS:
            trainer.save(checkpoint)
            saved = time.monotonic()
        on_step(report)

    return step


def peak_memory(device: str) -> int:
    """Peak bytes so far: of the CUDA allocator on CUDA, else of this process's resident set.

    Linux's ``ru_maxrss`` outlives fork and exec, so a child would show its parent's peak; ``VmHWM`` is its own.
    """
    if device.startswith("cuda"):
        return int(torch.cuda.max_memory_allocated(device))
    if (status := Path("/proc/self/status")).is_file():
        peaks = [line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
        if peaks:
            return int(peaks[0]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _use_threads(settings: TrainSettings) -> None:
    if settings.threads:
        torch.set_num_threads(settings.threads)
