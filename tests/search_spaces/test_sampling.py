"""Drawing from a space with Optuna, the parameters that Optuna sees, and the way back from a spec."""

from collections.abc import Mapping
from typing import Any

import optuna
import pytest

from archspec.errors import ArchspecError
from archspec.presets import load_preset
from archspec.resolve import resolve
from archspec.schema import Document
from archspec.spec import DraftSpec
from search_spaces.sampling import (
    Candidate,
    Infeasible,
    apply_overrides,
    locate,
    sample,
)
from search_spaces.space import Space
from tests.smollm2 import SMOLLM2

FACTS = SMOLLM2
SMALL_TARGET = FACTS.model_copy(update={"vocab_size": 512, "num_layers": 8})


def parse(choices: str, base: str = "eagle3") -> Space:
    return Document.parse(f"base: {base}\nchoices:\n  {choices}\n", "s.yaml").validate(Space)


def draw(space: Space, params: dict[str, Any], fixed: Mapping[str, Any] | None = None) -> Candidate:
    return sample(space, optuna.trial.FixedTrial(params), FACTS, fixed)


def names_drawn(space: Space, params: dict[str, Any]) -> list[str]:
    trial = optuna.trial.FixedTrial(params)
    sample(space, trial, FACTS)
    return list(trial.params)


def test_layers_that_do_not_exist_are_not_suggested() -> None:
    space = parse("depth: {low: 1, high: 3}\n  layers.*.fusion: [none, concat]\n  layers.rest.stream: [h, 2h]")
    fusions = {f"layers.{layer}.fusion": "concat" for layer in range(3)}
    params = {"layers.rest.stream": "h", **fusions}
    assert names_drawn(space, {"depth": 1, **params}) == ["depth", "layers.0.fusion"]
    assert names_drawn(space, {"depth": 2, **params}) == [
        "depth",
        "layers.0.fusion",
        "layers.1.fusion",
        "layers.rest.stream",
    ]
    assert set(names_drawn(space, {"depth": 3, **params})) == {"depth", *params}


def test_a_single_layer_choice_waits_for_its_layer() -> None:
    space = parse("depth: [1, 3]\n  layers.2.fusion: [none, add]")
    assert names_drawn(space, {"depth": 1}) == ["depth"]
    assert [layer.fusion for layer in draw(space, {"depth": 3, "layers.2.fusion": "add"}).spec.layers] == [
        "concat",
        "concat",
        "add",
    ]


def test_all_ties_star_frees_and_rest_leaves_the_first() -> None:
    depth = "depth: [3]\n  layers."
    tied = draw(parse(depth + "all.fusion: [none, add]"), {"depth": 3, "layers.all.fusion": "add"})
    assert [layer.fusion for layer in tied.spec.layers] == ["add", "add", "add"]
    rest = draw(parse(depth + "rest.fusion: [none, add]"), {"depth": 3, "layers.rest.fusion": "none"})
    assert [layer.fusion for layer in rest.spec.layers] == ["concat", "none", "none"]
    words = {"layers.0.fusion": "concat", "layers.1.fusion": "none", "layers.2.fusion": "add"}
    free = draw(parse(depth + "*.fusion: [none, concat, add]"), {"depth": 3, **words})
    assert [layer.fusion for layer in free.spec.layers] == list(words.values())


def test_depth_cuts_and_copies_the_last_layer_of_the_base() -> None:
    space = parse("depth: [1, 2, 4]", base="eagle3-deep-fused-once")
    fusions = {depth: [layer.fusion for layer in draw(space, {"depth": depth}).spec.layers] for depth in (1, 2, 4)}
    assert fusions == {1: ["concat"], 2: ["concat", "none"], 4: ["concat", "none", "none", "none"]}


def test_optuna_sees_strings_and_numbers_only() -> None:
    space = parse(
        "layers.0.mlp.residual: [true, false]\n"
        "  layers.0.attention.window: [null, 64]\n"
        "  inputs.aux_layers: {options: {spread: [low, high], late: [27, 30]}}\n"
        "  layers.0.mlp.depth: {low: 1, high: 2}"
    )
    params = {
        "layers.0.mlp.residual": "false",
        "layers.0.attention.window": "null",
        "inputs.aux_layers": "late",
        "layers.0.mlp.depth": 2,
    }
    trial = optuna.trial.FixedTrial(params)
    candidate = sample(space, trial, FACTS)
    assert trial.params == params
    assert all(
        type(choice) in (str, int, float)
        for distribution in trial.distributions.values()
        if isinstance(distribution, optuna.distributions.CategoricalDistribution)
        for choice in distribution.choices
    )
    layer = candidate.spec.layers[0]
    assert (layer.mlp.residual, layer.attention and layer.attention.window) == (False, None)
    assert candidate.spec.inputs.aux_layers == (27, 30)


def test_ranges_become_optuna_ranges() -> None:
    space = parse(
        "layers.0.mlp.intermediate_size: {low: 256, high: 1024, step: 256}\n"
        "  train.learning_rate: {low: 3e-4, high: 3e-3, log: true}"
    )
    trial = optuna.trial.FixedTrial({"layers.0.mlp.intermediate_size": 512, "train.learning_rate": 1e-3})
    candidate = sample(space, trial, FACTS)
    assert trial.distributions == {
        "layers.0.mlp.intermediate_size": optuna.distributions.IntDistribution(256, 1024, step=256),
        "train.learning_rate": optuna.distributions.FloatDistribution(3e-4, 3e-3, log=True),
    }
    assert candidate.spec.layers[0].mlp.intermediate_size == 512
    assert candidate.train == {"learning_rate": 1e-3}


def test_a_mapping_is_merged_into_what_stands_there() -> None:
    space = parse("layers.0.attention: {options: {narrow: {heads: 4, kv_heads: 2}, none: none}}", base="eagle3-qwen3")
    attention = draw(space, {"layers.0.attention": "narrow"}).spec.layers[0].attention
    assert attention is not None
    assert (attention.heads, attention.kv_heads, attention.qk_norm) == (4, 2, True)
    with pytest.raises(Infeasible, match="attention is none"):  # the base's concat has nothing to feed
        draw(space, {"layers.0.attention": "none"})


def test_hash_tells_training_settings_apart() -> None:
    space = parse("train.learning_rate: {low: 3e-4, high: 3e-3, log: true}")
    plain, one, other = (
        draw(parse("depth: [1]"), {"depth": 1}),
        *(draw(space, {"train.learning_rate": rate}) for rate in (1e-3, 2e-3)),
    )
    assert plain.hash == plain.spec.hash == one.spec.hash == other.spec.hash
    assert len({plain.hash, one.hash, other.hash}) == 3
    assert one.hash.startswith(one.spec.hash)


def test_a_draw_that_does_not_fit_is_infeasible_and_says_why() -> None:
    space = parse("hidden_size: [target, 384]\n  embedding: [frozen, trained]")
    with pytest.raises(Infeasible, match="embedding: frozen is a copy of the target's") as caught:
        draw(space, {"hidden_size": 384, "embedding": "frozen"})
    assert "draw" not in caught.value.reason
    assert draw(space, {"hidden_size": 384, "embedding": "trained"}).spec.hidden_size == 384


def test_an_error_of_the_trial_is_not_taken_for_an_infeasible_draw() -> None:
    with pytest.raises(ValueError, match="depth"):
        draw(parse("depth: [1, 2]"), {})


def test_fixed_stands_between_base_and_choices() -> None:
    space = parse("depth: [1, 2]\n  layers.rest.fusion: [none, concat]")
    fixed = {"depth": 1, "layers.all.fusion": "add", "head.vocab_size": "full", "layers.1.stream": "2h"}
    candidate = draw(space, {"depth": 2, "layers.rest.fusion": "none"}, fixed)
    assert [(layer.fusion, layer.stream) for layer in candidate.spec.layers] == [("add", "h"), ("none", "2h")]
    assert candidate.spec.head.vocab_size == FACTS.vocab_size
    assert len(draw(space, {"depth": 1}, fixed).spec.layers) == 1, "the layer that fixed names is not drawn"


@pytest.mark.parametrize(
    ("overrides", "rule"),
    [
        (
            {"layers.0.fusoin": "none"},
            r"fixed: layers\.0\.fusoin: 'fusoin' does not exist in a spec here; did you mean 'fu",
        ),
        ({"layers.0.fusion": "conct"}, r"fixed: layers\.0\.fusion = 'conct': did you mean 'concat'"),
        ({"layers.1.fusion": "none"}, r"fixed: layers\.1\.fusion: layer 1 is beyond the greatest depth of 1"),
        ({"depth": 0}, r"fixed: depth = 0: must be a whole number of layers, 1 or more"),
        ({"train.warmup": 0.1}, r"fixed: train\.warmup: a training setting is no part of a spec; set it under train"),
        ({"layers.0.fusion": "none", "layers.0.fusion_bias": True}, r"fixed: layers\.0: fusion_bias needs fusion"),
    ],
)
def test_bad_overrides(overrides: dict[str, Any], rule: str) -> None:
    with pytest.raises(ArchspecError, match=rule):
        apply_overrides(load_preset("eagle3"), overrides, "fixed")


def test_overrides_put_depth_first() -> None:
    spec = apply_overrides(load_preset("eagle3"), {"layers.1.fusion": "none", "depth": 2})
    assert [layer.fusion for layer in spec.layers] == ["concat", "none"]
    assert apply_overrides(spec, {}) is spec


def test_names_are_short_readable_and_deterministic() -> None:
    space = parse("depth: [2]\n  layers.*.fusion: [none, concat]\n  layers.all.stream: [h, 2h]")
    params = {"depth": 2, "layers.0.fusion": "concat", "layers.1.fusion": "none", "layers.all.stream": "2h"}
    candidate = draw(space, params)
    assert candidate.spec.name == candidate.written.name == "d2-concat-none-2h"
    sizes = parse(
        "layers.0.mlp.depth: [1, 2]\n  head.vocab_size: [2048, full]\n  layers.0.attention.qk_norm: [true, false]"
    )
    words = {"layers.0.mlp.depth": 2, "head.vocab_size": "full", "layers.0.attention.qk_norm": "false"}
    assert draw(sizes, words).spec.name == "mlp2-v_full-noqk"
    rate = parse("train.learning_rate: {low: 3e-4, high: 3e-3, log: true}")
    assert draw(rate, {"train.learning_rate": 1.23456e-3}).spec.name == "lr0.00123"


def test_long_names_are_cut_and_stay_apart() -> None:
    space = Space.load("eagle-family")
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    drawn = [sample(space, study.ask(), FACTS) for _ in range(40)]
    assert all(len(candidate.spec.name) <= 48 for candidate in drawn)
    assert len({candidate.spec.name for candidate in drawn}) == len({candidate.hash for candidate in drawn})


@pytest.mark.parametrize("preset", ["eagle3", "eagle3-deep-fused-once", "eagle3-deep-fused-every-layer"])
def test_locate_finds_baselines(preset: str) -> None:
    space, spec = Space.load("depth-and-fusion"), load_preset(preset)
    params = locate(space, spec, FACTS)
    assert params is not None
    assert draw(space, params).hash == resolve(spec, FACTS).hash


def test_locate_says_when_a_spec_is_outside() -> None:
    space = Space.load("depth-and-fusion")
    assert locate(space, load_preset("eagle3.1"), FACTS) is None, "no choice of the space sets feedback"
    deep = apply_overrides(load_preset("eagle3"), {"depth": 4})
    assert locate(space, deep, FACTS) is None
    assert locate(parse("layers.0.attention.heads: [4, 9]"), load_preset("eagle1"), FACTS) is None


def test_locate_sees_through_placeholders_and_void_fields() -> None:
    space = parse("layers.0.mlp.intermediate_size: {low: 512, high: 2048, step: 512}\n  layers.0.mlp.depth: [0, 1]")
    assert locate(space, load_preset("eagle3"), FACTS) == {
        "layers.0.mlp.intermediate_size": 1536,
        "layers.0.mlp.depth": 1,
    }
    bare = apply_overrides(load_preset("eagle3"), {"layers.0.mlp.depth": 0})
    found = locate(space, bare, FACTS)
    assert found is not None
    assert draw(space, found).hash == resolve(bare, FACTS).hash
    off_grid = apply_overrides(load_preset("eagle3"), {"layers.0.mlp.intermediate_size": 1000})
    assert locate(space, off_grid, FACTS) is None


def test_locate_with_fixed_and_training_settings() -> None:
    space = parse(
        "depth: [1, 2]\n  train.learning_rate: {low: 3e-4, high: 3e-3, log: true}\n  train.optimizer: [adamw]"
    )
    fixed = {"head.vocab_size": "full"}
    spec = load_preset("eagle3")
    train = {"learning_rate": 1e-3, "optimizer": "adamw"}
    assert locate(space, spec, FACTS, fixed, train) is None, "the baseline needs the same overrides"
    params = {"depth": 1, "train.learning_rate": 1e-3, "train.optimizer": "adamw"}
    assert locate(space, apply_overrides(spec, fixed), FACTS, fixed, train) == params
    assert locate(space, apply_overrides(spec, fixed), FACTS, fixed, train | {"learning_rate": 1.0}) is None
    assert locate(space, apply_overrides(spec, fixed), FACTS, fixed) is None


def test_locate_recovers_every_draw() -> None:
    space = Space.load("eagle-family")
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=2))
    for _ in range(20):
        candidate = sample(space, study.ask(), FACTS)
        params = locate(space, candidate.written, FACTS)
        assert params is not None
        assert draw(space, params).hash == candidate.hash


def hashes_of_a_seeded_study(space: Space) -> list[str]:
    study = optuna.create_study(
        direction="maximize", sampler=optuna.samplers.TPESampler(multivariate=True, group=True, seed=7)
    )
    hashes = []
    for _ in range(15):
        trial = study.ask()
        candidate = sample(space, trial, FACTS)
        study.tell(trial, -sum(layer.mlp.intermediate_size for layer in candidate.spec.layers))
        hashes.append(candidate.hash)
    return hashes


def test_a_seeded_sampler_draws_the_same_candidates() -> None:
    space = Space.load("stream-width")
    first = hashes_of_a_seeded_study(space)
    assert first == hashes_of_a_seeded_study(space)
    assert len(set(first)) > 3


def test_known_results_can_be_told_to_a_study() -> None:
    """What the study does with a baseline: locate it, run it through the space, add it as a finished trial."""
    space = Space.load("depth-and-fusion")
    params = locate(space, load_preset("eagle3-deep-fused-once"), FACTS)
    assert params is not None
    trial = optuna.trial.FixedTrial(params)
    sample(space, trial, FACTS)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
    study.add_trial(optuna.trial.create_trial(params=trial.params, distributions=trial.distributions, value=1.0))
    sample(space, study.ask(), FACTS)
    assert study.best_params == params


def test_written_spec_is_for_any_target() -> None:
    candidate = draw(Space.load("depth-and-fusion"), {"depth": 1, "layers.0.fusion": "concat"})
    assert candidate.written.hidden_size == "target"
    assert isinstance(candidate.written, DraftSpec)
    assert resolve(candidate.written, FACTS).hash == candidate.spec.hash
