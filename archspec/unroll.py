"""Several draft steps over whole sequences at once, as training and exact evaluation need them."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from archspec.attention import UnrollMemory
from archspec.modules import Draft


def unroll(
    draft: Draft,
    next_tokens_BT: Tensor,
    aux_BTMh: Tensor,
    steps: int,
    *,
    positions_BT: Tensor | None = None,
    allowed_BTT: Tensor | None = None,
) -> Iterator[Tensor]:
    """Yield the state [B, T, h] (before the final norm) of every row at draft steps 0, 1, …; see ``Unroll``."""
    every_row = Unroll(draft, next_tokens_BT, aux_BTMh, positions_BT=positions_BT, allowed_BTT=allowed_BTT)
    for _ in range(steps):
        yield every_row.step()


class Unroll:
    """Draft steps of every row at once, one for each call of ``step``; ``keep`` goes on with some of the rows.

    Row t belongs to the target's state at token x_t. At step s it reads the embedding of x_{t+1+s} and a state: the
    projected aux states at step 0, its own state of the step before after that; its head predicts x_{t+2+s}. Rows whose
    tokens run off the end read token 0 and must not be counted.

    ``next_tokens`` holds x_{t+1} at row t, ``aux`` the target's aux states g_t [B, T, M, h_t]. ``positions`` are the
    rotary positions at step 0, by default 0 … T-1; each step adds one. ``allowed`` says which step-0 rows each row may
    see besides causality, by default all.
    """

    def __init__(
        self,
        draft: Draft,
        next_tokens_BT: Tensor,
        aux_BTMh: Tensor,
        *,
        positions_BT: Tensor | None = None,
        allowed_BTT: Tensor | None = None,
    ) -> None:
        if positions_BT is None:
            positions_BT = torch.arange(next_tokens_BT.shape[1], device=next_tokens_BT.device)[None]
        self._draft, self._memory, self._next_tokens = draft, UnrollMemory(allowed_BTT), next_tokens_BT
        self._positions, self._u = positions_BT, draft.project(aux_BTMh)
        self._state: Tensor | None = None
        self._rows: Tensor | None = None

    def step(self) -> Tensor:
        """The state [B, R, h], before the final norm, of the present rows at the next draft step."""
        if self._state is not None:
            self._u = self._draft.feed_back(self._state)
            self._memory.next_step()
        step = self._memory.step
        tokens = F.pad(self._next_tokens, (0, step))[:, step:] if step else self._next_tokens
        if self._rows is not None:
            tokens = tokens.gather(1, self._rows)
        self._state = self._draft(tokens, self._u, self._positions + step, self._memory)
        return self._state

    def keep(self, kept_BR: Tensor) -> None:
        """Go on with the rows at these places among the present ones; one may be there twice, to fill up a sequence."""
        if self._state is None:
            raise ValueError("every row's first step is needed: its keys are what later steps of other rows read")
        self._rows = kept_BR if self._rows is None else self._rows.gather(1, kept_BR)
        self._positions = self._positions.take_along_dim(kept_BR, 1)
        self._state = self._state.take_along_dim(kept_BR[:, :, None], 1)
        self._memory.keep(kept_BR)
