"""What a format of another project is: a name map, a config map and checks. No torch.

Each format has a small module of its own; ``archspec.formats`` lists them, ``archspec.checkpoints`` reads and writes.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from archspec.facts import TargetFacts
from archspec.foreign_config import (
    AUX_KEY,
    BLOCK,
    Choices,
    LlamaKeys,
    aux_layers_of,
    flag_of,
    input_norm_of,
    mapping_of,
    spec_of,
    target_of,
)
from archspec.layouts import Layout, Shape
from archspec.limits import Holds, Limit, limits
from archspec.readable import require_readable
from archspec.resolve import ResolvedSpec
from archspec.rope import rope_keys
from archspec.schema import Document


class Format(ABC):
    """How one project stores drafts. ``name`` is the word for it here, ``project`` what messages call it."""

    name: ClassVar[str]
    project: ClassVar[str]
    holds: ClassVar[Holds]

    def limits(self, spec: ResolvedSpec) -> list[Limit]:
        """What the format cannot hold of ``spec``, field by field; empty if it holds the draft."""
        return limits(spec, self.holds)

    @abstractmethod
    def config(self, spec: ResolvedSpec, verifier: str | None = None) -> dict[str, Any]:
        """The ``config.json`` for a draft that the format holds, without dtype and the block of this project.

        ``verifier`` is the hub name or folder of the target, for formats that tell it.
        """

    @abstractmethod
    def layout(self, names: Collection[str]) -> Layout:
        """Which naming a checkpoint has, from its tensors' names; for no names the one that is written."""

    @abstractmethod
    def spec(
        self, config: Mapping[str, Any], shapes: Mapping[str, Shape], target: TargetFacts | None, source: str
    ) -> ResolvedSpec:
        """The draft that a config describes, for ``target`` or for the one that the config names.

        ``shapes`` are those of the checkpoint's tensors by name, for what no config says; ``source`` begins messages.

        Raises:
            ArchspecError: the config describes no draft that can be built, or one for another target.
        """

    def require_runnable(self, _spec: ResolvedSpec, _names: Collection[str], _source: str, /) -> None:
        """Refuse a draft that was read and that the project would run as another; ``_names`` are its tensors'.

        Raises:
            ArchspecError: there is a field that the project ignores or replaces.
        """
        return

    def omitted(self, _spec: ResolvedSpec, /) -> Collection[str]:
        """Names of ours that are never written, since the project takes them from the target."""
        return ()

    def absent(self, _spec: ResolvedSpec, /) -> Collection[str]:
        """Names of ours that a checkpoint may leave out: the target's tensors, and what follows from others."""
        return ()

    def copies(self, _spec: ResolvedSpec, /) -> dict[str, str]:
        """Tensors that are written a second time: the second name, and the name that is read."""
        return {}

    def padding(self, _spec: ResolvedSpec, /) -> dict[str, Shape]:
        """Tensors that the project demands and no draft uses, written as ones."""
        return {}


class Eagle3(Format):
    """The EAGLE-3 family: a fused first layer, an fc over aux states, a head over the draft vocabulary."""

    read_only: ClassVar[tuple[Layout, ...]] = ()
    written: ClassVar[Layout]

    def layout(self, names: Collection[str]) -> Layout:
        """The first of the known namings that the first layer's tensors have."""
        known = (layout for layout in self.read_only if any(name.startswith(f"{layout.layer(0)}.") for name in names))
        return next(known, self.written)

    def spec(
        self, config: Mapping[str, Any], shapes: Mapping[str, Shape], target: TargetFacts | None, source: str
    ) -> ResolvedSpec:
        """See ``Format.spec``."""
        sizes = self.sizes(config, source)
        require_readable(config, sizes, source)
        keys = Document(sizes, source).validate(LlamaKeys)
        choices = self.choices(config, source)
        facts, block = target_of(config, target, source), mapping_of(config, BLOCK, source)
        return spec_of(keys, choices, self.layout(shapes), shapes, facts, block, self.project, source)

    def sizes(self, config: Mapping[str, Any], _source: str, /) -> Mapping[str, Any]:
        """Where the keys of ``LlamaKeys`` stand."""
        return config

    @abstractmethod
    def choices(self, config: Mapping[str, Any], source: str) -> Choices:
        """What the format's own keys choose.

        Raises:
            ArchspecError: a key has no such value, or keys contradict each other.
        """

    def absent(self, spec: ResolvedSpec, /) -> Collection[str]:
        """A frozen embedding is the target's, and the mask ``t2d`` follows from the offsets ``d2t``."""
        return ("t2d", "embed_tokens.weight") if spec.embedding == "frozen" else ("t2d",)


class Plain(Eagle3):
    """The common ``config.json`` of SpecForge, SGLang and vLLM, all keys at the top.

    Layer ids stand twice: at the top as vLLM and this project count, inside ``eagle_config`` from 0. Switches that are
    off are left out where projects disagree about what off means. ``short_alone``: by how much ids that stand in
    ``eagle_config`` alone are less than ours.
    """

    short_alone: ClassVar[int] = 1
    written = Layout(lambda i: "midlayer" if i == 0 else f"layers.{i}")
    read_only: ClassVar[tuple[Layout, ...]] = (Layout(lambda i: f"layers.{i}"),)

    def config(self, spec: ResolvedSpec, _verifier: str | None = None, /) -> dict[str, Any]:
        """See ``Format.config``."""
        ids = list(spec.inputs.aux_layers)
        return {
            "architectures": ["Eagle3Qwen3ForCausalLM" if has_qk_norm(spec) else "LlamaForCausalLMEagle3"],
            **layer_keys(spec),
            "draft_vocab_size": spec.head.vocab_size,
            **({"target_hidden_size": spec.target.hidden_size} if spec.hidden_size != spec.target.hidden_size else {}),
            "num_aux_hidden_states": len(ids),
            AUX_KEY: ids,
            "eagle_config": {"use_aux_hidden_state": True, AUX_KEY: [i - 1 for i in ids]},
            **self.switches(spec),
        }

    def switches(self, spec: ResolvedSpec) -> dict[str, Any]:
        """What the draft switches on beyond plain EAGLE-3, in the words of vLLM and SGLang."""
        return {
            "fc_norm": spec.inputs.norm == "each",
            "norm_before_fc": spec.inputs.norm == "joint",
            **({"norm_output": True} if spec.feedback == "post_norm" else {}),
            **({"norm_before_residual": True} if spec.layers[0].residual_from == "normed" else {}),
        }

    def choices(self, config: Mapping[str, Any], source: str) -> Choices:
        """See ``Eagle3.choices``; the words of vLLM and SGLang."""
        return Choices(
            aux_layers=aux_layers_of(config, source, alone=self.short_alone),
            input_norm=input_norm_of(config, source),
            residual_from="normed" if flag_of(config, "norm_before_residual", False, source) else "raw",
            feedback="post_norm" if flag_of(config, "norm_output", False, source) else "pre_norm",
        )


def layer_keys(spec: ResolvedSpec) -> dict[str, Any]:
    """The transformers keys of the draft's layers, which are all of the first one's sizes.

    Rotary settings stand in the layout of transformers 5 and in the older one, ``rope_theta`` and ``rope_scaling``.
    Which keys an engine wants is in vLLM 0.32's and SGLang 0.5.23's ``get_rope``: both read ``rope_parameters``, which
    transformers makes of the other two where it is missing.
    """
    first, target = spec.layers[0], spec.target
    assert first.attention is not None, "a format that holds the draft has been asked"
    windows = [layer.attention.window for layer in spec.layers if layer.attention is not None]
    keys: dict[str, Any] = {
        "model_type": "qwen3" if has_qk_norm(spec) else "llama",
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "intermediate_size": first.mlp.intermediate_size,
        "num_attention_heads": first.attention.heads,
        "num_key_value_heads": first.attention.kv_heads,
        "head_dim": first.attention.head_dim,
        "num_hidden_layers": len(spec.layers),
        "max_position_embeddings": target.max_positions,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,
        "rope_parameters": {**rope_keys(spec.rope_scaling), "rope_theta": spec.rope_theta},
        **({} if spec.rope_scaling == "none" else {"rope_scaling": rope_keys(spec.rope_scaling)}),
        "vocab_size": target.vocab_size,
        "tie_word_embeddings": False,
        "attention_bias": first.attention.bias,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "use_cache": True,
    }
    if used := {window for window in windows if window is not None}:
        keys |= {
            "use_sliding_window": True,  # Qwen3Config forgets sliding_window without it
            "sliding_window": used.pop(),
            "layer_types": ["full_attention" if window is None else "sliding_attention" for window in windows],
        }
    return keys


def has_qk_norm(spec: ResolvedSpec) -> bool:
    """Whether the layers are Qwen3's, in the words of configs."""
    attention = spec.layers[0].attention
    return attention is not None and attention.qk_norm


def renamed_norms(spec: ResolvedSpec, layout: Layout, name: str) -> dict[str, str]:
    """The norm before the attention of every plain layer under a second ``name``, for ``Format.copies``."""
    deeper = (layout.layer(i) for i, layer in enumerate(spec.layers) if layer.fusion == "none")
    return {f"{prefix}.{name}.weight": f"{prefix}.{layout.plain_norm}.weight" for prefix in deeper}
