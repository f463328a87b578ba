"""Named accelerators: memory, its bandwidth, and peak FLOP/s of dense products, each figure with its source. No torch.

Vendors often print peaks that hold for 2:4 sparse weights only; here stand the dense ones, which for NVIDIA's tensor
cores are half of those. ``float32`` is the plain one that PyTorch uses unless TF32 is asked for. For GeForce cards the
peaks are those of products that add up in fp32, as inference does.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from archspec.errors import ArchspecError, nearest


@dataclass(frozen=True)
class Accelerator:
    """One device. ``aliases`` are further names, among them what drivers report.

    ``bandwidth`` is in bytes/s and ``memory`` in bytes (of 10**9 to the GB, as printed); ``flops`` maps dtypes to dense
    FLOP/s. ``sources`` maps ``memory``, ``bandwidth`` and every dtype to the document that says so.
    """

    name: str
    memory: float
    bandwidth: float
    flops: Mapping[str, float]
    sources: Mapping[str, str]
    aliases: tuple[str, ...] = ()


_A100 = "NVIDIA A100 datasheet, https://www.nvidia.com/en-us/data-center/a100/"
_H100 = "NVIDIA H100 datasheet, https://www.nvidia.com/en-us/data-center/h100/ (sparse peaks halved)"
_H200 = "NVIDIA H200 datasheet, https://www.nvidia.com/en-us/data-center/h200/ (sparse peaks halved)"
_DGX = "NVIDIA DGX B200 datasheet, https://www.nvidia.com/en-us/data-center/dgx-b200/ (an eighth of the system)"
_HGX = "NVIDIA Blackwell architecture technical brief, HGX B200 at 1000 W, dense"
_L40S = "NVIDIA L40S datasheet, https://www.nvidia.com/en-us/data-center/l40s/"
_GA102 = "NVIDIA Ampere GA102 GPU architecture whitepaper, appendix A"
_ADA = "NVIDIA Ada GPU architecture whitepaper, appendix A"
_MI300X = "AMD Instinct MI300X data sheet, https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html"


def _device(
    name: str, sources: tuple[str, str], memory: float, bandwidth: float, *aliases: str, **tera: float
) -> Accelerator:
    """``memory`` in GB and ``bandwidth`` in GB/s from the first source, peaks in TFLOP/s from the second."""
    flops = {dtype: value * 1e12 for dtype, value in tera.items()}
    by_figure = {"memory": sources[0], "bandwidth": sources[0], **dict.fromkeys(tera, sources[1])}
    return Accelerator(name, memory * 1e9, bandwidth * 1e9, flops, by_figure, aliases)


# fmt: off
ACCELERATORS = (
    _device("A100-40GB", (_A100, _A100), 40, 1555, "A100-SXM4-40GB", "A100-PCIE-40GB",
            float32=19.5, bfloat16=312, float16=312),
    _device("A100-80GB", (_A100, _A100), 80, 2039, "A100-SXM4-80GB", "A100-80GB-SXM",
            float32=19.5, bfloat16=312, float16=312),
    _device("A100-80GB-PCIe", (_A100, _A100), 80, 1935, float32=19.5, bfloat16=312, float16=312),
    _device("H100-SXM", (_H100, _H100), 80, 3350, "H100-80GB-HBM3", "H100-SXM5",
            float32=67, bfloat16=989.5, float16=989.5, float8=1979),
    _device("H100-PCIe", (_H100, _H100), 80, 2000, float32=51, bfloat16=756.5, float16=756.5, float8=1513),
    _device("H200", (_H200, _H200), 141, 4800, "H200-SXM", float32=67, bfloat16=989.5, float16=989.5, float8=1979),
    _device("B200", (_DGX, _HGX), 180, 8000, float32=80, bfloat16=2250, float16=2250, float8=4500),
    _device("L40S", (_L40S, _L40S), 48, 864, float32=91.6, bfloat16=362.05, float16=362.05, float8=733),
    _device("RTX-3090", (_GA102, _GA102), 24, 936, "3090", float32=35.6, bfloat16=71, float16=71),
    _device("RTX-4090", (_ADA, _ADA), 24, 1008, "4090", float32=82.6, bfloat16=165.2, float16=165.2, float8=330.3),
    _device("MI300X", (_MI300X, _MI300X), 192, 5300, float32=163.4, bfloat16=1307.4, float16=1307.4, float8=2614.9),
)
# fmt: on


def accelerator_named(name: str) -> Accelerator:
    """The accelerator called ``name``, whatever its case, spaces, dashes and vendor.

    Raises:
        ArchspecError: there is none of that name, or there are several; the message names the nearest.
    """
    found = {_plain(word): entry for entry in ACCELERATORS for word in (entry.name, *entry.aliases)}
    if _plain(name) in found:
        return found[_plain(name)]
    names = [entry.name for entry in ACCELERATORS]
    begun = [each for each in names if _plain(name) and _plain(each).startswith(_plain(name))]
    if len(begun) > 1:
        raise ArchspecError(f"accelerator {name!r} is several: choose from {', '.join(begun)}")
    raise ArchspecError(f"accelerator {name!r} is unknown: {nearest(name.upper(), names)}")


def _plain(name: str) -> str:
    bare = re.sub(r"[^a-z0-9]", "", name.lower())
    return re.sub(r"^(nvidia|amd)?(geforce|instinct|tesla)?", "", bare)
