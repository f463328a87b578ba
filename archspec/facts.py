"""What a draft needs to know of its target: numbers only, so that specs resolve without loading a model."""

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt


class TargetFacts(BaseModel):
    """The target's dimensions, in the terms of a transformers config. All sizes are counts of units, not bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_type: str
    hidden_size: PositiveInt
    num_layers: PositiveInt
    vocab_size: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    intermediate_size: PositiveInt
    rope_theta: PositiveFloat = 10_000.0
    norm_eps: PositiveFloat = 1e-5
    max_positions: PositiveInt = 4096
