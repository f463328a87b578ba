"""Cheap bounds on what a draft costs."""

import optuna
import pytest

from archspec.cost import draft_params, flops_per_token, trainable_params, weight_bytes
from archspec.errors import ArchspecError
from archspec.presets import load_preset
from archspec.resolve import ResolvedSpec, resolve
from archspec.schema import Document
from archspec.servable import ENGINES
from search_spaces import Space, require_feasible
from search_spaces.constraints import Bound, ByteBound, Constraints
from tests.smollm2 import SMOLLM2

SPEC = resolve(
    load_preset("eagle3"),
    SMOLLM2,
)


def parse(text: str) -> Constraints:
    return Document.parse(text, "c.yaml").validate(Constraints)


def test_margins_are_relative_and_signed() -> None:
    params = draft_params(SPEC)
    constraints = Constraints(
        params=Bound(max=params / 2),
        trainable_params=Bound(min=trainable_params(SPEC) * 2),
        flops_per_token=Bound(min=1, max=flops_per_token(SPEC)),
        bytes=ByteBound(max=weight_bytes(SPEC, "bfloat16") * 2, dtype="bfloat16"),
    )
    assert constraints.margins(SPEC) == pytest.approx(
        {"params": 1.0, "trainable_params": 0.5, "flops_per_token": 0.0, "bytes": -0.5}
    )
    assert constraints.violations(SPEC) == pytest.approx({"params": 1.0, "trainable_params": 0.5})


def test_reason_names_count_and_bound() -> None:
    constraints = parse("params: {max: 1e6}\nbytes: {max: 2e6, dtype: float32}\ntrainable_params: {min: 9e9}")
    reason = constraints.reason(SPEC)
    assert reason == (
        f"params: {draft_params(SPEC):,} is above the greatest allowed, 1,000,000; "
        f"trainable_params: {trainable_params(SPEC):,} is below the least allowed, 9,000,000,000; "
        f"bytes in float32: {weight_bytes(SPEC, 'float32'):,} is above the greatest allowed, 2,000,000"
    )
    assert Constraints().reason(SPEC) is None
    assert Constraints().margins(SPEC) == {}


def test_margins_suit_optuna() -> None:
    trial = optuna.create_study().ask()
    for name, margin in parse("params: {max: 40e6}").margins(SPEC).items():
        trial.set_constraint(name, margin)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("params: {min: 5, max: 3}", "c.yaml:1: params: min <= max must hold, but got (min=5, max=3)"),
        ("params: {}", "c.yaml:1: params: the bound is empty; give min, max or both"),
        ("parms: {max: 3}", "c.yaml:1: parms: unknown key; did you mean 'params'?"),
        ("params: {max: -3}", "c.yaml:1: params.max = -3: input should be greater than 0"),
        ("bytes: {max: 3, dtype: bf16}", "c.yaml:1: bytes.dtype = 'bf16': did you mean 'bfloat16'?"),
        ("servable_by: [vlm]", "c.yaml:1: servable_by.0 = 'vlm': did you mean 'vllm'? choose from vllm, sglang"),
        ("params: 3", "c.yaml:1: params = 3: must be a mapping with keys from min, max"),
    ],
)
def test_bad_constraints(text: str, message: str) -> None:
    with pytest.raises(ArchspecError) as caught:
        parse(text)
    assert str(caught.value).startswith(message)


# Times, and what was measured


class OneTime:
    """Every draft step takes so many milliseconds."""

    source = "by hand"

    def __init__(self, ms: float) -> None:
        self._ms = ms

    def target_ms(self, rows: int) -> float:
        return 10.0 + rows

    def draft_ms(self, spec: ResolvedSpec) -> float:
        return self._ms

    def cycle_ms(self, spec: ResolvedSpec) -> float:
        return 0.0

    def draft_source(self, spec: ResolvedSpec) -> str:
        return "measured"


def test_a_bound_on_time_is_held_against_the_times() -> None:
    constraints = parse("draft_ms: {max: 2}")
    assert constraints.margins(SPEC, OneTime(2.5)) == {"draft_ms": 0.25}
    assert constraints.reason(SPEC, OneTime(2.5)) == "draft_ms: 2.5 is above the greatest allowed, 2"
    assert constraints.violations(SPEC, OneTime(1.5)) == {}
    assert constraints.margins(SPEC) == {}, "without times it cannot be checked"


def test_bounds_on_what_was_measured_are_checked_on_that_alone() -> None:
    constraints = parse("speedup: {min: 2}\nacceptance_length: {min: 3, max: 6}\nparams: {max: 1}")
    values = {"speedup": 1.5, "acceptance_length": 4.5, "acceptance_rate": 0.5, "params": 9.0}
    assert constraints.measured_margins(values) == {"speedup": 0.25, "acceptance_length": -0.25}
    assert set(constraints.margins(SPEC, OneTime(1.0))) == {"params"}
    assert Constraints().measured_margins(values) == {}


# Engines


QWEN3, WIDE = (resolve(load_preset(name), SMOLLM2) for name in ("eagle3-qwen3", "eagle3-wide-stream"))


def test_an_engine_counts_the_fields_that_it_cannot_serve() -> None:
    constraints = parse("servable_by: [vllm, sglang]")
    assert constraints.margins(SPEC) == {"servable_by.vllm": 0, "servable_by.sglang": 0}
    assert constraints.violations(SPEC) == {}
    assert constraints.reason(SPEC) is None
    assert constraints.violations(QWEN3) == {"servable_by.sglang": 1}
    assert constraints.margins(WIDE) == {"servable_by.vllm": 2, "servable_by.sglang": 2}
    for name, margin in constraints.margins(WIDE).items():
        optuna.create_study().ask().set_constraint(name, margin)


def test_reason_names_engine_field_and_source() -> None:
    told = "sglang cannot serve layers.0.attention.qk_norm = true: use false (SGLang 0.5.23)"
    assert parse("servable_by: [vllm, sglang]").reason(QWEN3) == told
    told = "vllm cannot serve layers.0.stream = 2h: use h (vLLM 0.32.0); layers.1.stream = 2h: use h (vLLM 0.32.0)"
    assert parse("servable_by: [vllm]").reason(WIDE) == told


def test_a_note_is_no_limit() -> None:
    deep = resolve(load_preset("eagle3-deep-fused-once"), SMOLLM2)
    assert ENGINES["sglang"].verdict(deep).word == "with a note"
    assert parse("servable_by: [sglang]").reason(deep) is None


def test_a_space_without_a_servable_draft_is_refused() -> None:
    space = {"base": "eagle3", "choices": {"depth": [1, 2]}}
    fixed = {"layers.all.attention.qk_norm": True}
    require_feasible(Space.model_validate(space), SMOLLM2, fixed, parse("servable_by: [vllm]"))
    with pytest.raises(ArchspecError) as caught:
        require_feasible(Space.model_validate(space), SMOLLM2, fixed, parse("servable_by: [sglang]"))
    assert str(caught.value) == (
        "no draft of the space can be used: of 2 drawn, 2 break the constraints, the nearest one as "
        "sglang cannot serve layers.0.attention.qk_norm = true: use false (SGLang 0.5.23)"
    )
