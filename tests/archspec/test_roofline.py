"""Counts and times against hand-worked figures, what must cost more than what, messages, and the page's predictions."""

import dataclasses
import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from archspec import roofline as model
from archspec.accelerators import ACCELERATORS, Accelerator, accelerator_named
from archspec.cost import draft_params
from archspec.errors import ArchspecError
from archspec.facts import TargetFacts
from archspec.presets import load_preset, preset_names
from archspec.resolve import ResolvedSpec, resolve
from archspec.roofline import Roofline
from archspec.spec import DraftSpec
from archspec.speedup import Times, speedup
from archspec.work import Forward, Work, aux_work, draft_work, target_work
from tests.archspec import published
from tests.archspec.published import EAGLE1, EAGLE3, LLAMA_8B, draft_of
from tests.archspec.strategies import TOY, draft_specs

PAGE = Path(__file__).parents[2] / "docs" / "roofline.md"
H100 = accelerator_named("H100-SXM")
SMALL = TOY.model_copy(update={"model_type": "llama"})  # h 16, 8 layers, V 48, 4 heads and 2 key heads of 4, inner 24
UNIT = Accelerator("unit", memory=1e9, bandwidth=1e9, flops={"bfloat16": 1e9, "float8": 2e9}, sources={})


def totals(works: list[Work]) -> tuple[float, float, int]:
    return sum(work.bytes for work in works), sum(work.flops for work in works), sum(work.kernels for work in works)


def toy(layers: list[dict[str, Any]], **fields: Any) -> ResolvedSpec:
    return resolve(DraftSpec.model_validate({"name": "toy", "layers": layers} | fields), SMALL)


def large(**changes: Any) -> ResolvedSpec:
    return draft_of(LLAMA_8B, "eagle3", **changes)


# Counts


def test_a_target_step_by_hand() -> None:
    """Two sequences of ten tokens, three new ones each: six rows, two bytes for everything."""
    projections = (16 + 16) + 2 * (8 + 16) + (16 + 16)  # out + in of q, of k and v, of o
    mlp = 3 * (24 + 16)
    weights = 16 * 16 + 2 * 8 * 16 + 16 * 16 + 3 * 24 * 16
    products = 2 * weights + 2 * 6 * (projections + mlp)
    norms, gate = 2 * 6 * 2 * (2 * 16), 2 * 6 * 3 * 24
    turned, kept = 2 * 6 * 2 * (4 + 2) * 4, 2 * 6 * 2 * (2 * 2 * 4)
    read = 2 * (2 * 13 * 2 * 2 * 4 + 6 * 2 * 4 * 4)  # keys and values of 13 positions; queries in, outputs out
    layer = products + norms + gate + turned + kept + read
    ends = 2 * 6 * (2 * 16) + 2 * 6 * (2 * 16) + (2 * 48 * 16 + 2 * 6 * (48 + 16)) + 2 * 6 * 48
    flops = 8 * (2 * 6 * weights + 2 * 2 * 6 * 4 * 4 * 13) + 2 * 6 * 48 * 16
    works = target_work(SMALL, Forward(3, 2, 10, "bfloat16", "bfloat16"))
    assert (layer, ends) == (10_432, 3648)
    assert totals(works) == (8 * layer + ends, flops, 8 * 10 + 4)


def test_a_draft_step_by_hand() -> None:
    """EAGLE-3 with D = 40 of 48, two sequences of ten tokens, one new one each: two rows."""
    spec = draft_of(SMALL, "eagle3", head={"vocab_size": 40})
    weights = 16 * 32 + 2 * 8 * 32 + 16 * 16 + 3 * 24 * 16
    products = 2 * weights + 2 * 2 * ((16 + 32) + 2 * (8 + 32) + (16 + 16) + 3 * (24 + 16))
    norms, gate, joined = 2 * 2 * 3 * (2 * 16), 2 * 2 * 3 * 24, 2 * 2 * 2 * (16 + 16)
    turned, kept, read = 2 * 2 * 2 * (4 + 2) * 4, 2 * 2 * 2 * (2 * 2 * 4), 2 * (2 * 11 * 2 * 2 * 4 + 2 * 2 * 4 * 4)
    layer = products + norms + gate + joined + turned + kept + read
    head = (2 * 40 * 16 + 2 * 2 * (40 + 16)) + 2 * 2 * (2 * 16)
    flops = 2 * 2 * weights + 2 * 2 * 2 * 4 * 4 * 11 + 2 * 2 * 40 * 16
    works = draft_work(spec, Forward(1, 2, 10, "bfloat16", "bfloat16"))
    assert totals([work for work in works if work.part == "layer 0"])[::2] == (layer, 4 + 3 + 1 + 1 + 3)
    assert totals([work for work in works if work.part == "head"])[::2] == (head, 2)
    assert totals(works) == (2 * 2 * (2 * 16) + layer + head + 2 * 2 * 40, flops, 1 + 12 + 2 + 2)
    fc = 2 * 16 * 48 + 2 * 2 * (16 + 48)
    joined = 2 * 2 * 2 * (3 * 16)
    assert totals(aux_work(spec, Forward(1, 2, 10, "bfloat16", "bfloat16"))) == (fc + joined, 2 * 2 * 16 * 48, 2)


def test_the_cache_by_hand() -> None:
    """One more token of context: keys and values of two sequences, in every layer, each read once."""
    for facts, forward in (
        (SMALL, Forward(1, 2, 10, "bfloat16", "bfloat16")),
        (SMALL, Forward(4, 2, 9, "float8", "bfloat16")),
    ):
        longer = dataclasses.replace(forward, context=forward.context + 1)
        grown = totals(target_work(facts, longer))[0] - totals(target_work(facts, forward))[0]
        assert grown == 8 * 2 * (2 * 2 * 4) * 2


def test_a_window_bounds_what_a_draft_reads() -> None:
    near, far = (Forward(1, 1, context, "bfloat16", "bfloat16") for context in (30, 300))
    windowed = toy([{"fusion": "concat", "attention": {"window": 8}}])
    assert totals(draft_work(windowed, near)) == totals(draft_work(windowed, far))
    short = Forward(1, 1, 3, "bfloat16", "bfloat16")
    assert totals(draft_work(windowed, short)) == totals(draft_work(toy([{"fusion": "concat"}]), short))


def test_float8_is_for_the_targets_layers() -> None:
    """Head, cache and activations stay in bfloat16: layers of one byte a weight, nothing else changes."""
    plain, small = (Forward(1, 1, 10, weights, "bfloat16") for weights in ("bfloat16", "float8"))
    weights = 8 * (16 * 16 + 2 * 8 * 16 + 16 * 16 + 3 * 24 * 16)
    assert totals(target_work(SMALL, plain))[0] - totals(target_work(SMALL, small))[0] == weights
    assert {work.dtype for work in target_work(SMALL, small) if work.part == "head"} == {"bfloat16"}
    times = Roofline(UNIT, SMALL, dtype="float8", context=10)
    step = draft_work(toy([{"fusion": "concat"}]), Forward(1, 1, 10, "bfloat16", "bfloat16"))
    assert times.draft_ms(toy([{"fusion": "concat"}])) == pytest.approx(1e3 * times.seconds(step))


def test_the_embedding_is_a_row_and_not_a_table() -> None:
    forward = Forward(1, 1, 10, "bfloat16", "bfloat16")
    assert draft_work(toy([{"fusion": "concat"}]), forward)[0] == Work("embedding", 2 * 2 * 16, 0.0, 1, "bfloat16")
    frozen, trained = toy([{"fusion": "concat"}]), toy([{"fusion": "concat"}], embedding="trained")
    assert totals(draft_work(frozen, forward)) == totals(draft_work(trained, forward))


@pytest.mark.parametrize(
    ("layer", "kernels"),
    [
        ({"fusion": "concat"}, 4 + 3 + 1 + 1 + 3),  # products, norms, gate, concatenation, attention
        ({"fusion": "project"}, 5 + 2 + 1 + 1 + 3),
        ({"fusion": "add"}, 5 + 3 + 1 + 1 + 3),
        ({"fusion": "project", "attention": "none"}, 3 + 1 + 1 + 1),
        ({"fusion": "concat", "mlp": {"depth": 0}}, 2 + 2 + 1 + 3),
        ({"fusion": "concat", "mlp": {"depth": 3}}, 8 + 5 + 3 + 1 + 3),
        ({"fusion": "concat", "mlp": {"depth": 3, "norm": "shared"}}, 8 + 5 + 3 + 1 + 3),
        ({"fusion": "concat", "mlp": {"depth": 3, "residual": False}}, 8 + 3 + 3 + 1 + 3),
        ({"fusion": "concat", "attention": {"qk_norm": True}}, 4 + 5 + 1 + 1 + 3),
        ({"fusion": "concat", "stream": "2h"}, 4 + 3 + 1 + 1 + 3),  # the map to h is the head's
    ],
)
def test_kernels_of_a_layer(layer: dict[str, Any], kernels: int) -> None:
    works = draft_work(toy([layer]), Forward(1, 1, 10, "bfloat16", "bfloat16"))
    assert totals([work for work in works if work.part == "layer 0"])[2] == kernels


# Times


def test_the_longer_of_moving_and_computing_and_every_kernel() -> None:
    times = Roofline(UNIT, SMALL, context=1)
    moving = Work("", bytes=9e8, flops=1.0, kernels=2, dtype="bfloat16")
    assert times.seconds([moving]) == pytest.approx(0.9 / 0.875 + 2 * model.KERNEL_SECONDS)
    computing = Work("", bytes=1.0, flops=7e8, kernels=0, dtype="bfloat16")
    assert times.seconds([computing]) == pytest.approx(0.7 / 0.7)
    assert times.seconds([dataclasses.replace(computing, dtype="float8")]) == pytest.approx(0.5 * 0.7 / 0.7)
    assert times.seconds([moving, computing]) == pytest.approx(times.seconds([moving]) + times.seconds([computing]))


def test_a_cycle_has_the_projection_and_the_engines_work() -> None:
    times = Roofline(H100, LLAMA_8B, batch=4)
    projection = 1e3 * times.seconds(aux_work(EAGLE3, Forward(1, 4, 512, "bfloat16", "bfloat16")))
    assert times.cycle_ms(EAGLE3) == pytest.approx(1.5 + 4 * 0.1 + projection)
    assert times.cycle_ms(EAGLE1) == pytest.approx(1.5 + 4 * 0.1 + 1e3 * model.KERNEL_SECONDS, rel=1e-3), "a norm alone"


def test_it_is_what_speedup_takes() -> None:
    times: Times = Roofline(H100, LLAMA_8B)
    found = speedup([1.7, 2.36, 2.79], EAGLE3, times, range(1, 4))
    by_hand = 2.36 * times.target_ms(1) / (times.target_ms(3) + 2 * times.draft_ms(EAGLE3) + times.cycle_ms(EAGLE3))
    assert found.by_k[2] == pytest.approx(by_hand)
    assert (found.draft_source, found.draft_ms) == ("roofline", times.draft_ms(EAGLE3))
    assert times.source == "roofline H100-SXM, bfloat16, batch 1, context 512"


def test_parts_make_the_draft_step() -> None:
    times = Roofline(H100, LLAMA_8B)
    parts = times.draft_parts(large(layers=[{"fusion": "concat"}, {}]))
    assert list(parts) == ["embedding", "layer 0", "layer 1", "head", "choice"]
    assert sum(times.draft_parts(EAGLE3).values()) == times.draft_ms(EAGLE3)


@pytest.mark.parametrize("accelerator", ACCELERATORS, ids=lambda accelerator: accelerator.name)
def test_every_preset_has_a_time_on_every_accelerator(accelerator: Accelerator) -> None:
    for dtype in accelerator.flops:
        facts = LLAMA_8B if dtype != "float32" else LLAMA_8B.model_copy(update={"num_layers": 8})
        times = Roofline(accelerator, facts, dtype=dtype)
        for name in preset_names():
            spec = resolve(load_preset(name), facts)
            values = [times.target_ms(1), times.target_ms(9), times.draft_ms(spec), times.cycle_ms(spec)]
            assert all(math.isfinite(value) and value > 0 for value in values), (dtype, name)
            assert times.draft_ms(spec) < times.target_ms(1)


@settings(max_examples=40)
@given(draft_specs())
def test_every_draft_has_a_time_and_another_layer_costs_more(spec: DraftSpec) -> None:
    times = Roofline(H100, SMALL)
    resolved = resolve(spec, SMALL)
    deeper = resolve(spec.model_copy(update={"layers": (*spec.layers, spec.layers[-1])}), SMALL)
    assert 0 < times.draft_ms(resolved) < times.draft_ms(deeper)


# What costs more


@pytest.mark.parametrize("accelerator", ACCELERATORS, ids=lambda accelerator: accelerator.name)
def test_more_is_never_cheaper(accelerator: Accelerator) -> None:
    """More rows, sequences and context, a larger D, more layers: target, draft and cycle."""

    def step(batch: int = 1, context: int = 512, rows: int = 1, **changes: Any) -> tuple[float, float]:
        times = Roofline(accelerator, LLAMA_8B, batch=batch, context=context)
        return times.target_ms(rows), times.draft_ms(large(**changes)) + times.cycle_ms(EAGLE3)

    for larger in (
        [step(batch=batch, context=64) for batch in (1, 2, 8, 64, 256)],
        [step(context=context) for context in (1, 512, 4096, 16_384)],
    ):
        assert larger == sorted(larger)
        assert all(a[0] < b[0] and a[1] < b[1] for a, b in pairwise(larger))
    rows = [step(rows=rows)[0] for rows in (1, 2, 4, 8, 64, 512)]
    heads = [step(head={"vocab_size": size})[1] for size in (1000, 16_000, 32_000, 64_000, "full")]
    layers = [step(layers=[{"fusion": "concat"}, *[{}] * more])[1] for more in range(4)]
    for times in (rows, heads, layers):
        assert all(a < b for a, b in pairwise(times))


def test_depth_costs_more_than_width_at_batch_1() -> None:
    """Equal parameters, three layers against one with a wider MLP (the finding of arXiv 2402.01528)."""
    layer = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14_336 + 2 * 4096
    deep = large(layers=[{"fusion": "concat"}, {}, {}])
    wide = large(layers=[{"fusion": "concat", "mlp": {"intermediate_size": 14_336 + round(2 * layer / (3 * 4096))}}])
    assert draft_params(deep) == pytest.approx(draft_params(wide), rel=1e-4)
    for accelerator in ACCELERATORS:
        times = Roofline(accelerator, LLAMA_8B)
        extra = times.draft_ms(deep) - times.draft_ms(wide)
        assert extra == pytest.approx(2 * 10 * 1e3 * model.KERNEL_SECONDS, rel=0.1), "the kernels of two layers"
    assert Roofline(H100, LLAMA_8B).draft_ms(deep) > 1.15 * Roofline(H100, LLAMA_8B).draft_ms(wide)


def test_the_heads_share_of_a_draft_step_falls_with_its_vocabulary() -> None:
    times = Roofline(H100, LLAMA_8B)
    shares = []
    for size in ("full", 64_000, 32_000, 16_000, 4000):
        spec = large(head={"vocab_size": size})
        shares.append(times.draft_parts(spec)["head"] / times.draft_ms(spec))
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.55
    assert shares[-1] < 0.15


def test_a_large_batch_is_bound_by_compute() -> None:
    """At batch 1 twice the FLOP/s change nothing; at 2,048 they halve the step, and twice the batch doubles it."""
    fast = dataclasses.replace(H100, flops={"bfloat16": 2 * H100.flops["bfloat16"]})
    one, many, twice = (
        [Roofline(accelerator, LLAMA_8B, batch=batch, context=1).target_ms(1) for accelerator in (H100, fast)]
        for batch in (1, 2048, 4096)
    )
    assert one[0] == one[1]
    assert many[0] / many[1] > 1.7
    assert twice[0] / many[0] == pytest.approx(2, rel=0.1)
    by_flops = 1e3 * 2048 * 2 * (8.03e9 - 128_256 * 4096) / (0.7 * 989.5e12)  # all parameters but the embedding
    assert many[0] == pytest.approx(by_flops, rel=0.25)


# Messages


def message(facts: TargetFacts = LLAMA_8B, accelerator: str = "A100-80GB", **options: Any) -> str:
    with pytest.raises(ArchspecError) as caught:
        Roofline(accelerator_named(accelerator), facts, **options)
    return str(caught.value)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "gpt2", "toy"])
def test_targets_that_are_not_counted(model_type: str) -> None:
    rule = "the roofline counts dense decoders of gated MLPs (llama, qwen3 and others, see docs/roofline.md)"
    assert message(LLAMA_8B.model_copy(update={"model_type": model_type})) == (
        f"target of type {model_type!r}: {rule}; measure a profile instead (archspec profile)"
    )


def test_a_target_that_does_not_fit() -> None:
    """Llama-3.1-70B: 80 * 8192 * (2 * 8192 + 2 * 1024 + 3 * 28672) + 128256 * 8192 weights, 0.33 MB a token."""
    facts = published.facts_of("llama", 8192, 80, 128_256, 64, 8, 28_672)
    assert message(facts, "H100-SXM", batch=8, context=4096) == (
        "the target does not fit H100-SXM: it needs at least 139.0 GB of weights in bfloat16 and 10.7 GB of KV cache "
        "(batch 8, context 4096), and the accelerator has 80 GB; choose a larger one, a smaller batch or context, or "
        "measure a profile on the devices that it runs on (archspec profile)"
    )
    assert Roofline(accelerator_named("H200"), facts, dtype="float8").target_ms(1) > 0


def test_dtypes_that_an_accelerator_has_not() -> None:
    choices = "choose from float32, bfloat16, float16"
    assert message(dtype="float8") == f"dtype 'float8' is none of A100-80GB: did you mean 'float32'? {choices}"
    assert message(dtype="bf16") == f"dtype 'bf16' is none of A100-80GB: did you mean 'bfloat16'? {choices}"


def test_batch_context_and_rows_out_of_range() -> None:
    assert message(batch=0) == "batch = 0: must be at least 1"
    assert message(context=-1) == "context = -1: must be at least 1"
    short = LLAMA_8B.model_copy(update={"max_positions": 2048})
    told = "context = 2048: the target has 2,048 positions, and new tokens take some; use fewer"
    assert message(short, context=2048) == told
    assert Roofline(H100, short, context=2047).target_ms(1) > 0
    with pytest.raises(ArchspecError, match=r"^rows = 0: the target reads at least one token$"):
        Roofline(H100, LLAMA_8B).target_ms(0)


# The page


def section(heading: str) -> list[str]:
    text = PAGE.read_text(encoding="utf-8")
    found = re.search(rf"^### {re.escape(heading)}\n(.*?)(?=^##|\Z)", text, flags=re.MULTILINE | re.DOTALL)
    assert found is not None, heading
    return [line for line in found[1].splitlines() if line.startswith("|")][2:]


@pytest.mark.parametrize("heading", published.TABLES)
def test_the_page_shows_what_the_code_predicts(heading: str) -> None:
    """``python -m tests.archspec.published`` prints the rows."""
    assert section(heading) == [pair.row() for pair in published.TABLES[heading]()]


def test_the_page_names_the_constants_and_the_targets() -> None:
    text = PAGE.read_text(encoding="utf-8")
    names = ("BANDWIDTH_SHARE", "KERNEL_SECONDS", "COMPUTE_SHARE", "CYCLE_SECONDS", "SEQUENCE_SECONDS")
    for name in names:
        assert f"| `{name}` | {getattr(model, name):g} |" in text
    listed = re.search(r"Counted are the types (.*?)\.\s", text, flags=re.DOTALL)
    assert listed is not None
    assert re.findall(r"`([^`]+)`", listed[1]) == list(model.DENSE)


def test_two_constants_are_the_best_of_their_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Least squares of log error over the target steps at batch 1, as their docstrings say."""

    def error(share: float, kernel: float) -> float:
        monkeypatch.setattr(model, "BANDWIDTH_SHARE", share)
        monkeypatch.setattr(model, "KERNEL_SECONDS", kernel)
        return math.sqrt(np.mean([math.log1p(pair.error) ** 2 for pair in published.steps_alone()]))

    share, kernel = model.BANDWIDTH_SHARE, model.KERNEL_SECONDS
    best = error(share, kernel)
    assert best < 0.05
    around = [error(share + i * 0.025, kernel + j * 0.25e-6) for i in (-1, 0, 1) for j in (-1, 0, 1)]
    assert best == min(around)
