"""What one forward of a target or a draft moves and computes, kernel by kernel, counted from shapes alone. No torch.

R is the rows of a forward: batch times new tokens of every sequence. Every product reads its weights once, however many
rows share them. Engines run q, k, v as one kernel, gate and up as another, and add residuals within the next norm; so
it is counted here (vLLM and SGLang, as read in vLLM 0.32 and SGLang 0.5.23).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from archspec.cost import BYTES_PER_ELEMENT, parameter_shapes
from archspec.facts import TargetFacts
from archspec.resolve import ResolvedSpec

_JOINED = ("k_proj.weight", "v_proj.weight", "up_proj.weight")  # run within the kernel of q_proj or gate_proj


@dataclass(frozen=True)
class Work:
    """Kernels that run one after another.

    ``bytes`` go through the accelerator's memory, ``flops`` are done in ``dtype``, ``kernels`` are started. ``part``
    says what for.
    """

    part: str
    bytes: float
    flops: float
    kernels: int
    dtype: str


@dataclass(frozen=True)
class Forward:
    """The circumstances of a forward: ``rows`` new tokens for each of ``batch`` sequences of ``context`` tokens.

    ``weights`` is the dtype of the layers' matrices; everything else (activations, KV cache, embedding, head) is in
    ``activations``.
    """

    rows: int
    batch: int
    context: int
    weights: str
    activations: str

    @property
    def all_rows(self) -> int:
        """R."""
        return self.rows * self.batch

    @property
    def size(self) -> int:
        """Bytes of one activation."""
        return BYTES_PER_ELEMENT[self.activations]

    def product(self, part: str, shape: tuple[int, ...], kernels: int = 1, dtype: str | None = None) -> Work:
        """Rows times a matrix [out, in]: weights once, rows in and out; 2 FLOPs for a weight and row."""
        wide, read = shape
        dtype = dtype or self.weights
        moved = wide * read * BYTES_PER_ELEMENT[dtype] + self.all_rows * (wide + read) * self.size
        return Work(part, moved, 2.0 * self.all_rows * wide * read, kernels, dtype)

    def touch(self, part: str, width: float, kernels: int = 1) -> Work:
        """Kernels that together read and write ``width`` activations of every row, with few FLOPs."""
        return Work(part, self.all_rows * width * self.size, 0.0, kernels, self.activations)

    def attend(self, part: str, heads: int, kv_heads: int, head_dim: int, window: int | None = None) -> list[Work]:
        """Rotary positions, the new keys and values into the cache, and attention over the cache, which is read once.

        4 FLOPs for a query element and key: one product with the keys, one with the values.
        """
        span = self.context + self.rows if window is None else min(self.context + self.rows, window)
        turned = self.touch(part, 2 * (heads + kv_heads) * head_dim)
        kept = self.touch(part, 2 * 2 * kv_heads * head_dim)
        moved = (self.batch * span * 2 * kv_heads + self.all_rows * 2 * heads) * head_dim * self.size
        flops = 4.0 * self.all_rows * heads * head_dim * span
        return [turned, kept, Work(part, moved, flops, 1, self.activations)]

    def layer(self, part: str, shapes: Iterable[tuple[str, tuple[int, ...]]]) -> Iterator[Work]:
        """Products, norms and gates of a layer whose parameters have these names (as in a draft) and shapes."""
        for name, shape in shapes:
            if len(shape) == 2:
                yield self.product(part, shape, kernels=int(not name.endswith(_JOINED)))
                if name.endswith("gate_proj.weight"):
                    yield self.touch(part, 3 * shape[0])
            elif "norm" in name:
                yield self.touch(part, 2 * shape[0])

    def head(self, shape: tuple[int, int], own_vocab: bool) -> list[Work]:
        """The head [vocabulary, hidden] and the choice of a token, with a look-up of its id where D < V."""
        choice = self.touch("choice", shape[0], kernels=1 + own_vocab)
        return [self.product("head", shape, dtype=self.activations), choice]


def target_work(facts: TargetFacts, forward: Forward) -> list[Work]:
    """A dense decoder of gated MLPs: embedding rows, ``num_layers`` equal layers, final norm, head, choice."""
    h, inner = facts.hidden_size, facts.intermediate_size
    wide, narrow = facts.heads * facts.head_dim, facts.kv_heads * facts.head_dim
    products = {"q": (wide, h), "k": (narrow, h), "v": (narrow, h), "o": (h, wide)}
    products |= {"gate": (inner, h), "up": (inner, h), "down": (h, inner)}
    shapes: list[tuple[str, tuple[int, ...]]] = [(f"{name}_proj.weight", shape) for name, shape in products.items()]
    shapes += [("state_norm.weight", (h,)), ("mlp_norm.weight", (h,))]
    layer = [*forward.layer("layers", shapes), *forward.attend("layers", facts.heads, facts.kv_heads, facts.head_dim)]
    layers = [times(work, facts.num_layers) for work in layer]
    ends = [forward.touch("embedding", 2 * h), forward.touch("head", 2 * h)]
    return [*ends, *layers, *forward.head((facts.vocab_size, h), own_vocab=False)]


def draft_work(spec: ResolvedSpec, forward: Forward) -> list[Work]:
    """One draft step: embedding rows, every layer, final norm, head over D, choice. The aux projection is not in it."""
    h, parts = spec.hidden_size, [forward.touch("embedding", 2 * spec.hidden_size)]
    shapes = [(name, shape) for name, shape, _ in parameter_shapes(spec)]
    for i, (layer, (width, _)) in enumerate(zip(spec.layers, spec.widths, strict=True)):
        part, start = f"layer {i}", f"layers.{i}."
        parts += forward.layer(part, [(name, shape) for name, shape in shapes if name.startswith(start)])
        if layer.fusion in ("concat", "project"):
            parts.append(forward.touch(part, 2 * (h + width)))
        if layer.fusion == "add":
            parts.append(forward.touch(part, 3 * width))
        if layer.attention is not None:
            sizes = layer.attention
            parts += forward.attend(part, sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.window)
        if layer.mlp.residual and layer.mlp.norm == "shared" and layer.mlp.depth > 1:
            parts += [forward.touch(part, 2 * spec.widths[i][1])] * (layer.mlp.depth - 1)
    ends = [(name, shape) for name, shape in shapes if name in ("narrow.weight", "norm.weight")]
    return [*parts, *forward.layer("head", ends), *forward.head((spec.head.vocab_size, h), spec.reduced_vocab)]


def aux_work(spec: ResolvedSpec, forward: Forward) -> list[Work]:
    """Norms over the aux states, their concatenation and projection: once a cycle."""
    shapes = [(name, shape) for name, shape, _ in parameter_shapes(spec) if name.startswith("inputs.")]
    count, width = len(spec.inputs.aux_layers), spec.target.hidden_size
    joined = [forward.touch("aux", 2 * count * width)] if count > 1 else []
    return [*joined, *forward.layer("aux", shapes)]


def times(work: Work, count: int) -> Work:
    """The same work ``count`` times."""
    return replace(work, bytes=work.bytes * count, flops=work.flops * count, kernels=work.kernels * count)
