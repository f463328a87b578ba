"""Which tokens a reduced draft vocabulary holds."""

import torch
from torch import Tensor

from archspec.errors import ArchspecError


def choose_vocabulary(token_counts_V: Tensor, size: int, always: frozenset[int] = frozenset()) -> Tensor:
    """The ``size`` most frequent target ids, rising; ``always`` are in whatever their count (end-of-turn tokens).

    Ties, and places left over by tokens that never occurred, go to the lower id.

    Raises:
        ArchspecError: there are no counts, or fewer places than tokens that must be in.
    """
    if int(token_counts_V.sum()) == 0:
        raise ArchspecError("a reduced draft vocabulary needs token counts, but every count is zero")
    if len(always) > size:
        raise ArchspecError(f"a draft vocabulary of {size} cannot hold the {len(always)} tokens that must be in it")
    counts = token_counts_V.clone()
    counts[list(always)] = torch.iinfo(counts.dtype).max
    return counts.argsort(descending=True, stable=True)[:size].sort().values
