"""The real decoding loop: lossless, and the evaluator counts the very cycles that it runs."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from archspec.attention import ChainCache
from archspec.builder import adopt_target, build_draft
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
from tests.runners.drafts import tiny_spec, trained_draft
from tests.runners.tiny import conversation, tiny_config, tiny_model, tiny_tokenizer

Floats = NDArray[np.float64]
NEW_TOKENS = 24  # of the session's own text
K = 3
DOCUMENTS = [0, 1, 2, 3, 4]

# One draft of every kind that changes what a decoding step reads: (preset, changes).
DRAFTS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "eagle3": ("eagle3", {}),
    "reduced vocabulary": ("eagle3", {"head.vocab_size": 40}),
    "window": ("eagle3", {"layers.0.attention.window": 4}),
    "two windows": ("eagle3", {"depth": 2, "layers.0.attention.window": 2, "layers.1.attention.window": 5}),
    "own hidden size": ("eagle3", {"hidden_size": 20, "embedding": "trained"}),
    "fused once": ("eagle3-deep-fused-once", {"depth": 2}),
    "fused in every layer": ("eagle3-deep-fused-every-layer", {"depth": 2}),
    "wide stream": ("eagle3-wide-stream", {}),
    "post_norm feedback": ("eagle3.1", {}),
    "eagle1": ("eagle1", {}),
    "no attention": ("eagle3", {"layers.0.fusion": "project", "layers.0.attention": "none"}),
    "attention in the second layer alone": (
        "eagle3",
        {"depth": 2, "layers.0.fusion": "project", "layers.0.attention": "none"},
    ),
}


@pytest.fixture(scope="module", params=DRAFTS)
def draft(request: pytest.FixtureRequest, tiny_store: FeatureStore) -> Draft:
    preset, changes = DRAFTS[request.param]
    return trained_draft(tiny_store, tiny_spec(tiny_store.facts, preset, changes), indices=DOCUMENTS)


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


# Sampling: a target of five tokens, so that whole continuations can be counted.


@pytest.fixture(scope="module")
def small() -> tuple[Target, Draft]:
    """One layer, five tokens of which none ends; and a draft whose distributions are far from the target's."""
    config = tiny_config(
        vocab_size=5, hidden_size=16, num_hidden_layers=1, intermediate_size=16, eos_token_id=None, bos_token_id=None
    )
    target = Target(tiny_model(config, seed=3), tiny_tokenizer(), "small")
    target.eos_token_ids = frozenset()
    torch.manual_seed(1)
    draft = build_draft(tiny_spec(target.facts, changes={"inputs.aux_layers": [0, 1]}))
    adopt_target(draft, target.weights, None)
    with torch.no_grad():
        draft.lm_head.weight.mul_(2.0)  # surer than the target, and of other tokens
    return target, draft


def continuations(target: Target, prompt: list[int], length: int, temperature: float) -> dict[tuple[int, ...], float]:
    """The target's own probability of every continuation of ``length`` tokens."""
    result: dict[tuple[int, ...], float] = {(): 1.0}
    last = target.facts.num_layers
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for tokens, chance in result.items():
            state = target.states(torch.tensor([[*prompt, *tokens]]), [last])[last][0, -1]
            p = (target.logits(state) / temperature).softmax(-1).tolist()
            longer.update({(*tokens, token): chance * p[token] for token in range(len(p))})
        result = longer
    return result


@pytest.mark.parametrize("sample_draft", [False, True], ids=["greedy draft", "sampled draft"])
def test_sampled_speculation_keeps_the_targets_distribution(small: tuple[Target, Draft], sample_draft: bool) -> None:
    """Chi-square over all 125 continuations of three tokens; the seed is fixed, the bound is at p = 1e-4."""
    target, draft = small
    prompt, runs = [0, 1, 2], 400
    generator = torch.Generator().manual_seed(0)
    found: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for _ in range(runs):
        decoded = decode_speculative(
            target, draft, prompt, 3, 2, temperature=1.0, sample_draft=sample_draft, generator=generator
        )
        found[tuple(decoded.tokens)] += 1
        accepted += sum(decoded.accepted)
    assert accepted > runs / 20
    wanted = {tokens: runs * chance for tokens, chance in continuations(target, prompt, 3, 1.0).items()}
    common = [tokens for tokens, count in wanted.items() if count >= 5]
    pairs = [(found[tokens], wanted[tokens]) for tokens in common]
    pairs.append((runs - sum(count for count, _ in pairs), runs - sum(count for _, count in pairs)))
    chi_square = sum((count - expected) ** 2 / expected for count, expected in pairs)
    degrees = len(pairs) - 1
    assert degrees > 10
    assert chi_square < degrees + 3.72 * np.sqrt(2 * degrees)


TEMPERATURE = 0.2


@pytest.fixture(scope="module")
def sampled(
    request: pytest.FixtureRequest, target: Target, simple: Draft, tmp_path_factory: pytest.TempPathFactory
) -> tuple[FeatureStore, dict[str, Decoded]]:
    """Text that the loop sampled with drafts that are drawn (True) or not (False), and how it was accepted."""
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
            sample_draft=request.param,
            generator=generator,
        )
        generation = Generation(
            token_ids=tuple(result.tokens), target=target.fingerprint, temperature=TEMPERATURE, finished=False
        )
        decoded[prompt.id] = result
        texts.append(prompt.model_copy(update={"generation": generation}))
    out = tmp_path_factory.mktemp("sampled") / "store"
    return capture(target, texts, [0, 1, 2, 3], out, "float32", 256, 1000, 3000), decoded


@pytest.mark.parametrize("sampled", [False], indirect=True, ids=["greedy draft"])
def test_greedy_drafts_of_sampled_text_are_counted_one_by_one_too(
    sampled: tuple[FeatureStore, dict[str, Decoded]], simple: Draft
) -> None:
    """The loop accepts a one-hot draft just where the text has that token, whatever was drawn."""
    store, decoded = sampled
    assert store.manifest.temperature == TEMPERATURE
    for index, chances in evaluate(simple, store, list(range(40))).items():
        assert decoded[store.documents[index].id].accepted == walk(chances)
    assert sum(sum(one.accepted) for one in decoded.values()) > 50


@pytest.mark.parametrize("sampled", [True], indirect=True, ids=["sampled draft"])
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
