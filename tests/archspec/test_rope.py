"""Scaled rotary positions: against transformers' own tables, and between a spec's words and those of configs."""

import logging
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from archspec.attention import Rotary, stretched
from archspec.errors import ArchspecError
from archspec.facts import TargetFacts
from archspec.presets import load_preset
from archspec.resolve import ResolvedSpec, resolve
from archspec.rope import Llama3Rope, YarnRope, rope_keys, rope_of, target_rope
from archspec.schema import Document
from archspec.spec import DraftSpec
from tests.archspec.drafts import logits, make, make_draft
from tests.archspec.strategies import ROPES, TOY
from tests.smollm2 import SMOLLM2

logging.getLogger("transformers").setLevel(logging.ERROR)  # it warns of odd numbers, of which there are some here

LLAMA31: dict[str, Any] = {
    "type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_positions": 8192,
}
YARN: dict[str, Any] = {"type": "yarn", "factor": 4.0, "original_max_positions": 32768}


def resolved(rope: Any, facts: TargetFacts = TOY) -> ResolvedSpec:
    return resolve(DraftSpec.model_validate({"name": "x", "layers": [{"fusion": "add"}], "rope_scaling": rope}), facts)


# Against transformers


SIZES = [(64, 10_000.0), (128, 500_000.0), (96, 1_000_000.0), (4, 10_000.0), (2, 100.0)]
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"type": "linear", "factor": 2.5},
    "llama3.1": LLAMA31,
    "llama3.2": LLAMA31 | {"factor": 32.0},
    "llama3, short": LLAMA31 | {"original_max_positions": 64, "high_freq_factor": 2.0},
    "yarn": YARN,
    "yarn, short": YARN | {"original_max_positions": 64, "beta_fast": 16, "beta_slow": 2},
    "yarn, not truncated": YARN | {"factor": 32.0, "original_max_positions": 4096, "truncate": False},
    "yarn, own factor": YARN | {"attention_factor": 1.5},
}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize(("head_dim", "theta"), SIZES)
def test_frequencies_and_tables_are_those_of_transformers(name: str, head_dim: int, theta: float) -> None:
    """Its functions, and its table of a Llama, run on the keys that an export writes; bounds at 64 positions bite."""
    rope = resolved(SCALINGS[name]).rope_scaling
    assert rope != "none"
    config = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters={**rope_keys(rope), "rope_theta": theta},
    )
    theirs, scale = ROPE_INIT_FUNCTIONS[rope.type](config)
    plain = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    torch.testing.assert_close(stretched(plain, theta, rope), theirs, rtol=1e-6, atol=0)
    assert rope.attention_scale == pytest.approx(scale, rel=1e-9)
    positions = torch.tensor([[0, 1, 7, 63, 100]])
    for got, want in zip(
        Rotary(head_dim, theta, rope)(positions),
        LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=torch.float32), positions),
        strict=True,
    ):
        torch.testing.assert_close(got[:, 0], want, rtol=0, atol=2e-5)  # 1e-7 of an angle of 100 radians


def test_every_kind_of_pair_is_among_them() -> None:
    """So that the comparison above does not hold for one branch only: some pairs kept, some divided, some blended."""
    plain = 500_000.0 ** -(torch.arange(0, 128, 2, dtype=torch.float32) / 128)
    for name in ("llama3.1", "yarn"):
        rope = resolved(SCALINGS[name]).rope_scaling
        assert rope != "none"
        share = plain / stretched(plain, 500_000.0, rope)
        kept, divided = share < 1 + 1e-6, share > rope.factor * (1 - 1e-6)
        assert min(kept.sum(), divided.sum(), (~kept & ~divided).sum()) > 5


def test_a_draft_turns_by_its_own_scaling() -> None:
    """Built from the spec, with and without: other logits behind the first position, equal ones for factor 1."""
    plain, scaled, one = (
        logits(make_draft(make(rope_scaling=rope)))
        for rope in ("none", LLAMA31 | {"original_max_positions": 16}, {"type": "linear", "factor": 1})
    )
    assert all(torch.equal(a, b) for a, b in zip(plain, one, strict=True))
    assert not torch.allclose(plain[0], scaled[0])


# In a spec


LLAMA3_LINES = (
    "\n  type: llama3\n  factor: 8\n  low_freq_factor: 4\n  high_freq_factor: 1\n  original_max_positions: 8192"
)
KEYS = "type, factor, original_max_positions, beta_fast, beta_slow, truncate, attention_factor"


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("3", 3, " = 3: must be 'none', 'target' or a mapping whose type is linear, llama3, yarn"),
        ("dynamic", 3, " = 'dynamic': must be 'none', 'target' or a mapping whose type is linear, llama3, yarn"),
        ("[none]", 3, ": must be 'none', 'target' or a mapping whose type is linear, llama3, yarn"),
        ("{factor: 3}", 3, ".type: this key is required; choose from linear, llama3, yarn"),
        ("{type: lama3}", 3, ".type: 'lama3': did you mean 'llama3'? choose from linear, llama3, yarn"),
        ("{type: linear}", 3, ".factor: this key is required"),
        ("{type: linear, factor: true}", 3, ".factor = True: must be a positive number"),
        ("{type: linear, factor: 0.5}", 3, ".factor = 0.5: must be 1 or more: so many times the original context"),
        ("{type: linear, factor: 1e999}", 3, ".factor = inf: must be a positive number"),
        (
            "{type: yarn, factor: 4, betafast: 3}",
            3,
            f".betafast: unknown key; did you mean 'beta_fast'? choose from {KEYS}",
        ),
        (
            "\n  type: yarn\n  factor: 4\n  original_max_positions: 8.5",
            6,
            ".original_max_positions = 8.5: input should be a valid integer",
        ),
        (
            "\n  type: yarn\n  factor: 4\n  original_max_positions: 64\n  beta_slow: 32",
            3,
            ".beta_fast: must be above beta_slow, which is 32.0, but is 32.0",
        ),
        (LLAMA3_LINES, 7, ".high_freq_factor: must be above low_freq_factor, which is 4.0, but is 1.0"),
    ],
)
def test_a_rule_is_told_at_its_line(text: str, line: int, said: str) -> None:
    with pytest.raises(ArchspecError) as caught:
        Document.parse(f"name: x\nlayers: [fusion: add]\nrope_scaling: {text}", "f.yaml").validate(DraftSpec)
    assert str(caught.value) == f"f.yaml:{line}: rope_scaling{said}"


def test_yarn_has_its_attention_factor_as_a_number_once_resolved() -> None:
    rope = resolved(YARN).rope_scaling
    assert isinstance(rope, YarnRope)
    assert rope.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    written = DraftSpec.model_validate({"name": "x", "layers": [{"fusion": "add"}], "rope_scaling": YARN})
    assert isinstance(written.rope_scaling, YarnRope)
    assert written.rope_scaling.attention_factor is None


def test_yarn_needs_a_base_above_one() -> None:
    """Its bounds are logarithms of that base."""
    with pytest.raises(ArchspecError, match=r"^spec 'draft': rope_theta: must be above 1 for yarn, but is 1\.0$"):
        make(rope_scaling=YARN, rope_theta=1)
    assert make(rope_scaling=LLAMA31, rope_theta=1).rope_theta == 1


def test_target_is_the_targets_scaling_with_all_its_numbers() -> None:
    scaled = TOY.model_copy(update={"rope_scaling": Llama3Rope.model_validate(LLAMA31)})
    assert resolved("target", scaled).rope_scaling == resolved(LLAMA31, scaled).rope_scaling
    assert resolved("target", scaled).hash == resolved(LLAMA31).hash
    assert resolved("none", scaled).hash == resolved("none").hash  # of the target only what the draft has counts
    assert resolved("target").rope_scaling == "none"


def test_a_target_of_another_kind_is_named() -> None:
    document = Document.parse("name: x\nlayers: [fusion: add]\nrope_scaling: target", "f.yaml")
    spec, facts = document.validate(DraftSpec), TOY.model_copy(update={"rope_scaling": "longrope"})
    with pytest.raises(ArchspecError) as caught:
        resolve(spec, facts, document)
    rule = "the target's positions are scaled by 'longrope', which drafts do not have"
    assert str(caught.value) == (f"f.yaml:3: rope_scaling: {rule}; use none, or a mapping of type linear, llama3, yarn")
    assert resolved("none", facts).hash == resolved("none").hash


def test_a_resolved_spec_has_no_placeholder() -> None:
    data = resolved("none").model_dump(mode="json") | {"rope_scaling": "target"}
    with pytest.raises(ArchspecError, match="rope_scaling = 'target': must be 'none' or a mapping: the target's has"):
        Document(data, "resolved").validate(ResolvedSpec)


# The hash, and facts that were written before there was any scaling


BEFORE = {"eagle1": "fa9f3f60c2b9", "eagle3": "bbbdb3eed959", "eagle3.1": "d6590e27c910"}
"""For SmolLM2, recorded before ``rope_scaling`` was a field."""


@pytest.mark.parametrize("name", BEFORE)
def test_hashes_of_drafts_without_scaling_stay(name: str) -> None:
    assert resolve(load_preset(name), SMOLLM2).hash == BEFORE[name]


def test_scalings_have_hashes_of_their_own_unless_they_change_nothing() -> None:
    changes = [
        *("none", LLAMA31, LLAMA31 | {"factor": 32}, LLAMA31 | {"low_freq_factor": 2}),
        *(LLAMA31 | {"high_freq_factor": 5}, LLAMA31 | {"original_max_positions": 4096}),
        *(YARN, YARN | {"factor": 2}, YARN | {"beta_fast": 31}, YARN | {"beta_slow": 2}, YARN | {"truncate": False}),
        *(
            YARN | {"attention_factor": 1},
            YARN | {"original_max_positions": 64},
            YARN | {"factor": 1, "attention_factor": 2},
        ),
        *({"type": "linear", "factor": 2}, {"type": "linear", "factor": 4}),
    ]
    assert len({resolved(change).hash for change in changes}) == len(changes)
    same = YARN | {"attention_factor": 0.1 * math.log(4) + 1, "beta_fast": 32, "beta_slow": 1, "truncate": True}
    assert resolved(same).hash == resolved(YARN).hash
    for nothing in ({"type": "linear", "factor": 1}, LLAMA31 | {"factor": 1}, YARN | {"factor": 1}):
        assert resolved(nothing).hash == resolved("none").hash


def test_facts_without_scaling_are_written_as_before() -> None:
    written = SMOLLM2.model_dump(mode="json")
    assert "rope_scaling" not in written
    assert "rope_scaling" not in SMOLLM2.model_dump_json()
    assert TargetFacts.model_validate(written) == SMOLLM2
    scaled = SMOLLM2.model_copy(update={"rope_scaling": YarnRope.model_validate(YARN)})
    for facts in (scaled, SMOLLM2.model_copy(update={"rope_scaling": "dynamic"})):
        again = TargetFacts.model_validate_json(facts.model_dump_json())
        assert again.rope_scaling != "none"
        assert again.model_dump(mode="json")["rope_scaling"] == (
            "dynamic"
            if facts.rope_scaling == "dynamic"
            else YARN
            | {"beta_fast": 32, "beta_slow": 1, "truncate": True}
            | {"attention_factor": 0.1 * math.log(4) + 1}
        )


# In configs


@given(ROPES.filter(lambda rope: isinstance(rope, dict)))
def test_keys_are_read_as_they_were_written(rope: Any) -> None:
    ours = resolved(rope).rope_scaling
    keys = rope_keys(ours)
    assert rope_of(keys, None) == ours
    assert all(isinstance(value, float) for key, value in keys.items() if "factor" in key)


def test_the_keys_of_llama_3_1() -> None:
    assert rope_keys(resolved(LLAMA31).rope_scaling) == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


KEPT = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("keys", "max_positions", "expected"),
    [
        ({}, None, "none"),
        ({"rope_type": "default", "factor": 3}, None, "none"),
        ({"rope_type": None}, None, "none"),
        ({"type": "linear", "factor": 2}, None, {"type": "linear", "factor": 2}),
        ({"type": "linear", "rope_type": "linear", "factor": 2}, None, {"type": "linear", "factor": 2}),
        ({"rope_type": "dynamic", "factor": 2}, None, "dynamic"),
        (KEPT | {"beta_fast": None}, None, YARN | {"original_max_positions": 64}),
        ({"rope_type": "yarn", "factor": 4.0}, 99, YARN | {"original_max_positions": 99}),
        (KEPT | {"mscale": 1.0}, None, YARN | {"original_max_positions": 64}),
        (
            KEPT | {"mscale": 1.0, "mscale_all_dim": 0.5},
            None,
            YARN
            | {"original_max_positions": 64, "attention_factor": (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1)},
        ),
        (
            KEPT | {"mscale": 1.0, "mscale_all_dim": 0.5, "attention_factor": 1.5},
            None,
            YARN | {"original_max_positions": 64, "attention_factor": 1.5},
        ),
    ],
)
def test_what_configs_say(keys: dict[str, Any], max_positions: int | None, expected: Any) -> None:
    found = rope_of(keys, max_positions)
    assert found == (expected if isinstance(expected, str) else resolved(expected).rope_scaling)
    if isinstance(found, YarnRope):
        config = LlamaConfig(rope_parameters={**KEPT, **keys, "rope_theta": 100.0})
        assert found.attention_scale == pytest.approx(ROPE_INIT_FUNCTIONS["yarn"](config)[1])


@pytest.mark.parametrize(
    "keys", [{"rope_type": "yarn"}, {"type": "linear", "factor": 0.5}, {"rope_type": "linear", "type": "yarn"}]
)
def test_a_target_whose_keys_break_a_rule_has_a_word(keys: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must|required|agree"):
        rope_of(keys, 64)
    assert target_rope(keys, 64) == f"unusual {keys.get('rope_type') or keys['type']}"


def test_the_longest_context_only_stands_in_for_the_original_one() -> None:
    assert rope_of(KEPT, 10) == rope_of(KEPT, 10_000)
