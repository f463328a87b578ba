"""From a search file to a finished run folder: every cheap check first, then features, then the search.

``prepare`` raises whatever is wrong before anything is trained; ``execute`` may be interrupted and prepared again.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archspec.errors import ArchspecError
from archspec.facts import TargetFacts
from archspec.files import exclusive, write_text
from archspec.presets import load_spec
from archspec.resolve import aux_layer_id
from archspec.speedup import Times
from runners.features.capture import capture
from runners.features.conversations import read_conversations
from runners.features.manifest import read_manifest
from runners.features.store import FeatureStore
from runners.features.target import load_target, target_facts
from runners.features.work import Workers
from runners.search.checks import check_alone, check_fit, require_some_draft
from runners.search.driver import Search, Watcher
from runners.search.executor import Executor
from runners.search.leaderboard import write_leaderboard
from runners.search.local import LocalExecutor
from runners.search.measuring import decode_finalists, measure_search_profile
from runners.search.report import write_provenance, write_results
from runners.search.resources import by_training_memory
from runners.search.result import BestConfig
from runners.search.run_folder import RunFolder
from runners.search.search_file import SearchFile, TargetSettings
from runners.search.times import missing_profile, open_times, times_identity
from runners.search.worker import Shared
from runners.training.device import compute_dtype, pick_device
from runners.training.settings import TrainSettings
from search_spaces import apply_overrides

if TYPE_CHECKING:
    from runners.search.ray_runner import RayExecutor

Report = Callable[[str], None]
Progress = Callable[[int, int], None]

VERIFIED_BYTES = 50 * 10**9  # a minute or two of reading


@dataclass(frozen=True)
class Prepared:
    """A search that can begin: its folder, its file, a store that has every layer that a candidate may ask for.

    ``times`` are what speed is reckoned with; None where the search asks for none.
    """

    folder: RunFolder
    file: SearchFile
    store: FeatureStore
    times: Times | None = None


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
    if file.runner.kind == "local":
        file = file.model_copy(update={"train": _settled(file.train)})
    store = open_features(file, facts, folder, report, on_progress)
    _verify(store, report)
    store.split(file.data.holdout)
    times = _times(folder, file, store, report)
    _require_same_times(folder, times)
    if not resume:
        folder = RunFolder.begin(out, file)
    return Prepared(folder, file, store, times)


def _times(folder: RunFolder, file: SearchFile, store: FeatureStore, report: Report) -> Times | None:
    """The search's times; a profile that is not there yet is measured first, and bounds on time are checked by it."""
    missing = missing_profile(file)
    if missing is None:
        return open_times(file, store.facts, store.manifest.key.target)
    if _provenance(folder) is not None:  # another measurement would give other times
        rule = f"no such file, but {folder.path} began with its times; put it back, or begin a new run with --out"
        raise ArchspecError(f"speed.profile: {missing}: {rule}")
    measure_search_profile(file, store, report)
    times = open_times(file, store.facts, store.manifest.key.target)
    require_some_draft(file, store.facts, times)
    return times


def _require_same_times(folder: RunFolder, times: Times | None) -> None:
    """A run that began with other times would mix speed-ups that cannot be compared."""
    began = _provenance(folder)
    if began is not None and began.get("times") != times_identity(times):
        raise ArchspecError(
            f"{folder.path}: the run began with other times ({began.get('times')}) than now "
            f"({times_identity(times)}); put the profile back, or begin a new run with --out"
        )


def _provenance(folder: RunFolder) -> dict[str, Any] | None:
    """What a run began with; None if it has not begun."""
    if not folder.provenance.exists():
        return None
    told: dict[str, Any] = json.loads(folder.provenance.read_text(encoding="utf-8"))
    return told


def _settled(train: TrainSettings) -> TrainSettings:
    """Training settings in which ``dtype: auto`` is what it means here, so that a resume elsewhere keeps to it."""
    return train.model_copy(update={"dtype": compute_dtype(train.dtype, pick_device(train.device))})


def _verify(store: FeatureStore, report: Report) -> None:
    """Read every checksum of a store that is not too large for it: damage in a shard's middle would be silent."""
    if store.size > VERIFIED_BYTES:
        report(f"features: {store.path} is too large to verify in whole; only the edges of its files were checked")
        return
    store.verify()


def check(file: SearchFile, facts: TargetFacts) -> None:
    """Everything about a search that can be told before its target is loaded.

    Raises:
        ArchspecError: a setting or path is wrong, a device is not there, a baseline does not fit, or no draft does.
    """
    if file.runner.kind == "local" or file.features.workers == 1:
        pick_device(file.target.device)
    if file.runner.kind == "ray":
        _ray_executor()
    else:
        pick_device(file.train.device)
    check_alone(file)
    check_fit(file, facts)


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
    """The search's feature store, captured if it is not there yet; one adopted from another project is used as it is.

    A run that began before knows its store, which is then opened without loading the target.

    Raises:
        ArchspecError: the store in place is another one, or it cannot be made.
    """
    layers, settings = aux_layers(file, facts), file.features
    began = _provenance(folder)
    if began is not None:
        store = FeatureStore.open(settings.path)
        before = began["features"]["fingerprint"]
        if store.fingerprint != before:
            raise ArchspecError(
                f"{settings.path}: store {store.fingerprint} is not the one that {folder.path} began with ({before}); "
                "begin a new run with --out"
            )
        store.require(layers)
        return store
    manifest = read_manifest(settings.path)
    adopted = manifest is not None and manifest.dump is not None
    conversations = [] if adopted else read_conversations(file.data.conversations)
    on_cluster = file.runner.kind == "ray" and settings.workers > 1
    device = "cpu" if on_cluster else pick_device(file.target.device)
    target = load_target(file.target.model, file.target.dtype, device, file.target.trust_remote_code)
    if adopted:
        store = FeatureStore.open(settings.path)
        store.require(layers, target.fingerprint)
        return store
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
        workers=cluster_workers(file.runner.address, file.target, settings.workers, report) if on_cluster else None,
    )


def cluster_workers(address: str | None, target: TargetSettings, count: int, report: Report) -> Workers:
    """Up to ``count`` workers on the Ray cluster at ``address``, which each load the target for themselves.

    Raises:
        ArchspecError: Ray is not installed.
    """
    _ray_executor()
    from runners.search.ray_capture import RayWorkers

    return RayWorkers(address, target, count, report)


def execute(
    prepared: Prepared, watcher: Watcher, executor: Executor | None = None, report: Report = lambda _: None
) -> tuple[BestConfig, Search]:
    """Search until the budget is spent, then write the results; ``executor`` defaults to the file's own runner.

    ``report`` gets lines for the user, such as where Ray's dashboard is.

    Raises:
        ArchspecError: another process searches in this folder, too many trials failed, or none came to an end.
    """
    file, folder = prepared.file, prepared.folder
    with exclusive(folder.path, "another process is searching in this folder; watch it with archspec status"):
        if executor is None:
            executor, file = make_executor(prepared, report)
        write_text(folder.search_file, file.dump())
        search = Search(folder, file, prepared.store, executor, watcher, prepared.times)
        if not folder.provenance.exists():
            write_provenance(folder, search)
        try:
            ranked = search.execute()
        finally:
            write_leaderboard(search)
        best = write_results(search, ranked)
        if file.decode:  # after the results, which nothing that happens here can lose
            best = write_results(search, ranked, decode_finalists(search, ranked, report))
        return best, search


def make_executor(prepared: Prepared, report: Report = lambda _: None) -> tuple[Executor, SearchFile]:
    """The runner that the file asks for, and the file with ``train.dtype: auto`` settled for where trials run.

    Raises:
        ArchspecError: Ray is asked for and not there, or the cluster cannot run this search.
    """
    file, store = prepared.file, prepared.store
    seconds = None if file.budget.rung_minutes is None else file.budget.rung_minutes * 60
    if file.runner.kind == "local":
        return LocalExecutor(file.runner.concurrent or 1, seconds), file
    longest = max(document.length for document in store.documents)
    shared = Shared.of(store.path, store.fingerprint, prepared.folder.path)
    executor = _ray_executor()(file.runner, by_training_memory(longest), seconds, shared, file.train.device)
    if executor.dashboard is not None:
        report(f"Ray's dashboard: {executor.dashboard}")
    train = file.train
    if train.dtype == "auto":  # bfloat16 only where all nodes multiply in it natively
        train = train.model_copy(update={"dtype": "bfloat16" if executor.dtypes == {"bfloat16"} else "float32"})
    return executor, file.model_copy(update={"train": train})


def _ray_executor() -> "type[RayExecutor]":
    try:
        from runners.search.ray_runner import RayExecutor
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        rule = "pip install 'draft-archspec[ray]'"
        raise ArchspecError(f"runner.kind: ray needs Ray, which is not installed here: {rule}") from None
    return RayExecutor
