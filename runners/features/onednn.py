"""Faster fp32 matrix products on CPUs where torch's default library leaves half the machine idle.

torch sends fp32 ``linear`` to MKL, which uses only AVX2 on AMD processors; oneDNN, in the same build, uses what the
processor has. Measured on an AMD EPYC with AVX-512, one thread, SmolLM2-135M prefill: 382 tokens/s with MKL, 653 with
oneDNN; its head on 1 and 5 rows: 23 and 32 ms with MKL, 13 and 15 with oneDNN; states agree to 3e-5 of their size.
Inference only: the operator has no gradient.

For few rows the product costs what it takes to read the weight, and oneDNN first puts a plain one into another layout.
While decoding, weights are therefore kept in that layout (``packed_linears``), as engines on CPUs do. All products of a
SmolLM2-135M forward on the same machine, medians in ms on 1, 2, 5 and 7 rows: 47, 58, 71 and 75 plain, 34, 31, 42 and
46 packed; MKL takes 58, 94, 104 and 110.
"""

import types
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

ROWS = 16  # for which a layout is chosen; those for 2, 8 and 16 rows do as well as each other on 1 to 8

_packed: dict[int, Tensor] = {}  # by the address of the plain weight


def use_onednn(model: nn.Module) -> list[nn.Linear]:
    """Route the fp32 linear layers of a CPU model through oneDNN for good; returns those that were changed."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return []
    changed = [module for module in model.modules() if type(module) is nn.Linear and _suits(module.weight)]
    for module in changed:
        module.forward = types.MethodType(_forward, module)  # type: ignore[method-assign]
    return changed


@contextmanager
def onednn_linears(model: nn.Module) -> Iterator[None]:
    """As ``use_onednn``, for the duration of a ``with`` block."""
    changed = use_onednn(model)
    try:
        yield
    finally:
        for module in changed:
            del module.forward


@contextmanager
def packed_linears(*models: nn.Module) -> Iterator[None]:
    """Keep the fp32 weights of CPU models packed too for the duration of a ``with`` block.

    It takes their memory once more, and what goes through oneDNN gets faster. They must not change within the block.
    """
    weights = [module.weight for model in models for module in model.modules() if type(module) is nn.Linear]
    suited = {weight.data_ptr(): weight for weight in weights if _suits(weight)}
    new = suited.keys() - _packed.keys() if hasattr(torch.ops.mkldnn, "_reorder_linear_weight") else set()
    _packed.update({key: torch.ops.mkldnn._reorder_linear_weight(suited[key].detach(), ROWS) for key in new})
    try:
        yield
    finally:
        for key in new:
            del _packed[key]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear`` without a gradient, through oneDNN where that is faster."""
    if x.dim() < 2 or not _suits(weight) or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return nn.functional.linear(x, weight, bias)
    return _product(x, weight, bias)


def _suits(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32


def _forward(self: nn.Linear, x: Tensor) -> Tensor:
    return _product(x, self.weight, self.bias)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    stored = _packed.get(weight.data_ptr(), weight)
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, stored, bias, "none", [], "")
    return out
