"""The Pareto set of a search over its objectives: who is on it, how it grew, and which of them is recommended."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from archspec.files import write_json
from runners.search.agreement import seed_spread
from runners.search.driver import Search
from runners.search.objective import ObjectiveName
from runners.search.pareto import Array, best_under, hypervolume, knee, logged, pareto_set, reference_point
from runners.search.record import Record
from runners.search.result import Pick
from runners.search.scores import SIZES, Scorer
from runners.training.trial import Measurement


def front_of(search: Search) -> list[Record]:
    """The records that no other dominates among all that were measured and keep the constraints, best gain first.

    One that was stopped counts as it was when it was stopped.
    """
    scorer = search.study.scorer
    records = [r for r in search.study.records.values() if r.measurements and scorer.meets(r)]
    on = pareto_set([scorer.means(record) for record in records], scorer.directions)
    return sorted((records[index] for index in on), key=search.gain, reverse=True)


def recommended(search: Search, ranked: Sequence[Record]) -> Pick:
    """The pick among completed records: the best under the caps, else the knee of their Pareto set.

    With one objective that is the first of ``ranked``; where none keeps the bounds or the caps too, as ``why`` tells.
    It also tells where even this draft is predicted to make serving slower.
    """
    scorer, within = search.study.scorer, search.file.objective.within
    names, first = scorer.names, ranked[0]
    if not scorer.meets(first):
        why = "no architecture keeps the constraints on what was measured; this is the best of the others"
        return _pick(scorer, first, why)
    if not within and len(names) == 1:
        return _pick(scorer, first, f"the best {names[0]}")
    fit = [record for record in ranked if scorer.meets(record)]
    # The followed objective goes first: by it equals are told apart.
    order = sorted(range(len(names)), key=lambda column: names[column] != scorer.followed)
    points = [[scorer.means(record)[column] for column in order] for record in fit]
    directions = [scorer.directions[column] for column in order]
    if not within:
        spread = seed_spread([scorer.gains(record) for record in fit])
        noise = [0.0 if spread is None else spread.noise(1, 1), *(0.0 for _ in order[1:])]
        index = knee(_scaled(points, [names[column] for column in order]), directions, noise)
        return _pick(scorer, fit[index], f"the knee of the Pareto set over {' and '.join(names)}")
    minimized = search.file.objective.minimize
    told = " and ".join(f"{name} {'<=' if name in minimized else '>='} {_figure(cap)}" for name, cap in within.items())
    best = best_under(points, directions, {order.index(names.index(name)): cap for name, cap in within.items()})
    if best is None:
        return _pick(scorer, first, f"no architecture has {told}; this is the best {scorer.followed} of the others")
    return _pick(scorer, fit[best], f"the best {scorer.followed} with {told}")


def write_front(search: Search, ranked: Sequence[Record]) -> None:
    """Write ``pareto.json``: the set, the pick, and the hypervolume over time."""
    scorer = search.study.scorer
    members = [
        {
            "trial": record.number,
            "name": record.name,
            "hash": record.hash,
            "state": record.state,
            "train_tokens": record.measurements[-1].tokens,
            "seeds": len(record.final),
            **_told(scorer.names, scorer.means(record)),
        }
        for record in front_of(search)
    ]
    write_json(
        search.folder.pareto,
        {
            "objectives": search.file.objective.directions,
            "members": members,
            "recommended": recommended(search, ranked).model_dump(),
            "hypervolume": _history(search),
        },
    )


def _history(search: Search) -> dict[str, Any]:
    """The hypervolume of the set of ``front_of`` as it was after every measurement, in the order in which they ended.

    So it ends with that of the final set, and falls where a candidate turned out worse than it looked. ``tokens`` are
    those trained by then, in all trials together. Sizes are taken by their base-10 logarithm.
    """
    scorer = search.study.scorer
    told = [(m, r) for r in search.study.records.values() for m in (*r.measurements, *r.repeats)]
    told.sort(key=lambda pair: (pair[0].finished, pair[1].number, pair[0].seed, pair[0].rung))
    reference = reference_point(
        _scaled([scorer.vector(record, m) for m, record in told], scorer.names), scorer.directions
    )
    volumes = _Volumes(scorer, reference)
    known, trained, steps = dict[int, dict[int, Measurement]](), dict[tuple[int, int], int](), []
    for m, record in told:
        trained[record.number, m.seed] = m.tokens
        known.setdefault(record.number, {})[m.seed] = m
        volume = volumes.after(record, list(known[record.number].values()))
        place = {"trial": record.number, "seed": m.seed, "rung": m.rung, "tokens": sum(trained.values())}
        steps.append(place | {"finished": m.finished, "hypervolume": volume})
    logarithmic = [name for name in scorer.names if name in SIZES]
    return {"reference": dict(zip(scorer.names, reference, strict=True)), "logarithmic": logarithmic, "steps": steps}


class _Volumes:
    """The hypervolume of the Pareto set while measurements come in."""

    def __init__(self, scorer: Scorer, reference: Sequence[float]) -> None:
        self._scorer, self._reference = scorer, reference
        self._front: dict[int, list[float]] = {}
        self._behind: dict[int, list[float]] = {}
        self._volume = 0.0

    def after(self, record: Record, final: Sequence[Measurement]) -> float:
        """The volume now that ``final`` are the record's last measurement of its own seed and those of others."""
        scorer, number = self._scorer, record.number
        was_on = self._front.pop(number, None) is not None
        self._behind.pop(number, None)
        keeps = scorer.keeps(record, final[0])
        if keeps:
            means = [fmean(column) for column in zip(*(scorer.vector(record, m) for m in final), strict=True)]
            self._behind[number] = _scaled([means], scorer.names)[0].tolist()
        if was_on:  # others may come to the fore
            self._settle(self._front | self._behind)
        elif keeps:
            self._settle(self._front | {number: self._behind[number]})
        return self._volume

    def _settle(self, points: dict[int, list[float]]) -> None:
        """Take as the set what no other of ``points`` dominates; the set lies among them."""
        numbers, directions = list(points), self._scorer.directions
        on = {numbers[index] for index in pareto_set(list(points.values()), directions)}
        self._behind |= {number: point for number, point in points.items() if number not in on}
        self._front = {number: points[number] for number in on}
        self._behind = {number: point for number, point in self._behind.items() if number not in on}
        self._volume = hypervolume(list(self._front.values()), directions, self._reference)


def _told(names: Sequence[ObjectiveName], values: Sequence[float]) -> dict[str, float]:
    """By objective; parameters are whole."""
    return {name: int(value) if name == "params" else value for name, value in zip(names, values, strict=True)}


def _scaled(points: Sequence[Sequence[float]], names: Sequence[ObjectiveName]) -> Array:
    return logged(points, [name in SIZES for name in names])


def _figure(cap: float) -> str:
    """``30,000,000`` or ``1.84``."""
    return f"{cap:,.0f}" if cap == round(cap) else f"{cap:g}"


def _pick(scorer: Scorer, record: Record, why: str) -> Pick:
    predicted = fmean(scorer.values(record, m).get("speedup", 1.0) for m in record.final)
    if predicted < 1:
        why += f"; it is predicted to make serving slower than without a draft, {predicted:.3f} times as fast"
    return Pick(trial=record.number, name=record.name, hash=record.hash, why=why)
