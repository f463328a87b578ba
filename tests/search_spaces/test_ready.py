"""The spaces that come with the package: valid, explained, feasible for any target, and holding what they promise."""

from importlib.resources import files

import optuna
import pytest

from archspec.facts import TargetFacts
from archspec.presets import load_preset, preset_names
from search_spaces.sampling import Infeasible, apply_overrides, locate, require_feasible, sample
from search_spaces.space import Space, ready_space_names
from tests.smollm2 import SMOLLM2

TOY = TargetFacts(
    model_type="llama",
    hidden_size=64,
    num_layers=8,
    vocab_size=3000,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate_size=128,
)
CONTAINS = {
    "aux-layers": {"eagle3"},
    "depth-and-fusion": {"eagle3", "eagle3-deep-fused-once", "eagle3-deep-fused-every-layer"},
    "draft-vocabulary": {"eagle3"},
    "eagle-family": set(preset_names()) - {"eagle1"},
    "mlp": {"eagle3", "eagle3-mlp-residual", "eagle3-mlp-stack"},
    "norms": {"eagle3", "eagle3.1", "eagle3-qwen3"},
    "stream-width": {"eagle3", "eagle3-wide-stream", "eagle3-deep-fused-once", "eagle3-deep-fused-every-layer"},
}


def test_every_ready_space_is_listed_here() -> None:
    assert ready_space_names() == sorted(CONTAINS)


@pytest.mark.parametrize("name", sorted(CONTAINS))
def test_space_says_its_question_and_holds_its_presets(name: str) -> None:
    space = Space.load(name)
    assert space.describe.endswith("?")
    text = (files("search_spaces") / "ready" / f"{name}.yaml").read_text(encoding="utf-8")
    assert text.startswith("# Question: ")
    assert {preset for preset in preset_names() if locate(space, load_preset(preset), SMOLLM2)} == CONTAINS[name]


@pytest.mark.parametrize("target", [SMOLLM2, TOY], ids=["smollm2", "toy"])
@pytest.mark.parametrize("name", sorted(CONTAINS))
def test_draws_are_many_and_mostly_feasible(name: str, target: TargetFacts) -> None:
    space = Space.load(name)
    fixed = {"head.vocab_size": "full"}
    require_feasible(space, target, fixed)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    hashes, reasons = set(), set()
    for _ in range(60):
        try:
            hashes.add(sample(space, study.ask(), target, fixed).hash)
        except Infeasible as infeasible:
            reasons.add(infeasible.reason)
    assert all("head.vocab_size" in reason for reason in reasons), "only the vocabulary may be too large"
    assert len(hashes) >= min(10, (space.grid_size() or 10) // 3)
    assert locate(space, apply_overrides(load_preset("eagle3"), fixed), target, fixed) is not None


def test_eagle_family_is_all_the_others_together() -> None:
    family = Space.load("eagle-family")
    for name in CONTAINS:
        for path, domain in Space.load(name).choices.items():
            wide = family.choices[path]
            assert set(domain.labels()) <= set(wide.labels()), (name, path)
