"""Times of targets and drafts on an accelerator that is not here, from bytes, FLOPs and kernels. No torch.

A step takes, summed over its kernels, the longer of moving its bytes and doing its FLOPs (the roofline of Williams et
al., doi 10.1145/1498765.1498785), and for every kernel a constant: what starts it, fills the device and drains it,
while no weights are read. At batch 1 this constant is what makes depth cost more than width (arXiv 2402.01528).
The model is of an engine that replays CUDA graphs. ``docs/roofline.md`` has predictions beside measurements.
"""

from collections.abc import Iterable

from archspec.accelerators import Accelerator
from archspec.cost import BYTES_PER_ELEMENT
from archspec.errors import ArchspecError, nearest
from archspec.facts import TargetFacts
from archspec.resolve import ResolvedSpec
from archspec.work import Forward, Work, aux_work, draft_work, target_work

BANDWIDTH_SHARE = 0.875
"""Share of the printed bandwidth that the model lets every kernel attain."""
KERNEL_SECONDS = 5.5e-6
"""Seconds a kernel of a replayed CUDA graph keeps the memory idle; the start alone takes 1.3e-6 on an H100.

With ``BANDWIDTH_SHARE`` the least squares of log error over nine published times of a target step at batch 1, on a grid
of 0.025 and 0.25e-6; see ``docs/roofline.md``, where the start's time has its source too.
"""
COMPUTE_SHARE = 0.7
"""Share of the printed dense FLOP/s that a large product attains. Assumed: pairs at batch 1 hardly show it."""
CYCLE_SECONDS = 1.5e-3
"""Seconds of a cycle in which the engine accepts tokens, prepares inputs and waits for the host."""
SEQUENCE_SECONDS = 1e-4
"""Seconds of a cycle for each sequence of the batch, for the same work.

Both are rounded from what vLLM and SGLang of 2025 and 2026 need beside their products; ``docs/roofline.md`` has the
pairs. Host work differs between engines more than anything else here: a measured profile replaces both.
"""

DENSE = (
    "llama", "mistral", "ministral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gemma3_text", "phi3", "granite",
    "smollm3", "olmo", "olmo2", "olmo3", "cohere", "cohere2", "internlm2", "internlm3", "exaone", "exaone4", "glm",
    "glm4", "seed_oss", "hunyuan_v1_dense", "ernie4_5", "helium", "stablelm", "baichuan",
)  # fmt: skip
"""Model types that are counted rightly: every layer has attention with a KV cache and one gated MLP."""


class Roofline:
    """Implements ``archspec.speedup.Times`` for one accelerator, target, dtype, batch and context.

    ``dtype`` is float32, bfloat16, float16 or float8; with float8 the target's layers are in it, and head, KV cache,
    activations and the draft in bfloat16, as engines serve such targets. ``batch`` counts sequences, ``context`` the
    tokens that each has behind it.

    Raises:
        ArchspecError: a dtype that the accelerator has not, a context beyond the target's positions, a target that is
            no dense decoder of gated MLPs, or one that does not fit the accelerator's memory.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        facts: TargetFacts,
        *,
        dtype: str = "bfloat16",
        batch: int = 1,
        context: int = 512,
    ) -> None:
        self.accelerator, self.facts = accelerator, facts
        self.dtype, self.batch, self.context = dtype, batch, context
        self._activations = "bfloat16" if dtype == "float8" else dtype
        if dtype not in accelerator.flops:
            raise ArchspecError(f"dtype {dtype!r} is none of {accelerator.name}: {nearest(dtype, accelerator.flops)}")
        for name, value in (("batch", batch), ("context", context)):
            if value < 1:
                raise ArchspecError(f"{name} = {value}: must be at least 1")
        if context >= facts.max_positions:
            rule = f"the target has {facts.max_positions:,} positions, and new tokens take some; use fewer"
            raise ArchspecError(f"context = {context}: {rule}")
        if facts.model_type not in DENSE:
            rule = "the roofline counts dense decoders of gated MLPs (llama, qwen3 and others, see docs/roofline.md)"
            raise ArchspecError(
                f"target of type {facts.model_type!r}: {rule}; measure a profile instead (archspec profile)"
            )
        self._must_fit()

    @property
    def source(self) -> str:
        """``roofline H100-SXM, bfloat16, batch 1, context 512``."""
        return f"roofline {self.accelerator.name}, {self.dtype}, batch {self.batch}, context {self.context}"

    def target_ms(self, rows: int) -> float:
        """T(m) in milliseconds for ``rows`` = m >= 1 tokens of every sequence, with head and choice.

        Raises:
            ArchspecError: fewer than one row.
        """
        if rows < 1:
            raise ArchspecError(f"rows = {rows}: the target reads at least one token")
        return 1e3 * self.seconds(target_work(self.facts, self.forward(rows)))

    def draft_ms(self, spec: ResolvedSpec) -> float:
        """One draft step in milliseconds, with the head over D and the choice of a token."""
        return sum(self.draft_parts(spec).values())

    def draft_parts(self, spec: ResolvedSpec) -> dict[str, float]:
        """Milliseconds of a draft step by part: ``embedding``, ``layer 0`` …, ``head`` with its norm, ``choice``."""
        parts: dict[str, float] = {}
        for work in draft_work(spec, self.draft_forward()):
            parts[work.part] = parts.get(work.part, 0.0) + 1e3 * self.seconds([work])
        return parts

    def cycle_ms(self, spec: ResolvedSpec) -> float:
        """T_0 in milliseconds: the projection of the aux states, one row a sequence, and the engine's own cost."""
        engine = CYCLE_SECONDS + self.batch * SEQUENCE_SECONDS
        return 1e3 * (engine + self.seconds(aux_work(spec, self.draft_forward())))

    def draft_source(self, spec: ResolvedSpec) -> str:
        """``roofline``, for every draft."""
        del spec
        return "roofline"

    def forward(self, rows: int) -> Forward:
        """A forward of the target with ``rows`` tokens of every sequence."""
        return Forward(rows, self.batch, self.context, self.dtype, self._activations)

    def draft_forward(self, rows: int = 1) -> Forward:
        """A forward of a draft; trees and blocks draft several ``rows`` of a sequence at once."""
        return Forward(rows, self.batch, self.context, self._activations, self._activations)

    def seconds(self, works: Iterable[Work]) -> float:
        """Seconds for kernels that run one after another."""
        bandwidth = self.accelerator.bandwidth * BANDWIDTH_SHARE
        peaks = {dtype: peak * COMPUTE_SHARE for dtype, peak in self.accelerator.flops.items()}
        return sum(
            max(work.bytes / bandwidth, work.flops / peaks[work.dtype]) + work.kernels * KERNEL_SECONDS
            for work in works
        )

    def _must_fit(self) -> None:
        facts, size = self.facts, BYTES_PER_ELEMENT[self._activations]
        h, wide, narrow = facts.hidden_size, facts.heads * facts.head_dim, facts.kv_heads * facts.head_dim
        layer = h * (2 * wide + 2 * narrow + 3 * facts.intermediate_size)
        weights = facts.num_layers * layer * BYTES_PER_ELEMENT[self.dtype] + facts.vocab_size * h * size
        cache = self.batch * self.context * facts.num_layers * 2 * narrow * size
        if weights + cache > self.accelerator.memory:
            needs = f"{weights / 1e9:.1f} GB of weights in {self.dtype} and {cache / 1e9:.1f} GB of KV cache"
            at = f"batch {self.batch}, context {self.context}"
            raise ArchspecError(
                f"the target does not fit {self.accelerator.name}: it needs at least {needs} ({at}), and the "
                f"accelerator has {self.accelerator.memory / 1e9:.0f} GB; choose a larger one, a smaller batch or "
                f"context, or measure a profile on the devices that it runs on (archspec profile)"
            )
