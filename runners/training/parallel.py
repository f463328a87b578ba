"""One trial on several processes, without the trainer knowing how many: a worker takes its share of every batch.

All workers draw the same batches from the same seed, so nothing is sent but sums: of the rows that count, before the
loss is divided by them, and of losses and gradients, after. What a worker then does depends on sums alone, which are
equal everywhere, so all take the same step, diverge in the same step, and stop at the same step.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from archspec.errors import ArchspecError

Item = TypeVar("Item")


class Workers:
    """The workers of a trial, seen from one of them; this class itself is the only worker there is."""

    first = True

    def share(self, items: Sequence[Item]) -> list[Item]:
        """This worker's items; each belongs to one worker, and some workers may have none."""
        return list(items)

    def add(self, *tensors: Tensor) -> None:
        """Put into each tensor, in place, its sum over all workers."""

    def copy_first(self, tensors: Sequence[Tensor]) -> None:
        """Put into each tensor, in place, what the first worker has in it."""

    def gather(self, items: Sequence[Item]) -> list[Item]:
        """Every worker's items, on every worker."""
        return list(items)

    def ask_first(self, answer: Callable[[], Item]) -> Item:
        """What the first worker answers; the others do not ask."""
        return answer()

    def require_same(self, facts: dict[str, object]) -> None:
        """Check that all workers have the same facts, by name.

        Raises:
            ArchspecError: they do not; on every worker.
        """

    def together(self) -> AbstractContextManager[None]:
        """A block in which workers do not speak to each other; what one raises there, all raise at its end."""
        return nullcontext()


ALONE = Workers()


class ProcessGroup(Workers):
    """The processes of torch.distributed's default group, which whoever started them has set up.

    NCCL sums on each process's current CUDA device, gloo on the CPU.
    """

    def __init__(self) -> None:
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self.first = self._rank == 0

    def share(self, items: Sequence[Item]) -> list[Item]:
        """See ``Workers``; items next to each other, which are of like length, go to different workers."""
        return list(items[self._rank :: self._size])

    def add(self, *tensors: Tensor) -> None:
        """See ``Workers``."""
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()

    def copy_first(self, tensors: Sequence[Tensor]) -> None:
        """See ``Workers``."""
        for tensor in tensors:
            dist.broadcast(tensor, src=0)

    def gather(self, items: Sequence[Item]) -> list[Item]:
        """See ``Workers``."""
        return [item for theirs in self._gathered(list(items)) for item in theirs]

    def ask_first(self, answer: Callable[[], Item]) -> Item:
        """See ``Workers``; what ``answer`` raises, all raise."""
        answers: list[Item] = []
        with self.together():
            answers += [answer()] if self.first else []
        return self.gather(answers)[0]

    def require_same(self, facts: dict[str, object]) -> None:
        """See ``Workers``."""
        everyone = self._gathered(facts)
        for name in facts:
            for rank, theirs in enumerate(everyone):
                if theirs[name] != everyone[0][name]:
                    differ = f"{everyone[0][name]} on worker 0, {theirs[name]} on worker {rank}"
                    rule = "all nodes must see the same run folder and the same feature store"
                    raise ArchspecError(f"the workers of a trial differ in {name}: {differ}; {rule}")

    @contextmanager
    def together(self) -> Iterator[None]:
        """See ``Workers``."""
        own: Exception | None = None
        try:
            yield
        except Exception as error:
            own = error
        errors = self.gather([] if own is None else [_portable(own)])
        if own is not None:
            raise own
        if errors:
            raise errors[0]

    def _gathered(self, own: Any) -> list[Any]:
        everyone: list[Any] = [None] * self._size
        dist.all_gather_object(everyone, own)
        return everyone


def _portable(error: Exception) -> Exception:
    """``error`` if its kind matters and can be sent to another process, else its words in a plain one."""
    if isinstance(error, ArchspecError | MemoryError | torch.OutOfMemoryError):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")
