"""How drafts are trained and measured: the settings that a search file may give, with their defaults."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from archspec.schema import Closed

Fraction = Annotated[float, Field(ge=0, lt=1)]


class TrainSettings(Closed):
    """Training of one draft. Token counts are tokens of conversations, prompts included, padding and draft steps not.

    The learning rate warms up over ``warmup`` of the budget and falls on a cosine to ``final_lr`` of its peak;
    ``learning_rate_rule: inverse_sqrt_depth`` divides it by the square root of the number of draft layers, so that a
    rate that suits one layer does not favour it over three.
    """

    ttt_steps: PositiveInt = 4
    step_decay: Annotated[float, Field(gt=0, le=1)] = 0.8
    batch_tokens: PositiveInt = 2048
    learning_rate: PositiveFloat = 1e-3
    learning_rate_rule: Literal["constant", "inverse_sqrt_depth"] = "constant"
    warmup: Fraction = 0.05
    final_lr: Fraction = 0.1
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    grad_clip: PositiveFloat = 1.0
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: str = "auto"
    threads: PositiveInt | None = None


class EvalSettings(Closed):
    """Acceptance on held-out conversations: ``draft_length`` k tokens are drafted a cycle, greedily or by sampling."""

    draft_length: PositiveInt = 4
    draft: Literal["greedy", "sampled"] = "greedy"
    batch_tokens: PositiveInt = 4096
    bootstrap: PositiveInt = 1000
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.95
