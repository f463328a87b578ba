"""Options of the whole test suite."""

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    default = Path(__file__).parent / "goldens"
    parser.addoption("--goldens", type=Path, default=default, help="folder of reference outputs for the golden tests")
