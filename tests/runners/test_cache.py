"""The roomy cache gives the states that transformers' own cache gives, through growth, cropping and dropped rows."""

import torch
from transformers import DynamicCache, Gemma2Config

from runners.features.cache import RoomyLayer, roomy_cache
from tests.runners.tiny import tiny_model, tiny_target


def test_equals_transformers_cache_through_growth_drops_and_cropping() -> None:
    target = tiny_target()
    ids_BT = torch.randint(3, 259, (4, 150), generator=torch.Generator().manual_seed(0))
    ours, theirs = roomy_cache(target.model.config), DynamicCache(config=target.model.config)
    steps = [(0, 30), (30, 31), (31, 110), (110, 111), (106, 150)]  # the third step outgrows the first buffer
    for number, (start, end) in enumerate(steps):
        if number == 3:
            kept = torch.tensor([3, 1])
            ids_BT = ids_BT[kept]
            ours.batch_select_indices(kept)
            theirs.batch_select_indices(kept)
        if number == 4:
            ours.crop(-5)
            theirs.crop(-5)
        found, expected = (target.states(ids_BT[:, start:end], [3], None, cache)[3] for cache in (ours, theirs))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert ours.get_seq_length() == theirs.get_seq_length() == 150


def test_layers_with_a_window_stay_transformers_own() -> None:
    config = Gemma2Config(
        vocab_size=264,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=8,
    )
    kinds = [isinstance(layer, RoomyLayer) for layer in roomy_cache(tiny_model(config).config).layers]
    assert kinds == [False, True]  # Gemma 2 alternates windowed and full attention, windowed first
