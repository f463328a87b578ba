"""``archspec eval`` as a user meets it: serving temperature, top-p, draft trees, and lengths for every k."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from archspec.weights import save_draft
from runners.features.store import FeatureStore
from tests.runners.drafts import single_thread, tiny_spec, trained_draft
from tests.test_cli import World, answered, refused


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def command(world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    single_thread()
    store = FeatureStore.open(world.features)
    folder = tmp_path_factory.mktemp("draft") / "draft"
    save_draft(trained_draft(store, tiny_spec(store.facts, changes={"inputs.aux_layers": [2, 4, 5]})), folder)
    return "eval", folder, "-f", world.features, "--holdout", 0.1


def record(*words: object) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(answered(*words, "--json"))
    return told


def test_lengths_are_told_for_every_k_to_eight(command: tuple[Any, ...]) -> None:
    lines = answered(*command, "-k", 2).splitlines()
    rows = [line.split() for line in lines if re.match(r"\d+ ", line)]
    assert [row[0] for row in rows] == [str(step) for step in range(8)]
    assert rows[1][1] != "—"
    assert [row[1:3] for row in rows[2:]] == [["—", "—"]] * 6
    lengths = [float(row[3]) for row in rows]
    assert lengths == sorted(lengths)
    assert f"acceptance length {lengths[1]:.4f}" in lines[0]


def test_serving_otherwise_than_the_text_was_sampled_is_a_proxy(command: tuple[Any, ...]) -> None:
    own = answered(*command)
    assert "proxy" not in own
    warm = " ".join(answered(*command, "--temperature", 0.7, "--top-p", 0.9, "--sampled").split())
    assert "acceptance length (proxy)" in warm
    assert "sampled draft at temperature 0.7, top-p 0.9" in warm
    assert (
        "proxy: the text was sampled at temperature 0, but is served at temperature 0.7 and top-p 0.9, "
        "so acceptance is only an indication"
    ) in warm
    told = record(*command, "--temperature", 0.7)["acceptance"]
    assert (told["temperature"], told["top_p"], told["own_text"]) == (0.7, 1.0, True)
    assert told["proxy"].endswith("is served at temperature 0.7")
    assert record(*command, "--temperature", 0)["acceptance"]["proxy"] == ""


def test_a_tree_stands_beside_the_chain(command: tuple[Any, ...]) -> None:
    words = (*command, "-k", 2, "--decode", 2, "--tree", "3x2")
    told = record(*words)["decoding"]
    assert (told["shape"], told["tree"]["shape"]) == ("chain of 2", "tree 3x2")
    assert told["same_text"] == told["tree"]["same_text"] == told["responses"] == 2
    assert told["tree"]["length"] >= told["length"] > 1
    assert told["length"] == pytest.approx(told["evaluator"]["length"])
    assert told["speedup_low"] <= told["speedup"] <= told["speedup_high"]
    shown = answered(*words)
    assert re.search(r"tree 3x2 +\d+ +\d+ +\d\.\d{4} ", shown)
    assert "2 of 2 texts equal plain greedy decoding\n2 of 2 with the tree" in shown
    assert "1 texts in each way, drawn at temperature 0.7" in answered(*command, "--decode", 1, "--temperature", 0.7)


def test_what_cannot_be_served_or_decoded_is_told(command: tuple[Any, ...], tmp_path: Path) -> None:
    assert "--tree 3x2: a tree is measured by decoding; add --decode 8" in refused(*command, "--tree", "3x2")
    assert "tree '3y2': write 4x2x1 for branches, or 4,4,16" in refused(*command, "--tree", "3y2", "--decode", 1)
    assert "tokens: 2 steps with topk 2 draft 6 tokens" in refused(*command, "--tree", "2,2,9", "--decode", 1)
    assert "top_p = 0.0: input should be greater than 0" in refused(*command, "--top-p", 0)


def test_text_is_sampled_with_top_p(world: World, tmp_path: Path) -> None:
    prompts, own, features = tmp_path / "prompts.jsonl", tmp_path / "own.jsonl", tmp_path / "features"
    prompts.write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(4)))
    making = ["capture", "-t", world.target, "--generate", prompts, "--responses", own, "--max-new-tokens", 8]
    making += ["--max-length", 128, "--temperature", 0.8, "-o", features]
    answered(*making, "--top-p", 0.9)
    manifest = FeatureStore.open(features).manifest
    assert (manifest.temperature, manifest.top_p) == (0.8, 0.9)
    assert "was generated with top-p 0.9, not 1.0; write the answers to a new file" in refused(*making)
    assert "top_p 0.0: must be above 0 and at most 1" in refused(*making, "--top-p", 0)
