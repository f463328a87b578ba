"""Specs and drafts for the tiny target, and how to train one for a moment."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from archspec.facts import TargetFacts
from archspec.modules import Draft
from archspec.presets import load_preset
from archspec.resolve import ResolvedSpec, resolve
from runners.features.store import FeatureStore
from runners.training.parallel import ALONE, Workers
from runners.training.settings import TrainSettings
from runners.training.trainer import StepReport, Trainer
from runners.training.trial import make_draft
from search_spaces import apply_overrides

SETTINGS = TrainSettings(
    ttt_steps=3, batch_tokens=300, learning_rate=5e-3, warmup=0.1, device="cpu", dtype="float32", threads=1
)

DOCUMENTS = [0, 1, 2, 3, 4]  # what the kinds below learn

# One draft of every kind that changes what a decoding step reads: (preset, changes).
KINDS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "eagle3": ("eagle3", {}),
    "reduced vocabulary": ("eagle3", {"head.vocab_size": 40}),
    "window": ("eagle3", {"layers.0.attention.window": 4}),
    "two windows": ("eagle3", {"depth": 2, "layers.0.attention.window": 2, "layers.1.attention.window": 5}),
    "own hidden size": ("eagle3", {"hidden_size": 20, "embedding": "trained"}),
    "fused once": ("eagle3-deep-fused-once", {"depth": 2}),
    "fused in every layer": ("eagle3-deep-fused-every-layer", {"depth": 2}),
    "wide stream": ("eagle3-wide-stream", {}),
    "post_norm feedback": ("eagle3.1", {}),
    "eagle1": ("eagle1", {}),
    "no attention": ("eagle3", {"layers.0.fusion": "project", "layers.0.attention": "none"}),
    "attention in the second layer alone": (
        "eagle3",
        {"depth": 2, "layers.0.fusion": "project", "layers.0.attention": "none"},
    ),
}


def tiny_spec(facts: TargetFacts, preset: str = "eagle3", changes: Mapping[str, Any] | None = None) -> ResolvedSpec:
    """A preset for the tiny target: aux layers 1 to 3 and a full vocabulary unless ``changes`` say otherwise."""
    spec = load_preset(preset)
    fits: dict[str, Any] = {"head.vocab_size": "full"}
    if spec.inputs.norm != "target":
        fits["inputs.aux_layers"] = [1, 2, 3]
    return resolve(apply_overrides(spec, {**fits, **(changes or {})}), facts)


def everything(store: FeatureStore) -> list[int]:
    """Indices of all documents."""
    return [document.index for document in store.documents]


def new_trainer(
    store: FeatureStore,
    settings: TrainSettings = SETTINGS,
    *,
    spec: ResolvedSpec | None = None,
    seed: int = 0,
    total_tokens: int = 4000,
    workers: Workers = ALONE,
) -> Trainer:
    """A trainer of a fresh draft on every document."""
    draft = make_draft(spec or tiny_spec(store.facts), store, everything(store), seed)
    return Trainer(draft, store, everything(store), settings, seed, total_tokens, workers)


def run(trainer: Trainer, until_tokens: int) -> list[StepReport]:
    """Train and return what every step reported."""
    reports: list[StepReport] = []
    trainer.run(until_tokens, reports.append)
    return reports


def trained_draft(
    store: FeatureStore, spec: ResolvedSpec, tokens: int = 6000, indices: list[int] | None = None
) -> Draft:
    """A draft that has learnt these documents (all of them) in part: it is right often, and wrong often."""
    indices = indices or everything(store)
    settings = SETTINGS.model_copy(update={"learning_rate": 1.5e-2})
    trainer = Trainer(make_draft(spec, store, indices, 0), store, indices, settings, 0, tokens)
    trainer.run(tokens)
    return trainer.draft.eval()


@cache
def draft_of_kind(store: FeatureStore, kind: str) -> Draft:
    """One of ``KINDS``, trained on a few documents of the store; shared, so do not change it."""
    preset, changes = KINDS[kind]
    return trained_draft(store, tiny_spec(store.facts, preset, changes), indices=DOCUMENTS)


def largest_gap(first: Draft, second: Draft) -> float:
    """Largest absolute difference between two drafts' parameters."""
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    return max(float((ours - theirs).detach().abs().max()) for ours, theirs in pairs)


def single_thread() -> None:
    """Floating-point sums depend on the number of threads; exact comparisons use one."""
    torch.set_num_threads(1)
