"""Several objectives at once, against definitions: dominance pair by pair, volumes by counting cells, and by hand."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna._hypervolume import compute_hypervolume

from runners.search.pareto import (
    Direction,
    best_under,
    fronts,
    hypervolume,
    knee,
    logged,
    pareto_set,
    reference_point,
    selected,
    weak,
)

UP: Direction = "maximize"
DOWN: Direction = "minimize"
FAST_AND_SMALL: tuple[Direction, Direction] = (UP, DOWN)  # (speed-up, millions of parameters)

Points = list[tuple[int, ...]]


@st.composite
def problems(draw: st.DrawFn, least: int = 1, objectives: int = 4) -> tuple[Points, list[Direction]]:
    """Small whole coordinates, so that ties and equal points are common."""
    width = draw(st.integers(1, objectives))
    directions = draw(st.lists(st.sampled_from([UP, DOWN]), min_size=width, max_size=width))
    point = st.tuples(*[st.integers(-3, 4)] * width)
    return draw(st.lists(point, min_size=least, max_size=9)), directions


def better(a: float, b: float, direction: Direction) -> bool:
    return a > b if direction == UP else a < b


def dominates(a: Sequence[float], b: Sequence[float], directions: Sequence[Direction]) -> bool:
    worse = any(better(y, x, d) for x, y, d in zip(a, b, directions, strict=True))
    return not worse and any(better(x, y, d) for x, y, d in zip(a, b, directions, strict=True))


def cells(points: Points, directions: Sequence[Direction], reference: Sequence[int]) -> int:
    """How many unit cells lie between some point and the reference: the volume where all coordinates are whole."""
    covered: set[tuple[int, ...]] = set()
    for point in points:
        ranges = (
            range(corner, x) if direction == UP else range(x, corner)
            for x, corner, direction in zip(point, reference, directions, strict=True)
        )
        covered.update(itertools.product(*ranges))
    return len(covered)


# Pareto set and fronts


@given(problems())
def test_the_pareto_set_is_what_no_point_dominates(problem: tuple[Points, list[Direction]]) -> None:
    points, directions = problem
    undominated = [i for i, p in enumerate(points) if not any(dominates(q, p, directions) for q in points)]
    assert pareto_set(points, directions) == undominated


@given(problems())
def test_a_front_is_the_pareto_set_of_what_the_fronts_before_it_leave(problem: tuple[Points, list[Direction]]) -> None:
    points, directions = problem
    ranks, left = fronts(points, directions), list(range(len(points)))
    for rank in range(max(ranks) + 1):
        best = [left[i] for i in pareto_set([points[i] for i in left], directions)]
        assert best == [i for i, other in enumerate(ranks) if other == rank]
        left = [i for i in left if i not in best]
    assert not left


def test_equal_points_are_all_kept() -> None:
    points = [(2.0, 30), (1.5, 40), (2.0, 30), (1.0, 10)]
    assert pareto_set(points, FAST_AND_SMALL) == [0, 2, 3]
    assert fronts(points, FAST_AND_SMALL) == [0, 1, 0, 0]


def test_no_points_have_no_pareto_set() -> None:
    assert pareto_set([], FAST_AND_SMALL) == []
    assert hypervolume([], FAST_AND_SMALL, [0, 0]) == 0.0
    assert selected([], FAST_AND_SMALL, 3) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_must_be_finite(value: float) -> None:
    with pytest.raises(ValueError, match="every value of every point must be finite"):
        pareto_set([(1.0, value)], FAST_AND_SMALL)


@pytest.mark.parametrize("points", [[(1.0,)], [1.0, 2.0], [(1.0, 2.0, 3.0)]])
def test_points_must_fit_the_directions(points: list[object]) -> None:
    with pytest.raises(ValueError, match=r"do not fit 2 directions; needed are \[N, M\]"):
        pareto_set(points, FAST_AND_SMALL)  # type: ignore[arg-type]


# Hypervolume


@given(problems(least=0))
def test_the_hypervolume_is_that_of_the_cells_covered(problem: tuple[Points, list[Direction]]) -> None:
    """Some points lie on or behind the reference: they add nothing."""
    points, directions = problem
    reference = [-2 if direction == UP else 3 for direction in directions]
    assert hypervolume(points, directions, reference) == pytest.approx(cells(points, directions, reference), abs=1e-9)


@pytest.mark.parametrize("objectives", [1, 2, 3, 4, 5])
def test_the_hypervolume_agrees_with_optunas(objectives: int) -> None:
    points = np.random.default_rng(objectives).uniform(size=(25, objectives))
    directions = [UP, DOWN, UP, DOWN, UP][:objectives]
    signs = np.where(np.array(directions) == UP, -1.0, 1.0)
    reference = reference_point(points, directions)
    other = compute_hypervolume(points * signs, np.array(reference) * signs)
    assert hypervolume(points, directions, reference) == pytest.approx(other, rel=1e-12)


def test_the_hypervolume_by_hand() -> None:
    """Boxes of 1 x 9 and 0.5 x 30 to the corner (1, 40), which share 0.5 x 9."""
    points = [(2.0, 31), (1.5, 10), (1.2, 35)]
    assert hypervolume(points, FAST_AND_SMALL, [1.0, 40]) == pytest.approx(9 + 15 - 4.5)


@given(problems(least=0))
def test_the_hypervolume_is_that_of_its_cells(problem: tuple[Points, list[Direction]]) -> None:
    points, directions = problem
    reference = [-2 if direction == UP else 3 for direction in directions]
    assert hypervolume(points, directions, reference) == pytest.approx(cells(points, directions, reference), abs=1e-9)


@given(problems())
def test_every_point_has_a_volume_to_the_reference_point(problem: tuple[Points, list[Direction]]) -> None:
    points, directions = problem
    reference = reference_point(points, directions)
    assert all(better(x, r, d) for point in points for x, r, d in zip(point, reference, directions, strict=True))
    assert hypervolume(points[-1:], directions, reference) > 0


def test_the_reference_point_is_a_tenth_of_the_range_beyond_the_worst() -> None:
    assert reference_point([(1.0, 30), (2.0, 10)], FAST_AND_SMALL) == pytest.approx([0.9, 32])


def test_the_reference_point_of_equal_values_is_a_tenth_of_their_size_away() -> None:
    assert reference_point([(2.0, 0.0), (2.0, 0.0)], FAST_AND_SMALL) == pytest.approx([1.8, 0.1])


def test_the_reference_point_lies_beyond_values_that_all_but_touch() -> None:
    close = [1e9, float(np.nextafter(1e9, 2e9))]
    assert reference_point([(x,) for x in close], [DOWN])[0] > close[1]


def test_without_points_there_is_no_reference() -> None:
    with pytest.raises(ValueError, match="no points"):
        reference_point([], FAST_AND_SMALL)


# The recommended pick


def test_the_knee_is_where_more_parameters_stop_buying_speed() -> None:
    """Sums of the normalised losses: 1, 0.1 + 0.2, 0 + 1; the last is dominated and no pick, whatever its sum."""
    points = [(1.0, 10), (1.9, 20), (2.0, 60), (1.8, 21)]
    assert knee(points, FAST_AND_SMALL) == 1


def test_the_knee_lies_farthest_from_the_line_through_the_ends() -> None:
    """Against the geometry: distances from the line by a cross product, after normalising."""
    x = np.linspace(0.0, 1.0, 30)
    curve = np.stack([x, 7 * (1 - x) ** 3 + 1], axis=1)
    u = np.stack([x, (1 - x) ** 3], axis=1)
    distances = abs(u[:, 0] + u[:, 1] - 1) / np.sqrt(2)
    assert knee(curve, (DOWN, DOWN)) == int(distances.argmax())


@pytest.mark.parametrize("points", [[(2.0, 60)], [(2.0, 60), (1.0, 10)], [(2.0, 60), (1.5, 60), (1.0, 10)]])
def test_between_two_ends_the_knee_is_the_better_of_the_first_objective(points: list[tuple[float, float]]) -> None:
    assert knee(points, FAST_AND_SMALL) == 0
    assert points[knee(points, FAST_AND_SMALL, followed=1)][1] == min(params for _, params in points)


def test_equal_steps_are_a_tie_that_rounding_does_not_decide() -> None:
    points = [(x / 7, x + 0.1) for x in range(7)]  # by their plain sums the second would be the least
    assert knee(points, FAST_AND_SMALL) == 6


def test_the_knee_of_one_objective_is_its_best() -> None:
    assert knee([(3.0,), (1.0,), (2.0,)], [DOWN]) == 1


def test_a_flat_objective_decides_nothing() -> None:
    assert knee([(1.0, 10, 4), (1.9, 20, 4), (2.0, 60, 4)], (UP, DOWN, DOWN)) == 1


def test_a_difference_inside_the_noise_is_not_a_full_range() -> None:
    """Two drafts alike in speed but for noise: the smaller one, not the one that happened to be faster."""
    points = [(2.001, 60), (2.0, 10)]
    assert knee(points, FAST_AND_SMALL) == 0
    assert knee(points, FAST_AND_SMALL, noise=[0.05, 0]) == 1


def test_a_logarithm_counts_parameters_by_ratio() -> None:
    """From 1 to 10 costs as much as from 10 to 100; without it 10 is all but free."""
    points = [(0.0, 1e6), (0.4, 1e7), (1.0, 1e8)]
    assert knee(points, FAST_AND_SMALL) == 1
    assert knee(logged(points, [False, True]), FAST_AND_SMALL) == 2
    assert logged(points, [False, True])[:, 1] == pytest.approx([6, 7, 8])


def test_only_what_is_above_zero_has_a_logarithm() -> None:
    with pytest.raises(ValueError, match="column 1 has a value that is not above 0"):
        logged([(1.0, 0.0)], [False, True])


def test_without_points_there_is_no_pick() -> None:
    with pytest.raises(ValueError, match="no points"):
        knee([], FAST_AND_SMALL)


def test_the_best_under_a_cap() -> None:
    points = [(2.0, 60), (1.9, 20), (1.9, 25), (1.0, 10)]
    assert best_under(points, FAST_AND_SMALL, {1: 25}) == 1
    assert best_under(points, FAST_AND_SMALL, {}) == 0
    assert best_under(points, FAST_AND_SMALL, {0: 1.5}, followed=1) == 1
    assert best_under(points, FAST_AND_SMALL, {0: 1.5, 1: 15}) is None


# Rungs


def weak_by_value(value: float, values: Sequence[float], reduction: int) -> bool:
    """The rule of the scalar search: ``Study._is_weak``."""
    ordered = sorted(values, reverse=True)
    return value < ordered[max(1, len(ordered) // reduction) - 1]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=20), st.integers(2, 4))
def test_with_one_objective_a_rung_stops_whom_the_scalar_rule_stops(values: list[int], reduction: int) -> None:
    others, places = [(value,) for value in values[1:]], max(1, len(values) // reduction)
    expected = weak_by_value(values[0], values, reduction)
    assert weak((values[0],), others, [UP], places) == expected
    assert weak((-values[0],), [(-value,) for (value,) in others], [DOWN], places) == expected


@given(problems(), st.integers(2, 4))
def test_a_rung_lets_the_best_share_pass_and_their_equals(
    problem: tuple[Points, list[Direction]], reduction: int
) -> None:
    points, directions = problem
    kept = max(1, len(points) // reduction)
    passing = [i for i, point in enumerate(points) if not weak(point, points[:i] + points[i + 1 :], directions, kept)]
    assert len({points[i] for i in passing}) <= kept <= len(passing)
    ranks = fronts(points, directions)
    assert all(i in passing for i in range(len(points)) if sum(r <= ranks[i] for r in ranks) <= kept)
    assert not any(i in passing for i in range(len(points)) if sum(r < ranks[i] for r in ranks) >= kept)


@given(problems(objectives=3), st.integers(1, 9))
def test_the_units_of_the_objectives_do_not_change_who_is_selected(
    problem: tuple[Points, list[Direction]], count: int
) -> None:
    points, directions = problem
    scale, offset = np.array([1e6, 0.3, 7.0])[: len(directions)], np.array([3e7, -2.1, 0.5])[: len(directions)]
    assert selected(np.array(points) * scale + offset, directions, count) == selected(points, directions, count)


def test_a_cluster_is_not_thrown_away_because_its_members_are_alike() -> None:
    """Each of the two good ones adds next to nothing beside the other; one of them goes on before the lone ends do."""
    points = [(0.0, 1.0), (0.80, 0.81), (0.81, 0.80), (1.0, 0.0)]
    assert selected(points, (UP, UP), 1) in ([1], [2])
    assert set(selected(points, (UP, UP), 3)) in ({0, 1, 3}, {0, 2, 3})


def test_of_a_dominated_cluster_nobody_passes() -> None:
    best = [(2.0, 10), (1.8, 8), (1.5, 5)]
    assert weak((1.4, 11), [*best, (1.3, 12), (1.2, 13)], FAST_AND_SMALL, 3)
    assert not weak((1.8, 8), [*best[::2], (1.4, 11), (1.3, 12), (1.2, 13)], FAST_AND_SMALL, 3)


def test_the_first_at_a_rung_goes_on() -> None:
    assert not weak((1.0, 60), [], FAST_AND_SMALL, 1)
