"""Acceptance from one forward: chains written out by hand, enumerated by brute force, and bookkeeping around them."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from archspec.errors import ArchspecError
from archspec.modules import Draft
from archspec.unroll import unroll
from runners.features.capture import capture
from runners.features.store import FeatureStore
from runners.features.target import Target
from runners.training.acceptance import Counts, _bootstrap, acceptance_chances, count_cycles, measure_acceptance, spans
from runners.training.batches import read_batch
from runners.training.settings import EvalSettings
from tests.runners.drafts import everything, tiny_spec, trained_draft
from tests.runners.tiny import conversation

Floats = NDArray[np.float64]
K = 3


def chances(*rows: str) -> Floats:
    """One row of a response for each word; 1 where that step's token is right."""
    return np.array([[float(character) for character in row] for row in rows])


def greedy(response_rows: Floats) -> tuple[float, list[float], list[float]]:
    counts = count_cycles(response_rows)
    return counts.cycles, counts.reached.tolist(), counts.accepted.tolist()


# Each case: the rows at which cycles start, marked >, and what they accept.


def test_nothing_is_right() -> None:
    # >000 >000 >000: a cycle at every row
    assert greedy(chances("000", "000", "000")) == (3, [3, 0, 0], [0, 0, 0])


def test_a_chain_jumps_over_what_it_accepted() -> None:
    # >110  111  000 >010 >100: 2 accepted, on to row 3; 0 there, its right second step does not count; then 1
    assert greedy(chances("110", "111", "000", "010", "100")) == (3, [3, 2, 1], [2, 1, 0])


def test_a_full_chain_wins_k_and_a_bonus_token() -> None:
    # >111 111 111 111 >000
    assert greedy(chances("111", "111", "111", "111", "000")) == (2, [2, 1, 1], [1, 1, 1])


def test_a_chain_that_ends_at_the_last_token_leaves_no_cycle() -> None:
    # >110 and the response is over
    assert greedy(chances("110", "100")) == (1, [1, 1, 1], [1, 1, 0])


def test_one_draft_token_a_cycle() -> None:
    # >1 1 >0 >1
    assert greedy(chances("1", "1", "0", "1")) == (3, [3], [2])


def brute_force(r: Floats) -> tuple[float, Floats, Floats]:
    """Every outcome of accepting or not at every (row, step), each walked as an engine would walk it."""
    rows, k = r.shape
    cycles, reached, accepted = 0.0, np.zeros(k), np.zeros(k)
    for outcome in itertools.product((0, 1), repeat=rows * k):
        hits = np.array(outcome).reshape(rows, k)
        weight = float(np.prod(np.where(hits == 1, r, 1 - r)))
        row = 0
        while weight and row < rows:
            a = int(np.cumprod(hits[row]).sum())
            cycles += weight
            reached[: a + 1] += weight
            accepted[:a] += weight
            row += a + 1
    return cycles, reached, accepted


@pytest.mark.parametrize(("rows", "k"), [(4, 2), (3, 3), (6, 1), (2, 4)])
def test_sampled_chances_equal_every_outcome_weighed(rows: int, k: int) -> None:
    r = np.random.default_rng(rows).random((rows, k))
    counts = count_cycles(r)
    cycles, reached, accepted = brute_force(r)
    assert counts.cycles == pytest.approx(cycles)
    np.testing.assert_allclose(counts.reached, reached)
    np.testing.assert_allclose(counts.accepted, accepted)


def test_every_token_but_the_last_rows_overshoot_is_won_once() -> None:
    """Cycles and accepted tokens add up to the response: each row is a cycle's start or an accepted token."""
    r = np.random.default_rng(0).random((20, K))
    r = np.where(np.arange(20)[:, None] + np.arange(K)[None, :] < 20, r, 0.0)
    counts = count_cycles(r)
    won = counts.cycles + counts.accepted.sum()
    assert 20 <= won <= 21  # the very last cycle may or may not have had room for its bonus token


def test_spans_of_several_responses() -> None:
    mask = torch.tensor([0, 0, 1, 1, 0, 1, 0, 1, 1], dtype=torch.bool)
    assert spans(mask) == [(2, 4), (5, 6), (7, 9)]
    assert spans(torch.zeros(4, dtype=torch.bool)) == []
    assert spans(torch.ones(4, dtype=torch.bool)) == [(1, 4)]
    assert spans(torch.tensor([True, False, True])) == [(2, 3)]


@pytest.fixture(scope="module")
def draft(tiny_store: FeatureStore) -> Draft:
    return trained_draft(tiny_store, tiny_spec(tiny_store.facts))


def settings(**changes: object) -> EvalSettings:
    return EvalSettings.model_validate({"draft_length": K, "bootstrap": 200, **changes})


def wanted_matches(draft: Draft, store: FeatureStore, index: int, k: int) -> Tensor:
    """[T, k] by the definition: are the argmaxes of row t at steps 0 … s the response tokens x_{t+2} … x_{t+2+s}?"""
    batch = read_batch(store, [index], draft.spec.inputs.aux_layers, "cpu")
    tokens, mask = batch.tokens[0], batch.response_mask[0]
    result = torch.zeros(len(tokens), k)
    with torch.no_grad():
        for step, state in enumerate(unroll(draft, batch.next_tokens, batch.aux, k)):
            proposed = draft.target_ids(draft.logits(state).argmax(-1))[0]
            for t in range(len(tokens) - 2 - step):
                result[t, step] = float(proposed[t] == tokens[t + 2 + step] and mask[t + 2 + step])
    return result.cumprod(1)


def test_rows_of_a_response_are_those_before_its_tokens(tiny_store: FeatureStore, draft: Draft) -> None:
    found = dict(acceptance_chances(draft, tiny_store, everything(tiny_store), settings()))
    assert set(found) == set(everything(tiny_store))
    for index, rows in found.items():
        ((first, end),) = spans(tiny_store.read(index, []).response_mask)
        wanted = wanted_matches(draft, tiny_store, index, K)[first - 1 : end - 2]
        np.testing.assert_array_equal(rows, wanted.numpy())
    assert 0.1 < np.concatenate(list(found.values())).mean() < 0.95  # right often and wrong often


def test_nothing_is_accepted_beyond_the_end_of_a_response(tiny_store: FeatureStore, draft: Draft) -> None:
    for _, rows in acceptance_chances(draft, tiny_store, everything(tiny_store), settings(draft_length=5)):
        for back in range(1, min(5, len(rows) + 1)):
            assert not rows[len(rows) - back, back:].any()


def test_sampled_chances_are_q_over_p_inside_a_response_and_zero_beyond(multi_turn: FeatureStore, draft: Draft) -> None:
    """By the definition, token by token; the text's temperature is unknown and counts as 1.

    Chains of 50 tokens reach into the next answer, which is no part of theirs.
    """
    k = 50
    found = acceptance_chances(draft, multi_turn, [0], settings(draft="sampled", draft_length=k))
    batch = read_batch(multi_turn, [0], draft.spec.inputs.aux_layers, "cpu")
    tokens, weights = batch.tokens[0], multi_turn.weights()
    p = weights.logits(batch.last[0]).softmax(-1)
    with torch.no_grad():
        q = [draft.logits(state)[0].softmax(-1) for state in unroll(draft, batch.next_tokens, batch.aux, k)]
    runs = [(first, end) for first, end in spans(batch.response_mask[0]) if end - first > 1]
    for (first, end), (_, rows) in zip(runs, found, strict=True):
        for row, step in itertools.product(range(end - first - 1), range(k)):
            t, token = first - 1 + row, int(tokens[min(first + 1 + row + step, len(tokens) - 1)])
            inside = t + 2 + step < end
            wanted = min(1.0, float(q[step][t, token] / p[t + 1 + step, token])) if inside else 0.0
            assert rows[row, step] == pytest.approx(wanted, rel=1e-4)


def test_batches_change_nothing(tiny_store: FeatureStore, draft: Draft) -> None:
    alone = measure_acceptance(draft, tiny_store, everything(tiny_store), settings(batch_tokens=1))
    together = measure_acceptance(draft, tiny_store, everything(tiny_store), settings(batch_tokens=100_000))
    assert alone == together


@pytest.fixture(scope="module")
def multi_turn(target: Target, tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    """Given text with two and three answers, some of a single token or two."""
    texts = [
        conversation("one", "word word word", "two", "word word", name="a", category="chat"),
        conversation("one", "a", "two", "", "three", "word word word word", name="b"),
    ]
    return capture(target, texts, [0, 1, 2, 3], tmp_path_factory.mktemp("turns") / "store", "float32", 256, 400, 300)


def test_every_answer_of_a_conversation_is_a_chain_of_its_own(multi_turn: FeatureStore, draft: Draft) -> None:
    found = acceptance_chances(draft, multi_turn, [0, 1], settings())
    for index in (0, 1):
        runs = [(first, end) for first, end in spans(multi_turn.read(index, []).response_mask) if end - first > 1]
        assert len(runs) == 2  # an empty answer is its end token alone and offers nothing to draft
        matches = wanted_matches(draft, multi_turn, index, K)
        for (first, end), rows in zip(runs, [rows for at, rows in found if at == index], strict=True):
            inside = matches[first - 1 : end - 2].numpy()
            ends = np.arange(len(inside))[:, None] + np.arange(K)[None, :] < len(inside)
            np.testing.assert_array_equal(rows, inside * ends)  # the next answer's tokens belong to another chain


def test_foreign_text_is_told(multi_turn: FeatureStore, tiny_store: FeatureStore, draft: Draft) -> None:
    assert measure_acceptance(draft, tiny_store, [0, 1], settings()).own_text
    assert not measure_acceptance(draft, multi_turn, [0, 1], settings()).own_text


def test_figures_agree_with_each_other(tiny_store: FeatureStore, draft: Draft) -> None:
    indices = everything(tiny_store)
    found = measure_acceptance(draft, tiny_store, indices, settings())
    assert found.length == pytest.approx(1 + sum(found.per_position))
    assert found.rate == pytest.approx((found.length - 1) / K)
    assert found.per_position == pytest.approx(np.cumprod(found.conditional))
    assert found.length_by_k[-1] == pytest.approx(found.length)
    assert list(found.length_by_k) == sorted(found.length_by_k)
    for k in range(1, K + 1):
        shorter = measure_acceptance(draft, tiny_store, indices, settings(draft_length=k))
        assert found.length_by_k[k - 1] == pytest.approx(shorter.length)
    assert found.conversations == len(indices)
    assert found.response_tokens == tiny_store.manifest.response_tokens
    groups = found.by_category
    assert set(groups) == {"chat", "code"}
    assert sum(group["conversations"] for group in groups.values()) == len(indices)
    assert sum(group["cycles"] for group in groups.values()) == pytest.approx(found.cycles)
    pooled = sum(group["length"] * group["cycles"] for group in groups.values()) / found.cycles
    assert pooled == pytest.approx(found.length)


def test_averages_are_over_cycles_and_not_over_conversations(tiny_store: FeatureStore, draft: Draft) -> None:
    indices = everything(tiny_store)
    counts = [count_cycles(rows) for _, rows in acceptance_chances(draft, tiny_store, indices, settings())]
    total = sum(counts, Counts.zero(K))
    found = measure_acceptance(draft, tiny_store, indices, settings())
    assert found.length == pytest.approx(1 + total.accepted.sum() / total.cycles)
    each = float(np.mean([1 + one.accepted.sum() / one.cycles for one in counts]))
    assert abs(each - found.length) > 1e-3


def test_the_interval_holds_the_length_repeats_itself_and_widens_with_confidence(
    tiny_store: FeatureStore, draft: Draft
) -> None:
    indices = everything(tiny_store)
    found = measure_acceptance(draft, tiny_store, indices, settings(bootstrap=2000))
    assert found.low < found.length < found.high
    assert measure_acceptance(draft, tiny_store, indices, settings(bootstrap=2000)) == found
    narrow = measure_acceptance(draft, tiny_store, indices, settings(bootstrap=2000, confidence=0.5))
    assert found.low < narrow.low < found.length < narrow.high < found.high
    one = measure_acceptance(draft, tiny_store, [0], settings())
    assert one.low == one.length == one.high


def test_the_interval_covers_the_true_length_about_as_often_as_it_says() -> None:
    """Conversations drawn from a known population; 200 intervals at 90 % miss it in 20 cases, give or take 4 x 4.2."""
    generator = np.random.default_rng(5)
    rates = np.array([0.2, 0.5, 0.8])
    truth = 1 + rates.mean()  # every conversation has 30 cycles of one drafted token
    covered = 0
    for _ in range(200):
        accepted = generator.binomial(30, generator.choice(rates, size=60))
        counts = [Counts(30.0, np.array([30.0]), np.array([float(a)])) for a in accepted]
        low, high = _bootstrap(counts, settings(draft_length=1, bootstrap=300, confidence=0.9))
        covered += low <= truth <= high
    assert covered / 200 == pytest.approx(0.9, abs=4 * math.sqrt(0.9 * 0.1 / 200))


def test_text_without_room_for_a_draft_is_told(target: Target, tmp_path: Path) -> None:
    short = [conversation("one", "", name="short"), conversation("two", "", name="empty")]
    store = capture(target, short, [1, 2, 3], tmp_path / "store", "float32", 256, 400, 300)
    draft = trained_draft(store, tiny_spec(store.facts), tokens=1)
    with pytest.raises(ArchspecError, match="no held-out conversation has a response of two or more tokens"):
        measure_acceptance(draft, store, [0, 1], settings())


def test_a_reduced_vocabulary_never_accepts_what_it_lacks(tiny_store: FeatureStore) -> None:
    spec = tiny_spec(tiny_store.facts, changes={"head.vocab_size": 12})
    draft = trained_draft(tiny_store, spec, tokens=2000)
    has = set(draft.vocab_ids.tolist())
    lacking = 0
    for index, rows in acceptance_chances(draft, tiny_store, everything(tiny_store), settings()):
        features = tiny_store.read(index, [])
        ((first, _),) = spans(features.response_mask)
        for row in range(len(rows)):
            if int(features.tokens[first + 1 + row]) not in has:
                lacking += 1
                assert rows[row, 0] == 0
    assert lacking > 0


def test_on_greedy_text_a_sampled_draft_is_a_greedy_one(tiny_store: FeatureStore, draft: Draft) -> None:
    """At temperature 0 an engine draws no draft at random; the decoding loop does not either."""
    greedily = acceptance_chances(draft, tiny_store, [0, 1], settings())
    sampled = acceptance_chances(draft, tiny_store, [0, 1], settings(draft="sampled"))
    for (_, ours), (_, theirs) in zip(greedily, sampled, strict=True):
        np.testing.assert_array_equal(ours, theirs)
