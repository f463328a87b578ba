"""Which tokens a reduced vocabulary holds."""

import pytest
import torch

from archspec.errors import ArchspecError
from archspec.vocabulary import choose_vocabulary

COUNTS = torch.tensor([5, 0, 9, 5, 1, 0, 7, 5])


def test_the_most_frequent_rising() -> None:
    assert choose_vocabulary(COUNTS, 2).tolist() == [2, 6]
    assert choose_vocabulary(COUNTS, 8).tolist() == list(range(8))


def test_ties_and_tokens_that_never_occurred_go_to_the_lower_id() -> None:
    assert choose_vocabulary(COUNTS, 4).tolist() == [0, 2, 3, 6]
    assert choose_vocabulary(COUNTS, 7).tolist() == [0, 1, 2, 3, 4, 6, 7]


def test_tokens_that_must_be_in() -> None:
    assert choose_vocabulary(COUNTS, 3, frozenset({5})).tolist() == [2, 5, 6]
    assert choose_vocabulary(COUNTS, 2, frozenset({1, 5})).tolist() == [1, 5]
    assert choose_vocabulary(COUNTS, 2, frozenset({2})).tolist() == [2, 6]


def test_counts_stay_as_they_are() -> None:
    before = COUNTS.clone()
    choose_vocabulary(COUNTS, 3, frozenset({5}))
    assert torch.equal(COUNTS, before)


def test_no_counts() -> None:
    with pytest.raises(ArchspecError) as caught:
        choose_vocabulary(torch.zeros(8, dtype=torch.long), 3)
    assert str(caught.value) == "a reduced draft vocabulary needs token counts, but every count is zero"


def test_too_few_places() -> None:
    with pytest.raises(ArchspecError) as caught:
        choose_vocabulary(COUNTS, 1, frozenset({1, 5}))
    assert str(caught.value) == "a draft vocabulary of 1 cannot hold the 2 tokens that must be in it"
