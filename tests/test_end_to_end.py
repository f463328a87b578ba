"""One whole search over a tiny target that has learnt real text, and what it wrote, checked."""

import csv
import json
from pathlib import Path

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from archspec.checkpoints import load
from archspec.formats import FORMATS
from archspec.weights import load_draft
from cli import app
from runners.features.capture import capture
from runners.features.chat import prompt_tokens
from runners.features.conversations import read_conversations
from runners.features.generate import generate_responses
from runners.features.store import FeatureStore
from runners.features.target import Target, load_target
from runners.search.result import BestConfig
from runners.search.search_file import SearchFile
from runners.training.acceptance import measure_acceptance
from runners.training.decoding import decode_plain, decode_speculative
from tests.runners.trained import trained_target

PROMPTS = Path(__file__).parents[1] / "data" / "prompts.jsonl"
NEW_TOKENS = 64
SEARCH = {
    "data": {"max_length": 400, "holdout": 0.25},
    "space": "depth-and-fusion",
    "fixed": {"head.vocab_size": 64},
    "baselines": ["eagle3", "eagle3-deep-fused-once"],
    "train": {"ttt_steps": 3, "batch_tokens": 1024, "learning_rate": 4e-3, "threads": 1},
    "objective": {"maximize": "acceptance_length", "draft_length": 3},
    "budget": {"trials": 4, "rungs": [4000, 12000], "seeds": 2, "finalists": 2},
    "runner": {"kind": "local", "concurrent": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder, its own text, and a finished run."""
    folder = tmp_path_factory.mktemp("end-to-end")
    target = trained_target()
    target.model.save_pretrained(folder / "target")
    target.tokenizer.save_pretrained(folder / "target")
    target = load_target(str(folder / "target"))
    prompts = [one for one in read_conversations(PROMPTS) if len(one.messages[-1].content) < 150][:80]
    generate_responses(target, prompts, NEW_TOKENS, 0.0, 40, 0, folder / "text.jsonl")
    search = SEARCH | {"target": {"model": str(folder / "target")}, "features": str(folder / "features")}
    search["data"] = {**SEARCH["data"], "conversations": [str(folder / "text.jsonl")]}  # type: ignore[dict-item]
    (folder / "search.yaml").write_text(yaml.safe_dump(search), encoding="utf-8")
    result = CliRunner().invoke(app, ["search", str(folder / "search.yaml"), "--out", str(folder / "run")])
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture(scope="module")
def best(folder: Path) -> BestConfig:
    return BestConfig.model_validate_json((folder / "run" / "best-config.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return load_target(str(folder / "target"))


@pytest.fixture(scope="module")
def store(folder: Path) -> FeatureStore:
    return FeatureStore.open(folder / "features")


def test_best_config_fits_its_schema_and_the_leaderboard(folder: Path, best: BestConfig) -> None:
    written = json.loads((folder / "run" / "best-config.json").read_text(encoding="utf-8"))
    jsonschema.validate(written, BestConfig.model_json_schema())
    with (folder / "run" / "leaderboard.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert rows[0]["name"] == best.name
    assert float(rows[0]["acceptance_length"]) == pytest.approx(best.metrics.length, abs=1e-5)
    assert {"eagle3", "eagle3-deep-fused-once"} <= {row["name"] for row in rows if row["baseline"] == "True"}
    assert len({row["hash"] for row in rows}) == len(rows) == 4
    assert SearchFile.load(folder / "run" / "search.yaml").budget.trials == 4


def test_drafts_learnt_something(best: BestConfig) -> None:
    """Far above 1.0, which an untrained draft reaches; several steps of it."""
    assert best.metrics.low > 1.2
    assert best.metrics.acceptance["conditional"][0] > 0.2
    assert best.metrics.acceptance["own_text"] is True
    assert len(best.metrics.seed_lengths) == 2


def test_saved_weights_replay_to_the_recorded_acceptance(folder: Path, best: BestConfig, store: FeatureStore) -> None:
    """Written, read back, measured again: the same to the last digit, and the formats that hold the draft are told."""
    file = SearchFile.load(folder / "run" / "search.yaml")
    heldout = store.split(file.data.holdout)[1]
    draft = load_draft(folder / "run" / "best", store.weights())
    again = measure_acceptance(draft, store, heldout, file.objective)
    assert again.length == best.metrics.seed_lengths[0]
    assert best.draft_model_configs.keys() | best.not_held_by.keys() == FORMATS.keys()
    assert {name for name, verdict in best.servable.items() if verdict["servable"] != "no"} <= FORMATS.keys()


@pytest.mark.parametrize("form", ["vllm", "sglang", "specforge", "speculators"])
def test_an_export_replays_to_the_acceptance_of_the_draft(form: str, folder: Path, store: FeatureStore) -> None:
    """The baseline eagle3, which every format of its family holds."""
    file = SearchFile.load(folder / "run" / "search.yaml")
    heldout, trial, out = store.split(file.data.holdout)[1], folder / "run" / "trials" / "0000", folder / form
    draft = load_draft(trial / "draft", store.weights())
    assert draft.spec.name == "eagle3"
    words = ["export", str(trial), "--features", str(folder / "features"), "--out", str(out), "--format", form]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    before = measure_acceptance(draft, store, heldout, file.objective)
    after = measure_acceptance(load(out, target=store.weights()), store, heldout, file.objective)
    assert before.length > 1.0
    assert after.length == before.length


def test_the_engine_loop_counts_what_the_evaluator_said(folder: Path, store: FeatureStore, target: Target) -> None:
    """Speculative decoding of every held-out prompt: lossless, and the same cycles and acceptances in total."""
    file = SearchFile.load(folder / "run" / "search.yaml")
    heldout = store.split(file.data.holdout)[1]
    draft = load_draft(folder / "run" / "best", store.weights())
    measured = measure_acceptance(draft, store, heldout, file.objective)
    texts = {one.id: one for one in read_conversations(folder / "text.jsonl")}
    cycles, accepted = 0, 0
    for index in heldout:
        prompt = prompt_tokens(texts[store.documents[index].id], target.tokenizer)
        decoded = decode_speculative(target, draft, prompt, NEW_TOKENS, file.objective.draft_length)
        assert decoded.tokens == decode_plain(target, prompt, NEW_TOKENS)
        cycles += len(decoded.accepted)
        accepted += sum(decoded.accepted)
    assert cycles == measured.cycles
    assert 1 + accepted / cycles == pytest.approx(measured.length, abs=1e-9)


def test_capturing_the_same_again_is_the_same_store(folder: Path, store: FeatureStore, target: Target) -> None:
    lines: list[str] = []
    texts = read_conversations(folder / "text.jsonl")
    again = capture(target, texts, [2, 4, 5], folder / "features", "float32", 400, report=lines.append)
    assert again.fingerprint == store.fingerprint
    assert any("reusing" in line for line in lines)
