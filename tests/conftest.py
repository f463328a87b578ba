"""Options of the whole test suite."""

from pathlib import Path

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    default = Path(__file__).parent / "goldens"
    parser.addoption("--goldens", type=Path, default=default, help="folder of reference outputs for the golden tests")


def pytest_configure() -> None:
    """Toy tensors gain nothing from threads, and hand-over between them costs more than the products."""
    torch.set_num_threads(1)
