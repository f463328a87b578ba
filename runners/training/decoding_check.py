"""Real decoding beside the evaluator, timed against plain decoding on the same prompts."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from archspec.errors import ArchspecError
from archspec.modules import Draft
from runners.clock import now
from runners.features.onednn import packed_linears
from runners.features.store import FeatureStore
from runners.features.target import Target, load_target
from runners.training.acceptance import Acceptance, measure_acceptance, spans
from runners.training.decoding import Decoded, OnFirst, decode_plain, decode_speculative, ignore
from runners.training.settings import EvalSettings, TreeSettings
from runners.training.tree import decode_tree

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
WARM_UP = 8  # tokens decoded in every way before anything is timed


@dataclass(frozen=True)
class Timed:
    """One way of drafting, over all responses, beside plain decoding of the same.

    Times and tokens count from a response's first token, which the target's prefill gives in either way, to its last:
    ``tokens`` are those after the first. ``speedup`` is the tokens per second over plain decoding's, with the interval
    ``speedup_low`` … ``speedup_high`` from a paired bootstrap over responses; ``speedup_with_prompts`` counts prefills
    as well. ``same_text`` counts responses equal to plain decoding's, None where both are drawn at random.
    """

    shape: str
    cycles: int
    accepted: int
    tokens: int
    tokens_per_second: float
    milliseconds_per_cycle: float
    speedup: float
    speedup_low: float
    speedup_high: float
    speedup_with_prompts: float
    same_text: int | None

    @property
    def length(self) -> float:
        """Acceptance length, mean(a) + 1."""
        return 1.0 + self.accepted / max(1, self.cycles)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self) | {"length": self.length}


@dataclass(frozen=True)
class DecodingCheck:
    """A chain of drafted tokens, and a tree if one was asked for, in the real loop; ``evaluator`` is the chain's."""

    responses: int
    temperature: float
    top_p: float
    plain_tokens: int
    plain_tokens_per_second: float
    chain: Timed
    tree: Timed | None
    evaluator: Acceptance

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON; the chain's figures stand at the top."""
        chain = self.chain.as_dict()
        draft = {"draft_tokens_per_second": chain.pop("tokens_per_second"), "draft_tokens": chain.pop("tokens")}
        own = {key: value for key, value in vars(self).items() if key not in ("chain", "tree", "evaluator")}
        tree = None if self.tree is None else self.tree.as_dict()
        return own | chain | draft | {"tree": tree, "evaluator": self.evaluator.as_dict()}


Way = Callable[[list[int], int, OnFirst], Decoded]


@dataclass(frozen=True)
class _Run:
    """One response in one way: its text, and the seconds to its first token and from there to its last."""

    decoded: Decoded
    prefill: float
    seconds: float

    @property
    def tokens(self) -> int:
        """Those after the first."""
        return len(self.decoded.tokens) - 1


def check_decoding(
    draft: Draft,
    model: str | Target | None,
    store: FeatureStore,
    indices: Sequence[int],
    draft_length: int,
    device: str = "cpu",
    *,
    temperature: float | None = None,
    top_p: float | None = None,
    tree: TreeSettings | None = None,
    sample_draft: bool = False,
    max_new_tokens: int | None = None,
) -> DecodingCheck:
    """Decode the responses of these documents with and without the draft, and evaluate the chain on the same.

    Every response is decoded plainly, with a chain of ``draft_length`` tokens, and with ``tree`` if given, one after
    the other, and each time another way goes first. An answer is as long as the store's at most, and no longer than
    ``max_new_tokens``, which the evaluator does not know. ``temperature`` and ``top_p`` are the text's if None, and 0
    and 1 where it has none. ``model`` names the target or is it; None takes the one that the store was made from.

    Raises:
        ArchspecError: the target cannot be loaded or is not the store's, or the documents hold no response.
    """
    target = model if isinstance(model, Target) else load_target(model or store.manifest.target_path, "float32", device)
    store.require(draft.spec.inputs.aux_layers, target.fingerprint)
    settings = EvalSettings(
        draft_length=draft_length,
        draft="sampled" if sample_draft else "greedy",
        temperature=store.manifest.temperature or 0.0 if temperature is None else temperature,
        top_p=top_p,
    )
    evaluator = measure_acceptance(draft, store, indices, settings, str(target.device))
    how: dict[str, Any] = {"temperature": evaluator.temperature, "top_p": evaluator.top_p}
    how["generator"] = torch.Generator(target.device).manual_seed(0)

    def plainly(prompt: list[int], length: int, on_first: OnFirst) -> Decoded:
        return Decoded(decode_plain(target, prompt, length, on_first=on_first, **how), [])

    def with_chain(prompt: list[int], length: int, on_first: OnFirst) -> Decoded:
        more = how | {"sample_draft": sample_draft, "on_first": on_first}
        return decode_speculative(target, draft, prompt, length, draft_length, **more)

    ways: list[Way] = [plainly, with_chain]
    if tree is not None:
        ways.append(
            lambda prompt, length, on_first: decode_tree(target, draft, prompt, length, tree, on_first=on_first, **how)
        )
    with packed_linears(target.model, draft):
        runs = _decode(ways, _prompts(store, indices, max_new_tokens))
    plain, chained, *trees = zip(*runs, strict=True)
    tokens, sampled = sum(run.tokens for run in plain), evaluator.temperature > 0
    return DecodingCheck(
        responses=len(plain),
        temperature=evaluator.temperature,
        top_p=evaluator.top_p,
        plain_tokens=tokens,
        plain_tokens_per_second=tokens / sum(run.seconds for run in plain),
        chain=_timed(f"chain of {draft_length}", chained, plain, settings, sampled),
        tree=_timed(f"tree {tree}", trees[0], plain, settings, sampled) if trees else None,
        evaluator=evaluator,
    )


def _prompts(store: FeatureStore, indices: Sequence[int], most: int | None) -> list[tuple[list[int], int]]:
    """The tokens before each response, and how many may follow."""
    found = []
    for index in indices:
        features = store.read(index, ())
        for first, end in spans(features.response_mask):
            length = end - first
            if length > 1 and (most is None or most > 1):
                found.append((features.tokens[:first].tolist(), length if most is None else min(length, most)))
    if not found:
        rule = "has a response of two or more tokens"
        raise ArchspecError(f"{store.path}: none of the {len(indices)} conversations to decode {rule}")
    return found


def _decode(ways: Sequence[Way], prompts: Sequence[tuple[list[int], int]]) -> list[list[_Run]]:
    """Every response in every way. Which goes first rotates, so that a machine that slows down slows all alike."""
    for way in ways:
        way(prompts[0][0], WARM_UP, ignore)
    found = []
    for number, (prompt, length) in enumerate(prompts):
        runs: dict[int, _Run] = {}
        for turn in range(len(ways)):
            which = (number + turn) % len(ways)
            runs[which] = _run(ways[which], prompt, length)
        found.append([runs[which] for which in range(len(ways))])
    return found


def _run(way: Way, prompt: list[int], length: int) -> _Run:
    marks = [now()]
    decoded = way(prompt, length, lambda: marks.append(now()))
    return _Run(decoded, marks[1] - marks[0], now() - marks[1])


def _timed(shape: str, drafted: Sequence[_Run], plain: Sequence[_Run], settings: EvalSettings, sampled: bool) -> Timed:
    tokens, seconds = sum(run.tokens for run in drafted), sum(run.seconds for run in drafted)
    cycles = sum(len(run.decoded.accepted) for run in drafted)
    ratio = partial(_tokens_per_second_over, drafted, plain)
    low, high = _interval(ratio, len(plain), settings)
    same = sum(run.decoded.tokens == other.decoded.tokens for run, other in zip(drafted, plain, strict=True))
    return Timed(
        shape=shape,
        cycles=cycles,
        accepted=sum(sum(run.decoded.accepted) for run in drafted),
        tokens=tokens,
        tokens_per_second=tokens / seconds,
        milliseconds_per_cycle=1e3 * seconds / max(1, cycles),
        speedup=float(ratio(np.arange(len(plain)))),
        speedup_low=low,
        speedup_high=high,
        speedup_with_prompts=float(ratio(np.arange(len(plain)), prefill=True)),
        same_text=None if sampled else same,
    )


def _tokens_per_second_over(
    drafted: Sequence[_Run], plain: Sequence[_Run], chosen: Integers, prefill: bool = False
) -> Floats:
    """Tokens per second of one way over another's, for draws [..., N] of the N responses."""
    rates = []
    for runs in (drafted, plain):
        tokens = np.array([run.tokens + prefill for run in runs])
        seconds = np.array([run.seconds + prefill * run.prefill for run in runs])
        rates.append(tokens[chosen].sum(-1) / seconds[chosen].sum(-1))
    return np.asarray(rates[0] / rates[1])


def _interval(ratio: Callable[[Integers], Floats], count: int, settings: EvalSettings) -> tuple[float, float]:
    """A percentile interval; seed fixed. A draw takes all ways of a response together: what slows one slows all."""
    drawn = np.random.default_rng(0).integers(count, size=(settings.bootstrap, count))
    tail = (1 - settings.confidence) / 2
    low, high = np.quantile(ratio(drawn), [tail, 1 - tail])
    return float(low), float(high)
