"""Options of the whole test suite, and what the tests of commands share."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from tests.commands import World


def pytest_addoption(parser: pytest.Parser) -> None:
    default = Path(__file__).parent / "goldens"
    parser.addoption("--goldens", type=Path, default=default, help="folder of reference outputs for the golden tests")


def pytest_configure() -> None:
    """Toy tensors gain nothing from threads, and hand-over between them costs more than the products."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> "World":
    """The small world of the tests of commands, which change nothing in it."""
    from tests.commands import World  # loads transformers

    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture
def few_threads() -> Iterator[None]:
    """For commands that set torch's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
