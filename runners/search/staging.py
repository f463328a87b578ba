"""A feature store copied to a node's own disk, once for each node, where the shared file system is slow."""

import fcntl
import os
import shutil
from pathlib import Path

from archspec.errors import ArchspecError
from runners.features.store import MANIFEST, FeatureStore


def stage(source: Path, into: Path) -> Path:
    """Copy the store at ``source`` into ``into`` unless it is there; returns where its copy lies.

    Processes of one node take turns. A copy has its name only when every checksum was right, so that a kill leaves
    nothing that looks whole.

    Raises:
        ArchspecError: the store's states lie outside it, the disk lacks room or cannot be written, or the copy differs.
    """
    store = FeatureStore.open(source)
    if store.manifest.dump is not None and store.manifest.dump.files:
        rule = "its states lie in the dump that it was adopted from; adopt it with --copy, or leave stage_to out"
        raise ArchspecError(f"{source}: cannot be staged: {rule}")
    target = into / store.fingerprint
    try:
        into.mkdir(parents=True, exist_ok=True)
        with (into / f".{store.fingerprint}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (target / MANIFEST).is_file():
                _copy(store, target)
            staged = FeatureStore.open(target).fingerprint
    except OSError as error:
        raise ArchspecError(f"{into}: {source} cannot be staged there: {error}") from None
    if staged != store.fingerprint:
        raise ArchspecError(f"{target}: holds store {staged} instead; remove it")
    return target


def _copy(store: FeatureStore, target: Path) -> None:
    for left in target.parent.glob(f".{store.fingerprint}.*.part"):
        shutil.rmtree(left)
    free = shutil.disk_usage(target.parent).free
    if free < store.size:
        rule = f"needs {store.size / 1e9:.1f} GB, but {free / 1e9:.1f} GB are free"
        raise ArchspecError(f"{target.parent}: {store.path} cannot be staged there: it {rule}")
    temporary = target.with_name(f".{store.fingerprint}.{os.getpid()}.part")
    try:
        shutil.copytree(store.path, temporary)
        FeatureStore.open(temporary).verify()
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
