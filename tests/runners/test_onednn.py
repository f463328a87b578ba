"""Products through oneDNN: the same numbers, plain or packed, and nothing left behind."""

import pytest
import torch
from torch import nn

from runners.features import onednn
from runners.features.onednn import linear, onednn_linears, packed_linears

pytestmark = pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="torch without oneDNN")


@pytest.fixture
def first() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(48, 96)


@pytest.fixture
def model(first: nn.Linear) -> nn.Sequential:
    return nn.Sequential(first, nn.SiLU(), nn.Linear(96, 32, bias=False)).requires_grad_(False)


@pytest.mark.parametrize("rows", [1, 2, 7, 40])
def test_plain_and_packed_products_are_those_of_torch(model: nn.Sequential, first: nn.Linear, rows: int) -> None:
    x = torch.randn(2, rows, 48)
    wanted = model(x)
    with onednn_linears(model):
        torch.testing.assert_close(model(x), wanted)
        with packed_linears(model):
            assert len(onednn._packed) == 2
            torch.testing.assert_close(model(x), wanted)
            torch.testing.assert_close(linear(x, first.weight, first.bias), first(x))
    assert not onednn._packed


def test_a_packed_product_reads_the_packed_weight(model: nn.Sequential, first: nn.Linear) -> None:
    """So that the test above cannot pass without packing: what changes meanwhile is not seen."""
    x = torch.randn(1, 3, 48)
    with onednn_linears(model), packed_linears(model):
        before = model(x)
        first.weight.mul_(2)
        torch.testing.assert_close(model(x), before)
    assert not torch.allclose(model(x), before)


def test_blocks_may_lie_in_each_other_and_end_in_any_way(model: nn.Sequential) -> None:
    with packed_linears(model):
        with packed_linears(model), pytest.raises(ValueError, match="stop"):
            raise ValueError("stop")
        assert len(onednn._packed) == 2
    assert not onednn._packed


def test_other_float_types_are_left_alone(model: nn.Sequential) -> None:
    with packed_linears(model.to(torch.bfloat16)):
        assert not onednn._packed
