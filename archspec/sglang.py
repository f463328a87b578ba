"""What SGLang serves: a plain EAGLE-3 config with Llama layers, whose ids in ``eagle_config`` alone it reads.

The norm before the attention of deeper layers is ``hidden_norm``; where it is missing, ones take its place and nobody
is told. It is written a second time as ``input_layernorm``, which vLLM reads.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from archspec.errors import ArchspecError
from archspec.facts import TargetFacts
from archspec.foreign_config import flag_of, require_nested_ids
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
        alone = has_hidden_norms_alone(shapes)  # then vLLM, which lacks the norms, is no way out
        hint = "put the ids into eagle_config too, counted from 0" if alone else "read it as vllm"
        require_nested_ids(config, self.project, hint, source)
        if flag_of(config, "norm_before_residual", False, source):
            rule = f"SGLang ignores it and would run another draft{'' if alone else '; read the checkpoint as vllm'}"
            raise ArchspecError(f"{source}: norm_before_residual is true, but {rule}")
        spec = super().spec(config, shapes, target, source)
        self.require_runnable(spec, shapes, source)
        return spec

    def require_runnable(self, spec: ResolvedSpec, names: Collection[str], source: str, /) -> None:
        """See ``Format.require_runnable``; vLLM is named as a way out only where it finds the norms that it reads."""
        if problems := self.limits(spec):
            told = "\n".join(f"{source}: {problem}" for problem in problems)
            hint = "" if has_hidden_norms_alone(names) else "; read it as vllm"
            raise ArchspecError(f"{told}\n{source}: SGLang would not run this draft as it is{hint}")

    def copies(self, spec: ResolvedSpec, /) -> dict[str, str]:
        """See the module."""
        return renamed_norms(spec, self.written, "input_layernorm")


def has_hidden_norms_alone(names: Collection[str]) -> bool:
    """Whether some deeper layer lacks ``input_layernorm``, so that only SGLang finds its norm before attention."""
    deeper = {name.split(".")[1] for name in names if name.startswith("layers.") and name.endswith("norm.weight")}
    return not all(f"layers.{i}.input_layernorm.weight" in names for i in deeper - {"0"})
