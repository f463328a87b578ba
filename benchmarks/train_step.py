"""Tokens a second and peak memory of a training step, at the shape that peers were measured at.

Draft: one layer, h 576, 9 heads, 3 kv heads, head_dim 64, MLP 1536, V 49152, D 8192; TTT 4; two conversations of 512
tokens a step, every token a response token; fp32; forward, backward and AdamW. A batch token counts once, not once per
draft step. Prints the median, the best step, and the figure by process CPU time, which other jobs disturb least.

    python benchmarks/train_step.py --threads 2 --steps 15
"""

import argparse
import resource
import statistics
import time
from types import SimpleNamespace
from typing import Any, cast

import torch

from archspec.builder import adopt_target, build_draft
from archspec.facts import TargetFacts
from archspec.presets import load_preset
from archspec.resolve import resolve
from runners.features.frozen import FrozenWeights
from runners.features.store import FeatureStore
from runners.provenance import hardware
from runners.training.batches import Batch
from runners.training.settings import TrainSettings
from runners.training.trainer import Trainer
from search_spaces import apply_overrides

SMOLLM2 = TargetFacts(
    model_type="llama",
    hidden_size=576,
    num_layers=30,
    vocab_size=49152,
    heads=9,
    kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    rope_theta=100_000.0,
)
ROWS, TOKENS, DRAFT_VOCAB, TTT_STEPS = 2, 512, 8192, 4


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--preset", default="eagle3")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    trainer, batch = make_step(options.preset, options.dtype)
    trainer.train_step(batch)  # the first step allocates the optimiser's state
    wall, cpu = [], []
    for _ in range(options.steps):
        start, start_cpu = time.perf_counter(), time.process_time()
        trainer.train_step(batch)
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - start_cpu)
    tokens = ROWS * TOKENS
    by_cpu = tokens * options.threads / statistics.median(cpu)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    speeds = {"median": tokens / statistics.median(wall), "best": tokens / min(wall), "by CPU": by_cpu}
    print(f"{options.preset}, {options.dtype}, {options.threads} threads, {options.steps} steps")
    print(hardware()["processor"])
    print("tokens/s:", ", ".join(f"{name} {speed:.0f}" for name, speed in speeds.items()))
    print(f"peak memory: {peak:.0f} MiB")


def make_step(preset: str, dtype: str) -> tuple[Trainer, Batch]:
    """A trainer of ``preset`` with random target weights, and one batch of random states."""
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(SMOLLM2.vocab_size, SMOLLM2.hidden_size, generator=generator) * 0.02
    weights = FrozenWeights(embedding, embedding, torch.ones(SMOLLM2.hidden_size), SMOLLM2.norm_eps)
    written = apply_overrides(load_preset(preset), {"head.vocab_size": DRAFT_VOCAB})
    draft = build_draft(resolve(written, SMOLLM2))
    adopt_target(draft, weights, torch.arange(0, SMOLLM2.vocab_size, SMOLLM2.vocab_size // DRAFT_VOCAB))
    document: Any = SimpleNamespace(length=TOKENS)
    store = cast("FeatureStore", SimpleNamespace(documents=[document] * ROWS, weights=lambda: weights))
    settings = TrainSettings(ttt_steps=TTT_STEPS, batch_tokens=ROWS * TOKENS, dtype=dtype)
    trainer = Trainer(draft, store, list(range(ROWS)), settings, seed=0, total_tokens=10**9)
    shape, layers = (ROWS, TOKENS), len(draft.spec.inputs.aux_layers)
    batch = Batch(
        tokens=torch.randint(SMOLLM2.vocab_size, shape, generator=generator),
        response_mask=torch.ones(shape, dtype=torch.bool),
        aux=torch.randn(*shape, layers, SMOLLM2.hidden_size, generator=generator),
        last=torch.randn(*shape, SMOLLM2.hidden_size, generator=generator),
        documents=tuple(range(ROWS)),
        real_tokens=ROWS * TOKENS,
    )
    return trainer, batch


if __name__ == "__main__":
    main()
