"""Batches: every document once an epoch, within the budget, in an order that the seed alone decides."""

import itertools
import random

import pytest
import torch

from runners.features.store import FeatureStore
from runners.training.batches import epoch_batches, length_batches, read_batch
from runners.training.sizes import round_up
from tests.runners.drafts import everything


def lengths(count: int = 300, longest: int = 400) -> dict[int, int]:
    generator = random.Random(0)
    return {3 * index: generator.randint(5, longest) for index in range(count)}


@pytest.mark.parametrize("epoch", range(3))
def test_an_epoch_holds_every_document_once_and_keeps_the_budget(epoch: int) -> None:
    sizes = lengths()
    batches = epoch_batches(sizes, 1000, 7, epoch)
    assert sorted(index for batch in batches for index in batch) == sorted(sizes)
    assert all(len(batch) * max(sizes[index] for index in batch) <= 1000 for batch in batches)


def test_order_is_a_function_of_seed_and_epoch() -> None:
    sizes = lengths()
    once = epoch_batches(sizes, 1000, 7, 2)
    assert epoch_batches(dict(reversed(sizes.items())), 1000, 7, 2) == once
    assert epoch_batches(sizes, 1000, 7, 3) != once
    assert epoch_batches(sizes, 1000, 8, 2) != once


def test_documents_meet_others_in_the_next_epoch() -> None:
    sizes = lengths()
    first, second = ({frozenset(batch) for batch in epoch_batches(sizes, 1000, 7, epoch)} for epoch in (0, 1))
    assert len(first & second) < len(first) / 4


def test_batches_do_not_come_in_order_of_length() -> None:
    sizes = lengths()
    longest = [max(sizes[index] for index in batch) for batch in epoch_batches(sizes, 1000, 7, 0)]
    falls = sum(after < before for before, after in itertools.pairwise(longest))
    assert falls > len(longest) / 4


def test_little_of_a_batch_is_padding() -> None:
    sizes = lengths()
    batches = epoch_batches(sizes, 2000, 0, 0)
    padded = sum(len(batch) * max(sizes[index] for index in batch) for batch in batches)
    assert sum(sizes.values()) / padded > 0.9


def test_a_document_longer_than_the_budget_is_a_batch_of_its_own() -> None:
    batches = epoch_batches({0: 10, 1: 5000, 2: 10}, 100, 0, 0)
    assert [1] in batches
    assert sorted(map(sorted, batches)) == [[0, 2], [1]]


def test_one_document_and_none() -> None:
    assert epoch_batches({4: 9}, 100, 0, 5) == [[4]]
    assert length_batches({}, 100) == []


def test_evaluation_takes_all_in_rising_length_within_the_budget() -> None:
    sizes = lengths()
    batches = length_batches(sizes, 1000)
    order = [index for batch in batches for index in batch]
    assert order == sorted(sizes, key=lambda index: (sizes[index], index))
    assert all(len(batch) * max(sizes[index] for index in batch) <= 1000 for batch in batches)


def test_a_batch_is_what_the_store_holds_padded_on_the_right(tiny_store: FeatureStore) -> None:
    documents = everything(tiny_store)[:3]
    batch = read_batch(tiny_store, documents, [0, 2], "cpu")
    assert batch.documents == tuple(documents)
    assert batch.real_tokens == sum(tiny_store.documents[index].length for index in documents)
    for row, index in enumerate(documents):
        features, length = tiny_store.read(index, [0, 2]), tiny_store.documents[index].length
        assert torch.equal(batch.tokens[row, :length], features.tokens)
        assert torch.equal(batch.next_tokens[row, : length - 1], features.tokens[1:])
        assert torch.equal(batch.response_mask[row, :length], features.response_mask)
        assert torch.equal(batch.aux[row, :length], features.aux)
        assert torch.equal(batch.last[row, :length], features.last)
        assert not batch.response_mask[row, length:].any()
        assert not batch.last[row, length:].any()
    longest = max(tiny_store.documents[index].length for index in documents)
    assert batch.tokens.shape[1] == round_up(longest)


def test_lengths_come_in_few_sizes() -> None:
    """For every new shape oneDNN keeps a kernel, and memory would grow with the number of lengths in the data."""
    assert [round_up(length) for length in (1, 15, 16, 17, 512)] == [16, 16, 16, 32, 512]
