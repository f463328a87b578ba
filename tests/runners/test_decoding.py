"""The real decoding loop: lossless, and the evaluator counts the very cycles that it runs."""

from typing import Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from archspec.attention import ChainCache
from archspec.modules import Draft
from archspec.unroll import unroll
from runners.features.capture import capture
from runners.features.chat import prompt_tokens
from runners.features.conversations import Conversation, Generation
from runners.features.store import FeatureStore
from runners.features.target import Target
from runners.training.acceptance import acceptance_chances, count_cycles
from runners.training.batches import read_batch
from runners.training.decoding import Decoded, decode_plain, decode_speculative
from runners.training.settings import EvalSettings
from tests.runners.drafts import DOCUMENTS, KINDS, draft_of_kind, tiny_spec, trained_draft
from tests.runners.sampled import assert_distributed, continuations, small_pair
from tests.runners.tiny import conversation

Floats = NDArray[np.float64]
NEW_TOKENS = 24  # of the session's own text
K = 3


@pytest.fixture(scope="module", params=KINDS)
def draft(request: pytest.FixtureRequest, tiny_store: FeatureStore) -> Draft:
    return draft_of_kind(tiny_store, request.param)


def walk(chances: Floats) -> list[int]:
    """The accepted counts of the cycles that greedy chances [rows, k] describe."""
    accepted, row = list[int](), 0
    while row < len(chances):
        accepted.append(int(np.cumprod(chances[row]).sum()))
        row += accepted[-1] + 1
    return accepted


def evaluate(
    draft: Draft, store: FeatureStore, indices: list[int], kind: Literal["greedy", "sampled"] = "greedy"
) -> dict[int, Floats]:
    return dict(acceptance_chances(draft, store, indices, EvalSettings(draft_length=K, draft=kind)))


def test_the_evaluator_counts_the_cycles_of_the_loop_one_by_one(
    target: Target, tiny_store: FeatureStore, own_text: list[Conversation], draft: Draft
) -> None:
    """On text that the target wrote greedily; and the loop writes that very text."""
    texts = {one.id: one for one in own_text}
    everything_accepted: list[int] = []
    for index, chances in evaluate(draft, tiny_store, DOCUMENTS).items():
        one = texts[tiny_store.documents[index].id]
        assert one.generation is not None
        decoded = decode_speculative(target, draft, prompt_tokens(one, target.tokenizer), NEW_TOKENS, K)
        assert decoded.tokens == list(one.generation.token_ids)
        assert decoded.accepted == walk(chances)
        counts = count_cycles(chances)
        assert (counts.cycles, counts.accepted.sum()) == (len(decoded.accepted), sum(decoded.accepted))
        everything_accepted += decoded.accepted
    assert 0 < sum(everything_accepted) < K * len(everything_accepted)


def test_a_chain_of_cached_steps_has_the_states_of_the_unrolled_forward(tiny_store: FeatureStore, draft: Draft) -> None:
    """Numbers, where acceptance sees only which is the largest: positions, windows and caches, at every start row."""
    batch = read_batch(tiny_store, [0], draft.spec.inputs.aux_layers, "cpu")
    next_tokens = batch.next_tokens
    with torch.no_grad():
        wanted = list(unroll(draft, next_tokens, batch.aux, K))
        first = draft.project(batch.aux)
        for row in range(0, next_tokens.shape[1] - K, 5):
            rows, cache = slice(0, row + 1), ChainCache()
            state = draft(next_tokens[:, rows], first[:, rows], torch.arange(row + 1)[None], cache)[:, -1:]
            torch.testing.assert_close(state[:, 0], wanted[0][:, row])
            for step in range(1, K):
                token, position = next_tokens[:, row + step, None], torch.tensor([[row + step]])
                state = draft(token, draft.feed_back(state), position, cache)
                torch.testing.assert_close(state[:, 0], wanted[step][:, row], rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def simple(tiny_store: FeatureStore) -> Draft:
    return trained_draft(tiny_store, tiny_spec(tiny_store.facts))


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("new_tokens", [1, 2, 13])
def test_greedy_speculation_writes_what_plain_decoding_writes(
    target: Target, simple: Draft, k: int, new_tokens: int
) -> None:
    for text in ("word " * 2, "another prompt"):
        prompt = prompt_tokens(conversation(text), target.tokenizer)
        plain = decode_plain(target, prompt, new_tokens)
        decoded = decode_speculative(target, simple, prompt, new_tokens, k)
        assert decoded.tokens == plain
        assert len(decoded.tokens) <= new_tokens
        won = 1 + len(decoded.accepted) + sum(decoded.accepted)
        assert len(decoded.tokens) <= won <= len(decoded.tokens) + 1  # the last bonus token may have been cut


def test_tokens_that_are_cut_off_do_not_count_as_accepted(
    target: Target, own_text: list[Conversation], simple: Draft
) -> None:
    """Stop one token into a chain of which two or more were accepted."""
    cut = 0
    for one in own_text:
        prompt = prompt_tokens(one, target.tokenizer)
        full = decode_speculative(target, simple, prompt, NEW_TOKENS, K)
        start = 1
        for cycle, a in enumerate(full.accepted):
            if a >= 2 and cut < 5:
                cut += 1
                decoded = decode_speculative(target, simple, prompt, start + 1, K)
                assert decoded == Decoded(full.tokens[: start + 1], [*full.accepted[:cycle], 1])
            start += a + 1
    assert cut > 0


def test_plain_decoding_writes_what_generation_writes(target: Target, own_text: list[Conversation]) -> None:
    for one in own_text[:3]:
        assert one.generation is not None
        plain = decode_plain(target, prompt_tokens(one, target.tokenizer), NEW_TOKENS)
        assert plain == list(one.generation.token_ids)


def test_an_end_token_ends_the_text_wherever_it_is_drafted(target: Target, simple: Draft) -> None:
    """Any token can be made the end: the loop stops at its first one and counts only what lies before."""
    prompt = prompt_tokens(conversation("word " * 3), target.tokenizer)
    full = decode_speculative(target, simple, prompt, 20, K)
    cuts = set()
    for end in dict.fromkeys(full.tokens):
        other = Target(target.model, target.tokenizer, "other")
        other.eos_token_ids = frozenset({end})
        decoded = decode_speculative(other, simple, prompt, 20, K)
        length = full.tokens.index(end) + 1
        assert decoded.tokens == full.tokens[:length]
        assert decoded.tokens == decode_plain(other, prompt, 20)
        won = 1 + len(decoded.accepted) + sum(decoded.accepted)
        assert length <= won <= length + 1
        cuts.add(won - length)
    assert cuts == {0, 1}  # ends that were a bonus token, and ends that were drafted


def test_acceptance_length_of_a_text() -> None:
    assert Decoded([1, 2, 3, 4], [0, 2, 1]).acceptance_length == 2.0
    assert Decoded([1], []).acceptance_length == 1.0


# Sampling


@pytest.mark.parametrize("top_p", [1.0, 0.7])
@pytest.mark.parametrize("sample_draft", [False, True], ids=["greedy draft", "sampled draft"])
def test_sampled_speculation_keeps_the_targets_distribution(sample_draft: bool, top_p: float) -> None:
    target, draft = small_pair()
    prompt, random = [0, 1, 2], torch.Generator().manual_seed(0)
    texts, accepted = list[list[int]](), 0
    for _ in range(200):
        one = decode_speculative(
            target, draft, prompt, 3, 2, temperature=1.0, top_p=top_p, sample_draft=sample_draft, generator=random
        )
        texts.append(one.tokens)
        accepted += sum(one.accepted)
    assert accepted > 10
    assert_distributed(texts, continuations(target, prompt, 3, 1.0, top_p))


def test_plain_sampling_has_the_distribution_that_the_others_keep() -> None:
    target, _ = small_pair()
    prompt, random = [0, 1, 2], torch.Generator().manual_seed(0)
    texts = [decode_plain(target, prompt, 3, temperature=1.3, top_p=0.8, generator=random) for _ in range(200)]
    assert_distributed(texts, continuations(target, prompt, 3, 1.3, 0.8))


TEMPERATURE = 0.2


@pytest.fixture(scope="module")
def sampled(
    request: pytest.FixtureRequest, target: Target, simple: Draft, tmp_path_factory: pytest.TempPathFactory
) -> tuple[FeatureStore, dict[str, Decoded]]:
    """Text that the loop sampled with (drafts that are drawn, top-p), and how it was accepted."""
    sample_draft, top_p = request.param
    generator = torch.Generator().manual_seed(4)
    texts, decoded = list[Conversation](), dict[str, Decoded]()
    for number in range(40):
        prompt = conversation("word " * (1 + number % 5), name=f"{number}")
        result = decode_speculative(
            target,
            simple,
            prompt_tokens(prompt, target.tokenizer),
            16,
            K,
            temperature=TEMPERATURE,
            top_p=top_p,
            sample_draft=sample_draft,
            generator=generator,
        )
        ids, told = tuple(result.tokens), {"temperature": TEMPERATURE, "top_p": top_p, "finished": False}
        generation = Generation.model_validate({"token_ids": ids, "target": target.fingerprint, **told})
        decoded[prompt.id] = result
        texts.append(prompt.model_copy(update={"generation": generation}))
    out = tmp_path_factory.mktemp("sampled") / "store"
    return capture(target, texts, [0, 1, 2, 3], out, "float32", 256, 1000, 3000), decoded


@pytest.mark.parametrize("sampled", [(False, 1.0)], indirect=True, ids=["greedy draft"])
def test_greedy_drafts_of_sampled_text_are_counted_one_by_one_too(
    sampled: tuple[FeatureStore, dict[str, Decoded]], simple: Draft
) -> None:
    """The loop accepts a one-hot draft just where the text has that token, whatever was drawn."""
    store, decoded = sampled
    assert store.manifest.temperature == TEMPERATURE
    for index, chances in evaluate(simple, store, list(range(40))).items():
        assert decoded[store.documents[index].id].accepted == walk(chances)
    assert sum(sum(one.accepted) for one in decoded.values()) > 40


@pytest.mark.parametrize("sampled", [(True, 1.0), (True, 0.8)], indirect=True, ids=["all", "top-p"])
def test_sampled_drafts_are_accepted_as_often_as_the_evaluator_expects(
    sampled: tuple[FeatureStore, dict[str, Decoded]], simple: Draft
) -> None:
    """Given the text, cycles and accepted tokens are random; their expectations must fit within standard errors."""
    store, decoded = sampled
    gaps, expected = list[list[float]](), list[float]()
    for index, chances in evaluate(simple, store, list(range(40)), "sampled").items():
        counts, found = count_cycles(chances), decoded[store.documents[index].id].accepted
        gaps.append([len(found) - counts.cycles, sum(found) - counts.accepted.sum()])
        expected.append(float(counts.accepted.sum()))
    mean, error = np.mean(gaps, axis=0), np.std(gaps, axis=0, ddof=1) / np.sqrt(len(gaps))
    assert np.all(np.abs(mean) < 3.5 * error)
    assert error[1] < np.mean(expected) / 8  # the comparison is sharp enough to mean something
