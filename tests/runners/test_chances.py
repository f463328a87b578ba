"""Rows that are given up once rejected change no figure: against the unroll of every row, for every kind of draft."""

from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from archspec.modules import Draft
from archspec.unroll import Unroll, unroll
from runners.features.store import FeatureStore
from runners.training.acceptance import Counts, acceptance_chances, count_cycles, measure_acceptance, spans
from runners.training.batches import read_batch
from runners.training.settings import LONGEST, EvalSettings
from tests.runners.drafts import DOCUMENTS, KINDS, draft_of_kind, everything
from tests.runners.sampled import nucleus


@pytest.fixture(scope="module", params=KINDS)
def draft(request: pytest.FixtureRequest, tiny_store: FeatureStore) -> Draft:
    return draft_of_kind(tiny_store, request.param)


@torch.no_grad()
def every_chance(draft: Draft, store: FeatureStore, index: int, k: int, kind: str, top_p: float) -> list[Tensor]:
    """The chances [rows, k] of each response of a document, all rows at all steps; temperature 1 for sampled drafts."""
    batch = read_batch(store, [index], draft.spec.inputs.aux_layers, "cpu")
    tokens, p_TV = batch.tokens[0], store.weights().logits(batch.last[0]).softmax(-1)
    p_TV = torch.tensor([nucleus(p, top_p) for p in p_TV.tolist()])
    found = torch.zeros(len(tokens), k)
    for step, state in enumerate(unroll(draft, batch.next_tokens, batch.aux, k)):
        q_TV = torch.zeros_like(p_TV)
        q_TV[:, draft.vocab_ids] = draft.logits(state)[0].softmax(-1)
        for t in range(len(tokens) - 2 - step):
            x = tokens[t + 2 + step]
            p = float(p_TV[t + 1 + step, x])
            ratio = min(1.0, float(q_TV[t, x]) / p) if p else 0.0
            found[t, step] = ratio if kind == "sampled" else float(q_TV[t].argmax() == x)
    runs = [(first, end) for first, end in spans(batch.response_mask[0]) if end - first > 1]
    rows = [torch.arange(end - first - 1) for first, end in runs]
    inside = [row[:, None] + 1 + torch.arange(k) < end - first for row, (first, end) in zip(rows, runs, strict=True)]
    return [found[first - 1 : end - 2] * keep for (first, end), keep in zip(runs, inside, strict=True)]


@pytest.mark.parametrize(("kind", "top_p"), [("greedy", 1.0), ("sampled", 1.0), ("sampled", 0.6)])
def test_figures_are_those_of_every_row_at_every_step(
    tiny_store: FeatureStore, draft: Draft, kind: Literal["greedy", "sampled"], top_p: float
) -> None:
    settings = EvalSettings(draft_length=3, draft=kind, temperature=1.0, top_p=top_p, bootstrap=10, batch_tokens=500)
    wanted = {index: every_chance(draft, tiny_store, index, LONGEST, kind, top_p) for index in DOCUMENTS}
    far = settings.model_copy(update={"draft_length": LONGEST})
    for index, chances in acceptance_chances(draft, tiny_store, DOCUMENTS, far):
        np.testing.assert_allclose(chances.cumprod(1), wanted[index][0].cumprod(1).numpy(), atol=1e-6)
    found = measure_acceptance(draft, tiny_store, DOCUMENTS, settings)
    for k in range(1, LONGEST + 1):
        rows = [chances[:, :k].double().numpy() for each in wanted.values() for chances in each]
        total = sum(map(count_cycles, rows), Counts.zero(k))
        assert found.length_by_k[k - 1] == pytest.approx(1 + total.accepted.sum() / total.cycles, abs=1e-6)
        if k == settings.draft_length:
            assert found.cycles == pytest.approx(total.cycles)
            assert found.per_position == pytest.approx(tuple(total.accepted / total.cycles), abs=1e-6)
    assert 1.05 < found.length < 3.9


@torch.no_grad()
def test_rows_that_stay_have_the_states_of_the_whole(tiny_store: FeatureStore, draft: Draft) -> None:
    """Any rows in any order, some twice, and those of one sequence not those of the other; fewer at every step."""
    steps, generator = 4, torch.Generator().manual_seed(0)
    batch = read_batch(tiny_store, DOCUMENTS[:2], draft.spec.inputs.aux_layers, "cpu")
    length = batch.tokens.shape[1]
    allowed = (torch.rand(1, length, length, generator=generator) < 0.7) | torch.eye(length, dtype=torch.bool)
    wanted = list(unroll(draft, batch.next_tokens, batch.aux, steps, allowed_BTT=allowed))
    some, rows = Unroll(draft, batch.next_tokens, batch.aux, allowed_BTT=allowed), torch.arange(length).expand(2, -1)
    for step in range(steps):
        torch.testing.assert_close(some.step(), wanted[step].take_along_dim(rows[:, :, None], 1), rtol=1e-4, atol=1e-5)
        kept = torch.randint(rows.shape[1], (2, rows.shape[1] // 2), generator=generator)
        some.keep(kept)
        rows = rows.gather(1, kept)


def test_rows_cannot_be_chosen_before_their_first_step(tiny_store: FeatureStore) -> None:
    batch = read_batch(tiny_store, [0], [1, 2, 3], "cpu")
    fresh = Unroll(draft_of_kind(tiny_store, "eagle3"), batch.next_tokens, batch.aux)
    with pytest.raises(ValueError, match="every row's first step is needed"):
        fresh.keep(torch.zeros(1, 1, dtype=torch.int64))


def test_lengths_are_told_to_eight_whatever_is_drafted(tiny_store: FeatureStore) -> None:
    draft, indices = draft_of_kind(tiny_store, "eagle3"), everything(tiny_store)
    short, long = (
        measure_acceptance(draft, tiny_store, indices, EvalSettings(draft_length=k, bootstrap=10)) for k in (2, 10)
    )
    assert (len(short.length_by_k), len(long.length_by_k)) == (LONGEST, 10)
    assert (len(short.conditional), len(short.per_position)) == (2, 2)
    assert short.length == short.length_by_k[1] == long.length_by_k[1]
    assert list(long.length_by_k) == sorted(long.length_by_k)
