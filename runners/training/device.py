"""Where drafts are trained, and in which float type their products are computed."""

from contextlib import AbstractContextManager, nullcontext

import torch

from archspec.errors import ArchspecError


def pick_device(device: str) -> str:
    """``auto`` is the first CUDA device if there is one, else the CPU; anything else is checked to be there.

    Raises:
        ArchspecError: no such kind of device, or this machine has none or fewer of them.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind, index = torch.device(device).type, torch.device(device).index or 0
    except RuntimeError:
        raise ArchspecError(f"device {device!r}: choose from auto, cpu, cuda, cuda:1") from None
    if kind == "cuda" and index >= torch.cuda.device_count():
        raise ArchspecError(
            f"device {device!r}: this machine has {torch.cuda.device_count()} CUDA devices; use auto or cpu"
        )
    return device


def compute_dtype(dtype: str, device: str) -> str:
    """What ``auto`` means on a device: bfloat16 where it is multiplied natively, else float32."""
    if dtype != "auto":
        return dtype
    if device.startswith("cuda"):
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        native = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
    return "bfloat16" if native else "float32"


def autocast(dtype: str, device: str) -> AbstractContextManager[object]:
    """Products in ``compute_dtype`` over fp32 weights."""
    if compute_dtype(dtype, device) == "float32":
        return nullcontext()
    return torch.autocast(device.split(":")[0], dtype=torch.bfloat16)
