"""Cheap bounds on what a draft costs."""

import optuna
import pytest

from archspec.cost import draft_params, flops_per_token, trainable_params, weight_bytes
from archspec.errors import ArchspecError
from archspec.presets import load_preset
from archspec.resolve import resolve
from archspec.schema import Document
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
        ("params: 3", "c.yaml:1: params = 3: must be a mapping with keys from min, max"),
    ],
)
def test_bad_constraints(text: str, message: str) -> None:
    with pytest.raises(ArchspecError) as caught:
        parse(text)
    assert str(caught.value).startswith(message)
