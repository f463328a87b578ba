"""Top-p by its definition, and what the text of a store says of how it was sampled."""

import json
from pathlib import Path

import pytest
import torch

from archspec.errors import ArchspecError
from runners.features.capture import capture
from runners.features.conversations import Conversation, Generation, digest, read_conversations
from runners.features.generate import generate_responses
from runners.features.manifest import Manifest
from runners.features.sampling import tempered
from runners.features.store import FeatureStore
from runners.features.target import Target
from runners.training.acceptance import Serving
from runners.training.proxy import FOREIGN
from runners.training.settings import EvalSettings
from tests.runners.sampled import nucleus
from tests.runners.tiny import conversation

PROMPTS = [conversation("word " * (1 + number % 3), name=f"p{number}") for number in range(4)]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 1.0])
def test_kept_are_the_likeliest_tokens_that_have_top_p_together(temperature: float, top_p: float) -> None:
    logits = 3 * torch.randn(20, 50, generator=torch.Generator().manual_seed(0))
    wanted = [nucleus(p, top_p) for p in (logits / temperature).softmax(-1).tolist()]
    torch.testing.assert_close(tempered(logits, temperature, top_p).softmax(-1), torch.tensor(wanted))


def test_tokens_as_likely_as_the_last_one_stay() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, -9.0], [5.0, 0.0, 0.0, 0.0]])
    kept = tempered(logits, 1.0, 0.4).isfinite()
    assert kept.tolist() == [[True, True, True, False], [True, False, False, False]]


def generated(target: Target, out: Path, temperature: float, top_p: float) -> list[Conversation]:
    generate_responses(target, PROMPTS, 12, temperature, 4, 0, out, top_p=top_p)
    return read_conversations(out)


def test_generated_tokens_come_from_the_nucleus(target: Target, tmp_path: Path) -> None:
    last, seen = target.facts.num_layers, 0
    store = _store(target, generated(target, tmp_path / "own.jsonl", 1.0, 0.5), tmp_path)
    for document in store.documents:
        features = store.read(document.index, [])
        allowed = tempered(target.logits(features.last), 1.0, 0.5).isfinite()
        rows = features.response_mask.nonzero().squeeze(-1)
        assert allowed[rows - 1, features.tokens[rows]].all()
        seen += int((features.tokens[rows] != target.logits(features.last).argmax(-1)[rows - 1]).sum())
    assert seen > 5
    assert last in store.manifest.layer_ids


def _store(target: Target, texts: list[Conversation], folder: Path) -> FeatureStore:
    return capture(target, texts, [1], folder / "store", "float32", 256, 400, 300)


def test_the_store_knows_how_its_text_was_sampled(target: Target, tmp_path: Path) -> None:
    texts = generated(target, tmp_path / "own.jsonl", 0.8, 0.9)
    manifest = _store(target, texts, tmp_path / "one").manifest
    assert (manifest.temperature, manifest.top_p) == (0.8, 0.9)
    generation = texts[0].generation
    assert generation is not None
    other = texts[0].model_copy(update={"generation": generation.model_copy(update={"top_p": 0.5})})
    assert _store(target, [other, *texts[1:]], tmp_path / "two").manifest.top_p is None


def test_what_was_written_before_top_p_was_known_means_the_same(tiny_store: FeatureStore) -> None:
    row = {"token_ids": [7, 2], "target": "ab12", "temperature": 0.5, "finished": True}
    generation = Generation.model_validate(row)
    assert generation.top_p == 1
    assert generation.row() == row
    assert Generation.model_validate(generation.model_copy(update={"top_p": 0.9}).row()).top_p == 0.9
    text = conversation("word", "word")
    assert digest([text.model_copy(update={"generation": generation})]) == "01963437ee3fd2f4"
    told = json.loads(tiny_store.manifest.model_dump_json())
    del told["top_p"]
    old = Manifest.model_validate(told)
    assert old.digest() == tiny_store.manifest.digest() != old.model_copy(update={"top_p": 0.9}).digest()


def test_answers_of_another_top_p_are_not_mixed(target: Target, tmp_path: Path) -> None:
    out = tmp_path / "own.jsonl"
    generated(target, out, 1.0, 0.5)
    with pytest.raises(ArchspecError, match=r"p\d was generated with top-p 0\.5, not 1\.0; write .* new file"):
        generated(target, out, 1.0, 1.0)
    with pytest.raises(ArchspecError, match=r"top_p 1\.5: must be above 0 and at most 1"):
        generated(target, tmp_path / "other.jsonl", 1.0, 1.5)


@pytest.mark.parametrize(
    ("text", "asked", "served", "mismatch"),
    [
        ((0.0, 1.0), {}, (0.0, 1.0), ""),
        ((0.0, 1.0), {"top_p": 0.9}, (0.0, 0.9), ""),  # at temperature 0 nothing is left to leave out
        ((0.7, 0.9), {}, (0.7, 0.9), ""),
        ((0.7, 0.9), {"temperature": 0.7, "top_p": 0.9}, (0.7, 0.9), ""),
        ((0.7, 0.9), {"top_p": 1.0}, (0.7, 1.0), "at temperature 0.7 and top-p 0.9, but is served at temperature 0.7"),
        ((0.7, 1.0), {"temperature": 0.0}, (0.0, 1.0), "at temperature 0.7, but is served at temperature 0"),
        ((None, 1.0), {}, (1.0, 1.0), ""),  # greedy drafts are right for each text at its own
        ((None, 1.0), {"draft": "sampled"}, (1.0, 1.0), "in several ways, but is served at temperature 1"),
        ((0.7, None), {"temperature": 0.7}, (0.7, 1.0), "in several ways, but is served at temperature 0.7"),
    ],
)
def test_text_that_is_served_otherwise_is_told(
    tiny_store: FeatureStore,
    text: tuple[float | None, float | None],
    asked: dict[str, object],
    served: tuple[float, float],
    mismatch: str,
) -> None:
    manifest = tiny_store.manifest.model_copy(update=dict(zip(("temperature", "top_p"), text, strict=True)))
    found = Serving.of(EvalSettings.model_validate(asked), FeatureStore(tiny_store.path, manifest))
    assert (found.temperature, found.top_p) == served
    assert found.mismatch == (mismatch and f"the text was sampled {mismatch}")
    assert "written by the target" in FOREIGN
