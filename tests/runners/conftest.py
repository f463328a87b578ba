"""Session-wide small targets and stores."""

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
