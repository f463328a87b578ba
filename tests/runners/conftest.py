"""Session-wide small targets and stores."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runners.features.capture import capture
from runners.features.conversations import Conversation, read_conversations
from runners.features.generate import generate_responses
from runners.features.store import FeatureStore
from runners.features.target import Target
from tests.runners.tiny import conversation, tiny_target


@pytest.fixture(scope="session")
def target() -> Target:
    """The shared tiny target: 3 layers, 32 wide, 264 tokens."""
    return tiny_target()


@pytest.fixture(scope="session")
def own_text(target: Target, tmp_path_factory: pytest.TempPathFactory) -> list[Conversation]:
    """Twelve prompts of different length with the tiny target's own greedy answers, in two categories."""
    prompts = [
        conversation("word " * (1 + index % 5), category=("chat", "code")[index % 2], name=f"own-{index}")
        for index in range(12)
    ]
    out = tmp_path_factory.mktemp("text") / "own.jsonl"
    generate_responses(target, prompts, 24, 0.0, 6, 0, out)
    return read_conversations(out)


@pytest.fixture(scope="session")
def tiny_store(target: Target, own_text: list[Conversation], tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    """All layers of the own text in float32, over several shards."""
    out = tmp_path_factory.mktemp("features") / "store"
    return capture(target, own_text, [0, 1, 2, 3], out, "float32", 256, 400, 300)


@pytest.fixture
def other_store(tiny_store: FeatureStore, tmp_path: Path) -> Path:
    """A store that can be opened and is another one."""
    copy = tmp_path / "other"
    shutil.copytree(tiny_store.path, copy)
    manifest = json.loads((copy / "manifest.json").read_text(encoding="utf-8"))
    manifest["key"]["conversations"] = "0" * 16
    (copy / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return copy


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """The one Ray cluster of the session; who needs another shape starts it apart."""
    pytest.importorskip("ray")
    from tests.runners.ray_cluster import NODES, running_cluster

    with running_cluster(*NODES) as cluster:
        yield cluster
