"""What a draft needs to know of its target: numbers only, so that specs resolve without loading a model."""

from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from archspec.rope import TargetRope


class TargetFacts(BaseModel):
    """The target's dimensions, in the terms of a transformers config. All sizes are counts of units, not bytes.

    ``rope_scaling`` may be a word, for a kind that drafts do not have. Plain positions are not written down, so that
    what is hashed or saved of such targets is what it was before the field was there.
    """

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
    rope_scaling: TargetRope = "none"
    max_positions: PositiveInt = 4096

    @model_serializer(mode="wrap")
    def _without_plain_positions(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = write(self)
        if self.rope_scaling == "none":
            data.pop("rope_scaling", None)
        return data
