"""Timed decoding: figures of runs that are written out, and the check of a real draft on a loaded target."""

import pytest

from archspec.errors import ArchspecError
from runners.features.store import FeatureStore
from runners.features.target import Target
from runners.training.decoding import Decoded, OnFirst
from runners.training.decoding_check import _decode, _Run, _timed, check_decoding
from runners.training.settings import EvalSettings, TreeSettings
from tests.runners.drafts import draft_of_kind

SETTINGS = EvalSettings(bootstrap=500)


def run(tokens: int, seconds: float, accepted: list[int], prefill: float = 1.0) -> _Run:
    return _Run(Decoded(list(range(tokens)), accepted), prefill, seconds)


def test_figures_count_from_the_first_token() -> None:
    plain = [run(11, 10.0, []), run(21, 20.0, [])]  # a token a second
    drafted = [run(11, 4.0, [2, 2, 2, 0]), run(21, 6.0, [3, 3, 3, 3, 3])]
    timed = _timed("chain of 3", drafted, plain, SETTINGS, sampled=False)
    assert (timed.cycles, timed.accepted, timed.tokens, timed.same_text) == (9, 21, 30, 2)
    assert timed.length == pytest.approx(1 + 21 / 9)
    assert timed.tokens_per_second == pytest.approx(3.0)
    assert timed.speedup == pytest.approx(3.0)
    assert (timed.speedup_low, timed.speedup_high) == pytest.approx((10 / 4, 20 / 6))
    assert timed.speedup_with_prompts == pytest.approx((32 / 12) / (32 / 32))
    assert timed.milliseconds_per_cycle == pytest.approx(1e4 / 9)
    assert timed.as_dict()["length"] == timed.length


def test_what_slows_both_ways_of_a_response_is_not_in_the_interval() -> None:
    slow = [1.0, 9.0, 2.0, 30.0]
    plain, drafted = ([run(11, each * seconds, [1]) for seconds in slow] for each in (10.0, 5.0))
    timed = _timed("chain of 1", drafted, plain, SETTINGS, sampled=True)
    assert timed.speedup == timed.speedup_low == timed.speedup_high == pytest.approx(2.0)
    assert timed.same_text is None


def test_another_way_goes_first_each_time() -> None:
    order: list[str] = []

    def way(name: str, prompt: list[int], on_first: OnFirst) -> Decoded:
        order.append(f"{name}{prompt[0]}")
        on_first()
        return Decoded(prompt, [])

    ways = [lambda prompt, _, on_first, name=name: way(name, prompt, on_first) for name in "abc"]
    found = _decode(ways, [([number], 5) for number in range(3)])
    assert order == ["a0", "b0", "c0", *("a0", "b0", "c0"), *("b1", "c1", "a1"), *("c2", "a2", "b2")]
    assert [[one.decoded.tokens[0] for one in runs] for runs in found] == [[0] * 3, [1] * 3, [2] * 3]


def test_a_loaded_target_decodes_chain_and_tree(target: Target, tiny_store: FeatureStore) -> None:
    draft, tree = draft_of_kind(tiny_store, "eagle3"), TreeSettings(steps=3, topk=2, tokens=7)
    check = check_decoding(draft, target, tiny_store, [0, 1, 2], 3, tree=tree, max_new_tokens=12)
    assert check.tree is not None
    assert check.responses == check.chain.same_text == check.tree.same_text == 3
    assert check.plain_tokens == check.chain.tokens == check.tree.tokens == 3 * 11
    assert check.tree.cycles <= check.chain.cycles
    assert check.chain.length == 1 + check.chain.accepted / check.chain.cycles
    told = check.as_dict()
    assert (told["shape"], told["tree"]["shape"]) == ("chain of 3", "tree 3,2,7")
    assert told["draft_tokens_per_second"] == check.chain.tokens_per_second > 0
    assert told["plain_tokens_per_second"] > 0
    assert (told["temperature"], told["top_p"]) == (0.0, 1.0)
    warm = check_decoding(draft, target, tiny_store, [0], 2, temperature=0.5, sample_draft=True)
    assert (warm.temperature, warm.chain.same_text, warm.tree, warm.evaluator.draft) == (0.5, None, None, "sampled")


def test_nothing_to_decode_is_told(target: Target, tiny_store: FeatureStore) -> None:
    draft = draft_of_kind(tiny_store, "eagle3")
    with pytest.raises(ArchspecError, match="none of the 1 conversations to decode has a response of two or more"):
        check_decoding(draft, target, tiny_store, [0], 2, max_new_tokens=1)
