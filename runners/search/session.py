"""From a search file to a finished run folder: every cheap check first, then features, then the search.

``prepare`` raises whatever is wrong before anything is trained; ``execute`` may be interrupted and prepared again.
"""

import fcntl
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from archspec.errors import ArchspecError, nearest
from archspec.facts import TargetFacts
from archspec.presets import load_spec
from archspec.resolve import aux_layer_id
from archspec.schema import Document
from runners.features.capture import capture
from runners.features.conversations import read_conversations
from runners.features.store import FeatureStore
from runners.features.target import load_target, target_facts
from runners.search.driver import Search, Watcher
from runners.search.executor import Executor
from runners.search.local import LocalExecutor
from runners.search.report import write_leaderboard, write_provenance, write_results
from runners.search.result import BestConfig
from runners.search.run_folder import RunFolder
from runners.search.search_file import SearchFile
from runners.search.study import require_baselines
from runners.training.settings import TrainSettings
from runners.training.trainer import pick_device
from search_spaces import apply_overrides, require_feasible

Report = Callable[[str], None]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Prepared:
    """A search that can begin: its folder, its file, and a store that has every layer that a candidate may ask for."""

    folder: RunFolder
    file: SearchFile
    store: FeatureStore


def prepare(
    out: Path,
    file: SearchFile | None,
    resume: bool,
    report: Report = lambda _: None,
    on_progress: Progress | None = None,
) -> Prepared:
    """Check the whole search, make or open its features, and begin or reopen the run folder ``out``.

    ``file`` is needed for a new run; on a resume it may raise the budget. ``report`` gets lines for the user,
    ``on_progress`` tokens captured and in all.

    Raises:
        ArchspecError: anything that is wrong with the file, the target, the data, the store or the folder.
    """
    if resume:
        folder, file = RunFolder.resume(out, file)
    elif file is None:
        raise ArchspecError(f"{out}: a new run needs a search file")
    else:
        RunFolder.require_new(out)
        folder = RunFolder(out)
    facts = target_facts(file.target.model, file.target.trust_remote_code)
    check(file, facts)
    store = open_features(file, facts, folder, report, on_progress)
    store.split(file.data.holdout)
    if not resume:
        folder = RunFolder.begin(out, file)
    return Prepared(folder, file, store)


def check(file: SearchFile, facts: TargetFacts) -> None:
    """Everything about a search that its target's dimensions decide.

    Raises:
        ArchspecError: a setting that the space draws is none, a baseline does not fit, or no draft of the space does.
    """
    require_train_choices(file)
    require_baselines(file, facts)
    require_feasible(file.space, facts, file.fixed, file.constraints)


def require_train_choices(file: SearchFile) -> None:
    """Check that every ``train.NAME`` of the space is a training setting and takes every value drawn for it.

    Raises:
        ArchspecError: it does not; the message names the choice, the value and the rule.
    """
    for parameter in file.space.parameters(file.space.greatest_depth):
        if parameter.path.kind != "train":
            continue
        (name, *below), domain = parameter.path.field, parameter.domain
        if name not in TrainSettings.model_fields or below:
            known = [f"train.{field}" for field in TrainSettings.model_fields]
            raise ArchspecError(f"space: choices.{parameter.name}: no such setting; {nearest(parameter.name, known)}")
        labels = domain.labels() if domain.size is not None else (domain.low, domain.high)
        for label in labels:
            settings = file.train.model_dump() | {name: domain.value(label)}
            Document(settings, f"space: choices.{parameter.name}").validate(TrainSettings)


def aux_layers(file: SearchFile, facts: TargetFacts) -> list[int]:
    """Every target layer that a candidate or a baseline may read; choices beyond the target are infeasible anyway."""
    written = set(file.space.aux_layer_choices(file.fixed))
    for name in file.baselines:
        written |= set(apply_overrides(load_spec(name), file.fixed, f"baseline {name} with fixed").inputs.aux_layers)
    ids = {aux_layer_id(layer, facts.num_layers) for layer in written}
    return sorted(layer for layer in ids if 0 <= layer <= facts.num_layers)


def open_features(
    file: SearchFile, facts: TargetFacts, folder: RunFolder, report: Report, on_progress: Progress | None
) -> FeatureStore:
    """The search's feature store, captured if it is not there yet.

    A run that began before knows its store, which is then opened without loading the target.

    Raises:
        ArchspecError: the store in place is another one, or it cannot be made.
    """
    layers, settings = aux_layers(file, facts), file.features
    if folder.provenance.exists():
        store = FeatureStore.open(settings.path)
        before = json.loads(folder.provenance.read_text(encoding="utf-8"))["features"]["fingerprint"]
        if store.fingerprint != before:
            raise ArchspecError(
                f"{settings.path}: store {store.fingerprint} is not the one that {folder.path} began with ({before}); "
                "begin a new run with --out"
            )
        store.require(layers)
        return store
    conversations = read_conversations(file.data.conversations)
    device = pick_device(file.target.device)
    target = load_target(file.target.model, file.target.dtype, device, file.target.trust_remote_code)
    return capture(
        target,
        conversations,
        layers,
        settings.path,
        dtype=settings.dtype,
        max_length=file.data.max_length,
        batch_tokens=settings.batch_tokens,
        shard_tokens=settings.shard_tokens,
        on_progress=on_progress,
        report=report,
        sources=[str(path) for path in file.data.conversations],
    )


def execute(prepared: Prepared, watcher: Watcher, executor: Executor | None = None) -> tuple[BestConfig, Search]:
    """Search until the budget is spent, then write the results; ``executor`` defaults to the file's own runner.

    Raises:
        ArchspecError: another process searches in this folder, too many trials failed, or none came to an end.
    """
    file, folder = prepared.file, prepared.folder
    with alone_in(folder.path):
        search = Search(folder, file, prepared.store, executor or make_executor(file), watcher)
        if not folder.provenance.exists():
            write_provenance(folder, search)
        try:
            ranked = search.execute()
        finally:
            write_leaderboard(search)
        return write_results(search, ranked), search


def make_executor(file: SearchFile) -> Executor:
    """The runner that the file asks for."""
    minutes = file.budget.rung_minutes
    return LocalExecutor(file.runner.concurrent, None if minutes is None else minutes * 60)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which the system drops when this process ends in whatever way.

    Raises:
        ArchspecError: another process holds it.
    """
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            rule = "another process is searching in this folder; watch it with archspec status"
            raise ArchspecError(f"{folder}: {rule}") from None
        yield
