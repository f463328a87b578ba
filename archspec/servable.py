"""Which engines can serve a draft, told from its resolved spec before anything is trained. No torch.

An engine serves what one of its formats holds (``limits``). ``notes`` name what it serves though it was seen to go
wrong, or nobody has seen it run. Every finding carries where it is known from; docs/serving.md has the measurements.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from archspec.errors import ArchspecError, nearest
from archspec.format import Format
from archspec.formats import FORMATS
from archspec.limits import Limit
from archspec.resolve import ResolvedSpec
from archspec.rope import YarnRope

EngineName = Literal["vllm", "sglang"]


@dataclass(frozen=True)
class Finding:
    """One field's limit or note, and where it is known from: a public thread, a source file, or a measurement."""

    limit: Limit
    source: str

    def __str__(self) -> str:
        return f"{self.limit} ({self.source})"


@dataclass(frozen=True)
class Verdict:
    """Whether ``engine`` serves a draft: not at all if there are ``limits``. ``version`` is the one looked at.

    ``form`` is the format to export to, or the one that comes nearest.
    """

    engine: str
    version: str
    form: str
    limits: tuple[Finding, ...]
    notes: tuple[Finding, ...]

    @property
    def servable(self) -> bool:
        """Whether the engine serves the draft, with or without notes."""
        return not self.limits

    @property
    def word(self) -> Literal["yes", "with a note", "no"]:
        """The verdict in one word or three."""
        return "no" if self.limits else "with a note" if self.notes else "yes"

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "servable": self.word,
            "version": self.version,
            "format": self.form,
            "because": [str(finding) for finding in self.limits],
            "notes": [str(finding) for finding in self.notes],
        }


@dataclass(frozen=True)
class Engine:
    """An engine, its version that was looked at, and where each limit is known from, by a field's last word.

    ``refuses`` names what a format holds and the engine does not take.
    """

    name: str
    project: str
    version: str
    forms: tuple[Format, ...]
    sources: Mapping[str, str]
    refuses: Callable[[ResolvedSpec], Iterator[Limit]]
    notes: Callable[[ResolvedSpec], Iterator[Finding]]

    def verdict(self, spec: ResolvedSpec) -> Verdict:
        """The verdict on ``spec``, by the format that holds the most of it."""
        held = {form.name: [*form.limits(spec), *self.refuses(spec)] for form in self.forms}
        form = min(held, key=lambda name: len(held[name]))
        usual = f"{self.project} {self.version}"
        limits = [Finding(limit, self.sources.get(limit.field.rsplit(".", 1)[-1], usual)) for limit in held[form]]
        return Verdict(self.name, self.version, form, tuple(limits), () if limits else tuple(self.notes(spec)))


def _vllm_refuses(spec: ResolvedSpec) -> Iterator[Limit]:
    if spec.layers[0].fusion_bias:
        yield Limit("layers.0.fusion_bias", True, "vLLM's EAGLE-1 has no bias on fc; use false")


def _sglang_refuses(spec: ResolvedSpec) -> Iterator[Limit]:
    if spec.layers[0].fusion == "project":
        yield Limit("layers.0.fusion", "project", "SGLang's EAGLE-1 demands a bias on fc and was not run; use concat")


def _vllm_notes(spec: ResolvedSpec) -> Iterator[Finding]:
    attention, target, rope = spec.layers[0].attention, spec.target, spec.rope_scaling
    if isinstance(rope, YarnRope) and (end := rope.factor * rope.original_max_positions) < target.max_positions:
        rule = f"its table ends at position {end:.0f}, the target's context at {target.max_positions}; serve no further"
        yield Finding(Limit("rope_scaling", "yarn", rule), "vLLM 0.32.0, yarn_scaling_rope.py")
    if attention is None:
        return
    ours, theirs = attention.kv_heads * attention.head_dim, target.kv_heads * target.head_dim
    if max(ours, theirs) % min(ours, theirs):
        rule = (
            f"{ours} cached elements a token and layer beside the target's {theirs}, neither a multiple of the other: "
            "vLLM 0.32 pads the smaller, older versions refused"
        )
        yield Finding(Limit("layers.0.attention.head_dim", attention.head_dim, rule), "AngelSlim#5")


def _sglang_notes(spec: ResolvedSpec) -> Iterator[Finding]:
    by_source = "SGLang 0.5.23, by its source"
    if not spec.reduced_vocab:
        yield Finding(Limit("head.vocab_size", spec.head.vocab_size, "the full vocabulary was not run"), by_source)
    if spec.hidden_size > spec.target.hidden_size:
        rule = f"wider than the target's {spec.target.hidden_size} was not run, narrower was"
        yield Finding(Limit("hidden_size", spec.hidden_size, rule), by_source)
    if spec.rope_scaling != "none":
        yield Finding(Limit("rope_scaling", spec.rope_scaling.type, "scaled positions were not run"), by_source)
    if len(spec.layers) > 1:
        rule = "version 0.5.23 serves more than one layer, older ones refused them"
        yield Finding(Limit("layers", len(spec.layers), rule), "sglang#18175")
    for name in ("heads", "kv_heads", "head_dim"):
        for field, theirs, ours in _attention_sizes(spec, name):
            rule = f"other than the target's {theirs} was run with heads of 32 only"
            yield Finding(Limit(field, ours, rule), by_source)


def _attention_sizes(spec: ResolvedSpec, name: str) -> Iterator[tuple[str, int, int]]:
    """(field, the target's size, the draft's) where they differ; all layers of a servable draft are alike."""
    attention = spec.layers[0].attention
    if attention is not None and getattr(attention, name) != getattr(spec.target, name):
        yield f"layers.0.attention.{name}", getattr(spec.target, name), getattr(attention, name)


ENGINES: dict[str, Engine] = {
    "vllm": Engine(
        "vllm",
        "vLLM",
        "0.32.0",
        (FORMATS["vllm"], FORMATS["eagle1"]),
        {"fusion": "vllm#26164"},
        _vllm_refuses,
        _vllm_notes,
    ),
    "sglang": Engine(
        "sglang",
        "SGLang",
        "0.5.23",
        (FORMATS["sglang"], FORMATS["eagle1"]),
        {"fusion": "sglang#18112", "aux_layers": "SGLang 0.5.23; sglang#21272", "bias": "SGLang 0.5.23, by its source"},
        _sglang_refuses,
        _sglang_notes,
    ),
}


def engine(name: str) -> Engine:
    """The engine of this name.

    Raises:
        ArchspecError: there is none.
    """
    if name not in ENGINES:
        raise ArchspecError(f"engine {name!r}: {nearest(name, ENGINES)}")
    return ENGINES[name]


def verdicts(spec: ResolvedSpec) -> list[Verdict]:
    """What every engine says of ``spec``."""
    return [each.verdict(spec) for each in ENGINES.values()]


def servable_by(spec: ResolvedSpec) -> list[str]:
    """Names of the engines that serve ``spec``, with or without a note."""
    return [verdict.engine for verdict in verdicts(spec) if verdict.servable]
