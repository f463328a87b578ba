"""What other projects' configs say of a draft, and the spec that follows from it. No torch.

``LlamaKeys`` are the config keys that all formats share, ``Choices`` what a format's other keys choose, in the spec's
words. ``spec_of`` makes a resolved spec from both.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from archspec.errors import ArchspecError
from archspec.facts import TargetFacts
from archspec.layouts import Layout, Shape
from archspec.resolve import ResolvedSpec, aux_layer_id
from archspec.rope import ORIGINAL, ResolvedRope, Rope, rope_of
from archspec.schema import Document, field_error

BLOCK = "draft_archspec"
"""Key of a config for what the spec holds and no other project's key can say."""

AUX_KEY = "eagle_aux_hidden_state_layer_ids"
MOST_LAYERS = 256


class _Rope(BaseModel):
    """Rotary settings in the layout of transformers 5, or the older ``rope_scaling``."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    rope_theta: PositiveFloat | None = None
    scaling: ResolvedRope = "none"


class LlamaKeys(BaseModel):
    """The keys of a transformers Llama or Qwen3 config that describe a draft; others are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    model_type: Literal["llama", "qwen3"] = "llama"
    hidden_act: str = "silu"
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    num_hidden_layers: Annotated[int, Field(gt=0, le=MOST_LAYERS)] = 1
    vocab_size: PositiveInt
    draft_vocab_size: PositiveInt | None = None
    target_hidden_size: PositiveInt | None = None
    num_aux_hidden_states: PositiveInt | None = None
    rms_norm_eps: Annotated[PositiveFloat, Field(allow_inf_nan=False)] = 1e-6
    max_position_embeddings: PositiveInt | None = None
    original_max_position_embeddings: PositiveInt | None = None
    rope_theta: PositiveFloat | None = None
    rotary_emb_base: PositiveFloat | None = None
    rope_parameters: _Rope | None = None
    rope_scaling: _Rope | None = None
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    use_sliding_window: bool = False
    sliding_window: PositiveInt | None = None
    max_window_layers: NonNegativeInt = 28
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = None

    @field_validator("hidden_act")
    @classmethod
    def _gated_silu(cls, value: str) -> str:
        if value != "silu":
            raise ValueError("must be silu, the only activation that drafts have here")
        return value

    @field_validator("rope_parameters", "rope_scaling", mode="before")
    @classmethod
    def _known_positions(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, dict):
            return value
        original = info.data.get(ORIGINAL)
        scaling = rope_of(value, original or info.data.get("max_position_embeddings"))
        if isinstance(scaling, str) and scaling != "none":
            rule = f"{scaling!r}: must be default, linear, llama3 or yarn, the rotary positions that drafts have here"
            raise field_error("rope_type", rule)
        if original is not None and getattr(scaling, "original_max_positions", original) != original:
            raise field_error(ORIGINAL, f"must be as at the top of the config, where it is {original}")
        return {"rope_theta": value.get("rope_theta"), "scaling": scaling}

    @field_validator("tie_word_embeddings")
    @classmethod
    def _own_head(cls, value: bool) -> bool:
        if value:
            raise ValueError("must be false: the head of a draft is a tensor of its own")
        return value

    @model_validator(mode="after")
    def _keys_agree(self) -> Self:
        if len(set(self._thetas.values())) > 1:
            raise ValueError(f"{' and '.join(self._thetas)} must agree, but are {list(self._thetas.values())}")
        if self.rope_parameters and self.rope_scaling and self.rope_parameters.scaling != self.rope_scaling.scaling:
            raise ValueError("rope_parameters and rope_scaling must describe the same positions, but differ")
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            kinds, layers = len(self.layer_types), self.num_hidden_layers
            raise ValueError(f"layer_types must name {layers} layers, as num_hidden_layers says, but names {kinds}")
        if self.sliding_window is None and "sliding_attention" in (self.layer_types or ()):
            raise ValueError("layer_types names sliding_attention, but sliding_window does not say how wide it is")
        return self

    @property
    def _thetas(self) -> dict[str, float]:
        """Every statement of the base, by where it stands; ``rotary_emb_base`` is a name that vLLM reads too."""
        stated = {
            "rope_theta": self.rope_theta,
            "rope_parameters.rope_theta": self.rope_parameters.rope_theta if self.rope_parameters else None,
            "rope_scaling.rope_theta": self.rope_scaling.rope_theta if self.rope_scaling else None,
            "rotary_emb_base": self.rotary_emb_base,
        }
        return {where: theta for where, theta in stated.items() if theta is not None}

    @property
    def theta(self) -> float:
        """Base of the rotary positions; transformers' default where nothing is said."""
        return next(iter(self._thetas.values()), 10_000.0)

    @property
    def scaling(self) -> Rope | Literal["none"]:
        """How the rotary positions are scaled; not at all where nothing is said."""
        stated = (rope.scaling for rope in (self.rope_parameters, self.rope_scaling) if rope is not None)
        return next(stated, "none")

    def window(self, index: int) -> int | None:
        """Sliding window of a layer, in tokens; None sees everything.

        Layers slide that ``layer_types`` says do. Qwen3 goes on as transformers' Qwen3Config reads it: nothing slides
        without ``use_sliding_window``; without ``layer_types`` the layers from ``max_window_layers`` on do.
        """
        qwen3 = self.model_type == "qwen3"
        if qwen3 and not self.use_sliding_window:
            return None
        if self.layer_types is not None:
            return self.sliding_window if self.layer_types[index] == "sliding_attention" else None
        return self.sliding_window if qwen3 and index >= self.max_window_layers else None


@dataclass(frozen=True)
class Choices:
    """What a config chooses beyond its Llama keys, in the words of the spec.

    ``aux_layers`` None: the config does not say, so EAGLE-3's default.
    """

    aux_layers: tuple[int, ...] | None = None
    input_norm: Literal["none", "each", "joint"] = "none"
    residual_from: Literal["raw", "normed"] = "raw"
    feedback: Literal["pre_norm", "post_norm"] = "pre_norm"
    head_norm: Literal["own", "none"] = "own"
    embedding: Literal["frozen", "trained"] | None = None
    frozen_head: bool = False


def spec_of(
    keys: LlamaKeys,
    choices: Choices,
    layout: Layout,
    shapes: Mapping[str, Shape],
    target: TargetFacts,
    block: Mapping[str, Any],
    project: str,
    source: str,
) -> ResolvedSpec:
    """The resolved spec of an EAGLE-3 draft.

    Sizes and switches come from the config alone, so that the tensors can be held against them. What no config says
    comes from the tensors' names and ``shapes``: which layers fuse the embedding (by the width that q_proj reads) and
    how many MLPs are stacked (by name). ``block`` is what an export of ours added: the spec's name and what is trained.

    Raises:
        ArchspecError: the config does not describe a draft for this target; the message names the key or field.
    """
    require_target(keys, target, source)
    as_target = keys.hidden_size == target.hidden_size
    aux_layers = choices.aux_layers or _default_layers(target, source)
    if keys.num_aux_hidden_states not in (None, len(aux_layers)):
        counted = f"num_aux_hidden_states = {keys.num_aux_hidden_states}"
        named = f"{AUX_KEY} names" if choices.aux_layers else f"without {AUX_KEY} a draft reads"
        raise ArchspecError(f"{source}: {counted}, but {named} {len(aux_layers)} layers: {list(aux_layers)}")
    data = {
        "name": block.get("name", project),
        "inputs": {"aux_layers": aux_layers, "norm": choices.input_norm},
        "hidden_size": keys.hidden_size,
        "embedding": block.get("embedding", choices.embedding or ("frozen" if as_target else "trained")),
        "layers": [_layer_data(i, keys, choices, layout, shapes) for i in range(_layer_count(keys, layout, shapes))],
        "feedback": choices.feedback,
        "head": {
            "vocab_size": keys.draft_vocab_size or keys.vocab_size,
            "weights": block.get("head_weights", "target" if choices.frozen_head and as_target else "own"),
            "norm": choices.head_norm,
        },
        "rope_theta": keys.theta,
        "rope_scaling": keys.scaling,
        "norm_eps": keys.rms_norm_eps,
        "target": target,
    }
    return Document(data, source).validate(ResolvedSpec)


def _default_layers(target: TargetFacts, source: str) -> tuple[int, ...]:
    ids = tuple(aux_layer_id(word, target.num_layers) for word in ("low", "middle", "high"))
    if not 0 <= ids[0] < ids[1] < ids[2]:
        rule = f"without {AUX_KEY} a draft reads EAGLE-3's default layers, {list(ids)}"
        raise ArchspecError(f"{source}: {rule}, which a target of {target.num_layers} layers does not have; name them")
    return ids


def require_target(keys: LlamaKeys, target: TargetFacts, source: str) -> None:
    """Hold the sizes that a draft shares with its target against ``target``.

    Raises:
        ArchspecError: one differs.
    """
    facts = {"vocab_size": target.vocab_size, "target_hidden_size": target.hidden_size}
    stated = {"vocab_size": keys.vocab_size, "target_hidden_size": keys.target_hidden_size or keys.hidden_size}
    for key, value in facts.items():
        if stated[key] != value:
            raise ArchspecError(f"{source}: {key} = {stated[key]}, but the target has {value}; name the draft's target")


def _layer_count(keys: LlamaKeys, layout: Layout, shapes: Mapping[str, Shape]) -> int:
    """The config's count, save for one layer with a stack of MLPs, whose length stands in the same key."""
    stacked = _stack_depth(layout.layer(0), shapes) > 1
    deeper = any(name.startswith(f"{layout.layer(1)}.") for name in shapes)
    return 1 if stacked and not deeper else keys.num_hidden_layers


def _stack_depth(prefix: str, shapes: Mapping[str, Shape]) -> int:
    depth = 0
    while f"{prefix}.mlps.{depth}.gate_proj.weight" in shapes:
        depth += 1
    return depth


def _layer_data(
    index: int, keys: LlamaKeys, choices: Choices, layout: Layout, shapes: Mapping[str, Shape]
) -> dict[str, Any]:
    prefix = layout.layer(index)
    q_proj = shapes.get(f"{prefix}.self_attn.q_proj.weight")
    fused = index == 0 or (q_proj is not None and q_proj[-1] == 2 * keys.hidden_size)
    depth = _stack_depth(prefix, shapes) or 1
    return {
        "fusion": "concat" if fused else "none",
        "residual_from": choices.residual_from if index == 0 else "raw",
        "attention": attention_data(keys, qk_norm=keys.model_type == "qwen3", window=keys.window(index)),
        "mlp": {"depth": depth, "intermediate_size": keys.intermediate_size, "residual": depth == 1},
    }


def attention_data(keys: LlamaKeys, **more: Any) -> dict[str, Any]:
    """The attention of a layer from the config's sizes."""
    return {
        "heads": keys.num_attention_heads,
        "kv_heads": keys.num_key_value_heads or keys.num_attention_heads,
        "head_dim": keys.head_dim or keys.hidden_size // keys.num_attention_heads,
        "bias": keys.attention_bias,
        **more,
    }


def target_of(data: Mapping[str, Any], target: TargetFacts | None, source: str) -> TargetFacts:
    """The target that a config was written for, checked against ``target`` if both are known.

    Raises:
        ArchspecError: neither is known, or they differ.
    """
    written = mapping_of(data, BLOCK, source).get("target")
    if written is None:
        if target is None:
            raise ArchspecError(f"{source}: does not say which target the draft is for; name the target")
        return target
    facts = Document(written, f"{source}: {BLOCK}.target").validate(TargetFacts)
    if target is not None and target != facts:
        differing = [
            f"{name} {getattr(facts, name)} there, {getattr(target, name)} here"
            for name in TargetFacts.model_fields
            if getattr(facts, name) != getattr(target, name)
        ]
        raise ArchspecError(f"{source}: the draft is for another target: {'; '.join(differing)}")
    return facts


def aux_layers_of(data: Mapping[str, Any], source: str, *, alone: int = 1) -> tuple[int, ...] | None:
    """Aux layers in this project's counting, None where the config is silent.

    ``eagle_aux_hidden_state_layer_ids`` at the top counts as vLLM and this project do, inside ``eagle_config`` as
    SGLang and SpecForge do: from 0, one less. vLLM takes a list that stands inside ``alone`` as one of its own:
    ``alone`` is how much such a list is short of our counting.

    Raises:
        ArchspecError: the two lists contradict each other.
    """
    top = _ids(data.get(AUX_KEY), f"{source}: {AUX_KEY}")
    nested = _ids(mapping_of(data, "eagle_config", source).get(AUX_KEY), f"{source}: eagle_config.{AUX_KEY}")
    if nested is None:
        return top
    if top is None:
        return tuple(i + alone for i in nested)
    ours = tuple(i + 1 for i in nested)
    if top != ours:
        rule = f"eagle_config.{AUX_KEY} must be one less than {AUX_KEY} at every place"
        raise ArchspecError(f"{source}: {rule}, but they are {list(nested)} and {list(top)}")
    return ours


def require_nested_ids(data: Mapping[str, Any], project: str, hint: str, source: str) -> None:
    """Refuse layer ids that stand at the top alone, for a project that would use its default instead.

    Raises:
        ArchspecError: they stand there alone; ``hint`` ends the message.
    """
    if data.get(AUX_KEY) is not None and mapping_of(data, "eagle_config", source).get(AUX_KEY) is None:
        raise ArchspecError(f"{source}: {AUX_KEY} stands at the top alone, where {project} does not look; {hint}")


def _ids(value: Any, where: str) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not value or not all(type(i) is int for i in value):
        raise ArchspecError(f"{where} = {value!r}: must be a list of layer ids")
    return tuple(value)


def mapping_of(data: Mapping[str, Any], key: str, source: str) -> Mapping[str, Any]:
    """The mapping at ``key``, empty where there is none.

    Raises:
        ArchspecError: something else stands there.
    """
    value = data.get(key) or {}
    if not isinstance(value, Mapping):
        raise ArchspecError(f"{source}: {key} = {value!r}: must be a mapping")
    return value


def flag_of(data: Mapping[str, Any], key: str, default: bool, source: str) -> bool:
    """The switch at ``key``; null counts as left out.

    Raises:
        ArchspecError: it is neither true nor false.
    """
    value = data.get(key)
    if value is not None and not isinstance(value, bool):
        raise ArchspecError(f"{source}: {key} = {value!r}: must be true or false")
    return default if value is None else value


def input_norm_of(data: Mapping[str, Any], source: str) -> Literal["none", "each", "joint"]:
    """The norm on aux states: ``fc_norm`` for each, or ``norm_before_fc``, where ``eagle_config`` goes before the top.

    Raises:
        ArchspecError: a switch is neither true nor false, or both are on.
    """
    each, joint = flag_of(data, "fc_norm", False, source), flag_of(data, "norm_before_fc", False, source)
    joint = flag_of(mapping_of(data, "eagle_config", source), "norm_before_fc", joint, source)
    if each and joint:
        raise ArchspecError(f"{source}: fc_norm and norm_before_fc are both true; a draft has one of them")
    return "each" if each else "joint" if joint else "none"
