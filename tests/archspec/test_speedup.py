"""The formula against hand-worked figures, the choice of k, and the messages about ranges."""

from dataclasses import dataclass

import pytest

from archspec.errors import ArchspecError
from archspec.presets import load_preset
from archspec.resolve import ResolvedSpec, resolve
from archspec.speedup import speedup
from tests.smollm2 import SMOLLM2

SPEC = resolve(load_preset("eagle3"), SMOLLM2)


@dataclass(frozen=True)
class Table:
    """Times written down: a step of m tokens, a draft step, a cycle."""

    steps: dict[int, float]
    draft: float
    cycle: float
    source: str = "a table"

    def target_ms(self, rows: int) -> float:
        return self.steps[rows]

    def draft_ms(self, spec: ResolvedSpec) -> float:
        assert spec is SPEC
        return self.draft

    def cycle_ms(self, spec: ResolvedSpec) -> float:
        assert spec is SPEC
        return self.cycle

    def draft_source(self, spec: ResolvedSpec) -> str:
        assert spec is SPEC
        return "measured"


TIMES = Table({1: 10.0, 2: 10.5, 3: 11.0, 4: 12.0}, draft=1.0, cycle=0.5)


def test_the_formula_by_hand() -> None:
    """L(k) * T(1) / (T(k + 1) + k * T_draft + T_0)."""
    found = speedup([1.7, 2.1, 2.3], SPEC, TIMES, range(1, 4))
    assert found.by_k == {
        1: pytest.approx(17 / 12),
        2: pytest.approx(21 / 13.5),
        3: pytest.approx(23 / 15.5),
    }
    assert (found.k, found.value) == (2, found.by_k[2])
    assert (found.draft_ms, found.draft_source) == (1.0, "measured")


def test_a_draft_that_costs_nothing_wins_its_length() -> None:
    times = Table(dict.fromkeys(range(1, 4), 10.0), draft=0.0, cycle=0.0)
    assert speedup([1.5, 1.75], SPEC, times, range(1, 3)).by_k == {1: 1.5, 2: 1.75}


def test_a_draft_that_never_hits_slows_down() -> None:
    assert speedup([1.0, 1.0, 1.0], SPEC, TIMES, range(1, 4)).value == pytest.approx(10 / 12)


def test_the_range_bounds_the_choice() -> None:
    assert speedup([1.7, 2.1, 2.3], SPEC, TIMES, range(3, 4)).k == 3
    assert set(speedup([1.7, 2.1, 2.3], SPEC, TIMES, range(1, 4, 2)).by_k) == {1, 3}


def test_of_equally_fast_k_the_smallest() -> None:
    times = Table({1: 8.0, 2: 8.0, 3: 16.0}, draft=0.0, cycle=0.0)
    found = speedup([1.5, 3.0], SPEC, times, range(1, 3))
    assert found.by_k[1] == found.by_k[2]
    assert found.k == 1


@pytest.mark.parametrize("empty", [range(3, 3), range(5, 1), range(3)])
def test_a_range_without_draft_tokens(empty: range) -> None:
    with pytest.raises(ArchspecError) as caught:
        speedup([1.7], SPEC, TIMES, empty)
    assert str(caught.value) == f"draft_lengths: {empty} holds no number of draft tokens; use for example [1, 8]"


def test_a_range_beyond_what_was_measured() -> None:
    with pytest.raises(ArchspecError) as caught:
        speedup([1.7, 2.1], SPEC, TIMES, range(1, 6))
    known = "acceptance was measured for 1 to 2 draft tokens"
    assert str(caught.value) == f"draft_lengths: 5 is beyond what is known: {known}"
