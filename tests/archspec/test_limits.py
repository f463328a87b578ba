"""What no format, or one of them, can hold: every field that is refused, in the words that people read."""

from typing import Any

import pytest

from archspec.formats import unheld
from tests.archspec.drafts import CONCAT, make, preset

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "sglang",
        {"inputs": {"aux_layers": [0, 4, 5]}},
        "inputs.aux_layers = [0, 4, 5]: SGLang cannot read the embedding (0); use layers from 1",
    ),
    (
        "sglang",
        {"inputs": {"aux_layers": [2, 8]}},
        "inputs.aux_layers = [2, 8]: SGLang cannot read the last layer's output; use layers up to 7",
    ),
    (
        "sglang",
        {"inputs": {"aux_layers": [4]}},
        (
            "inputs.aux_layers = [4]: SGLang skips fc where the aux states together are as wide as the draft, 16; "
            "read 2 layers"
        ),
    ),
    ("vllm", {"inputs": {"bias": True}}, "inputs.bias = true: use false"),
    (
        "vllm",
        {"inputs": {"aux_layers": [4], "projection": "none"}},
        "inputs.projection = none: use linear",
    ),
    (
        "vllm",
        {"inputs": {"aux_layers": ["last"], "norm": "target"}},
        "inputs.norm = target: use none, each or joint",
    ),
    (
        "speculators",
        {"hidden_size": 12, "embedding": "trained"},
        "hidden_size = 12: speculators takes drafts as wide as their target; use 16",
    ),
    ("sglang", {"embedding": "trained"}, "embedding = trained: SGLang puts the target's in its place; use frozen"),
    ("specforge", {"layers": [CONCAT, {}]}, "layers = 2: SpecForge has 1; use 1"),
    ("specforge", {"feedback": "post_norm"}, "feedback = post_norm: SpecForge feeds back pre_norm"),
    ("vllm", {"head": {"norm": "none"}}, "head.norm = none: use own"),
    (
        "vllm",
        {"layers": [{**CONCAT, "attention": {"qk_norm": True, "bias": True}}]},
        "layers.0.attention.bias = true: vLLM has no bias on o beside q/k norms; use false",
    ),
    ("sglang", {"layers": [{**CONCAT, "residual_from": "normed"}]}, "layers.0.residual_from = normed: use raw"),
    ("vllm", {"layers": [CONCAT, {"residual_from": "normed"}]}, "layers.1.residual_from = normed: use raw"),
    (
        "vllm",
        {"layers": [{**CONCAT, "attention": {"window": 9}}, {"attention": {"window": 5}}]},
        "layers.1.attention.window = 5: all windows are the same; use 9",
    ),
    (
        "vllm",
        {"layers": [{**CONCAT, "attention": {"window": 9}}, {}]},
        "layers.1.attention.window = null: all windows are the same; use 9",
    ),
    (
        "speculators",
        {"layers": [{**CONCAT, "attention": {"window": 9}}, {}, {"attention": {"window": 5}}]},
        "layers.2.attention.window = 5: all windows are the same; use 9 or null",
    ),
    (
        "vllm",
        {"layers": [{**CONCAT, "attention": {"qk_norm": True}}, {}]},
        "layers.1.attention.qk_norm = false: all layers have the same; use true",
    ),
]


@pytest.mark.parametrize(("form", "fields", "message"), REFUSED, ids=[message.split(":")[0] for *_, message in REFUSED])
def test_a_field_that_a_format_lacks_is_named(form: str, fields: dict[str, Any], message: str) -> None:
    assert unheld(make(**fields))[form] == [message]


def test_eagle1_lists_all_that_makes_a_draft_another() -> None:
    assert unheld(preset("eagle3"))["eagle1"] == [
        "inputs.aux_layers = [2, 4, 5]: EAGLE-1 has [8]; use [8]",
        "inputs.norm = none: EAGLE-1 has target; use target",
        "inputs.projection = linear: EAGLE-1 has none; use none",
        "head.vocab_size = 20: EAGLE-1 has 48; use 48",
        "head.weights = own: EAGLE-1 has target; use target",
        "head.norm = own: EAGLE-1 has none; use none",
        "layers.0.fusion = concat: use project; only the first layer reads the embedding",
        "layers.0.attention.norm = own: use none",
    ]


def test_every_layer_is_looked_at() -> None:
    spec = make(
        layers=[CONCAT, CONCAT, {"attention": "none"}, {"attention": {"heads": 2}, "mlp": {"intermediate_size": 10}}]
    )
    assert unheld(spec)["vllm"] == [
        "layers.1.fusion = concat: use none; only the first layer reads the embedding",
        "layers.2.attention = none: every layer has attention",
        "layers.3.attention.heads = 2: all layers have the same; use 4",
        "layers.3.mlp.intermediate_size = 10: all layers have the same; use 24",
    ]
