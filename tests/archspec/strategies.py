"""Two targets, random specs from the whole schema for the smaller one, and the settings of the property tests.

Combinations are built so that they keep the schema's rules, rather than drawn and thrown away: each branch below names
the rule that it keeps. ``HYPOTHESIS_PROFILE=thorough`` draws twenty times as many, anew each time.
"""

import os
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from archspec.facts import TargetFacts
from archspec.limits import Holds
from archspec.spec import DraftSpec

_SLOW_FIRST_DRAW = [HealthCheck.too_slow]
settings.register_profile(
    "quick", max_examples=100, derandomize=True, deadline=None, database=None, suppress_health_check=_SLOW_FIRST_DRAW
)
settings.register_profile("thorough", max_examples=2000, deadline=None, suppress_health_check=_SLOW_FIRST_DRAW)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

TOY = TargetFacts(
    model_type="toy",
    hidden_size=16,
    num_layers=8,
    vocab_size=48,
    heads=4,
    kv_heads=2,
    head_dim=4,
    intermediate_size=24,
)


# PyYAML folds the line breaks of YAML 1.1 (next line, line and paragraph separator) even inside quotes.
PRINTABLE = st.characters(codec="utf-8", exclude_categories=["C", "Zl", "Zp"])
# A name is one printable line: of all spaces only the plain one counts as printable, and a name is more than that.
_NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]) | st.just(" "), min_size=1, max_size=8)

_FACTORS = st.sampled_from([1, 4.0, 2.5])
_ORIGINAL = st.sampled_from([16, 4096])
ROPES: st.SearchStrategy[Any] = st.sampled_from(["none", "target"]) | st.one_of(
    st.fixed_dictionaries({"type": st.just("linear"), "factor": _FACTORS}),
    st.fixed_dictionaries(
        {
            "type": st.just("llama3"),
            "factor": _FACTORS,
            "low_freq_factor": st.sampled_from([0.5, 1]),
            "high_freq_factor": st.sampled_from([2.0, 4]),
            "original_max_positions": _ORIGINAL,
        }
    ),
    st.fixed_dictionaries(
        {"type": st.just("yarn"), "factor": _FACTORS, "original_max_positions": _ORIGINAL},
        optional={
            "beta_fast": st.sampled_from([16, 32.0]),
            "beta_slow": st.sampled_from([0.5, 1]),
            "truncate": st.booleans(),
            "attention_factor": st.sampled_from([None, 1.0, 1.25]),
        },
    ),
)

_AUX_WORDS = {2: "low", 4: "middle", 5: "high", 8: "last"}  # what the words stand for in a target of 8 layers


@st.composite
def draft_specs(draw: st.DrawFn) -> DraftSpec:
    """A valid spec for ``TOY``, every field of the schema drawn."""
    hidden_size = draw(st.sampled_from(["target", TOY.hidden_size, 8, 10, 24]))
    copies = hidden_size in ("target", TOY.hidden_size)  # only then do the target's tensors fit
    head_norm = draw(st.sampled_from(["own", "none"]))
    return DraftSpec.model_validate(
        {
            "name": draw(_NAMES.filter(str.strip)),
            "inputs": draw(_inputs(copies)),
            "hidden_size": hidden_size,
            "embedding": draw(st.sampled_from(["frozen", "trained"])) if copies else "trained",
            "layers": draw(_stacks()),
            "feedback": draw(st.sampled_from(["pre_norm", "post_norm"])) if head_norm == "own" else "pre_norm",
            "head": {
                "vocab_size": draw(st.sampled_from(["full", TOY.vocab_size]) | st.integers(1, TOY.vocab_size - 1)),
                "weights": draw(st.sampled_from(["own", "target"])) if copies else "own",
                "norm": head_norm,
            },
            "rope_theta": draw(st.sampled_from(["target", 100, 1e6])),
            "rope_scaling": draw(ROPES),
            "norm_eps": draw(st.sampled_from(["target", 1e-6])),
        }
    )


@st.composite
def _inputs(draw: st.DrawFn, copies: bool) -> dict[str, Any]:
    norm = draw(st.sampled_from(["none", "joint", "each", "target"]))
    projection = draw(st.sampled_from(["linear", "none"])) if copies else "linear"
    if norm == "target":
        ids = [TOY.num_layers]
    else:
        most = 4 if projection == "linear" else 1
        ids = sorted(draw(st.sets(st.integers(0, TOY.num_layers), min_size=1, max_size=most)))
    words = draw(st.booleans())
    return {
        "aux_layers": [_AUX_WORDS.get(layer, layer) if words else layer for layer in ids],
        "norm": norm,
        "projection": projection,
        "bias": draw(st.booleans()),
    }


@st.composite
def _stacks(draw: st.DrawFn) -> list[dict[str, Any]]:
    """One to three layers, of which at least one reads the embedding."""
    count = draw(st.integers(1, 3))
    reader = draw(st.integers(0, count - 1))
    return [draw(_layers(fuses=index == reader)) for index in range(count)]


@st.composite
def _layers(draw: st.DrawFn, fuses: bool) -> dict[str, Any]:
    attention = draw(st.just("none") | _attentions())
    attends = isinstance(attention, dict)
    fusions = ["concat", "project", "add"] if attends else ["project"]
    fusion = draw(st.sampled_from(fusions if fuses else ["none", *fusions]))
    normed = isinstance(attention, dict) and attention["norm"] == "own"
    return {
        "repeat": draw(st.integers(1, 2)),
        "fusion": fusion,
        "fusion_bias": draw(st.booleans()) if fusion in ("project", "add") else False,
        "stream": draw(st.sampled_from(["h", "2h"])),
        "residual_from": draw(st.sampled_from(["raw", "normed"])) if normed else "raw",
        "attention": attention,
        "mlp": {
            "depth": draw(st.integers(0 if attends else 1, 3)),
            "intermediate_size": draw(st.sampled_from(["target", 3, 7])),
            "residual": draw(st.booleans()),
            "norm": draw(st.sampled_from(["own", "shared"])),
        },
    }


@st.composite
def _attentions(draw: st.DrawFn) -> dict[str, Any]:
    heads: Any = draw(st.sampled_from(["target", 1, 2, 3, 6]))
    count: int = TOY.heads if heads == "target" else heads
    fits: list[Any] = [kv_heads for kv_heads in range(1, count + 1) if count % kv_heads == 0]
    return {
        "heads": heads,
        "kv_heads": draw(st.sampled_from(["target", *fits] if count % TOY.kv_heads == 0 else fits)),
        "head_dim": draw(st.sampled_from(["target", 2, 6])),
        "qk_norm": draw(st.booleans()),
        "bias": draw(st.booleans()),
        "window": draw(st.none() | st.integers(2, 5)),
        "norm": draw(st.sampled_from(["own", "none"])),
    }


@st.composite
def eagle3_specs(draw: st.DrawFn, holds: Holds) -> DraftSpec:
    """A spec for ``TOY`` of the EAGLE-3 family, drawn from all that ``holds`` says a project takes."""
    width: int = draw(st.sampled_from([TOY.hidden_size, 8, 24] if holds.other_width else [TOY.hidden_size]))
    copies = width == TOY.hidden_size
    embeddings = ["frozen", "trained"] if holds.own_embedding else ["frozen"]
    head_norm = draw(st.sampled_from(holds.head_norms))
    feedback = draw(st.sampled_from(["pre_norm"] if head_norm == "none" else holds.feedbacks))
    return DraftSpec.model_validate(
        {
            "name": draw(_NAMES.filter(str.strip)),
            "inputs": {
                "aux_layers": draw(_held_aux_layers(holds, width)),
                "norm": draw(st.sampled_from(holds.input_norms)),
            },
            "hidden_size": width,
            "embedding": draw(st.sampled_from(embeddings)) if copies else "trained",
            "layers": draw(_held_stacks(holds)),
            "feedback": feedback,
            "head": {
                "vocab_size": draw(st.sampled_from(["full", TOY.vocab_size]) | st.integers(1, TOY.vocab_size - 1)),
                "weights": draw(st.sampled_from(["own", "target"])) if copies else "own",
                "norm": head_norm,
            },
            "rope_theta": draw(st.sampled_from(["target", 100, 1e6])),
            "rope_scaling": draw(ROPES.filter(lambda rope: _held(rope, holds))),
            "norm_eps": draw(st.sampled_from(["target", 1e-6])),
        }
    )


@st.composite
def _held_aux_layers(draw: st.DrawFn, holds: Holds, hidden_size: int) -> list[int]:
    """Any layers that can be read; so many that fc is not skipped where a project skips a square one."""
    ids = [i for i in range(TOY.num_layers + 1) if (i or holds.embedding_id) and (i < TOY.num_layers or holds.last_id)]
    square = hidden_size // TOY.hidden_size if holds.skips_square_fc and hidden_size % TOY.hidden_size == 0 else 0
    chosen = draw(st.sets(st.sampled_from(ids), min_size=1, max_size=5).filter(lambda chosen: len(chosen) != square))
    return sorted(chosen)


@st.composite
def _held_stacks(draw: st.DrawFn, holds: Holds) -> list[dict[str, Any]]:
    """One fused layer and plain ones of the same sizes; windows may differ, between one width and none, where held."""
    attention = draw(_attentions()) | {"norm": "own"}
    attention["qk_norm"] = holds.qk_norm and attention["qk_norm"]
    biased = holds.bias and (holds.biased_qk_norm or not attention["qk_norm"])
    attention["bias"] = biased and attention["bias"]
    window = draw(st.none() | st.integers(2, 5)) if holds.window else None
    windows = [window, None] if holds.mixed_windows else [window]
    mlp = {
        "intermediate_size": draw(st.sampled_from(["target", 3, 7])),
        "residual": draw(st.booleans()),  # of a single MLP both are the same draft
        "norm": draw(st.sampled_from(["own", "shared"])),
    }
    layers = [
        {"fusion": "none", "attention": attention | {"window": draw(st.sampled_from(windows))}, "mlp": mlp}
        for _ in range(draw(st.integers(1, holds.max_layers or 3)))
    ]
    layers[0] |= {"fusion": "concat", "residual_from": draw(st.sampled_from(holds.residuals))}
    return layers


def _held(rope: Any, holds: Holds) -> bool:
    """``attention_factor`` 1 is the paper's for factor 1 only."""
    if not isinstance(rope, dict):
        return True
    usual = rope.get("attention_factor") is None or (rope["attention_factor"], rope["factor"]) == (1, 1)
    return rope["type"] in holds.ropes and (usual or holds.attention_factor)


@st.composite
def eagle1_specs(draw: st.DrawFn) -> DraftSpec:
    """A spec for ``TOY`` of the EAGLE-1 family: one fusing projection, the target's last state, norm and head."""
    attention = draw(_attentions()) | {"qk_norm": False, "bias": False, "window": None, "norm": "own"}
    mlp = {"intermediate_size": draw(st.sampled_from(["target", 3, 7]))}
    layer: dict[str, Any] = {"fusion": "none", "attention": attention, "mlp": mlp}
    first = {"fusion": "project", "fusion_bias": draw(st.booleans()), "attention": attention | {"norm": "none"}}
    layers = [layer | first, *[layer] * draw(st.integers(0, 2))]
    return DraftSpec.model_validate(
        {
            "name": draw(_NAMES.filter(str.strip)),
            "inputs": {"aux_layers": ["last"], "norm": "target", "projection": "none", "bias": draw(st.booleans())},
            "embedding": draw(st.sampled_from(["frozen", "trained"])),
            "layers": layers,
            "head": {"vocab_size": "full", "weights": "target", "norm": "none"},
            "rope_theta": draw(st.sampled_from(["target", 100, 1e6])),
            "rope_scaling": draw(ROPES),
            "norm_eps": draw(st.sampled_from(["target", 1e-6])),
        }
    )
