"""Published times and speed-ups, and what the roofline says of the same set-up.

``docs/roofline.md`` shows them; ``python -m tests.archspec.published`` prints the rows of its tables anew.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from archspec.accelerators import accelerator_named
from archspec.facts import TargetFacts
from archspec.presets import load_preset
from archspec.resolve import ResolvedSpec, resolve
from archspec.roofline import Roofline
from archspec.spec import DraftSpec
from archspec.work import draft_work


def facts_of(model_type: str, hidden: int, layers: int, vocab: int, heads: int, kv: int, inner: int) -> TargetFacts:
    """Heads of 128, but 64 in Llama-3.2-1B."""
    return TargetFacts(
        model_type=model_type,
        hidden_size=hidden,
        num_layers=layers,
        vocab_size=vocab,
        heads=heads,
        kv_heads=kv,
        head_dim=64 if hidden == 2048 else 128,
        intermediate_size=inner,
        max_positions=131_072,
    )


LLAMA_8B = facts_of("llama", 4096, 32, 128_256, 32, 8, 14_336)  # Llama-3 and 3.1
LLAMA_1B = facts_of("llama", 2048, 16, 128_256, 32, 8, 8192)  # Llama-3.2
LLAMA2_7B = facts_of("llama", 4096, 32, 32_000, 32, 32, 11_008)
QWEN3_8B = facts_of("qwen3", 4096, 36, 151_936, 32, 8, 12_288)
QWEN3_4B = facts_of("qwen3", 2560, 36, 151_936, 32, 8, 9728)


@dataclass(frozen=True)
class Pair:
    """A published figure beside the prediction. ``source`` is a paper, or a thread as repository#number."""

    what: str
    measured: float
    predicted: float
    source: str

    @property
    def error(self) -> float:
        """Relative."""
        return self.predicted / self.measured - 1

    def row(self) -> str:
        """As in the page."""
        error = round(self.error, 2) + 0.0  # no minus before a zero
        return f"| {self.what} | {self.measured:.3g} | {self.predicted:.3g} | {error:+.0%} | {self.source} |"


def draft_of(facts: TargetFacts, preset: str, **changes: Any) -> ResolvedSpec:
    """A preset with some of its top-level fields changed."""
    return resolve(DraftSpec.model_validate(load_preset(preset).model_dump(mode="json") | changes), facts)


def deep(facts: TargetFacts, layers: int) -> ResolvedSpec:
    """EAGLE-3 with ``layers`` layers, the first of which is fused, and the target's head."""
    stack = [{"fusion": "concat"}, *[{"fusion": "none"}] * (layers - 1)]
    return draft_of(facts, "eagle3", layers=stack, head={"vocab_size": "full", "weights": "target"})


EAGLE1, EAGLE3 = (draft_of(LLAMA_8B, name) for name in ("eagle1", "eagle3"))
QUARTER = draft_of(LLAMA_8B, "eagle1", head={"vocab_size": 32_064, "weights": "target", "norm": "none"})

VLLM_SWEEP, SGLANG_TREE, FR_SPEC = "vllm-project/vllm#20780", "sgl-project/sglang#4247", "vllm-project/vllm#29334"
EAGLE3_PAPER, DFLASH = "arXiv 2503.01840", "arXiv 2602.06036"


def roofline(accelerator: str, facts: TargetFacts, batch: int = 1) -> Roofline:
    """bfloat16, context 512, as everywhere here: the published runs name neither exactly."""
    return Roofline(accelerator_named(accelerator), facts, batch=batch)


def draft_ms(times: Roofline, spec: ResolvedSpec, rows: int) -> float:
    """One draft step over several rows of a sequence: a level of a tree, or a block."""
    return 1e3 * times.seconds(draft_work(spec, times.draft_forward(rows)))


def chain(times: Roofline, spec: ResolvedSpec, k: int, length: float) -> float:
    """Speed-up with a chain of k, as ``archspec.speedup`` has it."""
    return length * times.target_ms(1) / (times.target_ms(k + 1) + k * times.draft_ms(spec) + times.cycle_ms(spec))


def tree(times: Roofline, spec: ResolvedSpec, steps: int, width: int, size: int, length: float) -> float:
    """Speed-up with a tree: ``steps`` draft steps of ``width`` rows, ``size`` rows for the target to check."""
    cycle = times.target_ms(size) + steps * draft_ms(times, spec, width) + times.cycle_ms(spec)
    return length * times.target_ms(1) / cycle


def steps_alone() -> Iterator[Pair]:
    """Milliseconds of a target step at batch 1. ``BANDWIDTH_SHARE`` and ``KERNEL_SECONDS`` come from these."""
    for name, facts, accelerator, measured, source in (
        ("Llama-3.1-8B, H100-SXM, SGLang", LLAMA_8B, "H100-SXM", 1e3 / 158.34, f"{EAGLE3_PAPER}, table 4"),
        ("Llama-3.1-8B, H100-SXM, vLLM", LLAMA_8B, "H100-SXM", 7.07, VLLM_SWEEP),
        ("Llama-2-7B, H100-SXM, SGLang", LLAMA2_7B, "H100-SXM", 1e3 / 156, "SafeAILab/EAGLE#173"),
        ("Qwen3-8B, H200, SGLang", QWEN3_8B, "H200", 1e3 / 186, "SafeAILab/EAGLE#211"),
        ("Llama-3.1-8B, A100-40GB, vLLM", LLAMA_8B, "A100-40GB", 1e3 / 74.87, FR_SPEC),
        (
            "Llama-2-7B, A100-80GB at 330 W, gpt-fast",
            LLAMA2_7B,
            "A100-80GB",
            1e3 / 104.9,
            "pytorch-labs/gpt-fast, README",
        ),
        ("Llama-3.1-8B, B200, SGLang", LLAMA_8B, "B200", 1e3 / 245, f"{DFLASH}, table 5"),
        ("Qwen3-8B, B200, SGLang", QWEN3_8B, "B200", 1e3 / 230, f"{DFLASH}, table 3"),
        ("Qwen3-4B, B200, SGLang", QWEN3_4B, "B200", 1e3 / 316, f"{DFLASH}, table 3"),
    ):
        yield Pair(f"T(1), {name}", measured, roofline(accelerator, facts).target_ms(1), source)


def other_steps() -> Iterator[Pair]:
    """A small target, and larger batches from throughput, which has the prefills in it."""
    small = roofline("H100-SXM", LLAMA_1B)
    weights = 2 * (16 * 2048 * (2 * 2048 + 2 * 512 + 3 * 8192) + 128_256 * 2048)
    used = weights / (1e-3 * small.target_ms(1) * small.accelerator.bandwidth)
    yield Pair("share of bandwidth, Llama-3.2-1B, H100, vLLM and SGLang", 0.5, used, "at most so much; No Bubbles")
    for facts, name, batch, throughput, table in (
        (LLAMA_8B, "Llama-3.1-8B", 8, 1778, 5),
        (LLAMA_8B, "Llama-3.1-8B", 32, 5854, 5),
        (QWEN3_4B, "Qwen3-4B", 8, 2201, 3),
        (QWEN3_4B, "Qwen3-4B", 32, 7136, 3),
    ):
        predicted = roofline("B200", facts, batch).target_ms(1)
        yield Pair(
            f"T(1), {name}, B200, SGLang, batch {batch}",
            1e3 * batch / throughput,
            predicted,
            f"{DFLASH}, table {table}",
        )


def draft_steps() -> Iterator[Pair]:
    """Milliseconds and shares of a draft step for Llama-3.1-8B; differences of cycles, where the rest cancels.

    sgl-project/sglang#3822 names neither device nor target.
    """
    a100, h100 = roofline("A100-80GB", LLAMA_8B), roofline("H100-SXM", LLAMA_8B)
    parts = a100.draft_parts(EAGLE1)
    unnamed = "EAGLE-1, taken as A100-80GB"
    yield Pair(f"head of a draft step, ms, {unnamed}", 0.86, parts["head"], "sgl-project/sglang#3822")
    yield Pair(f"whole draft step, ms, {unnamed}", 1.8, a100.draft_ms(EAGLE1), "sgl-project/sglang#3822")
    yield Pair(
        f"share of the head, {unnamed}", 0.86 / 1.8, parts["head"] / a100.draft_ms(EAGLE1), "sgl-project/sglang#3822"
    )
    small = roofline("A100-40GB", LLAMA_8B)
    saved = small.draft_ms(EAGLE1) - small.draft_ms(QUARTER)
    yield Pair("saved by D = V/4, ms, A100-40GB, vLLM", 1e3 * (1.70 / 108.88 - 1.67 / 112.54), saved, FR_SPEC)
    wider = draft_ms(h100, EAGLE1, 8) - draft_ms(h100, EAGLE3, 8)
    between = 1e3 * (3.76 / 230.08 - 5.39 / 378.57) / 8
    yield Pair("EAGLE-2's step less EAGLE-3's, ms, H100, SGLang tree", between, wider, SGLANG_TREE)
    more = 1e3 * (5.39 / 378.57 - 4.68 / 361.70) / 3
    yield Pair("one more EAGLE-3 step, ms, H100, SGLang tree", more, draft_ms(h100, EAGLE3, 8), SGLANG_TREE)
    for name, spec, first, last in (
        ("EAGLE-1", EAGLE1, 2.1 * 4.37, 2.47 * 5.2),
        ("EAGLE-3", EAGLE3, 2.36 * 4.32, 3.54 * 4.29),
    ):
        grown = (last - first) / 5
        step = h100.draft_ms(spec) + (h100.target_ms(8) - h100.target_ms(3)) / 5
        yield Pair(f"one more k, ms, {name}, H100, vLLM", grown, step, VLLM_SWEEP)


def chains() -> Iterator[Pair]:
    """Speed-ups of chains for Llama-3.1-8B on MT-bench."""
    eagle1, eagle3 = ("EAGLE-1", EAGLE1), ("EAGLE-3", EAGLE3)
    h100 = roofline("H100-SXM", LLAMA_8B)
    for (name, spec), k, length, tpot in (
        (eagle1, 2, 2.10, 4.37),
        (eagle1, 3, 2.29, 4.29),
        (eagle1, 4, 2.39, 4.48),
        (eagle1, 7, 2.47, 5.20),
        (eagle3, 2, 2.36, 4.32),
        (eagle3, 3, 2.79, 4.09),
        (eagle3, 4, 3.08, 4.05),
        (eagle3, 7, 3.54, 4.29),
    ):
        yield Pair(f"{name}, k = {k}, H100, vLLM", 7.07 / tpot, chain(h100, spec, k, length), VLLM_SWEEP)
    a100 = roofline("A100-40GB", LLAMA_8B)
    yield Pair("EAGLE-2 draft, k = 1, A100-40GB, vLLM", 108.88 / 74.87, chain(a100, EAGLE1, 1, 1.70), FR_SPEC)
    yield Pair("the same with D = V/4", 112.54 / 74.87, chain(a100, QUARTER, 1, 1.67), FR_SPEC)
    h100_of = {2: (1.40, 1.81), 8: (1.23, 1.62), 16: (1.02, 1.48), 32: (0.94, 1.32), 64: (0.99, 1.38)}
    rtx_of = {2: (1.30, 1.75), 8: (1.21, 1.58), 24: (1.03, 1.42), 56: (0.71, 1.01)}
    for device, engine, k, table, measured, lengths in (
        ("H100-SXM", "SGLang", 3, 3, h100_of, (2.29, 2.79)),
        ("RTX-3090", "vLLM", 2, 5, rtx_of, (2.10, 2.36)),
    ):
        for (name, spec), column in ((eagle1, 0), (eagle3, 1)):
            for batch, speeds in measured.items():
                predicted = chain(roofline(device, LLAMA_8B, batch), spec, k, lengths[column])
                what = f"{name}, k = {k}, batch {batch}, {device}, {engine}"
                yield Pair(what, speeds[column], predicted, f"{EAGLE3_PAPER}, table {table}; length of {VLLM_SWEEP}")


def trees() -> Iterator[Pair]:
    """Speed-ups of trees for Llama-3.1-8B. The trees are those that the sources name, or the method's usual ones."""
    rtx, h100 = roofline("RTX-3090", LLAMA_8B), roofline("H100-SXM", LLAMA_8B)
    usual = f"{EAGLE3_PAPER}, table 1; tree of SafeAILab/EAGLE#209"
    yield Pair("EAGLE-3, length 6.13, RTX-3090, EAGLE's code", 4.40, tree(rtx, EAGLE3, 8, 10, 60, 6.13), usual)
    yield Pair("EAGLE-2, length 4.05, RTX-3090, EAGLE's code", 3.16, tree(rtx, EAGLE1, 6, 10, 60, 4.05), usual)
    for steps, length, throughput in ((5, 4.68, 361.70), (8, 5.39, 378.57)):
        what = f"EAGLE-3, {steps} steps, length {length}, H100, SGLang"
        predicted = tree(h100, EAGLE3, steps, 8, 64, length)
        yield Pair(what, throughput / 158.34, predicted, f"{SGLANG_TREE}; T(1) of {EAGLE3_PAPER}")
    for batch, measured in ((1, 2.0), (8, 1.8), (32, 1.2)):
        predicted = tree(roofline("B200", LLAMA_8B, batch), EAGLE3, 7, 10, 10, 3.62)
        yield Pair(f"EAGLE-3, 7 steps, batch {batch}, B200, SGLang", measured, predicted, f"{DFLASH}, table 5")


def depths() -> Iterator[Pair]:
    """What draft layers cost. DFlash drafts a block of 16 in one forward; Transformers, H200, taken as Qwen3-4B."""
    h200 = roofline("H200", QWEN3_4B)
    base = draft_ms(h200, deep(QWEN3_4B, 2), 16)
    layer = (draft_ms(h200, deep(QWEN3_4B, 3), 16) - base) / h200.target_ms(1)

    def cycle(layers: int) -> float:
        spec = deep(QWEN3_4B, layers)
        return h200.target_ms(16) + draft_ms(h200, spec, 16) + h200.cycle_ms(spec)

    source = f"{DFLASH}, table 6"
    for task, three, five, eight in (
        ("Math500", (4.69, 5.64), (4.71, 5.99), (4.64, 6.33)),
        ("HumanEval", (3.90, 4.61), (3.96, 4.94), (3.96, 5.29)),
        ("MT-Bench", (2.38, 3.18), (2.35, 3.37), (2.23, 3.50)),
    ):
        grown = (eight[1] / eight[0] - three[1] / three[0]) / 5
        yield Pair(f"one more draft layer, share of T(1), {task}", grown, layer, source)
        for name, (speed, length) in (("5 over 3", three), ("5 over 8", eight)):
            other = 3 if name == "5 over 3" else 8
            predicted = five[1] / length * cycle(other) / cycle(5)
            yield Pair(f"{name} layers, speed-up, {task}", five[0] / speed, predicted, source)
    for task, measured, length in (("GSM8K", 2.1, 4.2), ("HumanEval", 2.2, 4.3), ("MT-Bench", 1.4, 3.1)):
        predicted = chain(h200, deep(QWEN3_4B, 5), 7, length)
        yield Pair(f"EAGLE-3 of 5 layers, k = 7, {task}", measured, predicted, f"{DFLASH}, table 9")


TABLES = {
    "A target step": steps_alone,
    "Other target steps": other_steps,
    "A draft step": draft_steps,
    "Chains": chains,
    "Trees": trees,
    "Depth": depths,
}

if __name__ == "__main__":
    for heading, pairs in TABLES.items():
        print(f"### {heading}\n")
        print(*(pair.row() for pair in pairs()), sep="\n", end="\n\n")
