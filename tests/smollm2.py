"""The dimensions of SmolLM2-135M-Instruct, for tests that need a real target's numbers and no weights."""

from archspec.facts import TargetFacts

SMOLLM2 = TargetFacts(
    model_type="llama",
    hidden_size=576,
    num_layers=30,
    vocab_size=49152,
    heads=9,
    kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    rope_theta=100_000,
    norm_eps=1e-5,
)
