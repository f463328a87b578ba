"""Faster fp32 matrix products on CPUs where torch's default library leaves half the machine idle.

torch sends fp32 ``linear`` to MKL, which uses only AVX2 on AMD processors; oneDNN, in the same build, uses what the
processor has. Measured on an AMD EPYC with AVX-512, one thread, SmolLM2-135M prefill: 382 tokens/s with MKL, 653 with
oneDNN; states agree to 3e-5 of their size. Inference only: the operator has no gradient.
"""

import types

import torch
from torch import Tensor, nn


def use_onednn(model: nn.Module) -> bool:
    """Route the fp32 linear layers of a frozen CPU model through oneDNN; returns whether that was possible."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.device.type == "cpu" and module.weight.dtype == torch.float32:
            module.forward = types.MethodType(_forward, module)  # type: ignore[method-assign]
    return True


def _forward(self: nn.Linear, x: Tensor) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
    return out
