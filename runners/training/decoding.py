"""A plain speculative decoding loop: a draft chain, one target verification a cycle, KV caches, lossless.

It exists to check the evaluator and to measure real speed, one sequence at a time. The rule (Leviathan et al.,
arXiv 2211.17192): a drafted token x is accepted with chance min(1, p(x) / q(x)); at the first rejection the next token
is drawn from max(p - q, 0), renormalised; after k acceptances one more token is drawn from p. At temperature 0, p and q
are one-hot and the rule is "equal to the argmax". A draft that proposes greedily has a one-hot q at any temperature.
Top-p narrows p alone, as in engines (see ``runners.training.acceptance``). ``runners.training.tree`` drafts trees.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import DynamicCache

from archspec.attention import ChainCache
from archspec.modules import Draft
from runners.features.onednn import onednn_linears
from runners.features.sampling import tempered
from runners.features.target import Target

OnFirst = Callable[[], None]


def ignore() -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Decoded:
    """New token ids, an end token included, and the drafted tokens accepted in every cycle."""

    tokens: list[int]
    accepted: list[int]

    @property
    def acceptance_length(self) -> float:
        """Mean tokens won per cycle, ``mean(a) + 1``."""
        return 1.0 + sum(self.accepted) / max(1, len(self.accepted))


@dataclass(frozen=True)
class Sampler:
    """How the target's next token is chosen: the argmax at temperature 0, else a draw."""

    temperature: float = 0.0
    top_p: float = 1.0
    generator: torch.Generator | None = None

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0

    def probabilities(self, logits_RV: Tensor) -> Tensor:
        """The chances p [R, V] of what the target writes next; only above temperature 0."""
        return tempered(logits_RV, self.temperature, self.top_p).softmax(-1)

    def choose(self, logits_V: Tensor) -> int:
        """The next token."""
        return int(logits_V.argmax()) if self.greedy else self.draw(self.probabilities(logits_V))

    def draw(self, weights_V: Tensor) -> int:
        """A token, each with a chance in proportion to its weight."""
        return int(torch.multinomial(weights_V, 1, generator=self.generator))

    def happens(self, chance: Tensor) -> bool:
        """True with this chance, [] in 0 … 1."""
        return bool(torch.rand((), generator=self.generator, device=chance.device) < chance)


@torch.no_grad()
def decode_plain(
    target: Target,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
    on_first: OnFirst = ignore,
) -> list[int]:
    """The target's own continuation of ``prompt``, end token included; ``on_first`` as the first token is known."""
    cache, last, sampler = DynamicCache(), target.facts.num_layers, Sampler(temperature, top_p, generator)
    ids, tokens = torch.tensor([list(prompt)], device=target.device), list[int]()
    while len(tokens) < max_new_tokens:
        state = target.states(ids, [last], past_key_values=cache)[last][:, -1]
        tokens.append(sampler.choose(target.logits(state)[0]))
        if len(tokens) == 1:
            on_first()
        if tokens[-1] in target.eos_token_ids:
            break
        ids = torch.tensor([[tokens[-1]]], device=target.device)
    return tokens


def decode_speculative(
    target: Target,
    draft: Draft,
    prompt: Sequence[int],
    max_new_tokens: int,
    draft_length: int,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    sample_draft: bool = False,
    generator: torch.Generator | None = None,
    on_first: OnFirst = ignore,
) -> Decoded:
    """Continue ``prompt`` with ``draft_length`` drafted tokens a cycle.

    Tokens past an end token or ``max_new_tokens`` are cut, and cut tokens do not count as accepted. ``on_first`` is
    called after the target's prefill, which gives the first token.
    """
    sampler = Sampler(temperature, top_p, generator)
    chain = _Chain(Decoding(target, draft, sampler), draft_length, sample_draft and not sampler.greedy)
    return run_cycles(chain, prompt, max_new_tokens, on_first)


class Cycles(Protocol):
    """What one cycle does, and on what."""

    @property
    def decoding(self) -> "Decoding":
        """What is being decoded."""
        ...

    def cycle(self) -> list[int]:
        """Draft, verify, keep: the accepted tokens, and one more that the target chose."""
        ...


@torch.no_grad()
def run_cycles(cycles: Cycles, prompt: Sequence[int], max_new_tokens: int, on_first: OnFirst) -> Decoded:
    """Continue ``prompt`` cycle by cycle; see ``decode_speculative``."""
    ends = cycles.decoding.target.eos_token_ids
    with onednn_linears(cycles.decoding.draft):
        tokens, accepted = [cycles.decoding.begin(prompt)], list[int]()
        on_first()
        while len(tokens) < max_new_tokens and tokens[-1] not in ends:
            won = cycles.cycle()
            kept = won[: max_new_tokens - len(tokens)]
            kept = kept[: next((i + 1 for i, token in enumerate(kept) if token in ends), len(kept))]
            accepted.append(min(len(won) - 1, len(kept)))
            tokens += kept
    return Decoded(tokens, accepted)


class Decoding:
    """One sequence being decoded, as target and draft know it.

    ``tokens`` x_0 … x_n are known. The target's cache holds the rows before x_n; the draft's those whose aux states it
    has read, and the rows that are new to it wait with theirs. A draft may be without attention, so its cache cannot
    tell how many it has read.
    """

    def __init__(self, target: Target, draft: Draft, sampler: Sampler) -> None:
        self.target, self.draft, self.sampler = target, draft.eval(), sampler
        self.target_cache, self.draft_cache = DynamicCache(), ChainCache()
        self.tokens: list[int] = []
        self.rows_read = 0
        self._aux_ids, self._last_id = draft.spec.inputs.aux_layers, target.facts.num_layers
        self._new_aux = torch.empty(0)

    def begin(self, prompt: Sequence[int]) -> int:
        """Prefill; returns the first new token, which the target alone decides."""
        logits_1V, aux = self.verify(list(prompt), keep_rows=1)
        first = self.sampler.choose(logits_1V[0])
        self.tokens = list(prompt)
        self.win([first], aux)
        return first

    def read(self) -> tuple[Tensor, int]:
        """The draft's first step: it reads the rows that are new to it.

        Returns its state [1, 1, h] at the last of them, from which it proposes what follows x_n, and that row's place.
        """
        first, rows = self.rows_read, self._new_aux.shape[1]
        ids = torch.tensor([self.tokens[first + 1 : first + 1 + rows]], device=self.target.device)
        positions = torch.arange(first, first + rows, device=self.target.device)[None]
        state = self.draft(ids, self.draft.project(self._new_aux.float()), positions, self.draft_cache)[:, -1:]
        self.rows_read += rows
        return state, self.rows_read - 1

    def forget_drafted(self) -> None:
        """Drop the draft's rows of this cycle beyond those that it has read."""
        self.draft_cache.truncate(self.rows_read)

    def verify(
        self,
        ids: list[int],
        keep_rows: int,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The target's logits [keep_rows, V] at the last rows of ``ids``, and the aux states [1, R, M, h_t] of all."""
        wanted = sorted({*self._aux_ids, self._last_id})
        inputs = torch.tensor([ids], device=self.target.device)
        states = self.target.states(inputs, wanted, mask, self.target_cache, positions)
        logits = self.target.logits(states[self._last_id][0, -keep_rows:])
        return logits, torch.stack([states[layer] for layer in self._aux_ids], dim=2)

    def win(self, tokens: list[int], aux: Tensor) -> None:
        """Add tokens; ``aux`` [1, R, M, h_t] are the states of the rows that they came from."""
        self.tokens += tokens
        self._new_aux = aux


class _Chain:
    """Cycles that draft ``draft_length`` tokens, one after the other."""

    def __init__(self, decoding: Decoding, draft_length: int, sample_draft: bool) -> None:
        self.decoding, self._length, self._sample_draft = decoding, draft_length, sample_draft
        self._vocab_ids = decoding.draft.vocab_ids

    def cycle(self) -> list[int]:
        """See ``Cycles``."""
        decoding = self.decoding
        drafted, q_kV = self._propose()
        logits, aux = decoding.verify([decoding.tokens[-1], *drafted], keep_rows=len(drafted) + 1)
        a, final = self._judge(drafted, q_kV, logits)
        if a < len(drafted):
            decoding.target_cache.crop(a - len(drafted))
        won = [*drafted[:a], final]
        decoding.win(won, aux[:, : 1 + a])
        return won

    def _propose(self) -> tuple[list[int], list[Tensor]]:
        """Drafted target ids, and for sampled drafts the distributions q [V] that each was drawn from."""
        draft, decoding = self.decoding.draft, self.decoding
        state, place = decoding.read()
        drafted, distributions = list[int](), list[Tensor]()
        for step in range(self._length):
            if step:
                ids = torch.tensor([[drafted[-1]]], device=state.device)
                positions = torch.tensor([[place + step]], device=state.device)
                state = draft(ids, draft.feed_back(state), positions, decoding.draft_cache)
            logits_D = draft.logits(state)[0, 0]
            if self._sample_draft:
                distributions.append(self._distribution(logits_D))
                drafted.append(decoding.sampler.draw(distributions[-1]))
            else:
                drafted.append(int(draft.target_ids(logits_D.argmax())))
        decoding.forget_drafted()
        return drafted, distributions

    def _distribution(self, logits_D: Tensor) -> Tensor:
        """The chances q [V], over the target's vocabulary."""
        q_V = torch.zeros(self.decoding.draft.spec.target.vocab_size, device=logits_D.device)
        q_V[self._vocab_ids] = tempered(logits_D, self.decoding.sampler.temperature).softmax(-1)
        return q_V

    def _judge(self, drafted: list[int], q_kV: list[Tensor], logits_RV: Tensor) -> tuple[int, int]:
        """How many drafted tokens are accepted, and the token that follows them."""
        sampler = self.decoding.sampler
        if sampler.greedy:
            own = logits_RV.argmax(-1).tolist()
            a = next((i for i, token in enumerate(drafted) if token != own[i]), len(drafted))
            return a, own[a]
        p_RV = sampler.probabilities(logits_RV)
        for a, token in enumerate(drafted):
            p_V, chance = p_RV[a], p_RV[a, token] / (q_kV[a][token] if q_kV else 1)
            if not sampler.happens(chance):
                return a, sampler.draw((p_V - q_kV[a]).clamp_min(0) if q_kV else without(p_V, token))
        return len(drafted), sampler.draw(p_RV[-1])


def without(p_V: Tensor, token: int) -> Tensor:
    """``p`` with this token left out, not renormalised."""
    rest_V = p_V.clone()
    rest_V[token] = 0
    return rest_V
