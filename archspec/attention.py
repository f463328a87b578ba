"""Attention of a draft, apart from what it remembers.

Shapes: B batch, T rows, H query heads, K key/value heads, D head size, S draft steps so far. ``q_BHTD`` reads "query,
batch x heads x rows x head size". A *memory* decides which keys a row sees and keeps them between calls: while
training it is ``UnrollMemory``, while decoding ``ChainCache``; the layers do not know which.
"""

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from archspec.rope import LinearRope, Llama3Rope, Rope, YarnRope


class Memory(Protocol):
    """What attention asks of its surroundings."""

    def attend(self, layer: int, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, window: int | None) -> Tensor:
        """Take this call's keys and values of ``layer`` and return what the queries read, [B, H, T, D]."""
        ...


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; reads width ``read``, writes width ``write``."""

    def __init__(
        self,
        layer: int,
        read: int,
        write: int,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        bias: bool,
        window: int | None,
        q_norm: nn.Module,
        k_norm: nn.Module,
    ) -> None:
        super().__init__()
        self.layer, self.head_dim, self.window = layer, head_dim, window
        self.q_proj = nn.Linear(read, heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(read, kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(read, kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * head_dim, write, bias=bias)
        self.q_norm, self.k_norm = q_norm, k_norm

    def forward(self, x_BTW: Tensor, rotary: tuple[Tensor, Tensor], memory: Memory) -> Tensor:
        """[B, T, read] -> [B, T, write]; ``rotary`` is (cos, sin) of these rows' positions."""
        q_BHTD, k_BKTD, v_BKTD = (
            projection(x_BTW).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q_BHTD, k_BKTD = rotate(self.q_norm(q_BHTD), *rotary), rotate(self.k_norm(k_BKTD), *rotary)
        out_BHTD = memory.attend(self.layer, q_BHTD, k_BKTD, v_BKTD, self.window)
        out_BTW: Tensor = self.o_proj(out_BHTD.transpose(1, 2).flatten(2))
        return out_BTW


class Rotary(nn.Module):
    """Rotary position table (RoFormer, arXiv 2104.09864, in the half-split layout of Llama checkpoints).

    ``scaling`` stretches it over a longer context; see ``stretched``.
    """

    def __init__(self, head_dim: int, theta: float, scaling: Rope | None = None) -> None:
        super().__init__()
        self.head_dim, self.theta, self.scaling = head_dim, theta, scaling

    def forward(self, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Positions [B, T] (or [1, T]) -> cos and sin, each [B, 1, T, D] in fp32."""
        # Not a buffer: casting the draft to bf16 would round the frequencies and turn far positions by radians.
        exponent = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=positions_BT.device) / self.head_dim
        frequencies = self.theta**-exponent
        if self.scaling is not None:
            frequencies = stretched(frequencies, self.theta, self.scaling)
        angles = positions_BT[:, None, :, None].float() * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        if self.scaling is None or self.scaling.attention_scale == 1:
            return angles.cos(), angles.sin()
        return angles.cos() * self.scaling.attention_scale, angles.sin() * self.scaling.attention_scale


def stretched(frequencies_F: Tensor, theta: float, scaling: Rope) -> Tensor:
    """The frequencies of the F = D/2 pairs, in radians a position, for a context ``factor`` times the original one.

    ``kept`` is how much of a pair's own frequency is left, from 0 (divided by ``factor``) to 1 (untouched). It is 0 for
    ``linear`` (arXiv 2306.15595). For ``llama3`` it rises with the pair's turns in the original context, from
    ``low_freq_factor`` to ``high_freq_factor``; for ``yarn`` it falls along the pairs, between the two that would turn
    ``beta_fast`` and ``beta_slow`` times (arXiv 2309.00071, section 3.2). Both as in transformers 5.24,
    modeling_rope_utils.py.
    """
    match scaling:
        case LinearRope():
            return frequencies_F / scaling.factor
        case Llama3Rope():
            turns_F = frequencies_F * (scaling.original_max_positions / (2 * math.pi))
            width = scaling.high_freq_factor - scaling.low_freq_factor
            kept_F = ((turns_F - scaling.low_freq_factor) / width).clamp(0, 1)
        case YarnRope():
            first, last = _blended_pairs(2 * len(frequencies_F), theta, scaling)
            pairs_F = torch.arange(len(frequencies_F), dtype=torch.float32, device=frequencies_F.device)
            kept_F = 1 - ((pairs_F - first) / (last - first)).clamp(0, 1)
    return frequencies_F * (kept_F + (1 - kept_F) / scaling.factor)


def _blended_pairs(head_dim: int, theta: float, scaling: YarnRope) -> tuple[float, float]:
    """The pairs, counted from 0, between which YaRN blends: a real index each, rounded outwards where it truncates."""

    def pair(turns: float) -> float:
        """The index of the pair that turns so often in the original context."""
        return head_dim * math.log(scaling.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    return first, last + 0.001 if first == last else last


def rotate(x_BHTD: Tensor, cos_B1TD: Tensor, sin_B1TD: Tensor) -> Tensor:
    """Turn each (i, i + D/2) pair of ``x`` by its position's angle."""
    first, second = x_BHTD.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x_BHTD * cos_B1TD + turned * sin_B1TD).to(x_BHTD.dtype)


class UnrollMemory:
    """Training-time test (EAGLE-3, arXiv 2503.01840): a row sees step-0 keys of rows up to it, and its own later keys.

    ``allowed_BTT`` (or [1, T, T]; True = may see, diagonal included) narrows the step-0 keys further, for instance to
    one document of a packed row. Call ``next_step`` between draft steps, and ``keep`` to go on with some of the rows:
    none reads another's later keys, so those that stay miss nothing.
    """

    def __init__(self, allowed_BTT: Tensor | None = None) -> None:
        self.step = 0
        self._allowed = allowed_BTT
        self._rows: Tensor | None = None
        self._first: dict[int, tuple[Tensor, Tensor]] = {}
        self._own: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._masks: dict[int | None, Tensor] = {}

    def next_step(self) -> None:
        """Go on to the next draft step: later calls hold each row's own keys, seen by that row alone."""
        self.step += 1
        self._masks.clear()

    def keep(self, kept_BR: Tensor) -> None:
        """Later calls hold these rows alone, given by their places among the present ones; one may be there twice."""
        self._rows = kept_BR if self._rows is None else self._rows.gather(1, kept_BR)
        places = kept_BR[:, None, :, None]
        for layer, pairs in self._own.items():
            self._own[layer] = [(k.take_along_dim(places, 2), v.take_along_dim(places, 2)) for k, v in pairs]
        self._masks.clear()

    def attend(self, layer: int, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, window: int | None) -> Tensor:
        """See ``Memory.attend``."""
        if self.step == 0:
            self._first[layer], self._own[layer] = (k_BKTD, v_BKTD), []
            if self._allowed is None and window is None:
                return F.scaled_dot_product_attention(q_BHTD, k_BKTD, v_BKTD, is_causal=True, enable_gqa=True)
            mask = self._mask(window, q_BHTD)[:, None]
            return F.scaled_dot_product_attention(q_BHTD, k_BKTD, v_BKTD, attn_mask=mask, enable_gqa=True)
        self._own[layer].append((k_BKTD, v_BKTD))
        own = [pair for step, pair in enumerate(self._own[layer], 1) if window is None or self.step - step < window]
        first_k, first_v = self._first[layer]
        return _joint_attention(q_BHTD, first_k, first_v, own, self._mask(window, first_k))

    def _mask(self, window: int | None, first_BKTD: Tensor) -> Tensor:
        """[B or 1, R, T], True where a present row may see the step-0 key of row j."""
        if window not in self._masks:
            keys_T = torch.arange(first_BKTD.shape[2], device=first_BKTD.device)
            rows_BR = keys_T[None] if self._rows is None else self._rows
            distance = rows_BR[:, :, None] - keys_T
            mask = distance >= 0
            if self._allowed is not None:
                kept = self._rows is not None
                mask = mask & (self._allowed.take_along_dim(rows_BR[:, :, None], 1) if kept else self._allowed)
            if window is not None:
                mask = mask & (distance + self.step < window)
            self._masks[window] = mask
        return self._masks[window]


def _joint_attention(
    q_BHRD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, own: list[tuple[Tensor, Tensor]], mask_BRT: Tensor
) -> Tensor:
    """One softmax over the step-0 keys that ``mask`` allows and each of R rows' own keys, ``own`` [B, K, R, D]."""
    batch, heads, rows, size = q_BHRD.shape
    kv_heads, length = k_BKTD.shape[1:3]
    q_BKGRD = (q_BHRD * (1 / math.sqrt(size))).view(batch, kv_heads, heads // kv_heads, rows, size)
    first_BKGRT = q_BKGRD @ k_BKTD.transpose(-1, -2)[:, :, None]
    first_BKGRT = first_BKGRT.masked_fill(~mask_BRT[:, None, None], -math.inf)
    own_BKGRS = torch.stack([(q_BKGRD * k[:, :, None]).sum(-1) for k, _ in own], dim=-1)
    weights = torch.cat((first_BKGRT, own_BKGRS), dim=-1).softmax(dim=-1)
    out_BKGRD = weights[..., :length] @ v_BKTD[:, :, None]
    for step, (_, v) in enumerate(own):
        out_BKGRD = out_BKGRD + weights[..., length + step, None] * v[:, :, None]
    return out_BKGRD.reshape(batch, heads, rows, size)


class ChainCache:
    """Decoding: keys and values of every row so far, in order; ``truncate`` forgets a rejected chain.

    Rows follow each other unless ``branch`` says otherwise.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        self._distance: Tensor | None = None

    def __len__(self) -> int:
        """Rows kept."""
        return next((k.shape[2] for k, _ in self._kept.values()), 0)

    def truncate(self, rows: int) -> None:
        """Keep the first ``rows`` rows of every layer; what comes next follows the last of them."""
        self._distance = None
        self._kept = {layer: (k[:, :, :rows], v[:, :, :rows]) for layer, (k, v) in self._kept.items()}

    def branch(self, distance_RT: Tensor) -> None:
        """Say how many tokens before each of the next R rows every row lies, kept ones and then the new; < 0: unseen.

        It holds until the next call of this or of ``truncate``.
        """
        self._distance = distance_RT

    def attend(self, layer: int, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, window: int | None) -> Tensor:
        """See ``Memory.attend``; new rows see the kept ones and each other, as far as these lie before them."""
        if layer in self._kept:
            k_BKTD = torch.cat((self._kept[layer][0], k_BKTD), dim=2)
            v_BKTD = torch.cat((self._kept[layer][1], v_BKTD), dim=2)
        self._kept[layer] = (k_BKTD, v_BKTD)
        if self._distance is None and window is None and q_BHTD.shape[2] == 1:
            return F.scaled_dot_product_attention(q_BHTD, k_BKTD, v_BKTD, enable_gqa=True)
        distance = self._distance
        if distance is None:
            keys = torch.arange(k_BKTD.shape[2], device=q_BHTD.device)
            distance = keys[-q_BHTD.shape[2] :, None] - keys[None, :]
        mask = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
        return F.scaled_dot_product_attention(q_BHTD, k_BKTD, v_BKTD, attn_mask=mask, enable_gqa=True)
