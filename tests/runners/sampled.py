"""Sampling that can be counted: a target of a few tokens, every continuation of it, a chi-square over them.

And decoding without chance: every random decision is taken both ways, so that the loop's distribution is known exactly.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch

from archspec.builder import adopt_target, build_draft
from archspec.modules import Draft
from runners.features.target import Target
from runners.training.decoding import Cycles, Decoding, Sampler, ignore, run_cycles
from tests.runners.drafts import tiny_spec
from tests.runners.tiny import tiny_config, tiny_model, tiny_tokenizer


@cache
def small_pair(tokens: int = 5, drafted: int | None = None) -> tuple[Target, Draft]:
    """One layer, a few tokens of which none ends; and a draft whose distributions are far from the target's.

    It drafts the last ``drafted`` of them, or all.
    """
    config = tiny_config(
        vocab_size=tokens,
        hidden_size=16,
        num_hidden_layers=1,
        intermediate_size=16,
        eos_token_id=None,
        bos_token_id=None,
    )
    target = Target(tiny_model(config, seed=3), tiny_tokenizer(), "small")
    target.eos_token_ids = frozenset()
    torch.manual_seed(1)
    reduced = {} if drafted is None else {"head.vocab_size": drafted}
    draft = build_draft(tiny_spec(target.facts, changes={"inputs.aux_layers": [0, 1], **reduced}))
    adopt_target(draft, target.weights, None if drafted is None else torch.arange(tokens - drafted, tokens))
    with torch.no_grad():
        draft.lm_head.weight.mul_(2.0)  # surer than the target, and of other tokens
    return target, draft


def nucleus(p: Sequence[float], top_p: float) -> list[float]:
    """Top-p by its definition: the likeliest tokens until they have ``top_p`` together, renormalised."""
    kept, total = [0.0] * len(p), 0.0
    for token in sorted(range(len(p)), key=lambda token: -p[token]):
        if total >= top_p:
            break
        kept[token], total = p[token], total + p[token]
    return [chance / total for chance in kept]


def continuations(
    target: Target, prompt: list[int], length: int, temperature: float, top_p: float = 1.0
) -> dict[tuple[int, ...], float]:
    """The target's own probability of every continuation of ``length`` tokens."""
    result: dict[tuple[int, ...], float] = {(): 1.0}
    last = target.facts.num_layers
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for tokens, chance in result.items():
            state = target.states(torch.tensor([[*prompt, *tokens]]), [last])[last][0, -1]
            p = nucleus((target.logits(state) / temperature).softmax(-1).tolist(), top_p)
            longer.update({(*tokens, token): chance * p[token] for token in range(len(p))})
        result = longer
    return result


def assert_distributed(texts: Sequence[Sequence[int]], wanted: Mapping[tuple[int, ...], float]) -> None:
    """Chi-square over all continuations, the bound at p = 1e-4; and what cannot be written was not."""
    found, runs = Counter(map(tuple, texts)), len(texts)
    assert all(wanted[tokens] > 0 for tokens in found)
    common = [tokens for tokens, chance in wanted.items() if runs * chance >= 5]
    pairs = [(found[tokens], runs * wanted[tokens]) for tokens in common]
    rest = runs - sum(count for count, _ in pairs), runs - sum(count for _, count in pairs)
    pairs += [rest] if rest[1] > 1 else []
    chi_square = sum((count - expected) ** 2 / expected for count, expected in pairs)
    degrees = len(pairs) - 1
    assert degrees > 5
    assert chi_square < degrees + 3.72 * np.sqrt(2 * degrees)


CERTAIN = 1e-6  # what is left of a chance by rounding


@dataclass(frozen=True)
class Scripted(Sampler):
    """Takes the decisions of ``script`` and after them the first possible ones.

    ``taken`` are all that were taken, ``chances`` theirs, ``others`` the scripts of those that were not.
    """

    script: tuple[int, ...] = ()
    taken: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    others: list[tuple[int, ...]] = field(default_factory=list)

    def draw(self, weights_V: torch.Tensor) -> int:
        """See ``Sampler``."""
        return self._take((weights_V / weights_V.sum()).tolist())

    def happens(self, chance: torch.Tensor) -> bool:
        """See ``Sampler``."""
        yes = min(1.0, float(chance))
        return not self._take([yes, 1 - yes])

    def _take(self, chances: list[float]) -> int:
        options, place = [option for option, chance in enumerate(chances) if chance > CERTAIN], len(self.taken)
        if place < len(self.script):
            option = self.script[place]
        else:
            option = options[0]
            self.others.extend((*self.taken, other) for other in options[1:])
        self.taken.append(option)
        self.chances.append(chances[option])
        return option


def every_text(
    target: Target,
    draft: Draft,
    prompt: list[int],
    length: int,
    cycles: Callable[[Decoding], Cycles],
    temperature: float,
    top_p: float,
) -> dict[tuple[int, ...], float]:
    """The probability with which the loop writes each text of ``length`` tokens, by taking every decision every way."""
    found = defaultdict[tuple[int, ...], float](float)
    scripts: list[tuple[int, ...]] = [()]
    while scripts:
        sampler = Scripted(temperature, top_p, None, scripts.pop())
        decoded = run_cycles(cycles(Decoding(target, draft, sampler)), prompt, length, ignore)
        found[tuple(decoded.tokens)] += float(np.prod(sampler.chances))
        scripts += sampler.others
    return found
