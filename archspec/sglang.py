"""What SGLang serves: a plain EAGLE-3 config with Llama layers, whose ids in ``eagle_config`` alone it reads.

The norm before the attention of deeper layers is ``hidden_norm``; where it is missing, ones take its place and nobody
is told. It is written a second time as ``input_layernorm``, which vLLM reads.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from archspec.errors import ArchspecError
from archspec.facts import TargetFacts
from archspec.foreign_config import Choices
from archspec.format import Plain, renamed_norms
from archspec.layouts import Layout, Shape
from archspec.limits import Holds
from archspec.resolve import ResolvedSpec


class Sglang(Plain):
    """See the module."""

    name, project = "sglang", "SGLang"
    holds = Holds(
        project="SGLang",
        residuals=("raw",),
        last_id=False,
        own_embedding=False,
        skips_square_fc=True,
        attention_factor=False,
    )
    written = replace(Plain.written, plain_norm="hidden_norm")

    def layout(self, names: Collection[str]) -> Layout:
        """See ``Format.layout``."""
        return replace(super().layout(names), plain_norm="hidden_norm")

    def spec(
        self, config: Mapping[str, Any], shapes: Mapping[str, Shape], target: TargetFacts | None, source: str
    ) -> ResolvedSpec:
        """See ``Format.spec``; a draft that SGLang would run in another way is refused."""
        spec = super().spec(config, shapes, target, source)
        if problems := self.limits(spec):
            told = "\n".join(f"{source}: {problem}" for problem in problems)
            raise ArchspecError(f"{told}\n{source}: SGLang would not run this draft as it is; read it as vllm")
        return spec

    def choices(self, config: Mapping[str, Any], source: str) -> Choices:
        """See ``Eagle3.choices``."""
        choices = super().choices(config, source)
        if choices.residual_from != "raw":
            rule = "SGLang ignores it and would run another draft; read the checkpoint as vllm"
            raise ArchspecError(f"{source}: norm_before_residual is true, but {rule}")
        return choices

    def copies(self, spec: ResolvedSpec, /) -> dict[str, str]:
        """See the module."""
        return renamed_norms(spec, self.written, "input_layernorm")
