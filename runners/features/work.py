"""Work that a target does, cut into orders that this process or many workers carry out."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, Self

from runners.features.target import Target

Tell = Callable[[int], None]


class Order(Protocol):
    """Work that a worker does with the target; what is done of it already is left as it is."""

    @property
    def name(self) -> str:
        """For messages."""
        ...

    @property
    def folder(self) -> Path:
        """Where the results go, which every worker must see."""
        ...

    @property
    def size(self) -> int:
        """How much is told when it is done."""
        ...

    @property
    def done(self) -> bool:
        """Whether nothing is left to do."""
        ...

    def absolute(self) -> Self:
        """The order as a process with another working directory needs it."""
        ...

    def memory(self, target: Target) -> int:
        """About how many bytes of its host's memory a worker needs beside its libraries and the target's weights."""
        ...

    def run(self, target: Target, tell: Tell) -> None:
        """Do it; ``tell`` gets how much is done.

        Raises:
            ArchspecError: it cannot be done.
        """
        ...


class Workers(Protocol):
    """Who carries orders out."""

    @property
    def count(self) -> int:
        """How many orders may be carried out at once."""
        ...

    def carry_out(self, target: Target, orders: Sequence[Order], tell: Tell) -> None:
        """Carry all out; ``target`` is what this process has, ``tell`` gets how much is done of them together.

        Raises:
            ArchspecError: one cannot be carried out, or no worker is left.
        """
        ...


class Here:
    """This process alone, with the target that it has."""

    count = 1

    def carry_out(self, target: Target, orders: Sequence[Order], tell: Tell) -> None:
        """See ``Workers``."""
        before = 0
        for order in orders:
            order.run(target, _on_top(before, tell))
            before += order.size


def _on_top(before: int, tell: Tell) -> Tell:
    return lambda done: tell(before + done)
