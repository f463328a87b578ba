"""The table of accelerators: names as people and drivers write them, figures that fit each other, the page."""

import re
from pathlib import Path

import pytest

from archspec.accelerators import ACCELERATORS, Accelerator, accelerator_named
from archspec.cost import BYTES_PER_ELEMENT
from archspec.errors import ArchspecError

PAGE = Path(__file__).parents[2] / "docs" / "roofline.md"
NAMES = "A100-40GB A100-80GB A100-80GB-PCIe H100-SXM H100-PCIe H200 B200 L40S RTX-3090 RTX-4090 MI300X"


def name_of(accelerator: Accelerator) -> str:
    return accelerator.name


def test_the_names() -> None:
    assert [accelerator.name for accelerator in ACCELERATORS] == NAMES.split()


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("H100-SXM", "H100-SXM"),
        ("h100 sxm", "H100-SXM"),
        ("h100_sxm5", "H100-SXM"),
        ("rtx4090", "RTX-4090"),
        ("a100 80gb", "A100-80GB"),
        # as drivers report them (torch.cuda.get_device_name)
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB-PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_names_are_read_as_people_and_drivers_write_them(written: str, name: str) -> None:
    assert accelerator_named(written).name == name


def test_no_two_accelerators_share_a_name() -> None:
    words = [word for entry in ACCELERATORS for word in (entry.name, *entry.aliases)]
    plain = [re.sub("[^a-z0-9]", "", word.lower()) for word in words]
    assert len(set(plain)) == len(plain)


@pytest.mark.parametrize(("written", "guess"), [("L40", "L40S"), ("mi300", "MI300X"), ("tpu v5e", None), ("", None)])
def test_an_unknown_accelerator(written: str, guess: str | None) -> None:
    with pytest.raises(ArchspecError) as caught:
        accelerator_named(written)
    rule = f"did you mean {guess!r}? " * (guess is not None)
    assert str(caught.value) == f"accelerator {written!r} is unknown: {rule}choose from {', '.join(NAMES.split())}"


@pytest.mark.parametrize(
    ("written", "several"),
    [("h100", "H100-SXM, H100-PCIe"), ("NVIDIA A100", "A100-40GB, A100-80GB, A100-80GB-PCIe")],
)
def test_which_one_is_meant_is_not_guessed(written: str, several: str) -> None:
    with pytest.raises(ArchspecError) as caught:
        accelerator_named(written)
    assert str(caught.value) == f"accelerator {written!r} is several: choose from {several}"


@pytest.mark.parametrize("accelerator", ACCELERATORS, ids=name_of)
def test_figures_have_sources_and_the_right_size(accelerator: Accelerator) -> None:
    assert set(accelerator.sources) == {"memory", "bandwidth", *accelerator.flops}
    assert all(source for source in accelerator.sources.values())
    assert set(accelerator.flops) <= set(BYTES_PER_ELEMENT)
    assert accelerator.flops["bfloat16"] == accelerator.flops["float16"] > accelerator.flops["float32"]
    if "float8" in accelerator.flops:
        assert accelerator.flops["float8"] == pytest.approx(2 * accelerator.flops["bfloat16"], rel=0.02)
    assert 20e9 < accelerator.memory < 200e9
    assert 5e11 < accelerator.bandwidth < 1e13


def test_the_page_lists_them() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    for accelerator in ACCELERATORS:
        tera = [f"{accelerator.flops.get(dtype, 0) / 1e12:g}" for dtype in ("float32", "bfloat16", "float8")]
        figures = [f"{accelerator.memory / 1e9:g}", f"{accelerator.bandwidth / 1e9:g}", *tera]
        sources = "; ".join(dict.fromkeys(accelerator.sources.values()))
        row = f"| `{accelerator.name}` | {' | '.join(figures)} | {sources} |".replace("| 0 |", "| - |")
        assert row in rows
