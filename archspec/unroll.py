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
    """Yield the state [B, T, h] (before the final norm) of draft steps 0, 1, …, steps - 1.

    Row t belongs to the target's state at token x_t. At step s it reads the embedding of x_{t+1+s} and a state: the
    projected aux states at step 0, its own state of the step before after that; its head predicts x_{t+2+s}. Rows whose
    tokens run off the end read token 0 and must not be counted.

    ``next_tokens`` holds x_{t+1} at row t, ``aux`` the target's aux states g_t [B, T, M, h_t]. ``positions`` are the
    rotary positions at step 0, by default 0 … T-1; each step adds one. ``allowed`` says which step-0 rows each row may
    see besides causality, by default all.
    """
    if positions_BT is None:
        positions_BT = torch.arange(next_tokens_BT.shape[1], device=next_tokens_BT.device)[None]
    memory = UnrollMemory(allowed_BTT)
    u_BTh = draft.project(aux_BTMh)
    for step in range(steps):
        tokens_BT = F.pad(next_tokens_BT, (0, step))[:, step:] if step else next_tokens_BT
        state_BTh = draft(tokens_BT, u_BTh, positions_BT + step, memory)
        yield state_BTh
        if step + 1 < steps:
            memory.next_step()
            u_BTh = draft.feed_back(state_BTh)
