"""From a spec with placeholders to numbers everywhere, for one target; and the hash that says two drafts are equal."""

import hashlib
import json
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from archspec.errors import ArchspecError
from archspec.facts import TargetFacts
from archspec.rope import KINDS, ResolvedRope
from archspec.schema import Document, field_error
from archspec.spec import AttentionSpec, DraftSpec, HeadSpec, InputsSpec, LayerSpec, MlpSpec, OptionalAttention


class ResolvedInputs(InputsSpec):
    """Aux layers as ids, in rising order."""

    aux_layers: tuple[Annotated[int, Field(ge=0)], ...]


class ResolvedAttention(AttentionSpec):
    """Attention with numbers only."""

    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt


class ResolvedMlp(MlpSpec):
    """MLP with numbers only."""

    intermediate_size: PositiveInt


class ResolvedLayer(LayerSpec):
    """One layer with numbers only; repeats are written out."""

    repeat: Literal[1] = 1
    attention: Annotated[ResolvedAttention | None, *OptionalAttention.__metadata__]
    mlp: ResolvedMlp

    def width_in(self, before: "ResolvedLayer | None", hidden_size: int) -> int:
        """Width of the stream that enters this layer, whose predecessor is ``before`` (None for the first)."""
        return hidden_size * (2 if before is not None and before.stream == "2h" else 1)

    def width_out(self, hidden_size: int) -> int:
        """Width of the stream that leaves this layer."""
        return hidden_size * (2 if self.stream == "2h" else 1)


class ResolvedHead(HeadSpec):
    """Head over ``vocab_size`` draft tokens, D <= V."""

    vocab_size: PositiveInt


class ResolvedSpec(DraftSpec):
    """A draft for one target, complete: everything that building, counting and exporting need.

    Every rule that involves the target is checked here, so a resolved spec always builds.
    """

    target: TargetFacts
    inputs: ResolvedInputs
    hidden_size: PositiveInt
    layers: tuple[ResolvedLayer, ...]
    head: ResolvedHead
    rope_theta: PositiveFloat
    rope_scaling: ResolvedRope = "none"
    norm_eps: PositiveFloat

    @model_validator(mode="after")
    def _fits_target(self) -> Self:
        target, ids = self.target, self.inputs.aux_layers
        for layer_id in ids:
            if layer_id > target.num_layers:
                rule = f"layer {layer_id} is beyond the target, whose layers are 1 to {target.num_layers}"
                raise field_error("inputs.aux_layers", f"{rule} (0 is its embedding); use at most {target.num_layers}")
        if list(ids) != sorted(set(ids)):
            rule = f"ids must rise without repeats, but are {list(ids)} for a target of {target.num_layers} layers"
            raise field_error("inputs.aux_layers", f"{rule}; use {sorted(set(ids))}")
        if self.inputs.norm == "target" and ids != (target.num_layers,):
            raise field_error(
                "inputs.norm", f"target is the norm after layer {target.num_layers}; use aux_layers: [last]"
            )
        if self.head.vocab_size > target.vocab_size:
            rule = f"{self.head.vocab_size} is larger than the target's vocabulary of {target.vocab_size}"
            raise field_error("head.vocab_size", f"{rule}; use full or less")
        if self.rope_scaling != "none" and self.rope_scaling.type == "yarn" and self.rope_theta <= 1:
            raise field_error("rope_theta", f"must be above 1 for yarn, but is {self.rope_theta}")
        if self.hidden_size != target.hidden_size:
            self._needs_no_copies(f"hidden_size is {self.hidden_size}, not the target's {target.hidden_size}")
        return self

    def _needs_no_copies(self, sizes: str) -> None:
        """Copies of the target's tensors fit only its own hidden size."""
        if self.embedding == "frozen":
            raise field_error("embedding", f"frozen is a copy of the target's, but {sizes}; use trained")
        if self.head.weights == "target":
            raise field_error("head.weights", f"target is a copy of the target's, but {sizes}; use own")
        if self.inputs.projection == "none":
            raise field_error("inputs.projection", f"none keeps the target's width, but {sizes}; use linear")

    @property
    def reduced_vocab(self) -> bool:
        """Whether the draft proposes from fewer tokens than the target has, and so needs d2t and t2d."""
        return self.head.vocab_size < self.target.vocab_size

    @property
    def widths(self) -> tuple[tuple[int, int], ...]:
        """(width in, width out) of every layer's stream, in units of one hidden state element."""
        befores = (None, *self.layers[:-1])
        return tuple(
            (layer.width_in(before, self.hidden_size), layer.width_out(self.hidden_size))
            for layer, before in zip(self.layers, befores, strict=True)
        )

    @property
    def hash(self) -> str:
        """Twelve hex digits over the canonical form: equal for two specs that describe the same architecture."""
        return hashlib.sha256(json.dumps(canonical(self), sort_keys=True).encode()).hexdigest()[:12]


def resolve(spec: DraftSpec, target: TargetFacts, source: str | Document | None = None) -> ResolvedSpec:
    """Put the target's numbers into ``spec`` and check every rule that involves the target.

    ``source`` is what messages name: the document that the spec was read from, whose lines they then tell, or a word.

    Raises:
        ArchspecError: the spec does not fit this target; the message names field, value, rule and a valid choice.
    """
    origin = source if isinstance(source, Document) else Document(None, source or f"spec {spec.name!r}")
    data = {name: getattr(spec, name) for name in DraftSpec.model_fields}
    data |= {"target": target}
    if "high" in spec.inputs.aux_layers and target.num_layers < 4:
        rule = (
            f"high is layer n-3, but the target has {target.num_layers} layers; write ids from 0 to {target.num_layers}"
        )
        raise ArchspecError(f"{origin.at(('inputs', 'aux_layers'))}: inputs.aux_layers: {rule}")
    data["inputs"] = _numbers(
        spec.inputs, aux_layers=tuple(aux_layer_id(layer, target.num_layers) for layer in spec.inputs.aux_layers)
    )
    data["hidden_size"] = target.hidden_size if spec.hidden_size == "target" else spec.hidden_size
    data["layers"] = [_resolve_layer(layer, target) for layer in spec.layers]
    data["head"] = _numbers(
        spec.head, vocab_size=target.vocab_size if spec.head.vocab_size == "full" else spec.head.vocab_size
    )
    data["rope_theta"] = target.rope_theta if spec.rope_theta == "target" else spec.rope_theta
    if spec.rope_scaling == "target":
        if isinstance(target.rope_scaling, str) and target.rope_scaling != "none":
            rule = f"the target's positions are scaled by {target.rope_scaling!r}, which drafts do not have"
            where = origin.at(("rope_scaling",))
            raise ArchspecError(f"{where}: rope_scaling: {rule}; use none, or a mapping of type {', '.join(KINDS)}")
        data["rope_scaling"] = target.rope_scaling
    data["norm_eps"] = target.norm_eps if spec.norm_eps == "target" else spec.norm_eps
    resolved = Document(data, origin.source, origin.lines).validate(ResolvedSpec)
    counts = [layer.repeat for layer in spec.layers]
    layers = tuple(layer for layer, count in zip(resolved.layers, counts, strict=True) for _ in range(count))
    return resolved.model_copy(update={"layers": layers})


def canonical(spec: ResolvedSpec) -> dict[str, Any]:
    """The spec's data without its name and with fields that change nothing at their defaults.

    Of the target only what shapes the draft is kept, so that the same draft has one hash for two context lengths.
    """
    data = spec.model_dump(mode="json", exclude={"name", "target"})
    data["target"] = {name: getattr(spec.target, name) for name in ("hidden_size", "num_layers", "vocab_size")}
    if spec.rope_scaling == "none" or (spec.rope_scaling.factor, spec.rope_scaling.attention_scale) == (1, 1):
        del data["rope_scaling"]
    if spec.inputs.norm == "target":
        data["target"]["norm_eps"] = spec.target.norm_eps
    if data["inputs"]["norm"] == "joint" and len(spec.inputs.aux_layers) == 1:
        data["inputs"]["norm"] = "each"
    if spec.inputs.projection == "none":
        data["inputs"]["bias"] = False
    for layer in data["layers"]:
        mlp = layer["mlp"]
        if mlp["depth"] <= 1:
            mlp["residual"] = True
        if mlp["depth"] <= 1 or not mlp["residual"]:
            mlp["norm"] = "own"
        if mlp["depth"] == 0:
            mlp["intermediate_size"] = 0
    return data


def aux_layer_id(layer: int | str, num_layers: int) -> int:
    """The id of an aux layer as written: the words are EAGLE-3's default layers, in this project's counting."""
    named = {"low": 2, "middle": num_layers // 2, "high": num_layers - 3, "last": num_layers}
    return named[layer] if isinstance(layer, str) else layer


def _resolve_layer(layer: LayerSpec, target: TargetFacts) -> dict[str, Any]:
    attention, mlp = layer.attention, layer.mlp
    if attention is not None:
        sizes = {
            name: getattr(target, name)
            for name in ("heads", "kv_heads", "head_dim")
            if getattr(attention, name) == "target"
        }
        resolved_attention: dict[str, Any] | None = _numbers(attention, **sizes)
    else:
        resolved_attention = None
    size = target.intermediate_size if mlp.intermediate_size == "target" else mlp.intermediate_size
    return _numbers(layer, repeat=1, attention=resolved_attention, mlp=_numbers(mlp, intermediate_size=size))


def _numbers(spec: InputsSpec | HeadSpec | LayerSpec | AttentionSpec | MlpSpec, **resolved: Any) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in type(spec).model_fields} | resolved
