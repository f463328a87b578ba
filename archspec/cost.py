"""What a draft costs, counted from its resolved spec alone: parameters, FLOPs, bytes. No torch."""

import math
from collections.abc import Iterator

from archspec.errors import ArchspecError, nearest
from archspec.resolve import ResolvedAttention, ResolvedLayer, ResolvedSpec

BYTES_PER_ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}


def parameter_shapes(spec: ResolvedSpec) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """(name as in ``Draft.state_dict()``, shape, trainable) of every parameter of the draft."""
    h, h_t, inputs, count = spec.hidden_size, spec.target.hidden_size, spec.inputs, len(spec.inputs.aux_layers)
    yield "embed_tokens.weight", (spec.target.vocab_size, h), spec.embedding == "trained"
    if inputs.norm in ("each", "target"):
        for i in range(count):
            yield f"inputs.norms.{i}.weight", (h_t,), inputs.norm == "each"
    elif inputs.norm == "joint":
        yield "inputs.joint_norm.weight", (count * h_t,), True
    if inputs.projection == "linear":
        yield "inputs.fc.weight", (h, count * h_t), True
        if inputs.bias:
            yield "inputs.fc.bias", (h,), True
    for i, (layer, (width_in, width_out)) in enumerate(zip(spec.layers, spec.widths, strict=True)):
        for name, shape in _layer_shapes(layer, h, width_in, width_out):
            yield f"layers.{i}.{name}", shape, True
    if spec.widths[-1][1] != h:
        yield "narrow.weight", (h, spec.widths[-1][1]), True
    if spec.head.norm == "own":
        yield "norm.weight", (h,), True
    yield "lm_head.weight", (spec.head.vocab_size, h), spec.head.weights == "own"


Shapes = Iterator[tuple[str, tuple[int, ...]]]


def _layer_shapes(layer: ResolvedLayer, h: int, width_in: int, width_out: int) -> Shapes:
    width = width_out if layer.fusion == "project" else width_in
    if layer.fusion == "project":
        yield from _linear("project", width_out, h + width_in, layer.fusion_bias)
    if layer.fusion == "add":
        yield from _linear("embed_map", width, h, layer.fusion_bias)
    if layer.attention is not None:
        yield from _attention_shapes(layer.attention, layer.fusion, h, width, width_out)
    widens = layer.fusion == "concat" and width == h and width_out == 2 * h
    if width != width_out and not widens:
        yield "residual_map.weight", (width_out, width)
    mlp = layer.mlp
    for i in range(min(mlp.depth, mlp.depth if mlp.residual and mlp.norm == "own" else 1)):
        yield f"mlps.norms.{i}.weight", (width_out,)
    for i in range(mlp.depth):
        yield f"mlps.mlps.{i}.gate_proj.weight", (mlp.intermediate_size, width_out)
        yield f"mlps.mlps.{i}.up_proj.weight", (mlp.intermediate_size, width_out)
        yield f"mlps.mlps.{i}.down_proj.weight", (width_out, mlp.intermediate_size)


def _attention_shapes(attention: ResolvedAttention, fusion: str, h: int, width: int, width_out: int) -> Shapes:
    if attention.norm == "own":
        yield "state_norm.weight", (width,)
        if fusion in ("concat", "add"):
            yield "embed_norm.weight", (h,)
    read = width + h * (fusion == "concat")
    wide, narrow = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    for name, rows, columns in (("q", wide, read), ("k", narrow, read), ("v", narrow, read), ("o", width_out, wide)):
        yield from _linear(f"attention.{name}_proj", rows, columns, attention.bias)
    if attention.qk_norm:
        yield "attention.q_norm.weight", (attention.head_dim,)
        yield "attention.k_norm.weight", (attention.head_dim,)


def _linear(name: str, rows: int, columns: int, bias: bool) -> Shapes:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def total_params(spec: ResolvedSpec) -> int:
    """Every parameter of the draft module, frozen copies included."""
    return sum(math.prod(shape) for _, shape, _ in parameter_shapes(spec))


def trainable_params(spec: ResolvedSpec) -> int:
    """Parameters that training changes."""
    return sum(math.prod(shape) for _, shape, trainable in parameter_shapes(spec) if trainable)


def draft_params(spec: ResolvedSpec) -> int:
    """Parameters that the draft adds beside the target when served.

    A frozen embedding and a full-vocabulary copy of the target's head are the target's own, which engines share.
    """
    table = spec.target.vocab_size * spec.hidden_size
    shared_head = spec.head.weights == "target" and not spec.reduced_vocab
    return total_params(spec) - table * ((spec.embedding == "frozen") + shared_head)


def weight_bytes(spec: ResolvedSpec, dtype: str) -> int:
    """Bytes of ``draft_params`` at ``dtype`` (float32, bfloat16, float16, float8).

    Raises:
        ArchspecError: an unknown dtype.
    """
    if dtype not in BYTES_PER_ELEMENT:
        raise ArchspecError(f"dtype {dtype!r} is unknown: {nearest(dtype, BYTES_PER_ELEMENT)}")
    return draft_params(spec) * BYTES_PER_ELEMENT[dtype]


def flops_per_token(spec: ResolvedSpec) -> int:
    """Floating-point operations of one draft step for one token, without attention over the context.

    Two per weight of every matrix that the step multiplies by; the projection of the aux states runs once per cycle
    and is counted as one step's.
    """
    matrices = (shape for name, shape, _ in parameter_shapes(spec) if len(shape) == 2 and name != "embed_tokens.weight")
    return sum(2 * math.prod(shape) for shape in matrices)
