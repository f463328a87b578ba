"""A target and drafts small enough for a real engine in seconds: heads 32 wide, which its CPU kernels ask for.

A vocabulary of sixteen tokens lets drafts that were never trained be right now and then, so that counters tell drafts
apart. ``served/vllm-0.32.0.json`` is what vLLM answered for the draft of ``DRAFT``; ``tests/test_engine.py`` asks it.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from archspec.builder import adopt_target, build_draft
from archspec.modules import Draft
from archspec.presets import load_preset
from archspec.resolve import resolve
from runners.features.target import Target
from search_spaces import apply_overrides
from tests.runners.tiny import tiny_model, tiny_tokenizer

RECORDED = Path(__file__).with_name("served") / "vllm-0.32.0.json"
VOCABULARY, END, DRAFT_LENGTH, NEW_TOKENS = 16, 2, 3, 16
DRAFT = {"layers.0.attention.bias": True}
SEED = 50  # of sixty, one of two whose drafts are right three times beyond the end of a response


@cache
def served_target() -> Target:
    """Five Llama layers, 64 wide, with random weights; shared, so do not change it."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=5,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.25,
        bos_token_id=1,
        eos_token_id=END,
        pad_token_id=None,
    )
    return Target(tiny_model(config, seed=3), tiny_tokenizer(), "served-tiny")


def served_draft(changes: Mapping[str, Any] | None = None, preset: str = "eagle3", seed: int = SEED) -> Draft:
    """A preset with ``changes`` and random weights for that target: aux layers 1, 3, 4 and the whole vocabulary."""
    target, spec = served_target(), load_preset(preset)
    fits = {} if spec.inputs.norm == "target" else {"inputs.aux_layers": [1, 3, 4], "head.vocab_size": "full"}
    draft = build_draft(resolve(apply_overrides(spec, {**fits, **(changes or {})}), target.facts))
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.25 if parameter.ndim == 2 else 1.0)
    adopt_target(draft, target.weights, None)
    return draft.eval()


def served_prompts() -> list[list[int]]:
    """Forty prompts of twelve to eighteen tokens."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCABULARY, (12 + i % 7,), generator=generator).tolist() for i in range(40)]
