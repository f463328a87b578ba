"""How far small budgets are to be trusted, against figures worked out by hand and simulated truths."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from runners.search.agreement import SELECTION, Agreement, _kendall_of, _spearman_of, agreements, seed_spread

TOKENS = (20_000, 60_000)


def agreement(early: dict[int, float], late: dict[int, float]) -> Agreement:
    (found,) = agreements([early, late], TOKENS)
    return found


def pair(early: list[float], late: list[float]) -> Agreement:
    return agreement(dict(enumerate(early)), dict(enumerate(late)))


def test_correlations_by_hand() -> None:
    """Ranks 1 2 3 4 5 and 2 1 3 4 5: rho = 1 - 6 * 2 / (5 * 24) = 0.9; 1 of 10 pairs is discordant: tau = 0.8."""
    found = pair([1.0, 2.0, 3.0, 4.0, 5.0], [1.2, 1.1, 1.3, 1.4, 1.5])
    assert found.spearman is not None
    assert found.spearman.value == pytest.approx(0.9)
    assert found.kendall is not None
    assert found.kendall.value == pytest.approx(0.8)


def test_ties_are_corrected_for() -> None:
    """Of 6 pairs one is tied in the first: tau-b = 5 / sqrt(5 * 6)."""
    found = pair([1.0, 1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0])
    assert found.kendall is not None
    assert found.kendall.value == pytest.approx(5 / math.sqrt(30))


def test_a_perfect_order_of_few_is_not_certain() -> None:
    """A bootstrap would say 1.00 to 1.00, but four unrelated candidates are in perfect order once in 24 times."""
    four, eight = (pair([1.0 * x for x in range(n)], [1.0 * x for x in range(n)]) for n in (4, 8))
    assert four.spearman is not None
    assert four.spearman.low < 0 < four.spearman.value == four.spearman.high == 1
    assert eight.spearman is not None
    assert four.spearman.low < eight.spearman.low < 1


def test_a_reversed_order_mirrors_a_perfect_one() -> None:
    up, down = pair([1.0, 2, 3, 4, 5], [1.0, 2, 3, 4, 5]), pair([1.0, 2, 3, 4, 5], [5.0, 4, 3, 2, 1])
    assert up.spearman is not None
    assert down.spearman is not None
    assert (down.spearman.value, down.spearman.low) == (-1, -1)
    assert down.spearman.high == pytest.approx(-up.spearman.low, abs=0.1)


@pytest.mark.parametrize(("count", "correlation"), [(5, 0.9), (12, 0.6)])
def test_intervals_hold_the_truth_about_as_often_as_they_say(count: int, correlation: float) -> None:
    """Of 20 samples 19 would be 95 %; a right interval holds fewer than 16 three times in 1,000."""
    random = np.random.default_rng(count)
    rho, tau = 6 / math.pi * math.asin(correlation / 2), 2 / math.pi * math.asin(correlation)
    held = np.zeros(2)
    for _ in range(20):
        x, noise = random.standard_normal((2, count))
        found = pair(list(x), list(correlation * x + math.sqrt(1 - correlation**2) * noise))
        assert found.spearman is not None
        assert found.kendall is not None
        held += found.spearman.low <= rho <= found.spearman.high, found.kendall.low <= tau <= found.kendall.high
    assert held.min() >= 16


@pytest.mark.parametrize("correlation", [-0.5, 0.7])
def test_rank_correlations_of_normal_variables(correlation: float) -> None:
    """Against a large sample; the standard error of each is below 0.001."""
    x, noise = np.random.default_rng(0).standard_normal((2, 400_000))
    y = correlation * x + math.sqrt(1 - correlation**2) * noise
    assert _spearman_of(correlation) == pytest.approx(stats.spearmanr(x, y).statistic, abs=0.004)
    assert _kendall_of(correlation) == pytest.approx(stats.kendalltau(x, y).statistic, abs=0.004)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=7))
def test_every_input_has_an_answer(values: list[tuple[int, int]]) -> None:
    found = pair([float(x) for x, _ in values], [float(y) for _, y in values])
    for correlation in (found.spearman, found.kendall):
        assert (correlation is None) == (found.reason is not None)
        assert correlation is None or -1 <= correlation.low <= correlation.value <= correlation.high <= 1
    assert found.kept in range(1, len(values) + 1)
    assert all(0 <= share <= 1 for share in found.overlap.values())
    assert found.text


def test_fewer_than_four_say_nothing() -> None:
    found = pair([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
    assert (found.spearman, found.kendall) == (None, None)
    assert found.text == (
        "20,000 -> 60,000 tokens: no correlation over 3 candidates: fewer than 4 say nothing; "
        "the best at 60,000 was number 1 of 3 at 20,000; top 2: 100% kept"
    )


def test_equal_values_have_no_correlation() -> None:
    found = pair([1.0, 2.0, 3.0, 4.0], [1.5, 1.5, 1.5, 1.5])
    assert found.spearman is None
    assert found.reason == "all have one value at 60,000"


def test_a_stage_that_nobody_reached() -> None:
    found = agreement({0: 1.0, 1: 2.0}, {})
    assert (found.candidates, found.measured, found.kept, found.overlap) == (0, 2, None, {})
    assert found.text == "20,000 -> 60,000 tokens: no correlation over 0 of 2 candidates: fewer than 4 say nothing"


EARLY = {0: 1.1, 1: 1.6, 2: 1.2, 3: 1.5, 4: 1.4, 5: 1.3, 6: 1.0, 7: 0.9}
LATE = {1: 1.80, 3: 1.85, 4: 1.7, 5: 1.75, 2: 1.6}  # of the five promoted, the second won and the fourth was third


def test_places_count_all_that_were_measured_and_overlaps_those_promoted() -> None:
    found = agreement(EARLY, LATE)
    assert (found.candidates, found.measured, found.kept) == (5, 8, 2)
    assert found.overlap == {1: 0.0, 2: 1.0, 3: pytest.approx(2 / 3)}
    assert found.spearman is not None
    assert found.spearman.value == pytest.approx(1 - 6 * 4 / 120)


def test_the_text_and_the_plain_data() -> None:
    found = agreement(EARLY, LATE)
    assert found.text == (
        f"20,000 -> 60,000 tokens: Spearman {found.spearman}, Kendall {found.kendall} over 5 of 8 candidates; "
        "the best at 60,000 was number 2 of 8 at 20,000; top 2: 100% kept; top 3: 67% kept"
    )
    assert str(found.spearman).startswith("0.80 (-0.")
    data = found.as_dict()
    assert data["overlap"].keys() == {"1", "2", "3"}
    assert data["spearman"].keys() == {"value", "low", "high"}
    assert data["text"] == found.text
    assert "only promoted candidates" in SELECTION


def test_what_is_minimised_is_best_where_it_is_least() -> None:
    (found,) = agreements([{0: 3.0, 1: 2.0, 2: 1.0}, {0: 3.0, 1: 2.5, 2: 2.0}], TOKENS, "minimize")
    assert (found.kept, found.overlap[1]) == (1, 1.0)


def test_every_two_stages_are_compared() -> None:
    stages = [{n: float(n) for n in range(size)} for size in (9, 6, 4)]
    found = agreements(stages, (20, 60, 180))
    assert [(a.earlier, a.later, a.candidates) for a in found] == [(20, 60, 6), (20, 180, 4), (60, 180, 4)]
    assert agreements(stages, (20, 60, 180)) == found


def test_a_narrowed_range_lowers_the_correlation() -> None:
    """The statement of the docstring: the same candidates, once all and once the best fifth of the earlier stage."""
    x, noise = np.random.default_rng(1).standard_normal((2, 60))
    early, late = dict(enumerate(x)), dict(enumerate(x + 0.5 * noise))
    promoted = sorted(early, key=lambda number: -early[number])[:12]
    whole, narrowed = agreement(early, late), agreement(early, {number: late[number] for number in promoted})
    assert whole.spearman is not None
    assert narrowed.spearman is not None
    assert narrowed.spearman.value < whole.spearman.value - 0.1


# Seeds


def test_the_seed_spread_by_hand() -> None:
    """Squares 0.0002 + 0.0002 with 2 + 2 degrees of freedom: 0.01; 2.7764 * 0.01 * sqrt(2 / 3) = 0.022670."""
    spread = seed_spread([[1.49, 1.5, 1.51], [1.7], [1.29, 1.3, 1.31]])
    assert spread is not None
    assert spread.deviation == pytest.approx(0.01)
    assert (spread.freedom, spread.candidates, spread.seeds) == (4, 2, 6)
    assert spread.noise(3, 3) == pytest.approx(0.022670, abs=1e-6)
    assert spread.text == (
        "seed spread 0.0100 over 2 candidates with 6 seeds; two means of 3 seeds differ by chance by up to 0.0227, "
        "two single runs by 0.0393 (95 %)"
    )
    assert spread.as_dict()["freedom"] == 4


@pytest.mark.parametrize("groups", [[], [[1.5]], [[1.5], [1.4]]])
def test_single_seeds_have_no_spread(groups: list[list[float]]) -> None:
    assert seed_spread(groups) is None


def test_the_noise_of_two_means_is_that_of_the_two_sample_t_test() -> None:
    ours, theirs = [1.52, 1.49, 1.5], [1.48, 1.46, 1.47, 1.49]
    spread = seed_spread([ours, theirs])
    assert spread is not None
    interval = stats.ttest_ind(ours, theirs).confidence_interval(0.95)
    assert spread.noise(len(ours), len(theirs)) == pytest.approx((interval.high - interval.low) / 2)
