"""A dump's states are held against every layer of the target, so that no shift and no other model gets through."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from archspec.errors import ArchspecError
from runners.features.dumps import Dumped
from runners.features.proof import LastState, greedy_agreement, prove
from runners.features.target import Target
from tests.runners.dump_files import states
from tests.runners.tiny import tiny_target

Samples = list[tuple[Path, Dumped]]
Change = Callable[[Dumped], Dumped]


def samples(
    target: Target, layers: tuple[int, ...], dtype: torch.dtype = torch.float32, normed: bool = True
) -> Samples:
    """Two texts, one shorter than what is looked at and one longer."""
    found = []
    for length in (9, 90):
        tokens = torch.arange(3, 3 + length)
        below, last, after = states(target, tokens)
        aux = torch.stack([[*below, last][layer] for layer in layers], 1)
        found.append(
            (Path(f"data_{length}.ckpt"), Dumped(tokens, None, aux.to(dtype), (after if normed else last).to(dtype)))
        )
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("normed", [True, False])
def test_layers_and_the_side_of_the_norm_are_found(target: Target, dtype: torch.dtype, normed: bool) -> None:
    proof = prove(target, samples(target, (2, 0, 3), dtype, normed), [0, 2, 3])
    assert proof.layer_ids == (2, 0, 3)  # in the order of the file
    assert proof.last_state == ("post_norm" if normed else "pre_norm")
    assert proof.logits_error < (1e-5 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_shift_by_one_names_the_layers_that_fit(target: Target, dtype: torch.dtype) -> None:
    with pytest.raises(ArchspecError, match=r"are those of layers 0, 1, 2, not 1, 2, 3; use --layers 0,1,2$"):
        prove(target, samples(target, (0, 1, 2), dtype), [1, 2, 3])


def test_another_target_is_refused(target: Target) -> None:
    message = (
        r"aux state 1 of 2 is no layer's output of target tiny-1: the nearest is .*, off by .*%\); the dump was made"
    )
    with pytest.raises(ArchspecError, match=message):
        prove(tiny_target(1), samples(target, (1, 2)), [1, 2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda one: replace(one, last=one.last.roll(1, 0)),
            r"last state is not that of target tiny-0, neither before nor",
        ),
        (lambda one: replace(one, last=one.aux[:, 1]), r"the nearest is layer 2, off by 0\.0% \(at most 0\.1%\)"),
        (
            lambda one: replace(one, aux=one.last[:, None]),
            r"aux state 1 of 1 is no .*: the nearest is the last state after",
        ),
        (
            lambda one: replace(one, last=_spoilt(one.last)),
            r"data_9\.ckpt: logits recomputed from its last states differ",
        ),
    ],
)
def test_wrong_states_are_refused(change: Change, message: str, target: Target) -> None:
    changed = [(path, change(one)) for path, one in samples(target, (1, 2))]
    with pytest.raises(ArchspecError, match=message):
        prove(target, changed, [1, 2])


def _spoilt(last: torch.Tensor) -> torch.Tensor:
    """One row is off, which no median tells."""
    return torch.cat((last[:3] * 2, last[3:]))


@torch.no_grad()
def test_greedy_agreement_counts_the_argmax_before_a_response_token(target: Target) -> None:
    tokens = torch.arange(3, 9)
    for _ in range(6):
        tokens = torch.cat((tokens, target.model(input_ids=tokens[None]).logits[0, -1:].argmax(-1)))
    tokens[-1] = (tokens[-1] + 1) % 264
    _, last, after = states(target, tokens)
    sides: list[tuple[bool, LastState]] = [(True, "post_norm"), (False, "pre_norm")]
    for normed, side in sides:
        dumped = Dumped(tokens, None, last[:, None], after if normed else last)
        mask = torch.arange(12) > 5
        assert greedy_agreement(target, [(dumped, mask)], side) == pytest.approx(5 / 6)
        assert greedy_agreement(target, [(dumped, mask & False)], side) is None
