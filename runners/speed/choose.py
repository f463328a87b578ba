"""Which drafts of a space to measure, so that the times of all others can be told from them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import optuna

from archspec.errors import ArchspecError
from archspec.facts import TargetFacts
from archspec.resolve import ResolvedSpec
from archspec.step_fit import StepCounts
from search_spaces import Infeasible, Space, sample

DRAWS = 200
_CONTEXT = 256  # any will do: it decides only how much a layer's cache counts beside its weights


def spread_drafts(
    space: Space, facts: TargetFacts, fixed: Mapping[str, Any], named: Sequence[ResolvedSpec], count: int
) -> list[ResolvedSpec]:
    """``named`` and drafts drawn from ``space``, ``count`` in all, that lie far apart in depth, width and head.

    Of many draws, always the one is taken that is farthest from those taken so far; the distance is between logarithms
    of what a step does (``archspec.step_fit.StepCounts``). The same arguments give the same drafts. A small space gives
    fewer.

    Raises:
        ArchspecError: no draft of the space fits the target, and none was named.
    """
    drawn = _drawn(space, facts, fixed)
    chosen = list({spec.hash: spec for spec in named}.values())
    if not drawn and not chosen:
        raise ArchspecError("no draft of the space fits the target; archspec validate says why")
    rest = {key: spec for key, spec in drawn.items() if key not in {spec.hash for spec in chosen}}
    while rest and len(chosen) < count:
        places = [_place(spec) for spec in chosen]
        key = max(sorted(rest), key=lambda key: min((math.dist(_place(rest[key]), p) for p in places), default=0.0))
        chosen.append(rest.pop(key))
    return chosen


def _drawn(space: Space, facts: TargetFacts, fixed: Mapping[str, Any]) -> dict[str, ResolvedSpec]:
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
        found: dict[str, ResolvedSpec] = {}
        for _ in range(DRAWS):
            try:
                spec = sample(space, study.ask(), facts, fixed).spec
            except Infeasible:
                continue
            found.setdefault(spec.hash, spec)
    finally:
        optuna.logging.set_verbosity(verbosity)
    return found


def _place(spec: ResolvedSpec) -> tuple[float, ...]:
    counts = StepCounts.of(spec, 1, _CONTEXT)
    return tuple(math.log(count) for count in (counts.kernels, counts.layer_elements, counts.head_elements))
