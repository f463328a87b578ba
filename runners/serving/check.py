"""Whether an engine serves the draft that was meant: its counters beside the evaluator's, and what else must hold.

An engine that loads a wrong draft still writes the right text; only acceptance falls, and nobody is told. Shares are
over cycles, as vLLM reports them: position s counts the cycles in which steps 0 … s were all accepted.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from runners.serving.engine import Answer

if TYPE_CHECKING:
    from runners.serving.replay import Replay

TOLERANCE = 0.01
SAME_TARGET = 0.99  # in float32 only near-ties make two programs choose different tokens
COLLAPSED = 1.02
_Z = 1.959964  # 97.5 % point of the normal distribution
_COARSE = 0.2
_NEAR = 4
_STRAY = 0.005  # share of cycles by which two float32 programs may part on the same text: near-ties of the draft


@dataclass(frozen=True)
class Compared:
    """One figure of both; ``allowed`` is the largest difference that is not held against the engine."""

    name: str
    engine: float
    ours: float
    allowed: float

    @property
    def agrees(self) -> bool:
        """Whether the figures differ by no more than is allowed."""
        return abs(self.engine - self.ours) <= self.allowed


@dataclass(frozen=True)
class TextDifference:
    """The first place where text with the draft and text without it part. A token is None where a text has ended."""

    prompt: int
    position: int
    drafted: int | None
    plain: int | None


@dataclass(frozen=True)
class Expected:
    """What the draft that is meant says. ``vocabulary`` is a digest of its d2t, None for the whole vocabulary."""

    aux_layers: tuple[int, ...]
    num_layers: int
    vocabulary: str | None


@dataclass(frozen=True)
class ServeCheck:
    """One check. ``problems`` is empty exactly if the engine serves the draft that the evaluator measured.

    ``cycles`` and ``accepted`` (per position) are (engine, evaluator). ``same_text`` of ``responses`` are equal with
    and without the draft; ``own_tokens`` of ``tokens`` are the argmax of the target as this project runs it.
    ``missing``, ``unused`` (tensors) and ``aux_layers`` are None where the engine does not show them. ``power`` says
    how large a difference would have been noticed.
    """

    engine: str
    device: str
    draft: str
    draft_length: int
    responses: int
    tokens: int
    own_tokens: int
    same_text: int
    first_difference: TextDifference | None
    cycles: tuple[int, float]
    accepted: tuple[tuple[int, ...], tuple[float, ...]]
    length: Compared
    positions: tuple[Compared, ...]
    missing: tuple[str, ...] | None
    unused: tuple[str, ...] | None
    aux_layers: tuple[int, ...] | None
    expected_aux_layers: tuple[int, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    power: str
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def agrees(self) -> bool:
        """The verdict."""
        return not self.problems

    @property
    def identical(self) -> bool:
        """Whether both counted the same cycles and the same accepted tokens at every position."""
        return self.cycles[0] == self.cycles[1] and self.accepted[0] == self.accepted[1]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, verdicts included."""
        data = asdict(self) | {"agrees": self.agrees, "identical": self.identical}
        data["length"]["agrees"] = self.length.agrees
        for row, compared in zip(data["positions"], self.positions, strict=True):
            row["agrees"] = compared.agrees
        return data


def compare(
    answer: Answer,
    plain: Sequence[Sequence[int]],
    ours: "Replay",
    expected: Expected,
    *,
    draft: str,
    draft_length: int,
    engine: str = "vLLM",
    tolerance: float = TOLERANCE,
) -> ServeCheck:
    """Hold the engine's ``answer`` against its text without a draft, ``plain``, and the evaluator's counts ``ours``.

    Figures may differ by ``tolerance`` of ours or by the half-width of the 95 % interval of a share over that many
    cycles, whichever is wider.
    """
    counters, cycles = answer.counters, answer.counters.num_drafts
    accepted = (*counters.num_accepted_tokens_per_pos, *[0] * draft_length)[:draft_length]
    our_accepted = tuple(float(a) for a in ours.counts.accepted)
    shares = [a / ours.counts.cycles if ours.counts.cycles else 0.0 for a in our_accepted]
    positions = tuple(
        Compared(f"position {s + 1}", a / max(1, cycles), p, max(tolerance * p, share_interval(p, cycles)))
        for s, (a, p) in enumerate(zip(accepted, shares, strict=True))
    )
    mean = 1.0 + sum(shares)
    allowed = max(tolerance * mean, length_interval(shares, cycles))
    length = Compared("length", 1.0 + counters.num_accepted_tokens / max(1, cycles), mean, allowed)
    same, first = _texts(answer.responses, plain)
    problems = [
        *_text_problems(same, first, len(plain), ours),
        *_inside_problems(answer, expected),
        *_count_problems(length, positions, cycles),
    ]
    if any(not one.agrees for one in (length, *positions)):
        problems += _cause(answer, length, positions, expected)
    return ServeCheck(
        engine=engine,
        device=answer.device,
        draft=draft,
        draft_length=draft_length,
        responses=len(answer.responses),
        tokens=sum(map(len, answer.responses)),
        own_tokens=ours.argmax,
        same_text=same,
        first_difference=first,
        cycles=(cycles, ours.counts.cycles),
        accepted=(accepted, our_accepted),
        length=length,
        positions=positions,
        missing=answer.missing,
        unused=answer.unused,
        aux_layers=answer.aux_layers,
        expected_aux_layers=expected.aux_layers,
        problems=tuple(problems),
        notes=tuple(_notes(answer, draft_length, ours.counts.cycles)),
        power=_power(length, positions, cycles),
    )


def share_interval(share: float, cycles: int) -> float:
    """Half-width of Wilson's 95 % interval of a share over ``cycles`` (JASA 22, 1927); it is not 0 at a share of 0."""
    if not cycles:
        return 1.0
    spread = share * (1 - share) / cycles + _Z**2 / (4 * cycles**2)
    return _Z * math.sqrt(spread) / (1 + _Z**2 / cycles)


def length_interval(shares: Sequence[float], cycles: int) -> float:
    """Half-width of the 95 % interval of a mean length whose cycles pass position s with chance ``shares[s]``.

    With a accepted tokens, E[a] = sum of the shares and E[a^2] = sum of (2 s + 1) shares[s], s from 0.
    """
    if not cycles:
        return float(len(shares))
    mean, square = sum(shares), sum((2 * s + 1) * share for s, share in enumerate(shares))
    return _Z * math.sqrt(max(0.0, square - mean**2) / cycles)


def _texts(drafted: Sequence[Sequence[int]], plain: Sequence[Sequence[int]]) -> tuple[int, TextDifference | None]:
    """How many are equal, and the first place that is not."""
    unequal = [i for i, (a, b) in enumerate(zip(drafted, plain, strict=True)) if tuple(a) != tuple(b)]
    if not unequal:
        return len(plain), None
    a, b = drafted[unequal[0]], plain[unequal[0]]
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    tokens = (text[at] if at < len(text) else None for text in (a, b))
    return len(plain) - len(unequal), TextDifference(unequal[0], at, *tokens)


def _text_problems(same: int, first: TextDifference | None, responses: int, ours: "Replay") -> list[str]:
    problems = []
    if first is not None:
        told = ("the end" if token is None else f"token {token}" for token in (first.drafted, first.plain))
        problems.append(
            f"greedy text with the draft differs from text without it in {responses - same} of {responses} responses, "
            f"first in response {first.prompt + 1} at its token {first.position + 1}: {' and '.join(told)}"
        )
    if ours.tokens and ours.argmax < SAME_TARGET * ours.tokens:
        problems.append(
            f"{ours.argmax} of {ours.tokens} tokens that the engine wrote are what the target says here; "
            "the engine runs another target, or runs it in another way"
        )
    return problems


def _inside_problems(answer: Answer, expected: Expected) -> list[str]:
    problems = []
    if answer.missing:
        problems.append(f"the engine found no {', '.join(answer.missing)} in the draft; such parameters stay unset")
    if answer.unused:
        problems.append(f"the engine has no place for {', '.join(answer.unused)} and dropped them without a word")
    if answer.aux_layers and answer.aux_layers != expected.aux_layers:
        told = f"the engine reads aux layers {_listed(answer.aux_layers)}, but the draft was trained on "
        problems.append(f"{told}{_listed(expected.aux_layers)}{_shift(answer.aux_layers, expected)}")
    if answer.hidden is None and answer.vocabulary != expected.vocabulary:
        problems.append("the engine's map from draft ids to target ids (d2t) is not the draft's")
    return problems


def _shift(found: tuple[int, ...], expected: Expected) -> str:
    """Why these layers are not the expected ones, where it can be told."""
    n = expected.num_layers
    shifts = {a - b for a, b in zip(found, expected.aux_layers, strict=False)}
    if len(found) == len(expected.aux_layers) and len(shifts) == 1 and abs(shift := shifts.pop()) == 1:
        way = "less" if shift < 0 else "more"
        return f": each is one {way}, so the config counts layers from {'0' if shift < 0 else '2'}, and vLLM from 1"
    if found == (2, n // 2, n - 3):
        return ": these are vLLM's default, so eagle_aux_hidden_state_layer_ids is not where vLLM looks in the config"
    return ""


def _count_problems(length: Compared, positions: Sequence[Compared], cycles: int) -> list[str]:
    if not cycles:
        return ["the engine counted no cycle, so nothing was compared; ask for more new tokens"]
    problems = [
        f"{one.name}: the engine says {one.engine:.4f}, the evaluator {one.ours:.4f}; "
        f"they may differ by {one.allowed:.4f}"
        for one in (length, *positions)
        if not one.agrees
    ]
    if positions[0].ours <= positions[0].allowed:
        problems.append(
            f"{positions[0].ours * cycles:.0f} accepted first tokens in {cycles} cycles are too few to tell a draft "
            "that works from one that does not; ask for more prompts or more new tokens, or train the draft further"
        )
    return problems


def _cause(answer: Answer, length: Compared, positions: Sequence[Compared], expected: Expected) -> list[str]:
    """The likely reason of figures that differ, where nothing that was seen inside the engine tells it already."""
    if _inside_problems(answer, expected):
        return []
    first = positions[0]
    if length.engine < COLLAPSED < length.ours:
        told = "a norm flag (norm_before_residual, fc_norm, norm_before_fc), fc, or a draft of another target"
        return [f"likely: a length of about 1 means that hardly anything fits: {told}"]
    if abs(first.engine - first.ours) <= first.allowed / _NEAR:
        told = "the first position agrees and later ones do not, so the state that is fed back is another (norm_output)"
        return [f"likely: {told}"]
    told = "look at norm flags (norm_before_residual, fc_norm, norm_before_fc), at q and k, and at rope_theta"
    return [f"likely: some tokens fit, so most tensors do; {told}"]


def _notes(answer: Answer, draft_length: int, our_cycles: float) -> list[str]:
    cycles, drafted = answer.counters.num_drafts, answer.counters.num_draft_tokens
    planned, notes = draft_length * cycles, list[str]()
    if abs(cycles - our_cycles) > max(2.0, _STRAY * our_cycles):
        notes.append(
            f"on this very text the engine took {cycles} cycles and the evaluator takes {our_cycles:.0f}; one draft in "
            "float32 takes the same number, to within a few, so these are two drafts even where the figures agree"
        )
    if answer.hidden is not None:
        notes.append(f"tensors and aux layers were not checked, for the engine hides them ({answer.hidden})")
    if drafted != planned:
        notes.append(f"the engine drafted {drafted} tokens in place of {planned}; it shortened some cycles")
    return notes


def _power(length: Compared, positions: Sequence[Compared], cycles: int) -> str:
    first = positions[0]
    if not cycles or not first.ours:
        return "no difference could have been noticed"
    share = first.allowed / first.ours
    few = "; these are few cycles: ask for more prompts or more new tokens" if share > _COARSE else ""
    return (
        f"over {cycles} cycles, differences above {first.allowed:.3f} at the first position ({share:.0%} of it) and "
        f"above {length.allowed:.3f} in length are noticed{few}"
    )


def _listed(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers))
