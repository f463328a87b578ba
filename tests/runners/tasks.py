"""Rung tasks for the tiny store: ordinary ones, and ones that go wrong in the process that runs them."""

import os
import signal
import time
from pathlib import Path, PosixPath
from typing import Any, NoReturn

from archspec.resolve import ResolvedSpec
from runners.features.store import FeatureStore
from runners.training.settings import EvalSettings
from runners.training.trial import RungTask
from tests.runners.drafts import SETTINGS, tiny_spec

RUNGS = (600, 1200)
HOLDOUT = 0.3


def rung_task(
    store: FeatureStore,
    directory: Path,
    *,
    number: int = 0,
    spec: ResolvedSpec | None = None,
    features: Path | None = None,
    rungs: tuple[int, ...] = RUNGS,
    rung: int = 0,
    seed: int = 0,
    train: dict[str, Any] | None = None,
) -> RungTask:
    """A small trial on ``store``."""
    return RungTask(
        number=number,
        directory=directory,
        spec=spec or tiny_spec(store.facts),
        features=features or store.path,
        holdout=HOLDOUT,
        train=SETTINGS.model_copy(update=train or {}),
        evaluate=EvalSettings(draft_length=3, bootstrap=50),
        rungs=rungs,
        rung=rung,
        seed=seed,
    )


class _Trap(PosixPath):
    """Where a store would be; whoever opens it falls in. Traps do what stores and memory do at their worst."""

    def __truediv__(self, _name: Any) -> NoReturn:
        self.spring()

    def spring(self) -> NoReturn:
        """What happens to the process that opens the store."""
        raise NotImplementedError


class Raises(_Trap):
    """An error that nobody foresaw."""

    def spring(self) -> NoReturn:
        raise RuntimeError("the disk is on fire")


class RunsOutOfMemory(_Trap):
    """No memory left, told by Python."""

    def spring(self) -> NoReturn:
        raise MemoryError


class IsKilled(_Trap):
    """No memory left, told by the kernel."""

    def spring(self) -> NoReturn:
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
        raise AssertionError


class Exits(_Trap):
    """A library that ends the process."""

    def spring(self) -> NoReturn:
        os._exit(3)


class Hangs(_Trap):
    """A file system that never answers."""

    def spring(self) -> NoReturn:
        time.sleep(600)
        raise AssertionError
