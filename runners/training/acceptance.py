"""Acceptance, exactly, from one unrolled forward over text that the target itself wrote.

A response is a run of tokens that the target generated. Its first token comes from the prefill; after that every cycle
starts at a row t, drafts x_{t+2} … x_{t+1+k}, and a verified draft of which a tokens are accepted moves on to row
t + a + 1. Given the text, drafted token x_{t+2+s} was accepted with a chance r[t, s]:

- greedy draft: 1 if the draft's argmax is that token, else 0;
- sampled draft: min(1, q(x) / p(x)), with q the draft's probability at the serving temperature and p the target's at
  that temperature and top-p; at temperature 0 this is the greedy draft. Engines apply top-p to the target alone (vLLM
  0.32, v1/spec_decode/llm_base_proposer.py; SGLang 0.5.23, speculative/spec_utils.py): any q is lossless.

Acceptances are independent given the text, so the cycles form a Markov chain over rows, and the expected number of
cycles and of accepted tokens follow by one pass over the response: no sampling, no decoding loop. With greedy drafts
the chain is deterministic and the pass walks the very cycles that an engine runs. Text of another origin makes all this
a proxy, and so does text that was sampled otherwise than it is served, which ``Acceptance.proxy`` tells.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from archspec.errors import ArchspecError
from archspec.modules import Draft
from archspec.unroll import Unroll
from runners.features.onednn import onednn_linears
from runners.features.sampling import tempered
from runners.features.store import FeatureStore
from runners.training.batches import Batch, length_batches, read_batch
from runners.training.parallel import ALONE, Workers
from runners.training.proxy import FOREIGN
from runners.training.settings import EvalSettings
from runners.training.sizes import HEAD_ROWS, round_up
from runners.training.teacher import Teacher

SAMPLED = "the text was sampled"
NEVER = 1e-6  # rows that come so far less often are given up: their part of any figure is smaller than that
Floats = NDArray[np.float64]
Chance = Callable[[Draft, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Counts:
    """Expected sums over cycles: ``reached[s]`` had all steps before s accepted, ``accepted[s]`` step s as well."""

    cycles: float
    reached: Floats
    accepted: Floats

    @classmethod
    def zero(cls, draft_length: int) -> "Counts":
        """No cycles yet."""
        return cls(0.0, np.zeros(draft_length), np.zeros(draft_length))

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(self.cycles + other.cycles, self.reached + other.reached, self.accepted + other.accepted)


@dataclass(frozen=True)
class Serving:
    """How the target is sampled while serving; ``mismatch`` says how the text was sampled otherwise, else is empty."""

    temperature: float
    top_p: float
    mismatch: str

    @classmethod
    def of(cls, settings: EvalSettings, store: FeatureStore) -> "Serving":
        """What ``settings`` say, and where they are silent what the text says, or temperature 1 and top-p 1."""
        text = store.manifest.temperature, store.manifest.top_p
        asked = settings.temperature, settings.top_p
        temperature, top_p = (
            next(value for value in pair if value is not None) for pair in zip(asked, text, (1.0, 1.0), strict=True)
        )
        if asked == (None, None) and settings.draft == "greedy":
            return cls(temperature, top_p, "")  # whatever each text was sampled at
        if None in text:
            return cls(temperature, top_p, f"{SAMPLED} in several ways, but is served at {_words(temperature, top_p)}")
        same = temperature == text[0] and (temperature == 0 or top_p == text[1])
        told = f"{SAMPLED} at {_words(*text)}, but is served at {_words(temperature, top_p)}"
        return cls(temperature, top_p, "" if same else told)


@dataclass(frozen=True)
class Acceptance:
    """One draft's acceptance over a set of conversations.

    ``length`` is mean(a) + 1 over cycles, with the interval ``low`` … ``high`` from a bootstrap over conversations;
    ``rate`` is accepted / drafted tokens. ``conditional[s]`` is the rate of step s given that all before it were
    accepted (alpha_s); ``per_position[s]`` is unconditional, over cycles, as vLLM reports it. ``length_by_k[k-1]`` is
    the acceptance length with k draft tokens a cycle, for every k to ``EvalSettings.longest``. ``temperature`` and
    ``top_p`` are those of serving; ``proxy`` says why an engine's figure would be another one, and is empty where the
    text is the target's own, sampled as it is served.
    """

    length: float
    low: float
    high: float
    rate: float
    conditional: tuple[float, ...]
    per_position: tuple[float, ...]
    length_by_k: tuple[float, ...]
    cycles: float
    conversations: int
    response_tokens: int
    draft: str
    temperature: float
    top_p: float
    own_text: bool
    proxy: str
    by_category: dict[str, dict[str, float]]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, equal to what reading that JSON gives."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


def measure_acceptance(
    draft: Draft,
    store: FeatureStore,
    indices: Sequence[int],
    settings: EvalSettings,
    device: str = "cpu",
    workers: Workers = ALONE,
) -> Acceptance:
    """Acceptance of ``draft`` on the documents ``indices`` of ``store``; each of ``workers`` measures some batches.

    Raises:
        ArchspecError: no document among ``indices`` has a response long enough to draft for.
    """
    k, longest = settings.draft_length, settings.longest
    counts: dict[int, list[Counts]] = {}
    far = settings.model_copy(update={"draft_length": longest})
    for index, chances in acceptance_chances(draft, store, indices, far, device, workers):
        per_length = counts.setdefault(index, [Counts.zero(n) for n in range(1, longest + 1)])
        for n in range(1, longest + 1):
            per_length[n - 1] += count_cycles(chances[:, :n])
    if not counts:
        raise ArchspecError(
            "no held-out conversation has a response of two or more tokens; capture more text or raise the holdout"
        )
    order = sorted(counts)
    documents = [store.documents[index] for index in order]
    serving, own_text = Serving.of(settings, store), all(document.own for document in documents)
    own = {index: counts[index][k - 1] for index in order}
    total = sum(own.values(), Counts.zero(k))
    low, high = _bootstrap(list(own.values()), settings)
    return Acceptance(
        length=_length(total),
        low=low,
        high=high,
        rate=float(total.accepted.sum() / (k * total.cycles)),
        conditional=tuple(float(a / r) if r else 0.0 for a, r in zip(total.accepted, total.reached, strict=True)),
        per_position=tuple(float(a / total.cycles) for a in total.accepted),
        length_by_k=tuple(_length(sum((counts[i][n] for i in order), Counts.zero(n + 1))) for n in range(longest)),
        cycles=total.cycles,
        conversations=len(order),
        response_tokens=sum(document.response_tokens for document in documents),
        draft=settings.draft,
        temperature=serving.temperature,
        top_p=serving.top_p,
        own_text=own_text,
        proxy=serving.mismatch if own_text else FOREIGN,
        by_category=_by_category(own, store),
    )


@torch.no_grad()
def acceptance_chances(
    draft: Draft,
    store: FeatureStore,
    indices: Sequence[int],
    settings: EvalSettings,
    device: str = "cpu",
    workers: Workers = ALONE,
) -> list[tuple[int, Floats]]:
    """(document, r [rows, k]) of every response: the chance that each start row's drafted tokens are accepted.

    Row j of a response is the cycle start at row P - 1 + j, where P is the response's first token. A step whose token
    lies beyond the response has chance 0: nothing is accepted there. So has a step after one with chance 0.
    """
    draft = draft.to(device).eval()
    serving, chance = Serving.of(settings, store), _greedy_chance
    sampled = settings.draft == "sampled" and serving.temperature > 0  # at temperature 0 there is nothing to sample
    teacher = Teacher(store.weights(), None, device) if sampled else None
    if sampled:
        chance = partial(_sampled_chance, temperature=serving.temperature, vocab_ids=draft.vocab_ids)
    lengths = {index: store.documents[index].length for index in indices}
    result: list[tuple[int, Floats]] = []
    for documents in workers.share(length_batches(lengths, settings.batch_tokens)):
        batch = read_batch(store, documents, draft.spec.inputs.aux_layers, device)
        p_BT = _target_probabilities(batch, teacher, serving) if teacher else torch.ones_like(batch.last[..., 0])
        with onednn_linears(draft):
            rows = _chances(draft, batch, settings.draft_length, chance, p_BT)
        chances = rows.cpu().numpy().astype(np.float64)
        for row, index in enumerate(batch.documents):
            for first, end in spans(batch.response_mask[row]):
                result.append((index, _inside(chances[row, first - 1 : end - 2], end - first)))
    return workers.gather([(index, chances) for index, chances in result if len(chances)])


def spans(mask_T: Tensor) -> list[tuple[int, int]]:
    """Half-open runs [first, end) of response tokens; a run that begins at token 0 has no prefill and starts at 1."""
    padded = torch.nn.functional.pad(mask_T.to(torch.int8), (1, 1))
    edges = padded.diff().nonzero().squeeze(-1).tolist()
    return [(max(first, 1), end) for first, end in zip(edges[::2], edges[1::2], strict=True) if end > max(first, 1)]


def count_cycles(chances_Rk: Floats) -> Counts:
    """Expected cycles and accepted tokens of one response from its chances [rows, k].

    ``start[j]`` is the probability that a cycle starts at row j: 1 for the first, and from row j a cycle that accepts
    exactly a tokens starts the next one at row j + a + 1.
    """
    rows, k = chances_Rk.shape
    start = np.zeros(rows + k + 1)
    start[0] = 1.0
    alive = np.cumprod(chances_Rk, axis=1)
    reached = np.concatenate((np.ones((rows, 1)), alive[:, :-1]), axis=1)
    stops = np.concatenate((reached - alive, alive[:, -1:]), axis=1)  # exactly 0, 1, …, k tokens accepted
    for j in range(rows):
        if start[j]:
            start[j + 1 : j + k + 2] += start[j] * stops[j]
    weight = start[:rows]
    return Counts(float(weight.sum()), weight @ reached, weight @ alive)


def _inside(chances_Rk: Floats, length: int) -> Floats:
    """Zero the steps that draft beyond a response of ``length`` tokens: row j drafts its tokens j + 1 … j + k."""
    rows, k = chances_Rk.shape
    token = np.arange(rows)[:, None] + 1 + np.arange(k)[None, :]
    return np.where(token < length, chances_Rk, 0.0)


def _chances(draft: Draft, batch: Batch, k: int, chance: Chance, p_BT: Tensor) -> Tensor:
    """[B, T, k]: the chance of token x_{t+2+s} at row t, step s; 0 where that is no response token.

    ``p`` holds the target's probability of x_{t+1} at t. A row is given up, and its later chances are 0, where it comes
    so far with a chance of ``NEVER`` at most: with greedy drafts at its first rejection, so that most rows take one
    step. Only rows that count reach the head.
    """
    unrolled, found = Unroll(draft, batch.next_tokens, batch.aux), p_BT.new_zeros(*p_BT.shape, k)
    rows_BR = torch.arange(p_BT.shape[1], device=p_BT.device).expand(p_BT.shape)
    alive_BR = torch.ones_like(p_BT)
    for step in range(k):
        flat, out_BR = unrolled.step().flatten(0, 1), p_BT.new_zeros(rows_BR.shape)
        wanted, p, counted = (
            _shift(values, by).gather(1, rows_BR).flatten()
            for values, by in ((batch.tokens, step + 2), (p_BT, step + 1), (batch.response_mask, step + 2))
        )
        for part in torch.split((counted & (alive_BR.flatten() > NEVER)).nonzero().squeeze(-1), HEAD_ROWS):
            out_BR.view(-1)[part] = chance(draft, flat[part], wanted[part], p[part])
        found[..., step].scatter_add_(1, rows_BR, out_BR)  # rows that only fill up add 0
        alive_BR = alive_BR * out_BR
        kept_BR = _going(alive_BR > NEVER)
        if step + 1 == k or not kept_BR.shape[1]:
            break
        rows_BR, alive_BR = rows_BR.gather(1, kept_BR), alive_BR.gather(1, kept_BR)
        unrolled.keep(kept_BR)
    return found


def _going(going_BR: Tensor) -> Tensor:
    """Places of the rows that go on, in order; where a sequence has fewer than another, others fill it up."""
    most = min(round_up(int(going_BR.sum(1).max())), going_BR.shape[1])
    return going_BR.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :most]


def _greedy_chance(draft: Draft, rows_Ph: Tensor, wanted_P: Tensor, p_P: Tensor) -> Tensor:
    """1 where the draft's argmax is the wanted target id, else 0."""
    return (draft.target_ids(draft.logits(rows_Ph).argmax(-1)) == wanted_P).to(p_P.dtype)


def _sampled_chance(
    draft: Draft, rows_Ph: Tensor, wanted_P: Tensor, p_P: Tensor, *, temperature: float, vocab_ids: Tensor
) -> Tensor:
    """min(1, q / p) with q the draft's probability of the wanted id, 0 for tokens outside its vocabulary.

    Serving never writes a token with p = 0, which stands only in text that was sampled otherwise: its chance is 0 too.
    """
    log_q_PV = (draft.logits(rows_Ph).float() / temperature).log_softmax(-1)
    at = torch.searchsorted(vocab_ids, wanted_P).clamp_max(len(vocab_ids) - 1)
    q_P = log_q_PV.gather(-1, at[:, None]).squeeze(-1).exp()
    return torch.where((vocab_ids[at] == wanted_P) & (p_P > 0), q_P / p_P, 0.0).clamp_max(1.0)


def _target_probabilities(batch: Batch, teacher: Teacher, serving: Serving) -> Tensor:
    """[B, T]: the target's probability of x_{t+1} given the text up to t, where that is a response token."""
    flat, ids = batch.last.flatten(0, 1), batch.next_tokens.flatten()
    p = torch.ones(len(ids), device=ids.device)
    counted = _shift(batch.response_mask, 1).flatten().nonzero().squeeze(-1)
    for part in torch.split(counted, HEAD_ROWS if serving.top_p == 1 else HEAD_ROWS // 4):  # top-p sorts
        scores_PV = tempered(teacher.logits(flat[part]), serving.temperature, serving.top_p)
        wanted_P = scores_PV.gather(-1, ids[part, None]).squeeze(-1)
        p[part] = (wanted_P - scores_PV.logsumexp(-1)).exp()
    return p.view(batch.tokens.shape)


def _words(temperature: float | None, top_p: float | None) -> str:
    return f"temperature {temperature:g}" + (f" and top-p {top_p:g}" if top_p != 1 and temperature else "")


def _shift(values_BT: Tensor, by: int) -> Tensor:
    """values[t + by] at t, zeros past the end."""
    length = values_BT.shape[1]
    return torch.nn.functional.pad(values_BT, (0, by))[:, by : by + length]


def _length(counts: Counts) -> float:
    return 1.0 + float(counts.accepted.sum() / counts.cycles)


def _bootstrap(counts: Sequence[Counts], settings: EvalSettings) -> tuple[float, float]:
    """Percentile interval of the acceptance length under resampling of whole conversations; seed fixed."""
    accepted = np.array([c.accepted.sum() for c in counts])
    cycles = np.array([c.cycles for c in counts])
    drawn = np.random.default_rng(0).integers(len(counts), size=(settings.bootstrap, len(counts)))
    lengths = 1 + accepted[drawn].sum(1) / cycles[drawn].sum(1)
    tail = (1 - settings.confidence) / 2
    low, high = np.quantile(lengths, [tail, 1 - tail])
    return float(low), float(high)


def _by_category(counts: dict[int, Counts], store: FeatureStore) -> dict[str, dict[str, float]]:
    groups: dict[str, list[Counts]] = {}
    for index, count in counts.items():
        groups.setdefault(store.documents[index].category or "uncategorised", []).append(count)
    return {
        name: {
            "length": _length(sum(group[1:], group[0])),
            "cycles": sum(c.cycles for c in group),
            "conversations": len(group),
        }
        for name, group in sorted(groups.items())
    }
