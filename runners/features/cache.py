"""A key-value cache that grows in place.

transformers' own cache copies all keys and values of a layer for every new token. With SmolLM2-135M in batches of 32 on
one CPU thread that is 4 % of a step at 200 cached positions and 15 % at 400; more where memory is slow.
Shapes: B rows, H key-value heads, N cached positions, T new positions, D head size.
"""

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

_SPARE_POSITIONS = 64


class RoomyLayer(DynamicLayer):  # type: ignore[misc]  # transformers comes without types
    """One layer's cache; ``keys`` and ``values`` are views of buffers with room behind them."""

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_options: Any) -> tuple[Tensor, Tensor]:
        """Add states [B, H, T, D] and return all that are held, [B, H, N + T, D]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._buffers = [key_states[:, :, :0], value_states[:, :, :0]]
        held, new = self.get_seq_length(), key_states.shape[-2]
        self._buffers = [_with_room(buffer, held, new) for buffer in self._buffers]
        self.keys, self.values = (buffer[:, :, : held + new] for buffer in self._buffers)
        self.keys[:, :, held:], self.values[:, :, held:] = key_states, value_states
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows."""
        held = self.get_seq_length()
        self._buffers = [buffer[indices] for buffer in self._buffers]
        self.keys, self.values = (buffer[:, :, :held] for buffer in self._buffers)


def roomy_cache(config: Any) -> DynamicCache:
    """An empty cache for a model with this config; layers of other kinds, as with a window, stay transformers' own."""
    cache = DynamicCache(config=config)
    cache.layers = [RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def _with_room(buffer: Tensor, held: int, new: int) -> Tensor:
    if buffer.shape[2] >= held + new:
        return buffer
    rows, heads, _, size = buffer.shape
    larger = buffer.new_empty(rows, heads, held + new + held // 2 + _SPARE_POSITIONS, size)
    larger[:, :, :held] = buffer[:, :, :held]
    return larger
