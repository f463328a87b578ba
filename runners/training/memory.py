"""How much memory training a draft takes, counted from its spec before anything runs; no torch.

Counted is what the allocator hands out at the worst moment of a step, tensor by tensor, as the trainer, the unroll and
the loss keep them. What lies outside the allocator is a named allowance. ``tests/runners/test_memory.py`` trains drafts
of many shapes and holds the count against what was allocated.

Names: a batch has ``rows`` rows in conversations of ``length`` rows, padding included; a draft is unrolled for
``steps`` steps; products are computed in a float type of ``c`` bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from archspec.cost import BYTES_PER_ELEMENT, parameter_shapes, total_params, trainable_params
from archspec.resolve import ResolvedAttention, ResolvedLayer, ResolvedMlp, ResolvedSpec
from runners.training.settings import EvalSettings, TrainSettings
from runners.training.sizes import CHUNK_ELEMENTS, HEAD_ROWS, ROUND_TO, round_up

SAFETY = 1.1  # for what other library versions keep, and for the room between an allocator's blocks
PROCESS = 640 << 20  # an interpreter with torch, 300 MiB, what its libraries keep, and the target's mapped tables
CUDA_PROCESS = 3 << 30  # the same with the CUDA libraries; not measured here
CUDA_CONTEXT = 768 << 20  # kernels, handles and workspaces on a device, for each process; not measured here
NCCL_BUFFERS = 512 << 20  # what the workers of one trial send through, for each process; not measured here
FP32 = 4  # bytes of all that is no product: weights, gradients, moments, what norms keep, states that were read


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that one worker of a trial needs, by what they are for.

    Held from start to end are the ``weights`` with the frozen copies of the target's, the ``teacher``'s head, and
    AdamW's ``moments``. Of a step are the ``batch``, the ``activations`` that the unrolled forward keeps for its
    backward, the ``loss`` with the largest chunk of logits, and the ``gradients``; ``step`` is the most of these at
    once. ``evaluation`` is the most that measuring acceptance takes in a step's place. ``outside`` is an allowance for
    what the device's allocator does not see, ``host`` what the process needs in the host's memory, all included.
    """

    weights: int
    teacher: int
    moments: int
    batch: int
    activations: int
    loss: int
    gradients: int
    step: int
    evaluation: int
    outside: int
    host: int

    @property
    def allocated(self) -> int:
        """The most that is allocated on the device at once, as counted."""
        return self.weights + self.teacher + self.moments + max(self.step, self.evaluation)

    @property
    def device(self) -> int:
        """What must be free on the device: the count with ``SAFETY``, and what lies outside it."""
        return int(SAFETY * self.allocated) + self.outside


def training_memory(
    spec: ResolvedSpec,
    train: TrainSettings,
    dtype: str,
    longest: int,
    *,
    evaluate: EvalSettings | None = None,
    device: str = "cuda",
    workers: int = 1,
) -> MemoryEstimate:
    """What each of ``workers`` needs to train ``spec`` and, with ``evaluate``, to measure it.

    ``dtype`` is what products are computed in: ``float32``, ``bfloat16``, or ``auto`` where it is not known yet, which
    counts as the larger. ``longest`` is the longest conversation in tokens, and every token counts as a response's,
    which makes this a bound. ``device`` is ``cpu`` or begins with ``cuda``; on the CPU, host and device are one memory.
    """
    if dtype == "auto":
        each = (
            training_memory(spec, train, known, longest, evaluate=evaluate, device=device, workers=workers)
            for known in ("float32", "bfloat16")
        )
        return max(each, key=lambda estimate: estimate.allocated)
    cuda, trainable = device.startswith("cuda"), FP32 * trainable_params(spec)
    shapes = _batch_shapes(train.batch_tokens, longest, workers)
    steps = (_Step(spec, rows, length, train.ttt_steps, BYTES_PER_ELEMENT[dtype], cuda) for rows, length in shapes)
    worst = max(steps, key=lambda step: step.peak)
    maps = (8 * spec.head.vocab_size + spec.target.vocab_size) * spec.reduced_vocab
    estimate = MemoryEstimate(
        weights=FP32 * total_params(spec) + maps,
        teacher=FP32 * spec.head.vocab_size * spec.target.hidden_size,
        moments=2 * trainable,
        batch=worst.batch,
        activations=worst.activations,
        loss=worst.loss,
        gradients=trainable,
        step=worst.peak,
        evaluation=_evaluation(spec, evaluate, longest) if evaluate is not None else 0,
        outside=CUDA_CONTEXT + NCCL_BUFFERS * (workers > 1) if cuda else PROCESS,
        host=0,
    )
    if not cuda:
        return replace(estimate, host=estimate.device)
    # The draft is made on the host from the target's tables, and a checkpoint passes through it; so does each batch,
    # as it is in the store and as it is padded.
    made = estimate.weights + estimate.teacher + FP32 * spec.target.vocab_size * spec.target.hidden_size
    tokens = max(train.batch_tokens, longest, evaluate.batch_tokens if evaluate is not None else 0)
    through = max(made, estimate.moments + trainable) + 2 * tokens * _row_of_a_batch(spec)
    return replace(estimate, host=CUDA_PROCESS + int(SAFETY * through))


def _batch_shapes(batch_tokens: int, longest: int, workers: int) -> Iterator[tuple[int, int]]:
    """(rows, length) of the batches of which one must be the largest: the most conversations of each length that fit.

    Fewer and longer conversations make attention larger, more and shorter ones may fill a batch, or a worker's share of
    it, better.
    """
    longest = round_up(longest)
    fewest = max(1, batch_tokens // longest)
    for count in range(fewest, fewest + 2 * workers + 8):
        length = longest if count == 1 else min(longest, batch_tokens // count // ROUND_TO * ROUND_TO)
        if length:
            yield -(-count // workers) * length, length


@dataclass(frozen=True)
class _Step:
    """One training step of one worker, in bytes."""

    spec: ResolvedSpec
    rows: int
    length: int
    steps: int
    c: int
    cuda: bool

    @property
    def batch(self) -> int:
        """Tokens, mask, and the target's states."""
        return self.rows * _row_of_a_batch(self.spec)

    @property
    def peak(self) -> int:
        """The most that is held at once beside weights, teacher and moments.

        The backward first turns the loss's gradients into one for every row and step, then goes through the steps from
        the last to the first; after the last, every weight has a gradient, in the type of its products.
        """
        head = FP32 * _head(self.spec) * (self.spec.head.weights == "own")
        others = FP32 * trainable_params(self.spec) - head
        pending = self.steps * self.rows * self._head_input
        kept, last_done = self.activations, (self.steps - 1) / self.steps
        in_the_loss = kept + self._copies + self.loss
        in_the_last_step = kept + self._copies + pending + head + self._passing
        in_the_others = last_done * (kept + pending) + self._copies + others * self.c // FP32 + head + self._passing
        return self.batch + int(max(in_the_loss, in_the_last_step, in_the_others, head + others))

    @property
    def activations(self) -> int:
        """What the unrolled forward keeps for its backward, the copies of weights left out."""
        layers, steps = self.spec.layers, self.steps
        attentions = [layer.attention for layer in layers if layer.attention is not None]
        tables = 2 * FP32 * self.length * sum({attention.head_dim for attention in attentions})
        a_row = sum(self._layer(i, layer) for i, layer in enumerate(layers)) + self._ends
        rows = self.rows * (steps * a_row + self._inputs)
        return rows + steps * tables + sum(self._attention(attention) for attention in attentions)

    @property
    def loss(self) -> int:
        """What the loss holds: the head's inputs of all steps, gathered and their gradients, and a chunk of logits."""
        spec, table = self.spec, _head(self.spec)
        narrow, own = self.c < FP32, spec.head.weights == "own"
        inputs = 3 * self.steps * self.rows * self._head_input + FP32 * self.rows * spec.target.hidden_size
        held = inputs + table * (FP32 * own + self.c * narrow)
        # A chunk's share of the head's gradient is made in the narrow type and widened to be added.
        adding = (self.c + FP32) * (table * own + self._chunk(0)) if narrow else 0
        return held + max(self._logits, adding)

    @property
    def _logits(self) -> int:
        """Two chunks at most: the one before is let go when the next one's logits have become gradients."""
        first, second = self._chunk(0), self._chunk(1)
        teacher = 2 * FP32 * first // self.steps
        if not second:
            return 2 * FP32 * first + teacher
        return (FP32 * first + 2 * FP32 * second if self.c == FP32 else 6 * (first + second)) + teacher

    def _chunk(self, which: int) -> int:
        """Logits in a chunk, as a number."""
        a_row = self.steps * self.spec.head.vocab_size
        chunk = max(1, CHUNK_ELEMENTS // a_row)
        return a_row * min(chunk, max(0, self.rows - which * chunk))

    @property
    def _copies(self) -> int:
        """Matrices in a narrow type of products, kept from their first use to the backward."""
        names = parameter_shapes(self.spec)
        layers = [
            shape for name, shape, _ in names if len(shape) == 2 and not name.startswith(("embed_tok", "lm_head"))
        ]
        return self.c * sum(rows * columns for rows, columns in layers) * (self.c < FP32)

    @property
    def _passing(self) -> int:
        """What the backward of a layer holds for a moment."""
        mlp = max(3 * self.c * layer.mlp.intermediate_size * (layer.mlp.depth > 0) for layer in self.spec.layers)
        attentions = [layer.attention for layer in self.spec.layers if layer.attention is not None]
        square = max((self._square(attention) for attention in attentions), default=0)
        return self.rows * max(mlp, 3 * square * (self.length + self.steps) * (self.steps > 1))

    def _square(self, attention: ResolvedAttention) -> int:
        """Bytes kept for one query and key: the softmax, and where that is wider than products, its narrow copy."""
        widened = self.c < FP32 and (self.cuda or attention.qk_norm)
        return attention.heads * (self.c + FP32 * widened)

    def _attention(self, attention: ResolvedAttention) -> int:
        """What one layer's attention keeps over all steps.

        Step 0 is one fused kernel, unless CUDA has none for this call. Each later step keeps its softmax, copies of the
        step-0 keys and values for every query head, its own ones, and its queries in two layouts.
        """
        q, kv = (heads * attention.head_dim for heads in (attention.heads, attention.kv_heads))
        normed = FP32 * 2 * (q + kv) * attention.qk_norm
        first = self.c * (2 * q + 2 * kv) + FP32 * attention.heads
        later = self.c * (5 * q + 2 * kv) + FP32 * (q + kv) * (attention.qk_norm and self.c < FP32)
        fused = not self.cuda or (self.c < FP32 and attention.window is None)
        squares = self.steps - fused
        keys = squares * self.length + sum(range(self.steps))
        per_row = self.steps * normed + first + (self.steps - 1) * later + self._square(attention) * keys
        return self.rows * per_row + squares * self.length**2

    @property
    def _head_input(self) -> int:
        return self.spec.hidden_size * (FP32 if self.spec.head.norm == "own" else self.c)

    @property
    def _inputs(self) -> int:
        """Of the projection of the aux states, a row."""
        inputs, width = self.spec.inputs, len(self.spec.inputs.aux_layers) * self.spec.target.hidden_size
        normed = FP32 * 2 * width * (inputs.norm in ("joint", "each"))
        return normed + self.c * width * (inputs.projection == "linear" and self.c < FP32)

    @property
    def _ends(self) -> int:
        """Of a step's embedding, narrowing, final norm and gathering, a row."""
        spec, h = self.spec, self.spec.hidden_size
        narrow = self.c * spec.widths[-1][1] * (spec.widths[-1][1] != h)
        copied = self.c < FP32 or spec.feedback == "post_norm"
        norm = FP32 * (h + 1 + h * copied) * (spec.head.norm == "own")
        return FP32 * h * (spec.embedding == "trained") + narrow + norm + 8

    def _layer(self, i: int, layer: ResolvedLayer) -> int:
        """Of a layer in a step, a row; what attention itself keeps left out."""
        h, (width, out) = self.spec.hidden_size, self.spec.widths[i]
        total = self._mlps(layer.mlp, out)
        if layer.fusion == "project":
            total += self._read(h + width)
            width = out
        if layer.attention is None:
            return total + self._read(width) * (width != out)
        if layer.attention.norm == "own":
            total += self._norm(width) + FP32 * h * (layer.fusion in ("concat", "add"))
        if layer.fusion == "add":
            total += self._read(h)
        total += self._read(width + h * (layer.fusion == "concat"), 3)
        widens = layer.fusion == "concat" and out == 2 * width
        return total + self.c * width * (width != out and not widens)

    def _mlps(self, mlp: ResolvedMlp, width: int) -> int:
        inner, normed = 4 * self.c * mlp.intermediate_size, self._norm(width) + self._read(width, 2)
        if mlp.residual or not mlp.depth:
            return mlp.depth * (inner + normed)
        return mlp.depth * inner + normed + (mlp.depth - 1) * self.c * width

    def _norm(self, width: int) -> int:
        """An RMSNorm: its input, and the input divided by its size."""
        return FP32 * (2 * width + 1)

    def _read(self, width: int, readers: int = 1) -> int:
        """An fp32 tensor that ``readers`` matrices multiply; in a narrower type each makes a copy of its own."""
        return FP32 * width if self.c == FP32 else self.c * width * readers


def _row_of_a_batch(spec: ResolvedSpec) -> int:
    return 9 + FP32 * (len(spec.inputs.aux_layers) + 1) * spec.target.hidden_size


def _head(spec: ResolvedSpec) -> int:
    return spec.head.vocab_size * spec.hidden_size


def _evaluation(spec: ResolvedSpec, evaluate: EvalSettings, longest: int) -> int:
    """What measuring acceptance takes at most, all in fp32: keys and values, one step's states, logits of some rows."""
    sampled = evaluate.draft == "sampled"
    vocabularies = (spec.head.vocab_size, 3 * spec.target.vocab_size * sampled, 3 * spec.head.vocab_size * sampled)
    teacher = FP32 * spec.target.vocab_size * spec.target.hidden_size * sampled
    attentions = [layer.attention for layer in spec.layers if layer.attention is not None]
    square = 3 * max((attention.heads for attention in attentions), default=0)
    keys = sum(2 * attention.kv_heads * attention.head_dim for attention in attentions)
    inner = max(
        3 * layer.mlp.intermediate_size + max(widths) for layer, widths in zip(spec.layers, spec.widths, strict=True)
    )
    # Every row goes on to the last step: what a draft that is always right would need.
    kept = _row_of_a_batch(spec) + FP32 * (evaluate.longest * (keys + 1) + 4 * spec.hidden_size)
    most = 0
    for rows, length in _batch_shapes(evaluate.batch_tokens, longest, 1):
        passing = FP32 * max(rows * square * (length + evaluate.longest), rows * inner, HEAD_ROWS * max(vocabularies))
        most = max(most, rows * kept + passing)
    return teacher + most
