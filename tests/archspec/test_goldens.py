"""The builder, the unroll and the importers against outputs of the reference implementations.

``pytest --goldens DIR`` takes the references from another folder; whatever describes an EAGLE-1/3 draft is run. The
bounds leave room for the order of fp32 sums alone: the references differ by less than 1e-6.
"""

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.archspec.golden import Golden, decode_chain, load, refusal
from tests.archspec.golden_losses import figures


def same(found: object, expected: object, told: str) -> None:
    torch.testing.assert_close(
        found, expected, rtol=1e-4, atol=1e-5, check_dtype=False, msg=lambda text: f"{told}: {text}"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    folder: Path = metafunc.config.getoption("--goldens")
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise pytest.UsageError(f"--goldens {folder}: no *.json there")
    if "chain_path" in metafunc.fixturenames:
        paths = [path for path in paths if "output.chain.tokens" in path.read_text(encoding="utf-8")]
        metafunc.parametrize("chain_path", paths, ids=[path.stem for path in paths])
    elif "path" in metafunc.fixturenames:
        metafunc.parametrize("path", paths, ids=[path.stem for path in paths])


@lru_cache(maxsize=1)
def _load(path: Path) -> Golden:
    return load(path)


@pytest.fixture
def golden(path: Path) -> Golden:
    reason = refusal(json.loads(path.read_text(encoding="utf-8")))
    if reason is not None:
        pytest.skip(f"not an EAGLE-1/3 draft: {reason}")
    return _load(path)


def test_every_step_computes_the_reference_states_and_logits(golden: Golden) -> None:
    run, outputs = golden.run, dict(_outputs(golden))
    assert "logits" in outputs
    if "projected" in outputs:
        same(run.projected, outputs["projected"], "projected")
    for name in outputs.keys() & run.steps[0].keys():
        reference = outputs[name].reshape(len(run.steps), *run.steps[0][name].shape)
        for step, states in enumerate(run.steps):
            same(states[name], reference[step], f"step {step}, {name}")


def _outputs(golden: Golden) -> Iterator[tuple[str, Tensor]]:
    """What the reference's model gave, without the figures of its losses."""
    prefix = "output.prefill." if golden.kind == "decoding" else "output."
    for name, tensor in golden.tensors.items():
        if name.startswith(prefix):
            yield name.removeprefix(prefix), tensor


def test_losses_and_accuracies_equal_the_reference(golden: Golden) -> None:
    for run_name, run in golden.data.get("runs", {}).items():
        total, steps = figures(golden, run_name)
        same(total.item(), run["total_loss" if "total_loss" in run else "loss"], f"{run_name}: total loss")
        for name, values in steps.items():
            for step, value in enumerate(values):
                expected = _figure(golden, run_name, name, step)
                if expected is not None:
                    same(value.item(), expected, f"{run_name}, step {step}: {name}")
                else:  # older references report fewer figures, but never less than these
                    assert name not in ("loss", "accuracy", "full_acc_sum")


def _figure(golden: Golden, run_name: str, name: str, step: int) -> float | None:
    """One figure of one step: in speculators' metrics, in the JSON of the run, or among the tensors."""
    run = golden.data["runs"][run_name]
    if "metrics" in run:
        key = name.replace("_acc_", f"_acc_{step}_") if "_acc_" in name else f"{name}_{step}_sum"
        return float(run["metrics"][key])
    values = run.get(name, golden.tensors.get(f"output.{run_name}.{name}"))
    if values is None or isinstance(values, float):
        return values
    return float(values[step])


def test_gradients_equal_the_reference(golden: Golden) -> None:
    parameters, names = dict(golden.draft.named_parameters()), golden.names
    for run_name, run in golden.data.get("runs", {}).items():
        golden.draft.zero_grad()
        figures(golden, run_name)[0].backward(retain_graph=True)  # type: ignore[no-untyped-call]
        for theirs, expected in run["grad_of_total_loss"].items():
            gradient = parameters[names[theirs]].grad
            assert gradient is not None, f"{run_name}: {theirs} has no gradient"
            wide = gradient.double()
            found = {"l2": wide.norm().item(), "sum": wide.sum().item(), "absmax": wide.abs().max().item()}
            for measure, value in found.items():
                same(value, expected[measure], f"{run_name}: {measure} of {theirs}")
            whole = golden.tensors.get(f"grad.{run_name}.{theirs}")
            if whole is not None:
                same(gradient, whole, f"{run_name}: {theirs}")


def test_greedy_chain_with_a_cache_equals_the_reference(chain_path: Path) -> None:
    golden = _load(chain_path)
    given = golden.tensors
    chain = decode_chain(golden, len(given["output.chain.tokens"]))
    for step, (token, state, logits) in enumerate(chain):
        assert token == given["output.chain.tokens"][step]
        same(state, given["output.chain.hidden"][step], f"step {step}, state")
        same(logits, given["output.chain.logits"][step], f"step {step}, logits")
