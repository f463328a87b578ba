"""The original EAGLE-1 and EAGLE-2 layout: ``layers.N.*`` behind one fusing ``fc``, without norms around it.

Embedding and the target's last normed state go through ``fc``; layer 0 has no norm before attention; there is no final
norm; head and final norm are the target's own, so a checkpoint holds neither. vLLM serves it by its method ``eagle``.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from archspec.facts import TargetFacts
from archspec.foreign_config import BLOCK, LlamaKeys, attention_data, mapping_of, require_target, target_of
from archspec.format import Format, layer_keys
from archspec.layouts import Layout, Shape
from archspec.limits import Holds, Limit, of_layer
from archspec.readable import require_readable
from archspec.resolve import ResolvedSpec
from archspec.schema import Document


class Eagle1(Format):
    """See the module."""

    name, project = "eagle1", "EAGLE-1"
    holds = Holds(project="EAGLE-1", first_fusion="project", first_norm="none", residuals=("raw",))

    def limits(self, spec: ResolvedSpec) -> list[Limit]:
        """See ``Format.limits``."""
        layers = (of_layer(f"layers.{i}", i, layer, spec.layers[0], self.holds) for i, layer in enumerate(spec.layers))
        return [*_of_whole(spec), *(limit for found in layers for limit in found)]

    def config(self, spec: ResolvedSpec, _verifier: str | None = None, /) -> dict[str, Any]:
        """See ``Format.config``; ``bias`` is that of ``fc``."""
        bias = {"bias": True} if spec.layers[0].fusion_bias else {}
        return {"architectures": ["LlamaForCausalLM"], **layer_keys(spec), **bias}

    def layout(self, _names: Collection[str], /) -> Layout:
        """See ``Format.layout``."""
        return Layout(lambda i: f"layers.{i}")

    def omitted(self, _spec: ResolvedSpec, /) -> Collection[str]:
        """See ``Format.omitted``."""
        return "lm_head.weight", "inputs.norms.0.weight"

    def absent(self, spec: ResolvedSpec, /) -> Collection[str]:
        """See ``Format.absent``; many checkpoints also leave the embedding out."""
        return (*self.omitted(spec), "embed_tokens.weight")

    def spec(
        self, config: Mapping[str, Any], shapes: Mapping[str, Shape], target: TargetFacts | None, source: str
    ) -> ResolvedSpec:
        """See ``Format.spec``."""
        require_readable(config, config, source)
        keys = Document(config, source).validate(LlamaKeys)
        facts, block = target_of(config, target, source), mapping_of(config, BLOCK, source)
        require_target(keys, facts, source)
        mlp = {"intermediate_size": keys.intermediate_size}
        deeper = {"fusion": "none", "attention": attention_data(keys), "mlp": mlp}
        first = {
            "fusion": "project",
            "fusion_bias": "fc.bias" in shapes,
            "attention": attention_data(keys, norm="none"),
            "mlp": mlp,
        }
        data = {
            "name": block.get("name", "eagle1"),
            "inputs": {"aux_layers": (facts.num_layers,), "norm": "target", "projection": "none"},
            "hidden_size": keys.hidden_size,
            "embedding": block.get("embedding", "frozen"),
            "layers": [first, *[deeper] * (keys.num_hidden_layers - 1)],
            "head": {"vocab_size": keys.vocab_size, "weights": "target", "norm": "none"},
            "rope_theta": keys.theta,
            "rope_scaling": keys.scaling,
            "norm_eps": keys.rms_norm_eps,
            "target": facts,
        }
        return Document(data, source).validate(ResolvedSpec)


def _of_whole(spec: ResolvedSpec) -> Iterator[Limit]:
    inputs, head = spec.inputs, spec.head
    fixed: list[tuple[str, Any, Any]] = [
        ("inputs.aux_layers", list(inputs.aux_layers), [spec.target.num_layers]),
        ("inputs.norm", inputs.norm, "target"),
        ("inputs.projection", inputs.projection, "none"),
        ("feedback", spec.feedback, "pre_norm"),
        ("head.vocab_size", head.vocab_size, spec.target.vocab_size),
        ("head.weights", head.weights, "target"),
        ("head.norm", head.norm, "none"),
    ]
    for field, value, only in fixed:
        if value != only:
            yield Limit(field, value, f"EAGLE-1 has {only}; use {only}")
