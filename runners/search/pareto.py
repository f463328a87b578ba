"""Several objectives at once: Pareto set, hypervolume, the recommended pick, and who goes on from a rung.

Points are [N, M] arrays: N candidates, M objectives, each with a direction. A point *dominates* another if it is
nowhere worse and somewhere better. That does not depend on the scale of an objective, but volumes, the knee and the
choice within a front do: pass quantities that span orders of magnitude, such as parameters, through ``logged`` first.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Direction = Literal["maximize", "minimize"]
Array = NDArray[np.float64]

MARGIN = 0.1  # of an objective's range, between its worst value and the reference point


def pareto_set(points: ArrayLike, directions: Sequence[Direction]) -> list[int]:
    """Indices of the points that no other dominates, in order; of equal points all."""
    losses = _losses(points, directions)
    if losses.shape[1] == 1:
        return [int(index) for index in np.flatnonzero(losses == losses.min(initial=np.inf))]
    return [int(index) for index in np.flatnonzero(~_dominates(losses, losses).any(axis=0))]


def fronts(points: ArrayLike, directions: Sequence[Direction]) -> list[int]:
    """Every point's rank by non-dominated sorting: 0 is the Pareto set, 1 that of what is left without it, and so on.

    As Deb et al. define it (NSGA-II, IEEE TEVC 6(2), 2002, section III-A).

    Raises:
        ValueError: a value is not finite, or the points have not one column for each direction; as everywhere here.
    """
    losses = _losses(points, directions)
    dominated = _dominates(losses, losses)
    ranks = np.full(len(losses), -1)
    rank = 0
    while (left := ranks < 0).any():
        ranks[left & ~dominated[left].any(axis=0)] = rank
        rank += 1
    return [int(rank) for rank in ranks]


def logged(points: ArrayLike, logarithmic: Sequence[bool]) -> Array:
    """``points`` with the base-10 logarithm of those columns, so that equal ratios of a value are equal distances.

    Raises:
        ValueError: a value of such a column is not above 0.
    """
    scaled = np.array(points, dtype=np.float64)
    for column, wanted in enumerate(logarithmic):
        if wanted:
            if (scaled[:, column] <= 0).any():
                raise ValueError(f"column {column} has a value that is not above 0 and has no logarithm")
            scaled[:, column] = np.log10(scaled[:, column])
    return scaled


def reference_point(points: ArrayLike, directions: Sequence[Direction]) -> list[float]:
    """The corner from which volumes are measured: each objective's worst value, moved outward by a tenth of its range.

    The margin gives the ends of the Pareto set a volume too (Ishibuchi et al., "How to Specify a Reference Point in
    Hypervolume Calculation", Evolutionary Computation 26(3), 2018). Where all values are equal it is a tenth of their
    size, or 0.1 where they are 0. A history is monotone and repeatable if its one reference is that of all its points.
    """
    losses = _losses(points, directions)
    if not len(losses):
        raise ValueError("no points: there is nothing to refer to")
    return [float(value) for value in _reference(losses) * _signs(directions)]


def hypervolume(points: ArrayLike, directions: Sequence[Direction], reference: Sequence[float]) -> float:
    """The volume between the points and ``reference``: of all that some point dominates and that dominates it.

    Its unit is the product of the objectives'. Points that are not better than the reference everywhere add nothing.
    Exact. Each point adds a slab as thick as its last objective, less what later points cover of it: the limit sets
    of While, Bradstreet and Barone, "A Fast Way of Calculating Exact Hypervolumes", IEEE TEVC 16(1), 2012.
    """
    corner = np.asarray(reference, dtype=np.float64) * _signs(directions)
    losses = _losses(points, directions)
    return _volume(_front(losses[(losses < corner).all(axis=1)]), corner)


def knee(
    points: ArrayLike, directions: Sequence[Direction], noise: Sequence[float] | None = None, followed: int = 0
) -> int:
    """The recommended pick of the Pareto set: where giving up a little of one objective no longer buys much of another.

    Every objective runs from 0 at its best to 1 at its worst value in the Pareto set; the pick has the least sum. With
    two objectives that is the point farthest, to the good side, from the line through the two ends of the set (Das, "On
    characterizing the 'knee' of the Pareto curve based on Normal-Boundary Intersection", Structural Optimization 18,
    1999); with more, from the plane that cuts every axis at 1. It is also the compromise solution of equal weights and
    p = 1 (Yu, "A class of solutions for group decision problems", Management Science 19(8), 1973).

    ``noise`` is by objective the difference that says nothing, as the spread of seeds: where the whole set is no wider,
    it does not count as a full range. Among equals, as with two points, the best of objective ``followed`` is taken.
    An objective with equal values decides nothing.
    """
    losses = _losses(points, directions)
    on_front = pareto_set(points, directions)
    if not on_front:
        raise ValueError("no points: there is nothing to pick")
    ideal = losses[on_front].min(axis=0)
    width = losses[on_front].max(axis=0) - ideal
    width = np.maximum(width, np.zeros_like(width) if noise is None else np.asarray(noise, dtype=np.float64))
    sums = ((losses - ideal) / np.where(width > 0, width, 1.0)).sum(axis=1)
    rounded = sums.round(9)  # sums that are equal but for their rounding
    return min(on_front, key=lambda index: (rounded[index], losses[index, followed], *losses[index], index))


def best_under(
    points: ArrayLike, directions: Sequence[Direction], caps: Mapping[int, float], followed: int = 0
) -> int | None:
    """The best of objective ``followed`` among the points that meet every cap; None if none does.

    ``caps`` are by objective the worst value allowed: the greatest of a minimised one, the least of a maximised one.
    Equals are told apart by the other objectives in order; a point of the Pareto set of those allowed results.
    """
    losses = _losses(points, directions)
    limits = {column: cap * _signs(directions)[column] for column, cap in caps.items()}
    allowed = [i for i, loss in enumerate(losses) if all(loss[column] <= cap for column, cap in limits.items())]
    return min(allowed, key=lambda index: (losses[index, followed], *losses[index], index), default=None)


def selected(points: ArrayLike, directions: Sequence[Direction], count: int) -> list[int]:
    """Indices of the best ``count`` points, best first: by front, and within a front so as to cover much volume.

    Within a front the next is the one that adds most hypervolume to those taken before it, measured from the front's
    own reference point; equal ones go by the first objective. So a cluster of good points is not thrown away as a
    whole, as it would be by each one's contribution beside all others, and the ends are not kept whatever they are
    worth, as they would be by crowding distance. The greedy choice is within 1 - 1/e of the best one (Guerreiro et al.,
    "Greedy Hypervolume Subset Selection in Low Dimensions", Evolutionary Computation 24(3), 2016); Optuna's TPE tells
    good from bad trials in this way too (``_split_complete_trials_multi_objective``, optuna 5.0). Units do not matter.
    """
    losses, ranks = _losses(points, directions), np.array(fronts(points, directions), dtype=int)
    chosen: list[int] = []
    for rank in range(int(ranks.max(initial=-1)) + 1):
        if len(chosen) >= count:
            break
        front = np.flatnonzero(ranks == rank)
        unique, members = np.unique(losses[front], axis=0, return_inverse=True)
        for vector in _greedy(unique, count - len(chosen)):
            chosen += [int(index) for index in front[members.reshape(-1) == vector]]
    return chosen[:count]


def weak(value: Sequence[float], others: ArrayLike, directions: Sequence[Direction], places: int) -> bool:
    """Whether a candidate is not among the best ``places`` of all that were measured at its rung.

    ``others`` [N, M] are the other candidates' values there. Whoever equals one of the best is among them. ``selected``
    orders them; with one objective that is by value.
    """
    own = np.asarray(value, dtype=np.float64)
    points = np.vstack([own, np.asarray(others, dtype=np.float64).reshape(-1, len(own))])
    if len(own) == 1:  # asked after every rung of a search
        losses = _losses(points, directions)
        return bool((losses < losses[0]).sum() >= places)
    return not any((points[index] == own).all() for index in selected(points, directions, places))


def _signs(directions: Sequence[Direction]) -> Array:
    return np.array([-1.0 if direction == "maximize" else 1.0 for direction in directions])


def _losses(points: ArrayLike, directions: Sequence[Direction]) -> Array:
    """The points with every objective minimised, [N, M]; no value is a negative zero."""
    array = np.asarray(points, dtype=np.float64)
    if array.size == 0:
        array = array.reshape(0, len(directions))
    if array.ndim != 2 or array.shape[1] != len(directions):
        raise ValueError(f"points of shape {array.shape} do not fit {len(directions)} directions; needed are [N, M]")
    if not np.isfinite(array).all():
        raise ValueError("every value of every point must be finite")
    return array * _signs(directions) + 0.0


def _dominates(losses: Array, others: Array) -> NDArray[np.bool_]:
    """[N, K]: whether losses[n] dominates others[k]."""
    a, b = losses[:, None], others[None]
    return np.asarray((a <= b).all(axis=2) & (a < b).any(axis=2))


def _front(losses: Array) -> Array:
    """The distinct losses that no other dominates."""
    unique: Array = np.unique(losses, axis=0)
    return unique[~_dominates(unique, unique).any(axis=0)]


def _reference(losses: Array) -> Array:
    worst = losses.max(axis=0)
    width = worst - losses.min(axis=0)
    size = np.where(worst == 0, 1.0, np.abs(worst))
    moved = worst + MARGIN * np.where(width > 0, width, size)
    return np.asarray(np.maximum(moved, np.nextafter(worst, np.inf)))


def _volume(front: Array, reference: Array) -> float:
    """Hypervolume of distinct losses, none dominated, all below the reference."""
    if not len(front):
        return 0.0
    if front.shape[1] == 1:
        return float(reference[0] - front[:, 0].min())
    if front.shape[1] == 2:  # a staircase: the first objective rises as the second falls
        steps = front[np.argsort(front[:, 0])]
        ceilings = np.append(reference[1], steps[:-1, 1])
        return float(((reference[0] - steps[:, 0]) * (ceilings - steps[:, 1])).sum())
    ordered = front[np.argsort(-front[:, -1], kind="stable")]
    return math.fsum(
        (reference[-1] - loss[-1]) * _gain(loss[:-1], ordered[place + 1 :, :-1], reference[:-1])
        for place, loss in enumerate(ordered)
    )


def _gain(loss: Array, others: Array, reference: Array) -> float:
    """What ``loss`` adds to the volume of ``others``; never below 0."""
    box = float((reference - loss).prod())
    return max(0.0, box - _volume(_front(np.maximum(others, loss)), reference))


def _greedy(front: Array, count: int) -> list[int]:
    """Indices of up to ``count`` distinct losses, each next one adding most volume; equal gains go in order.

    Every objective runs from 0 to 1 here, and gains are rounded, so that units and rounding do not decide. What a point
    adds only falls as others are taken: a bound of an earlier turn saves computing most of them anew.
    """
    width = front.max(axis=0) - front.min(axis=0)
    unit = (front - front.min(axis=0)) / np.where(width > 0, width, 1.0)
    reference = unit.max(axis=0) + MARGIN
    bounds = (reference - unit).prod(axis=1).round(9)
    taken: list[int] = []
    while len(taken) < min(count, len(front)):
        best, most = -1, -1.0
        for index in np.argsort(-bounds, kind="stable"):
            if index in taken:
                continue
            if bounds[index] < most:
                break
            bounds[index] = min(bounds[index], round(_gain(unit[index], unit[taken], reference), 9))
            if bounds[index] > most or (bounds[index] == most and index < best):
                best, most = int(index), float(bounds[index])
        taken.append(best)
    return taken
