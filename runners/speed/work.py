"""What is timed: a target's forward over a cache, a chain of draft steps, the projection of the aux states.

Each is an object that is called as often as one likes and finds everything as it was: the caches have the same length
at every call. Shapes: B batch, T rows, M aux layers, h hidden size of the draft, h_t of the target.
"""

import copy
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from archspec.attention import ChainCache
from archspec.builder import build_draft, set_vocabulary
from archspec.modules import Draft
from archspec.resolve import ResolvedSpec
from runners.features.onednn import onednn_linears
from runners.features.target import Target


class Work(Protocol):
    """One piece of work of fixed size."""

    def __call__(self) -> object:
        """Do it once; this alone is timed."""
        ...

    def reset(self) -> None:
        """Put everything back, so that the next call does the same."""
        ...


class Prefix:
    """A target's cache of ``context`` tokens of ``batch`` equal sequences, and the way back to it."""

    def __init__(self, target: Target, batch: int, context: int) -> None:
        self.batch, self.context = batch, context
        self.cache = DynamicCache()
        ids = random_ids(target, 1, context)
        target.states(ids, [target.facts.num_layers], past_key_values=self.cache)
        self.cache.batch_repeat_interleave(batch)
        # A captured CUDA graph reads these very tensors at every replay, so they are kept rather than cropped again.
        self._kept = [(layer.keys, layer.values) for layer in self.cache.layers]

    def restore(self) -> None:
        """Forget the rows that came after the context; costs nothing."""
        for layer, (keys, values) in zip(self.cache.layers, self._kept, strict=True):
            layer.keys, layer.values = keys, values


class TargetForward:
    """``rows`` = m tokens of every sequence through all layers, head and argmax, as ``runners.training.decoding`` does.

    ``aux`` are the layers whose states are kept on the way.
    """

    def __init__(self, target: Target, prefix: Prefix, rows: int, aux: Sequence[int]) -> None:
        self._target, self._prefix = target, prefix
        self._last = target.facts.num_layers
        self._layers = sorted({*aux, self._last})
        self._ids = random_ids(target, prefix.batch, rows)

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """The argmax of every row, [B, T]."""
        states = self._target.states(self._ids, self._layers, past_key_values=self._prefix.cache)
        return self._target.logits(states[self._last]).argmax(-1)

    def reset(self) -> None:
        """See ``Work``."""
        self._prefix.restore()


class DraftSteps:
    """A chain of ``steps`` greedy draft steps of one row for each sequence, all layers, head and argmax included."""

    def __init__(self, draft: Draft, batch: int, context: int, steps: int) -> None:
        self._draft, self._steps, self._context = draft, steps, context
        weight = draft.lm_head.weight
        h, device = draft.spec.hidden_size, weight.device
        ids = torch.arange(batch * context, device=device).remainder(draft.spec.target.vocab_size).view(batch, context)
        u_BTh = torch.ones(batch, context, h, device=device, dtype=weight.dtype)
        self._memory = ChainCache()
        with torch.no_grad():
            draft(ids, u_BTh, torch.arange(context, device=device)[None], self._memory)
        self._ids, self._u = ids[:, :1], u_BTh[:, :1]
        self._position = torch.tensor([[context]], device=device)

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """The last token drafted, [B, 1]."""
        memory = copy.copy(self._memory)
        memory.truncate(self._context)  # the copy gets tensors of its own, and the kept cache stays as it is
        ids, u, position = self._ids, self._u, self._position
        with onednn_linears(self._draft):
            for _ in range(self._steps):
                state_B1h = self._draft(ids, u, position, memory)
                ids = self._draft.target_ids(self._draft.logits(state_B1h).argmax(-1))
                u, position = self._draft.feed_back(state_B1h), position + 1
        return ids

    def reset(self) -> None:
        """See ``Work``; the cache was never changed."""


class Projection:
    """The aux states of one row for each sequence, normed, joined and projected: what a cycle begins with."""

    def __init__(self, draft: Draft, batch: int) -> None:
        spec, weight = draft.spec, draft.lm_head.weight
        shape = (batch, 1, len(spec.inputs.aux_layers), spec.target.hidden_size)
        self._draft, self._aux = draft, torch.ones(shape, device=weight.device, dtype=weight.dtype)

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """The first state, [B, 1, h]."""
        with onednn_linears(self._draft):
            return self._draft.project(self._aux)

    def reset(self) -> None:
        """See ``Work``."""


def random_ids(target: Target, batch: int, rows: int) -> Tensor:
    """Any tokens, the same at every call, [B, T]."""
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(0, target.facts.vocab_size, (batch, rows), generator=generator).to(target.device)


def untrained(spec: ResolvedSpec, target: Target) -> Draft:
    """A draft to be timed: random weights, since time does not depend on what they are, and any D ids.

    An embedding as wide as the target's is the target's own, so that a dozen drafts do not hold a dozen copies. On a
    CPU the draft is in float32, as the decoding loop runs it; on CUDA in the target's dtype, as engines do.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        draft = build_draft(spec)
    if spec.reduced_vocab:
        set_vocabulary(draft, torch.arange(spec.head.vocab_size))
    dtype = torch.float32 if target.device.type == "cpu" else target.dtype
    own = target.weights.embed_tokens
    if own.shape == draft.embed_tokens.weight.shape and own.dtype == dtype:
        draft.embed_tokens.weight = nn.Parameter(own, requires_grad=False)
    return draft.to(device=target.device, dtype=dtype).eval().requires_grad_(False)
