"""The Pareto set of a search over its objectives: who is on it, how it grew, and which of them is recommended."""

from collections.abc import Sequence
from typing import Any

from archspec.files import write_json
from runners.search.agreement import seed_spread
from runners.search.driver import Search
from runners.search.objective import ObjectiveName
from runners.search.pareto import Array, best_under, hypervolume_history, knee, logged, pareto_set, reference_point
from runners.search.record import Record
from runners.search.result import Pick
from runners.search.scores import SIZES


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
    """
    scorer, within = search.study.scorer, search.file.objective.within
    names, first = scorer.names, ranked[0]
    if not scorer.meets(first):
        return _pick(
            first, "no architecture keeps the constraints on what was measured; this is the best of the others"
        )
    if not within and len(names) == 1:
        return _pick(first, f"the best {names[0]}")
    fit = [record for record in ranked if scorer.meets(record)]
    # The followed objective goes first: by it equals are told apart.
    order = sorted(range(len(names)), key=lambda column: names[column] != scorer.followed)
    points = [[scorer.means(record)[column] for column in order] for record in fit]
    directions = [scorer.directions[column] for column in order]
    if not within:
        spread = seed_spread([scorer.gains(record) for record in fit])
        noise = [0.0 if spread is None else spread.noise(1, 1), *(0.0 for _ in order[1:])]
        index = knee(_scaled(points, [names[column] for column in order]), directions, noise)
        return _pick(fit[index], f"the knee of the Pareto set over {' and '.join(names)}")
    minimized = search.file.objective.minimize
    told = " and ".join(f"{name} {'<=' if name in minimized else '>='} {_figure(cap)}" for name, cap in within.items())
    best = best_under(points, directions, {order.index(names.index(name)): cap for name, cap in within.items()})
    if best is None:
        return _pick(first, f"no architecture has {told}; this is the best {scorer.followed} of the others")
    return _pick(fit[best], f"the best {scorer.followed} with {told}")


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
            **dict(zip(scorer.names, scorer.means(record), strict=True)),
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
    """The hypervolume after every measurement of the search, in the order in which they ended.

    ``tokens`` are those trained by then, in all trials together. Sizes are taken by their base-10 logarithm.
    """
    scorer = search.study.scorer
    told = [(m, r) for r in search.study.records.values() for m in (*r.measurements, *r.repeats)]
    told.sort(key=lambda pair: (pair[0].finished, pair[1].number, pair[0].seed, pair[0].rung))
    points = _scaled([scorer.vector(record, m) for m, record in told], scorer.names)
    reference = reference_point(points, scorer.directions)
    steps, trained = [], dict[tuple[int, int], int]()
    for (m, record), volume in zip(told, hypervolume_history(points, scorer.directions, reference), strict=True):
        trained[record.number, m.seed] = m.tokens
        place = {"trial": record.number, "seed": m.seed, "rung": m.rung, "tokens": sum(trained.values())}
        steps.append(place | {"finished": m.finished, "hypervolume": volume})
    logarithmic = [name for name in scorer.names if name in SIZES]
    return {"reference": dict(zip(scorer.names, reference, strict=True)), "logarithmic": logarithmic, "steps": steps}


def _scaled(points: Sequence[Sequence[float]], names: Sequence[ObjectiveName]) -> Array:
    return logged(points, [name in SIZES for name in names])


def _figure(cap: float) -> str:
    """``30,000,000`` or ``1.84``."""
    return f"{cap:,.0f}" if cap == round(cap) else f"{cap:g}"


def _pick(record: Record, why: str) -> Pick:
    return Pick(trial=record.number, name=record.name, hash=record.hash, why=why)
