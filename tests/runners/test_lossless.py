"""What the decoding loop writes is distributed as the target's own text, exactly: no chance is left to chance."""

from collections.abc import Callable

import pytest

from runners.training.decoding import Cycles, Decoding, _Chain
from runners.training.settings import TreeSettings
from runners.training.tree import _Trees
from tests.runners.sampled import continuations, every_text, small_pair

PROMPT = [0, 1, 2]


def tree(text: str) -> Callable[[Decoding], Cycles]:
    return lambda decoding: _Trees(decoding, TreeSettings.parse(text))


WAYS: dict[str, Callable[[Decoding], Cycles]] = {
    "chain": lambda decoding: _Chain(decoding, 2, False),
    "sampled chain": lambda decoding: _Chain(decoding, 1, True),
    "tree 2x2": tree("2x2"),
    "tree 4x1": tree("4x1"),
    "tree of all": tree("5"),
    "dynamic tree": tree("3,3,7"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("drafted", [None, 2], ids=["all tokens drafted", "two of five drafted"])
@pytest.mark.parametrize(
    ("length", "temperature", "top_p"), [(2, 1.0, 1.0), (3, 1.5, 0.7)], ids=["plain", "hot, nucleus"]
)
def test_every_text_has_the_targets_probability(
    way: str, drafted: int | None, length: int, temperature: float, top_p: float
) -> None:
    """Children outside the nucleus or beyond the draft's vocabulary, and the rest after all of them, included."""
    target, draft = small_pair(5, drafted)
    found = every_text(target, draft, PROMPT, length, WAYS[way], temperature, top_p)
    wanted = continuations(target, PROMPT, length, temperature, top_p)
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-5)
    assert max(abs(found.get(text, 0.0) - chance) for text, chance in wanted.items()) < 1e-6
