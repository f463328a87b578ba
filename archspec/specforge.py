"""SpecForge's layout (``LlamaForCausalLMEagle3``): one layer, ``midlayer.*``, in a plain EAGLE-3 config.

Only read: ``midlayers.N.*`` (pull request 401) and ``fuse_layer.*`` with ``additional_layers.N.*`` (pull request 449).
``norm_output`` here means "norm before the head", true by default; elsewhere it means that the state after the norm is
fed back. So it is written only where the head has no norm. Its ``linear`` and ``yarn`` positions have the base 10,000
whatever ``rope_theta`` says, and its ``yarn`` an attention factor of its own (llama3_eagle.py at commit 89241ea): both
are refused in either direction.
"""

from collections.abc import Mapping
from typing import Any

from archspec.errors import ArchspecError
from archspec.facts import TargetFacts
from archspec.foreign_config import Choices, aux_layers_of, flag_of, require_nested_ids
from archspec.format import Plain
from archspec.layouts import Layout, Shape
from archspec.limits import Holds, of_rope
from archspec.resolve import ResolvedSpec


class SpecForge(Plain):
    """See the module."""

    name, project = "specforge", "SpecForge"
    holds = Holds(
        project="SpecForge",
        max_layers=1,
        input_norms=("none", "each"),
        head_norms=("own", "none"),
        feedbacks=("pre_norm",),
        residuals=("raw",),
        ropes=("llama3",),
    )
    read_only = (
        *Plain.read_only,
        Layout(lambda i: f"midlayers.{i}"),
        Layout(lambda i: "fuse_layer" if i == 0 else f"additional_layers.{i - 1}", "hidden_norm"),
    )

    def switches(self, spec: ResolvedSpec) -> dict[str, Any]:
        """See the module."""
        return {
            "fc_norm": spec.inputs.norm == "each",
            **({"norm_output": False} if spec.head.norm == "none" else {}),
        }

    def spec(
        self, config: Mapping[str, Any], shapes: Mapping[str, Shape], target: TargetFacts | None, source: str
    ) -> ResolvedSpec:
        """See ``Format.spec``."""
        as_vllm = self.layout(shapes) in (self.written, *Plain.read_only)
        hint = "read it as vllm" if as_vllm else "put the ids into eagle_config too, counted from 0"
        require_nested_ids(config, self.project, hint, source)
        way_out = "; read the checkpoint as vllm" if as_vllm else ""
        spec = super().spec(config, shapes, target, source)
        for i, layer in enumerate(spec.layers):
            if layer.attention is not None and layer.attention.window is not None:
                rule = "SpecForge's Llama draft has no windows"
                value = layer.attention.window
                raise ArchspecError(f"{source}: layers.{i}.attention.window = {value}: {rule}{way_out}")
        for limit in of_rope(spec, self.holds):
            raise ArchspecError(f"{source}: {limit}; SpecForge trains such a draft with other positions{way_out}")
        return spec

    def choices(self, config: Mapping[str, Any], source: str) -> Choices:
        """See ``Eagle3.choices``."""
        for flag in ("norm_before_residual", "norm_before_fc"):
            if flag_of(config, flag, False, source):
                rule = "SpecForge does not know it; read the checkpoint as vllm, or name the format it was written in"
                raise ArchspecError(f"{source}: {flag} is true, but {rule}")
        return Choices(
            aux_layers=aux_layers_of(config, source),
            input_norm="each" if flag_of(config, "fc_norm", False, source) else "none",
            head_norm="own" if flag_of(config, "norm_output", True, source) else "none",
        )

    def padding(self, spec: ResolvedSpec, /) -> dict[str, Shape]:
        """SpecForge has a final norm also where it does not use it."""
        return {"norm.weight": (spec.hidden_size,)} if spec.head.norm == "none" else {}
