"""The evaluator on text that an engine wrote: cycles and accepted tokens as the engine counts them.

vLLM (0.32.0, v1/core/sched/scheduler.py, ``update_from_output``) counts a cycle's accepted tokens before it cuts the
new tokens at the end of the response, and always drafts the full length. So drafted tokens beyond the end count as
accepted when the target would have gone on with them. The evaluator of training leaves them out, for there the text
ends; here the target first writes the few tokens that the last cycle can reach, and the counts are the engine's own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from archspec.modules import Draft
from archspec.unroll import unroll
from runners.features.target import Target
from runners.training.acceptance import Counts, Floats, count_cycles

_HEAD_ROWS = 64


@dataclass(frozen=True)
class Replay:
    """``counts`` of the cycles; ``argmax`` of ``tokens`` response tokens are what the target itself would say."""

    counts: Counts
    argmax: int
    tokens: int

    def __add__(self, other: "Replay") -> "Replay":
        return Replay(self.counts + other.counts, self.argmax + other.argmax, self.tokens + other.tokens)


def replay(target: Target, draft: Draft, prompt: Sequence[int], response: Sequence[int], draft_length: int) -> Replay:
    """Count the cycles in which an engine writes ``response`` with ``draft_length`` greedily drafted tokens each.

    The response's first token comes from the prefill; a response of one token has no cycle.
    """
    tokens, aux, last = _read(target, [*prompt, *response], draft_length - 1, draft.spec.inputs.aux_layers)
    first, end = len(prompt), len(prompt) + len(response)
    starts = slice(first - 1, end - 2)
    chances = _chances(draft.to(target.device).eval(), tokens, aux, starts, draft_length)
    said = torch.cat([target.logits(rows).argmax(-1) for rows in torch.split(last[first - 1 : end - 1], _HEAD_ROWS)])
    return Replay(count_cycles(chances), int((said == tokens[first:end]).sum()), len(response))


@torch.no_grad()
def _read(target: Target, known: list[int], extra: int, aux_layers: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """``known`` and ``extra`` tokens that the target adds: ids [T], aux states [T, M, h_t] and last states [T, h_t]."""
    cache, top = DynamicCache(), target.facts.num_layers
    ids, tokens = torch.tensor([known], device=target.device), list(known)
    aux, last = list[Tensor](), list[Tensor]()
    for remaining in range(extra, -1, -1):
        states = target.states(ids, sorted({*aux_layers, top}), past_key_values=cache)
        aux.append(torch.stack([states[layer][0] for layer in aux_layers], dim=1).float())
        last.append(states[top][0])
        if remaining:
            ids = target.logits(last[-1][-1:]).argmax(-1)[None]
            tokens.append(int(ids))
    return torch.tensor(tokens, device=target.device), torch.cat(aux), torch.cat(last)


@torch.no_grad()
def _chances(draft: Draft, tokens_T: Tensor, aux_TMh: Tensor, starts: slice, draft_length: int) -> Floats:
    """[rows, k]: 1 where step s of a cycle that starts at that row drafts the text's token x_{t+2+s}, else 0."""
    next_tokens_BT = torch.nn.functional.pad(tokens_T[1:], (0, 1))[None]
    steps = []
    for step, state_BTh in enumerate(unroll(draft, next_tokens_BT, aux_TMh[None], draft_length)):
        drafted = draft.target_ids(draft.logits(state_BTh[0, starts]).argmax(-1))
        steps.append(drafted == tokens_T[starts.start + 2 + step : starts.stop + 2 + step])
    return torch.stack(steps, dim=-1).cpu().numpy().astype(np.float64)
