"""Whether the best may be called the best, by hand: seed noise pooled over all that were repeated."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from archspec.cost import draft_params
from runners.features.store import FeatureStore
from runners.search.executor import Failure
from runners.search.record import Record
from runners.search.scores import Scorer
from runners.search.verdict import judge
from search_spaces import Candidate
from tests.runners.drafts import tiny_spec
from tests.runners.replay import K, ToyTimes, measured, search_file
from tests.runners.tasks import rung_task


@pytest.fixture
def records(tiny_store: FeatureStore, tmp_path: Path) -> Any:
    """Records by name, length at each seed and depth."""
    made: list[Record] = []

    def make(name: str, lengths: Sequence[float], *, layers: int = 1, width: float = 0.02) -> Record:
        spec = tiny_spec(
            tiny_store.facts, changes={"depth": layers, "layers.all.mlp.intermediate_size": 64 + len(made)}
        )
        candidate = Candidate(spec, replace_name(spec, name), {})
        task = rung_task(tiny_store, tmp_path, rungs=(100,))
        first, *others = (measured(replace(task, seed=seed), length, width) for seed, length in enumerate(lengths))
        made.append(Record(len(made), candidate, None, "complete", None, [first], others))
        return made[-1]

    return make


def replace_name(spec: Any, name: str) -> Any:
    return spec.model_copy(update={"name": name})


@pytest.fixture
def scorer(tiny_store: FeatureStore) -> Scorer:
    """By acceptance length, without times."""
    return Scorer(search_file(tiny_store), None)


def test_a_clear_winner(records: Any, scorer: Scorer) -> None:
    """Means 1.5 and 1.3; pooled variance 0.0001 with 4 degrees of freedom: 2.776 * sqrt(0.0001 * 2 / 3) = 0.02267."""
    verdict = judge([records("wide", [1.49, 1.5, 1.51]), records("plain", [1.29, 1.3, 1.31])], scorer)
    assert (verdict.winner, verdict.objective) == ("wide", "acceptance_length")
    assert (verdict.sureness, verdict.inside, verdict.cheaper) == ("outside seed noise", [], None)
    assert verdict.margin == pytest.approx(0.2)
    assert verdict.noise == pytest.approx(0.022670, abs=1e-6)
    assert verdict.text == (
        "wide leads plain by 0.2000 in acceptance_length; seed noise of the difference is 0.0227 (95 %, 3 and 3 seeds)"
    )


def test_a_difference_inside_seed_noise_names_the_cheaper(records: Any, scorer: Scorer) -> None:
    """Means 1.5 and 1.49; pooled variance 0.00505: noise 2.776 * sqrt(0.00505 * 2 / 3) = 0.16110."""
    deep, plain = records("deep", [1.4, 1.5, 1.6], layers=3), records("plain", [1.48, 1.49, 1.5])
    verdict = judge([deep, plain], scorer)
    assert (verdict.sureness, verdict.cheaper) == ("inside seed noise", "plain")
    assert verdict.noise == pytest.approx(0.161098, abs=1e-6)
    assert [(one.name, one.hash) for one in verdict.inside] == [("plain", plain.hash)]
    assert verdict.inside[0].margin == pytest.approx(0.01)
    params = f"{draft_params(plain.spec):,}"
    assert verdict.text == (
        "deep leads plain by 0.0100 in acceptance_length; "
        "seed noise of the difference is 0.1611 (95 %, 3 and 3 seeds): "
        f"not a real difference, and plain is the cheaper of the two ({params} parameters)"
    )


def test_the_spread_is_pooled_over_all_that_were_repeated(records: Any, scorer: Scorer) -> None:
    """Deviations from the means: 0.01 twice, 0.02 twice, 0.03 twice; 3 degrees of freedom."""
    three = [records("a", [1.51, 1.49]), records("b", [1.42, 1.38]), records("c", [1.33, 1.27])]
    verdict = judge(three, scorer)
    pooled = math.sqrt((2 * 0.01**2 + 2 * 0.02**2 + 2 * 0.03**2) / 3)
    noise = float(stats.t.ppf(0.975, 3)) * pooled * math.sqrt(1 / 2 + 1 / 2)
    assert verdict.noise == pytest.approx(noise)
    assert noise == pytest.approx(0.0972, abs=1e-4)
    assert verdict.sureness == "outside seed noise"


def test_a_winner_may_be_inside_the_noise_of_the_third_alone(records: Any, scorer: Scorer) -> None:
    """The third ran once: its noise is larger by sqrt((1/3 + 1) / (1/3 + 1/3))."""
    first, second = records("a", [1.49, 1.5, 1.51], layers=2), records("b", [1.464, 1.474, 1.484], layers=3)
    verdict = judge([first, second, records("c", [1.47])], scorer)
    assert verdict.margin == pytest.approx(0.026)
    assert verdict.noise == pytest.approx(0.022670, abs=1e-6)
    assert verdict.sureness == "inside seed noise"
    assert [one.name for one in verdict.inside] == ["c"]
    assert verdict.inside[0].noise == pytest.approx(0.022670 * math.sqrt(2), abs=1e-5)
    assert verdict.cheaper == "c"
    assert ": a real difference, but none to c, and c is the cheaper of the two (" in verdict.text


def test_of_many_alike_three_are_listed(records: Any, scorer: Scorer) -> None:
    winner = records("a", [1.4, 1.6], layers=2)
    others = [records(name, [1.49 - 0.01 * place]) for place, name in enumerate("bcdefg")]
    verdict = judge([winner, *others], scorer)
    assert [one.name for one in verdict.inside] == list("bcdefg")
    assert ": not a real difference, nor to c, d, e and 2 more, and b is the cheapest of them (" in verdict.text


def test_a_mean_over_seeds_beside_a_lucky_run_may_be_below_it(records: Any, scorer: Scorer) -> None:
    """Noise with 1 degree of freedom: 12.7 * 0.0707 * sqrt(1/2 + 1) = 1.1."""
    verdict = judge([records("wide", [1.4, 1.5], layers=2), records("plain", [1.6])], scorer)
    assert (verdict.sureness, verdict.cheaper) == ("inside seed noise", "plain")
    assert verdict.margin == pytest.approx(-0.15)
    assert verdict.text.startswith("wide is 0.1500 below plain's single run in acceptance_length; seed noise of the d")
    assert ": not a real difference, and plain is" in verdict.text


def test_a_single_run_that_is_better_beyond_noise_is_not_called_alike(records: Any, scorer: Scorer) -> None:
    """Its other seeds failed, else it would be the winner."""
    winner, rival = records("wide", [1.499, 1.5, 1.501]), records("plain", [1.9])
    assert ": plain is really better, but no seed repeats it, and " in judge([winner, rival], scorer).text


@pytest.mark.parametrize(("width", "told"), [(0.02, "do not overlap"), (0.2, "overlap")])
def test_one_seed_can_only_compare_intervals(records: Any, scorer: Scorer, width: float, told: str) -> None:
    verdict = judge([records("wide", [1.5], width=width), records("plain", [1.3], width=width)], scorer)
    assert (verdict.sureness, verdict.noise, verdict.cheaper) == ("one seed only", None, None)
    assert verdict.text == (
        f"wide leads plain by 0.2000 in acceptance_length on one seed; their intervals of acceptance length {told}"
    )


def test_without_a_rival(records: Any, scorer: Scorer) -> None:
    verdict = judge([records("wide", [1.5, 1.6])], scorer)
    assert (verdict.sureness, verdict.margin) == ("no rival", None)
    assert verdict.text == "wide is the only architecture that finished"


def test_failed_seeds_are_told(records: Any, scorer: Scorer) -> None:
    winner = records("wide", [1.49, 1.5])
    winner.failed_repeats[2] = Failure("diverged", "loss nan")
    assert judge([winner, records("plain", [1.3, 1.31])], scorer).text.endswith("; 1 of its seeds failed")


class Reversed(ToyTimes):
    """Deeper drafts are the quicker ones."""

    def draft_ms(self, spec: Any) -> float:
        return 1 / len(spec.layers)


def test_the_cheaper_is_the_quicker_where_times_are_known(tiny_store: FeatureStore, records: Any) -> None:
    objective = {"draft_length": K, "maximize": "acceptance_length"}
    file = search_file(tiny_store, objective=objective, speed={"accelerator": "H100-SXM", "draft_lengths": [1, K]})
    deep, plain = records("deep", [1.48, 1.49], layers=2), records("plain", [1.49, 1.5])
    verdict = judge([plain, deep], Scorer(file, Reversed()))
    assert verdict.cheaper == "deep"
    assert verdict.text.endswith(f"(0.500 ms a draft step, {draft_params(deep.spec):,} parameters)")


def test_speed_up_is_judged_in_its_own_unit(tiny_store: FeatureStore, records: Any) -> None:
    file = search_file(
        tiny_store, objective={"draft_length": K}, speed={"accelerator": "H100-SXM", "draft_lengths": [1, K]}
    )
    scorer = Scorer(file, ToyTimes())
    verdict = judge([records("wide", [1.49, 1.5]), records("plain", [1.29, 1.3])], scorer)
    assert verdict.objective == "speedup"
    assert verdict.margin is not None
    assert verdict.margin < 0.2
    assert f"leads plain by {verdict.margin:.4f} in speedup" in verdict.text


def test_what_is_minimised_leads_by_being_less(tiny_store: FeatureStore, records: Any) -> None:
    scorer = Scorer(search_file(tiny_store, objective={"draft_length": K, "minimize": "params"}), None)
    small, large = records("small", [1.2, 1.3]), records("large", [1.5, 1.6], layers=2)
    verdict = judge([small, large], scorer)
    assert verdict.margin == draft_params(large.spec) - draft_params(small.spec)
    assert (verdict.sureness, verdict.noise) == ("outside seed noise", 0.0)


def test_who_breaks_a_bound_is_no_rival_of_who_keeps_it(tiny_store: FeatureStore, records: Any) -> None:
    scorer = Scorer(search_file(tiny_store, constraints={"acceptance_length": {"min": 1.45}}), None)
    keeps, breaks = records("keeps", [1.5, 1.52], layers=2), records("breaks", [1.4, 1.6])
    verdict = judge([keeps, breaks], scorer)
    assert (verdict.sureness, verdict.cheaper) == ("no rival", None)
    assert verdict.text == "keeps is the only architecture that finished and keeps the constraints"
    other = records("other", [1.46, 1.48], layers=3)
    assert [one.name for one in judge([keeps, other, breaks], scorer).inside] == ["other"]
    neither = judge([breaks, records("too", [1.3, 1.5])], scorer)
    assert [one.name for one in neither.inside] == ["too"]
