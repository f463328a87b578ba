"""How drafts are trained and measured: the settings that a search file may give, with their defaults."""

import math
from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from archspec.errors import ArchspecError
from archspec.schema import Closed, Document, field_error

Fraction = Annotated[float, Field(ge=0, lt=1)]
LONGEST = 8  # draft tokens a cycle up to which every evaluation tells the acceptance length


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
    """Acceptance on held-out conversations: ``draft_length`` k tokens are drafted a cycle, greedily or by sampling.

    ``temperature`` and ``top_p`` are those of serving, by default those that the text was sampled at. Both draft kinds
    are greedy at temperature 0.
    """

    draft_length: PositiveInt = 4
    draft: Literal["greedy", "sampled"] = "greedy"
    temperature: NonNegativeFloat | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    batch_tokens: PositiveInt = 4096
    bootstrap: PositiveInt = 1000
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.95

    @property
    def longest(self) -> int:
        """Draft tokens a cycle up to which ``length_by_k`` goes."""
        return max(LONGEST, self.draft_length)


class TreeSettings(Closed):
    """What a cycle drafts where it is no chain: one of two shapes, each verified by one forward of the target.

    ``branches`` is a static tree: so many children of the last token, so many of each of those, and so on.
    ``steps``, ``topk`` and ``tokens`` are EAGLE-2's dynamic tree (arXiv 2406.16858) with the meaning that they have in
    SGLang 0.5.23 as speculative_num_steps, speculative_eagle_topk and speculative_num_draft_tokens: ``steps`` deep,
    the ``topk`` likeliest nodes of each depth get ``topk`` children each, and the ``tokens`` - 1 likeliest of all are
    verified together with the last token.
    """

    branches: tuple[PositiveInt, ...] | None = None
    steps: PositiveInt | None = None
    topk: PositiveInt | None = None
    tokens: Annotated[int, Field(ge=2)] | None = None

    @model_validator(mode="after")
    def _one_shape(self) -> Self:
        some = any(value is not None for value in (self.steps, self.topk, self.tokens))
        if (self.branches is None) == (self.dynamic is None) or (self.branches is not None and some):
            rule = "a tree has either branches or all of steps, topk and tokens"
            raise ValueError(f"{rule}: {{branches: [4, 2, 1]}} or {{steps: 4, topk: 4, tokens: 16}}")
        if self.branches is not None and not self.branches:
            raise field_error("branches", "must hold the children at each depth, as in [4, 2, 1]")
        if self.dynamic is not None:
            steps, topk, tokens = self.dynamic
            most = 1 + topk + (steps - 1) * topk**2
            if tokens > most:
                rule = f"{steps} steps with topk {topk} draft {most - 1} tokens"
                raise field_error("tokens", f"{rule}, so with the last known token tokens must be at most {most}")
        return self

    @classmethod
    def parse(cls, text: str) -> Self:
        """``4x2x1`` is a static tree with these branches, ``4,4,16`` a dynamic one: steps, topk, tokens.

        Raises:
            ArchspecError: the text is neither, or the numbers make no tree.
        """
        names, parts = ("steps", "topk", "tokens"), text.split("," if "," in text else "x")
        if not all(map(str.isdecimal, parts)) or ("," in text and len(parts) != len(names)):
            raise ArchspecError(f"tree {text!r}: write 4x2x1 for branches, or 4,4,16 for steps, topk and tokens")
        numbers = [int(part) for part in parts]
        data = dict(zip(names, numbers, strict=True)) if "," in text else {"branches": numbers}
        return Document(data, f"tree {text!r}").validate(cls)

    def __str__(self) -> str:
        """As ``parse`` reads it."""
        return ",".join(map(str, self.dynamic)) if self.dynamic else "x".join(map(str, self.branches or ()))

    @property
    def dynamic(self) -> tuple[int, int, int] | None:
        """``steps``, ``topk`` and ``tokens``, of a dynamic tree."""
        if self.steps is None or self.topk is None or self.tokens is None:
            return None
        return self.steps, self.topk, self.tokens

    @property
    def depth(self) -> int:
        """Draft steps of a cycle, and the most tokens that it can accept."""
        return self.dynamic[0] if self.dynamic else len(self.branches or ())

    @property
    def verified(self) -> int:
        """Tokens in one forward of the target, the last known one among them."""
        if self.dynamic:
            return self.dynamic[2]
        branches = self.branches or ()
        return 1 + sum(math.prod(branches[:depth]) for depth in range(1, len(branches) + 1))
