"""A plain speculative decoding loop: a draft chain, one target verification a cycle, KV caches, lossless.

It exists to check the evaluator and to measure real speed, one sequence at a time. The rule (Leviathan et al.,
arXiv 2211.17192): a drafted token x is accepted with chance min(1, p(x) / q(x)); at the first rejection the next token
is drawn from max(p - q, 0), renormalised; after k acceptances one more token is drawn from p. At temperature 0, p and q
are one-hot and the rule is "equal to the argmax". A draft that proposes greedily has a one-hot q at any temperature.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache

from archspec.attention import ChainCache
from archspec.modules import Draft
from runners.features.target import Target


@dataclass(frozen=True)
class Decoded:
    """New token ids, an end token included, and the drafted tokens accepted in every cycle."""

    tokens: list[int]
    accepted: list[int]

    @property
    def acceptance_length(self) -> float:
        """Mean tokens won per cycle, ``mean(a) + 1``."""
        return 1.0 + sum(self.accepted) / max(1, len(self.accepted))


@torch.no_grad()
def decode_plain(target: Target, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """The target's own greedy continuation of ``prompt``, end token included."""
    cache, last = DynamicCache(), target.facts.num_layers
    ids, tokens = torch.tensor([list(prompt)], device=target.device), list[int]()
    while len(tokens) < max_new_tokens:
        state = target.states(ids, [last], past_key_values=cache)[last][:, -1]
        tokens.append(int(target.logits(state).argmax()))
        if tokens[-1] in target.eos_token_ids:
            break
        ids = torch.tensor([[tokens[-1]]], device=target.device)
    return tokens


@torch.no_grad()
def decode_speculative(
    target: Target,
    draft: Draft,
    prompt: Sequence[int],
    max_new_tokens: int,
    draft_length: int,
    *,
    temperature: float = 0.0,
    sample_draft: bool = False,
    generator: torch.Generator | None = None,
) -> Decoded:
    """Continue ``prompt`` with ``draft_length`` drafted tokens a cycle.

    Tokens past an end token or ``max_new_tokens`` are cut, and cut tokens do not count as accepted.
    """
    loop = _Loop(target, draft.eval(), temperature, sample_draft, generator)
    tokens = [loop.begin(prompt)]
    accepted: list[int] = []
    while len(tokens) < max_new_tokens and tokens[-1] not in target.eos_token_ids:
        won = loop.cycle(draft_length)[: max_new_tokens - len(tokens)]
        ends = [i for i, token in enumerate(won) if token in target.eos_token_ids]
        kept = won[: ends[0] + 1] if ends else won
        accepted.append(min(loop.last_accepted, len(kept)))
        tokens += kept
    return Decoded(tokens, accepted)


class _Loop:
    """One sequence being decoded. ``tokens`` x_0 … x_n are known; the caches hold the rows before x_n."""

    def __init__(
        self, target: Target, draft: Draft, temperature: float, sample_draft: bool, generator: torch.Generator | None
    ) -> None:
        self._target, self._draft, self._temperature = target, draft, temperature
        self._sample_draft, self._generator = sample_draft, generator
        self._aux_ids, self._last_id = draft.spec.inputs.aux_layers, target.facts.num_layers
        self._target_cache, self._draft_cache = DynamicCache(), ChainCache()
        self._vocab_ids = draft.vocab_ids
        self._tokens: list[int] = []
        self._new_aux = torch.empty(0)
        self._rows = 0  # rows that the draft has read; its cache cannot tell, for a draft may be without attention
        self.last_accepted = 0

    def begin(self, prompt: Sequence[int]) -> int:
        """Prefill; returns the first new token, which the target alone decides."""
        p_1V, self._new_aux = self._verify(list(prompt), keep_rows=1)
        first = self._draw(p_1V[0])
        self._tokens = [*prompt, first]
        return first

    def cycle(self, draft_length: int) -> list[int]:
        """Draft, verify, keep what is accepted and one token more; returns the new tokens."""
        drafted, q_kV = self._propose(draft_length)
        p_kV, aux = self._verify([self._tokens[-1], *drafted], keep_rows=draft_length + 1)
        a = 0
        while a < draft_length and self._accepts(p_kV[a], q_kV[a], drafted[a]):
            a += 1
        final = self._draw(p_kV[a] if a == draft_length else (p_kV[a] - q_kV[a]).clamp_min(0))
        if a < draft_length:
            self._target_cache.crop(a - draft_length)
        self._new_aux = aux[:, : 1 + a]
        won = [*drafted[:a], final]
        self._tokens += won
        self.last_accepted = a
        return won

    def _propose(self, k: int) -> tuple[list[int], Tensor]:
        """Return k drafted target ids and the distributions q [k, V] that they were drawn from."""
        first, rows = self._rows, self._new_aux.shape[1]
        ids = torch.tensor([self._tokens[first + 1 : first + 1 + rows]], device=self._target.device)
        u = self._draft.project(self._new_aux.float())
        positions = torch.arange(first, first + rows, device=self._target.device)[None]
        drafted, distributions = list[int](), list[Tensor]()
        for step in range(k):
            state = self._draft(ids, u, positions, self._draft_cache)[:, -1:]
            q = self._distribution_of_draft(self._draft.logits(state)[0, 0])
            drafted.append(self._draw(q))
            distributions.append(q)
            if step == 0:
                positions = positions[:, -1:]
            ids, u, positions = ids.new_tensor([[drafted[-1]]]), self._draft.feed_back(state), positions + 1
        self._rows = first + rows
        self._draft_cache.truncate(self._rows)
        return drafted, torch.stack(distributions)

    def _verify(self, ids: list[int], keep_rows: int) -> tuple[Tensor, Tensor]:
        """The target's distributions p [keep_rows, V] after the last rows of ``ids``, and the aux states of all."""
        wanted = {*self._aux_ids, self._last_id}
        states = self._target.states(
            torch.tensor([ids], device=self._target.device), sorted(wanted), past_key_values=self._target_cache
        )
        logits = self._target.logits(states[self._last_id][0, -keep_rows:])
        aux = torch.stack([states[layer] for layer in self._aux_ids], dim=2)
        return self._distribution(logits), aux

    def _distribution(self, logits_RV: Tensor) -> Tensor:
        if self._temperature == 0:
            return _one_hot(logits_RV.argmax(-1), logits_RV.shape[-1])
        return (logits_RV.float() / self._temperature).softmax(-1)

    def _distribution_of_draft(self, logits_D: Tensor) -> Tensor:
        """Return q over the target's vocabulary."""
        size = self._draft.spec.target.vocab_size
        if self._temperature == 0 or not self._sample_draft:
            return _one_hot(self._vocab_ids[logits_D.argmax()], size)
        q_V = torch.zeros(size, device=logits_D.device)
        q_V[self._vocab_ids] = (logits_D.float() / self._temperature).softmax(-1)
        return q_V

    def _accepts(self, p_V: Tensor, q_V: Tensor, token: int) -> bool:
        if self._temperature == 0:
            return bool(p_V[token] > 0)
        chance = torch.rand((), generator=self._generator, device=p_V.device)
        return bool(chance * q_V[token] < p_V[token])

    def _draw(self, weights_V: Tensor) -> int:
        if self._temperature == 0:
            return int(weights_V.argmax())
        return int(torch.multinomial(weights_V, 1, generator=self._generator))


def _one_hot(ids: Tensor, size: int) -> Tensor:
    return torch.nn.functional.one_hot(ids, size).float()
