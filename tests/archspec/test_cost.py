"""Costs against numbers worked out by hand; that names and shapes are the module's is in test_property."""

from typing import Any

import pytest

from archspec import cost
from archspec.errors import ArchspecError
from archspec.presets import load_preset
from archspec.resolve import ResolvedSpec, resolve
from archspec.spec import DraftSpec
from tests.archspec.strategies import TOY
from tests.smollm2 import SMOLLM2

# EAGLE-3 for SmolLM2-135M: hidden 576, 9 heads and 3 key heads of 64, intermediate 1536, vocabulary 49,152 -> 32,000.
EMBEDDING = 49_152 * 576
FC = 576 * (3 * 576)
ATTENTION = (9 + 3 + 3) * 64 * (2 * 576) + 576 * (9 * 64)
MLP = 3 * 576 * 1536
HEAD = 32_000 * 576
NORMS = 2 * 576 + 576 + 576  # embedding and state, MLP, final


def test_eagle3_on_smollm2() -> None:
    spec = resolve(load_preset("eagle3"), SMOLLM2)
    assert cost.draft_params(spec) == FC + ATTENTION + MLP + HEAD + NORMS == 23_521_536
    assert cost.trainable_params(spec) == 23_521_536
    assert cost.total_params(spec) == EMBEDDING + 23_521_536 == 51_833_088
    assert cost.flops_per_token(spec) == 2 * (FC + ATTENTION + MLP + HEAD) == 47_038_464
    assert cost.weight_bytes(spec, "float32") == 94_086_144
    assert cost.weight_bytes(spec, "bfloat16") == cost.weight_bytes(spec, "float16") == 47_043_072
    assert cost.weight_bytes(spec, "float8") == 23_521_536


def test_eagle1_on_smollm2() -> None:
    """No aux projection; the fusing projection has a bias; embedding, head and the norm in front are the target's."""
    spec = resolve(load_preset("eagle1"), SMOLLM2)
    attention = (9 + 3 + 3) * 64 * 576 + 576 * 576
    own = (576 * 1152 + 576) + attention + MLP + 576
    assert cost.trainable_params(spec) == own
    assert cost.total_params(spec) == own + 2 * EMBEDDING + 576
    assert cost.draft_params(spec) == own + 576, "an engine holds the target's embedding and head already"


def test_three_fused_layers_on_smollm2() -> None:
    one, three = (
        cost.draft_params(resolve(load_preset(name), SMOLLM2)) for name in ("eagle3", "eagle3-deep-fused-every-layer")
    )
    assert three - one == 2 * (ATTENTION + MLP + 3 * 576)
    once = cost.draft_params(resolve(load_preset("eagle3-deep-fused-once"), SMOLLM2))
    assert three - once == 2 * ((9 + 3 + 3) * 64 * 576 + 576), "half of what attention reads, and the embedding's norm"


def toy(layers: list[dict[str, Any]], **fields: Any) -> ResolvedSpec:
    return resolve(DraftSpec.model_validate({"name": "toy", "layers": layers} | fields), TOY)


def test_a_wide_stream_at_toy_size() -> None:
    """h = 16, 4 heads and 2 key heads of 4, intermediate 24: [e, x] becomes the stream, then one wide layer."""
    spec = toy([{"fusion": "concat", "stream": "2h"}, {"stream": "2h"}])
    first = (16 + 8 + 8) * 32 + 32 * 16 + (16 + 16)
    second = (16 + 8 + 8) * 32 + 32 * 16 + 32
    mlp = 32 + 3 * 32 * 24
    narrow, final, fc, head = 16 * 32, 16, 16 * 48, 48 * 16
    assert cost.trainable_params(spec) == first + second + 2 * mlp + narrow + final + fc + head


def test_residual_maps_where_the_width_changes_without_fusion() -> None:
    names = {name: shape for name, shape, _ in cost.parameter_shapes(toy([{"stream": "2h"}, {}, {"fusion": "add"}]))}
    assert names["layers.0.residual_map.weight"] == (32, 16)
    assert names["layers.1.residual_map.weight"] == (16, 32)
    assert "narrow.weight" not in names
    widened = {name for name, _, _ in cost.parameter_shapes(toy([{"fusion": "concat", "stream": "2h"}]))}
    assert "layers.0.residual_map.weight" not in widened
    assert "narrow.weight" in widened


@pytest.mark.parametrize(
    ("mlp", "norms"),
    [
        ({"depth": 0}, 0),
        ({"depth": 1}, 1),
        ({"depth": 3}, 3),
        ({"depth": 3, "norm": "shared"}, 1),
        ({"depth": 3, "residual": False}, 1),
    ],
)
def test_norms_of_an_mlp(mlp: dict[str, Any], norms: int) -> None:
    names = [name for name, _, _ in cost.parameter_shapes(toy([{"fusion": "add", "mlp": mlp}]))]
    assert sum("mlps.norms" in name for name in names) == norms
    assert sum("down_proj" in name for name in names) == mlp["depth"]


def test_a_trained_embedding_is_the_drafts_own() -> None:
    frozen, trained = toy([{"fusion": "concat"}]), toy([{"fusion": "concat"}], embedding="trained")
    assert cost.total_params(frozen) == cost.total_params(trained)
    assert cost.draft_params(trained) - cost.draft_params(frozen) == 48 * 16
    assert cost.trainable_params(trained) - cost.trainable_params(frozen) == 48 * 16
    assert cost.flops_per_token(trained) == cost.flops_per_token(frozen), "a look-up multiplies nothing"


def test_the_targets_own_head_costs_nothing_but_rows_picked_from_it_do() -> None:
    """A full head is the target's tensor itself; one of fewer rows is a table of its own beside it."""
    layers = [{"fusion": "concat"}]
    own, copied = toy(layers), toy(layers, head={"weights": "target"})
    assert cost.draft_params(own) - cost.draft_params(copied) == 48 * 16
    fewer = toy(layers, head={"weights": "target", "vocab_size": 40})
    assert cost.draft_params(fewer) - cost.draft_params(copied) == 40 * 16
    assert cost.total_params(own) == cost.total_params(copied)


def test_an_unknown_dtype() -> None:
    with pytest.raises(ArchspecError) as caught:
        cost.weight_bytes(toy([{"fusion": "concat"}]), "bfloat")
    assert str(caught.value) == (
        "dtype 'bfloat' is unknown: did you mean 'bfloat16'? choose from float32, bfloat16, float16, float8"
    )
