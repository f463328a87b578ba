"""The spec: a closed description of one draft architecture, for any target.

``target`` stands wherever a dimension is the target's; ``archspec.resolve`` puts numbers there. Nothing in this module
or below it imports torch. Notation, here and in ``archspec.modules``: ``e`` the token embedding, ``x`` the residual
stream that enters a layer, ``N`` an RMSNorm, ``h`` the draft's hidden size, ``h_t`` the target's.
"""

import math
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, WithJsonSchema, model_validator

from archspec.rope import WrittenRope
from archspec.schema import Closed, ClosedFile, field_error

AUX_NAMES = ("low", "middle", "high", "last")


def _dimension(value: Any) -> Any:
    if value == "target" or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise ValueError("must be a positive whole number or 'target'")


def _positive_real(value: Any) -> Any:
    if value == "target" or (isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf):
        return value
    raise ValueError("must be a positive number or 'target'")


def _one_line(value: str) -> str:
    if not value.isprintable() or not value.strip():
        raise ValueError("must be one line of printable characters")
    return value


def _aux_layer(value: Any) -> Any:
    if value in AUX_NAMES or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    raise ValueError(
        f"must be a target layer id (0 = embeddings, i = output of layer i) or one of {', '.join(AUX_NAMES)}"
    )


def _vocab_size(value: Any) -> Any:
    if value == "full" or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise ValueError("must be a positive whole number or 'full'")


def _or_word(word: str, *kinds: str) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [*({"type": kind, "exclusiveMinimum": 0} for kind in kinds), {"const": word}]})


Dimension = Annotated[int | Literal["target"], BeforeValidator(_dimension), _or_word("target", "integer")]
Real = Annotated[float | Literal["target"], BeforeValidator(_positive_real), _or_word("target", "number")]
VocabSize = Annotated[int | Literal["full"], BeforeValidator(_vocab_size), _or_word("full", "integer")]
AuxLayer = Annotated[
    int | Literal["low", "middle", "high", "last"],
    BeforeValidator(_aux_layer),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, {"enum": list(AUX_NAMES)}]}),
]


class InputsSpec(Closed):
    """How the target's aux states become the draft's first state ``u = projection(norm(g_1), …, norm(g_m))``.

    ``low``, ``middle``, ``high``, ``last`` stand for layers 2, n//2, n-3 and n of an n-layer target.
    ``norm``: ``joint`` is one RMSNorm over the concatenation, ``each`` one per aux layer (EAGLE-3.1's ``fc_norm``),
    ``target`` the target's own final norm, frozen, which EAGLE-1 reads layer n through.
    """

    aux_layers: tuple[AuxLayer, ...] = ("low", "middle", "high")
    norm: Literal["none", "joint", "each", "target"] = "none"
    projection: Literal["linear", "none"] = "linear"
    bias: bool = False

    @model_validator(mode="after")
    def _states_fit(self) -> Self:
        if not self.aux_layers:
            raise ValueError("aux_layers must name at least one target layer, for example [low, middle, high]")
        if self.projection == "none" and len(self.aux_layers) != 1:
            raise ValueError(
                f"projection: none needs exactly one aux layer, but aux_layers names {len(self.aux_layers)}"
            )
        if self.norm == "target" and len(self.aux_layers) != 1:
            raise ValueError("norm: target is the target's final norm and needs aux_layers: [last]")
        return self


class AttentionSpec(Closed):
    """Grouped-query attention with rotary positions. ``window`` is in tokens; null attends to the whole prefix.

    ``norm: none`` leaves out the norms before attention (EAGLE-1's first layer). ``bias`` is on q, k, v and o.
    """

    heads: Dimension = "target"
    kv_heads: Dimension = "target"
    head_dim: Dimension = "target"
    qk_norm: bool = False
    bias: bool = False
    window: Annotated[int, Field(ge=2, strict=True)] | None = None
    norm: Literal["own", "none"] = "own"

    @model_validator(mode="after")
    def _kv_heads_divide_heads(self) -> Self:
        if isinstance(self.heads, int) and isinstance(self.kv_heads, int) and self.heads % self.kv_heads:
            fits = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            raise ValueError(f"kv_heads={self.kv_heads} must divide heads={self.heads}; use one of {fits}")
        if isinstance(self.head_dim, int) and self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even for rotary positions; use {self.head_dim + 1}")
        return self


class MlpSpec(Closed):
    """``depth`` gated MLPs (silu) in a row at the layer's stream width.

    ``residual: true``: a residual around each, normed by its ``own`` or by one ``shared`` RMSNorm.
    ``residual: false``: a bare stack after a single norm, one residual around the whole. ``depth: 0``: no MLP.
    """

    depth: Annotated[int, Field(ge=0, strict=True)] = 1
    intermediate_size: Dimension = "target"
    residual: bool = True
    norm: Literal["own", "shared"] = "own"


def _none_word(value: Any) -> Any:
    return None if value == "none" else value


OptionalAttention = Annotated[
    AttentionSpec | None,
    BeforeValidator(_none_word),
    PlainSerializer(lambda spec: "none" if spec is None else spec.model_dump(mode="json")),
]


class LayerSpec(Closed):
    """One draft layer; ``repeat: 3`` stands for three equal layers.

    ``fusion``, how ``e`` enters: ``none``: attention reads ``N(x)``. ``concat``: q, k, v read ``[N(e), N(x)]``, the
    residual is ``x`` (``[e, x]`` where an h-wide stream becomes 2h wide). ``project``: ``x <- W[e, x]``, then as
    ``none``. ``add``: attention reads ``N(x) + W N(e)``. ``stream`` is the width that leaves the layer.
    ``residual_from: normed`` takes the residual after the norm (vLLM's ``norm_before_residual``).
    """

    repeat: Annotated[int, Field(gt=0, strict=True)] = 1
    fusion: Literal["none", "concat", "project", "add"] = "none"
    fusion_bias: bool = False
    stream: Literal["h", "2h"] = "h"
    residual_from: Literal["raw", "normed"] = "raw"
    attention: OptionalAttention = AttentionSpec()
    mlp: MlpSpec = MlpSpec()

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.attention is None:
            if self.fusion in ("concat", "add"):
                raise ValueError(
                    f"fusion: {self.fusion} feeds attention, but attention is none; use fusion: none or project"
                )
            if self.mlp.depth == 0:
                raise ValueError("a layer needs attention or mlp.depth >= 1; it has neither")
        if self.residual_from == "normed" and (self.attention is None or self.attention.norm == "none"):
            raise ValueError("residual_from: normed needs attention with norm: own; use raw")
        if self.fusion_bias and self.fusion not in ("project", "add"):
            raise ValueError(f"fusion_bias needs fusion: project or add, but fusion is {self.fusion}")
        return self


class HeadSpec(Closed):
    """``vocab_size``: the D tokens that the draft can propose, ``full`` for all. ``weights: target`` are frozen copies.

    ``norm: none`` hands the last layer's state to the head as it is (EAGLE-1).
    """

    vocab_size: VocabSize = "full"
    weights: Literal["own", "target"] = "own"
    norm: Literal["own", "none"] = "own"


class DraftSpec(ClosedFile):
    """A whole draft. ``feedback`` is the state that the next draft step is fed: before or after the final norm."""

    name: Annotated[str, AfterValidator(_one_line)]
    inputs: InputsSpec = InputsSpec()
    hidden_size: Dimension = "target"
    embedding: Literal["frozen", "trained"] = "frozen"
    layers: tuple[LayerSpec, ...]
    feedback: Literal["pre_norm", "post_norm"] = "pre_norm"
    head: HeadSpec = HeadSpec()
    rope_theta: Real = "target"
    rope_scaling: WrittenRope = "none"
    norm_eps: Real = "target"

    @model_validator(mode="after")
    def _whole_fits(self) -> Self:
        if not self.layers:
            raise ValueError("layers must hold at least one layer")
        if all(layer.fusion == "none" for layer in self.layers):
            raise field_error("layers", "no layer reads the token embedding; give one fusion: concat, project or add")
        if self.feedback == "post_norm" and self.head.norm == "none":
            raise ValueError("feedback: post_norm needs head.norm: own; use pre_norm")
        return self
