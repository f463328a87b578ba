"""Whether a space holds any draft that fits and keeps the constraints, told before anything is trained."""

import random
from functools import partial

import optuna
import pytest

from archspec.cost import draft_params
from archspec.errors import ArchspecError
from archspec.resolve import ResolvedSpec
from archspec.schema import Document
from search_spaces.constraints import Bound, Constraints
from search_spaces.sampling import FEASIBILITY_DRAWS, _draw, _random_label, require_feasible, sample
from search_spaces.space import Space
from tests.smollm2 import SMOLLM2

FACTS = SMOLLM2
SMALL_TARGET = FACTS.model_copy(update={"vocab_size": 512, "num_layers": 8})


def parse(choices: str) -> Space:
    return Document.parse(f"base: eagle3\nchoices:\n  {choices}\n", "s.yaml").validate(Space)


def test_a_space_without_a_feasible_draw_is_an_error_with_the_reason() -> None:
    space = Space.load("depth-and-fusion")
    require_feasible(space, FACTS)
    require_feasible(space, SMALL_TARGET, {"head.vocab_size": "full"})
    rule = r"of 27 drawn, 27 failed because head.* is larger than the target's vocabulary of 512"
    with pytest.raises(ArchspecError, match=rule):
        require_feasible(space, SMALL_TARGET)
    with pytest.raises(ArchspecError, match="is above the greatest allowed, 1,000"):
        require_feasible(space, FACTS, constraints=Constraints(params=Bound(max=1000)))


def test_one_feasible_draw_of_a_small_space_is_enough() -> None:
    require_feasible(Space.load("draft-vocabulary"), SMALL_TARGET)
    require_feasible(parse("layers.*.fusion: [none, concat]"), FACTS, {"depth": 3})


def test_a_continuous_space_is_tried_by_draws() -> None:
    space = parse("train.learning_rate: {low: 3e-4, high: 3e-3, log: true}")
    require_feasible(space, FACTS)
    with pytest.raises(ArchspecError, match=r"of 500 drawn, 500 failed because head.* is larger than"):
        require_feasible(space, SMALL_TARGET)


def test_wrong_fixed_values_are_told_as_such() -> None:
    with pytest.raises(ArchspecError, match=r"^fixed: head\.norm = 'onw': did you mean 'own'"):
        require_feasible(Space.load("depth-and-fusion"), FACTS, {"head.norm": "onw"})


WIDE = """depth: {low: 1, high: 6}
  layers.*.mlp.intermediate_size: {low: 64, high: 8192, step: 64}
  layers.*.mlp.depth: [3, 2, 1]
  layers.0.fusion: [concat, project, add]
  head.vocab_size: [full, 32000, 8192, 2048]"""


def least(space: Space) -> int:
    """Parameters of the smallest draft of ``WIDE``: one layer with the narrowest MLP."""
    params = {"depth": 1, "layers.0.mlp.intermediate_size": 64, "layers.0.mlp.depth": 1, "head.vocab_size": 2048}
    fusions = ("concat", "project", "add")
    trials = [optuna.trial.FixedTrial({**params, "layers.0.fusion": fusion}) for fusion in fusions]
    drafts = [sample(space, trial, FACTS) for trial in trials]
    return min(draft_params(candidate.spec) for candidate in drafts)


def test_a_corner_of_a_large_space_that_random_draws_miss_is_found() -> None:
    space = parse(WIDE)
    constraints = Constraints(params=Bound(max=least(space)))
    generator = random.Random(0)
    drawn = 0
    for _ in range(FEASIBILITY_DRAWS):
        candidate = _draw(space, partial(_random_label, generator), FACTS, {})
        drawn += constraints.reason(candidate.spec) is None
    assert drawn == 0
    require_feasible(space, FACTS, constraints=constraints)


def test_a_bound_below_the_smallest_draft_is_refused_and_the_smallest_named() -> None:
    space = parse(WIDE)
    size = least(space)
    with pytest.raises(ArchspecError) as caught:
        require_feasible(space, FACTS, constraints=Constraints(params=Bound(max=size - 1)))
    assert str(caught.value) == (
        "no draft of the space can be used: of 500 drawn, 500 break the constraints, "
        f"the nearest one as params: {size:,} is above the greatest allowed, {size - 1:,}"
    )


class DepthTimes:
    """A draft step takes a millisecond for each layer."""

    source = "depth"

    def target_ms(self, rows: int) -> float:
        return 10.0 + rows

    def draft_ms(self, spec: ResolvedSpec) -> float:
        return float(len(spec.layers))

    def cycle_ms(self, spec: ResolvedSpec) -> float:
        return 0.0

    def draft_source(self, spec: ResolvedSpec) -> str:
        return "measured"


def test_a_bound_on_time_that_nothing_meets_is_refused_where_times_are_known() -> None:
    space, constraints = parse("depth: [2, 3]"), Constraints(draft_ms=Bound(max=1.5))
    require_feasible(space, FACTS, constraints=constraints)
    require_feasible(space, FACTS, constraints=Constraints(draft_ms=Bound(max=2)), times=DepthTimes())
    rule = r"of 2 drawn, 2 break the constraints, the nearest one as draft_ms: 2 is above the greatest allowed, 1\.5$"
    with pytest.raises(ArchspecError, match=rule):
        require_feasible(space, FACTS, constraints=constraints, times=DepthTimes())


def test_bounds_on_what_is_measured_refuse_no_space() -> None:
    require_feasible(parse("depth: [1, 2]"), FACTS, constraints=Constraints(speedup=Bound(min=99)), times=DepthTimes())


def test_choices_that_help_only_together_are_found_from_the_nearest_draw() -> None:
    """A hidden size of its own needs a trained embedding, which alone makes the target-sized draft larger."""
    space = parse(
        "depth: {low: 1, high: 8}\n  hidden_size: [target, 96]\n  embedding: [frozen, trained]\n"
        "  layers.*.mlp.intermediate_size: {low: 64, high: 8192, step: 64}\n  layers.0.fusion: [concat, project, add]\n"
        "  head.vocab_size: [full]"
    )
    require_feasible(space, SMALL_TARGET, constraints=Constraints(params=Bound(max=440_000)))
