"""Draft trees in the decoding loop: several continuations drafted and verified in one cycle, lossless.

A node stands for a token after the path that leads to it; node 0 is the last known token. The draft expands a node by
reading its token and the state that proposed it; the row sees the context and the node's ancestors. The target reads
all nodes in one forward, each seeing the context, its ancestors and itself, and what it accepts is one path. As in
EAGLE and SGLang, children are the draft's likeliest tokens, whatever the temperature, and are ordered by the draft's
own probabilities.

The rule (SpecInfer, arXiv 2305.09781, for proposals that are not drawn): the children of a node are tried in order; x
is accepted with chance p(x), and after a rejection p(x) is set to 0 and p renormalised. If none is accepted, the next
token is drawn from what is left of p. At temperature 0 the path follows the target's argmaxes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from archspec.errors import ArchspecError
from archspec.modules import Draft
from runners.features.target import Target
from runners.training.decoding import Decoded, Decoding, OnFirst, Sampler, ignore, run_cycles, without
from runners.training.settings import TreeSettings


def decode_tree(
    target: Target,
    draft: Draft,
    prompt: Sequence[int],
    max_new_tokens: int,
    tree: TreeSettings,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
    on_first: OnFirst = ignore,
) -> Decoded:
    """As ``decode_speculative``, with a tree of drafted tokens in place of a chain.

    Raises:
        ArchspecError: the text outgrows the window that some of the target's layers see, which trees do not know.
    """
    decoding = Decoding(target, draft, Sampler(temperature, top_p, generator))
    window, longest = target.window, len(prompt) + max_new_tokens + tree.verified
    if window is not None and longest > window:
        rule = f"its layers see {window} tokens back, and prompt, answer and tree have {longest}"
        raise ArchspecError(f"target {target.path}: {rule}; draft chains, or decode shorter texts")
    return run_cycles(_Trees(decoding, tree), prompt, max_new_tokens, on_first)


@dataclass
class Nodes:
    """A tree while it grows: token and parent of each node, parents before children; node 0 is the root.

    ``score`` is the sum of the draft's log-probabilities from the root to the node.
    """

    token: list[int]
    parent: list[int] = field(default_factory=lambda: [-1])
    depth: list[int] = field(default_factory=lambda: [0])
    score: list[float] = field(default_factory=lambda: [0.0])

    def add(self, parent: int, token: int, log_p: float) -> int:
        """A child of ``parent``; returns its number."""
        self.token.append(token)
        self.parent.append(parent)
        self.depth.append(self.depth[parent] + 1)
        self.score.append(self.score[parent] + log_p)
        return len(self.token) - 1

    def path(self, node: int) -> list[int]:
        """The nodes from below the root down to ``node``."""
        found = list[int]()
        while node:
            found.append(node)
            node = self.parent[node]
        return found[::-1]

    def likeliest(self, count: int) -> "Nodes":
        """The root and the ``count`` - 1 other nodes of the highest score.

        A child is no likelier than its parent, and of equals the earlier is taken, so that parents stay.
        """
        order = sorted(range(1, len(self.token)), key=lambda node: -self.score[node])
        chosen = [0, *sorted(order[: count - 1])]
        number = {node: new for new, node in enumerate(chosen)} | {-1: -1}
        token, parent, depth = ([values[node] for node in chosen] for values in (self.token, self.parent, self.depth))
        return Nodes(token, [number[node] for node in parent], depth, [self.score[node] for node in chosen])


class _Trees:
    """Cycles that draft a tree."""

    def __init__(self, decoding: Decoding, tree: TreeSettings) -> None:
        self.decoding, self._tree = decoding, tree

    def cycle(self) -> list[int]:
        """See ``Cycles``."""
        decoding = self.decoding
        nodes = self._grow()
        logits, aux = self._verify(nodes)
        path, final = self._judge(nodes, logits)
        self._keep([0, *path], len(nodes.token))
        won = [*(nodes.token[node] for node in path), final]
        decoding.win(won, aux[:, [0, *path]])
        return won

    def _grow(self) -> Nodes:
        """The draft's tree after the last known token."""
        decoding, shape = self.decoding, self._tree
        state, place = decoding.read()
        nodes, rows = Nodes([decoding.tokens[-1]]), _Rows(decoding, place)
        frontier = [0]
        for depth in range(shape.depth):
            if depth:
                state = rows.expand(nodes, frontier, state)
            children = shape.dynamic[1] if shape.dynamic else (shape.branches or ())[depth]
            tokens, log_p = _likeliest(decoding.draft, state[0], children)
            grown = [
                (nodes.add(node, token, value), row)
                for row, node in enumerate(frontier)
                for token, value in zip(tokens[row], log_p[row], strict=True)
            ]
            if shape.dynamic:
                grown = sorted(sorted(grown, key=lambda pair: -nodes.score[pair[0]])[: shape.dynamic[1]])
            frontier = [node for node, _ in grown]
            state = state[:, [row for _, row in grown]]
        decoding.forget_drafted()
        return nodes.likeliest(shape.verified)

    def _verify(self, nodes: Nodes) -> tuple[Tensor, Tensor]:
        """The target's logits [N, V] and aux states [1, N, M, h_t] at every node."""
        decoding, count = self.decoding, len(nodes.token)
        known, target = len(decoding.tokens) - 1, decoding.target
        seen_NT = torch.ones(count, known + count, dtype=torch.bool)
        seen_NT[:, known:] = _ancestry(nodes, range(count), range(count))
        hidden = torch.finfo(target.dtype).min
        mask = torch.zeros(seen_NT.shape, dtype=target.dtype).masked_fill(~seen_NT, hidden)[None, None]
        positions = known + torch.tensor([nodes.depth])
        return decoding.verify(nodes.token, count, mask.to(target.device), positions.to(target.device))

    def _judge(self, nodes: Nodes, logits_NV: Tensor) -> tuple[list[int], int]:
        """The nodes that are accepted, in order, and the token that follows them."""
        sampler, children = self.decoding.sampler, dict[int, list[int]]()
        for node in sorted(range(1, len(nodes.token)), key=lambda node: -nodes.score[node]):
            children.setdefault(nodes.parent[node], []).append(node)
        node = 0
        if sampler.greedy:
            own = logits_NV.argmax(-1).tolist()
            while step := [c for c in children.get(node, ()) if nodes.token[c] == own[node]]:
                node = step[0]
            return nodes.path(node), own[node]
        while True:
            rest_V, accepted = sampler.probabilities(logits_NV[node]), None
            for child in children.get(node, ()):
                if sampler.happens(rest_V[nodes.token[child]] / rest_V.sum()):
                    accepted = child
                    break
                rest_V = without(rest_V, nodes.token[child])
            if accepted is None:
                return nodes.path(node), sampler.draw(rest_V)
            node = accepted

    def _keep(self, kept: list[int], count: int) -> None:
        """Leave the rows of ``kept`` nodes, of ``count``, in the target's cache, in that order."""
        cache, start = self.decoding.target_cache, len(self.decoding.tokens) - 1
        if kept != list(range(len(kept))):
            rows = torch.tensor(kept) + start
            for layer in cache.layers:
                for held in (layer.keys, layer.values):
                    held[:, :, start : start + len(kept)] = held[:, :, rows.to(held.device)]
        if len(kept) < count:  # to earlier transformers of version 5, 0 is the length to be left
            cache.crop(len(kept) - count)


class _Rows:
    """The draft's rows of one tree: which node each expanded."""

    def __init__(self, decoding: Decoding, place: int) -> None:
        self._decoding, self._place, self._expanded = decoding, place, list[int]()

    def expand(self, nodes: Nodes, frontier: list[int], state_1Rh: Tensor) -> Tensor:
        """Draft states [1, R, h] at the frontier's nodes, from those that proposed them."""
        draft, device = self._decoding.draft, state_1Rh.device
        self._expanded += frontier
        depth_R = torch.tensor([nodes.depth[node] for node in frontier])
        back_RT = depth_R[:, None] + self._place - torch.arange(self._place + 1)
        above_RN = depth_R[:, None] - torch.tensor([nodes.depth[node] for node in self._expanded])
        above_RN = above_RN.masked_fill(~_ancestry(nodes, frontier, self._expanded), -1)
        self._decoding.draft_cache.branch(torch.cat((back_RT, above_RN), dim=1).to(device))
        ids = torch.tensor([[nodes.token[node] for node in frontier]], device=device)
        positions = (self._place + depth_R)[None].to(device)
        state: Tensor = draft(ids, draft.feed_back(state_1Rh), positions, self._decoding.draft_cache)
        return state


def _ancestry(nodes: Nodes, of: Sequence[int], among: Sequence[int]) -> Tensor:
    """[len(of), len(among)]: whether a node is the other one or descends from it."""
    found, place = torch.zeros(len(of), len(among), dtype=torch.bool), {node: i for i, node in enumerate(among)}
    for row, node in enumerate(of):
        found[row, [place[above] for above in (0, *nodes.path(node)) if above in place]] = True
    return found


def _likeliest(draft: Draft, state_Rh: Tensor, count: int) -> tuple[list[list[int]], list[list[float]]]:
    """The ``count`` likeliest tokens after each state, likeliest first, as target ids, and their log-probabilities."""
    logits_RD = draft.logits(state_Rh)
    top = logits_RD.topk(min(count, logits_RD.shape[-1]))
    log_p = (top.values.float() - logits_RD.float().logsumexp(-1, keepdim=True)).clamp_max(0)  # rounding
    return draft.target_ids(top.indices).tolist(), log_p.tolist()
