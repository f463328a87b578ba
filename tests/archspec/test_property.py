"""What every draft promises, checked on random specs from the whole schema at toy size, in fp64.

T rows, S draft steps. The scale of the weights matters to one check: a bare stack of three gated MLPs raises what
passes to the eighth power, so larger weights saturate an attention behind it, and smaller ones hide its gradient in
rounding.
"""

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from torch import Tensor, nn

from archspec import cost
from archspec.attention import ChainCache
from archspec.builder import build_draft
from archspec.modules import Draft
from archspec.resolve import ResolvedSpec, resolve
from archspec.spec import DraftSpec
from archspec.unroll import unroll
from tests.archspec.strategies import TOY, draft_specs

ROWS, STEPS = 8, 4  # four steps, so that a window of two forgets a row's own key
DTYPE = torch.float64


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Handing matrices of this size to other threads takes ten times as long as the products themselves."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make(spec: DraftSpec) -> Draft:
    """The draft of ``spec`` with random weights: matrices shrink what passes a little, norms are near 1."""
    draft = build_draft(resolve(spec, TOY)).to(DTYPE)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=DTYPE)
            if name.startswith("embed_tokens"):
                parameter.copy_(noise)
            elif parameter.ndim == 2:
                parameter.copy_(noise * 0.7 / math.sqrt(parameter.shape[1]))
            else:
                parameter.copy_(noise * 0.2 + (0.0 if name.endswith("bias") else 1.0))
    return draft


def inputs(spec: ResolvedSpec, batch: int = 1, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Next tokens [B, T] and aux states [B, T, M, h_t]."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(TOY.vocab_size, (batch, rows), generator=generator)
    aux = torch.randn(batch, rows, len(spec.inputs.aux_layers), TOY.hidden_size, generator=generator, dtype=DTYPE)
    return tokens, aux


def states(draft: Draft, tokens: Tensor, aux: Tensor, allowed: Tensor | None = None) -> Tensor:
    """States of all steps, [S, B, T, h]."""
    return torch.stack(list(unroll(draft, tokens, aux, STEPS, allowed_BTT=allowed)))


def reach(spec: ResolvedSpec) -> float:
    """How many rows back a row can see: each layer adds its window less one, infinite without a window."""
    windows = [layer.attention.window for layer in spec.layers if layer.attention is not None]
    return sum(math.inf if window is None else window - 1 for window in windows)


@given(draft_specs())
def test_parameters_are_those_of_the_cost_model(spec: DraftSpec) -> None:
    resolved = resolve(spec, TOY)
    draft = build_draft(resolved)
    built = {name: (tuple(p.shape), p.requires_grad) for name, p in draft.named_parameters()}
    assert built == {name: (shape, trainable) for name, shape, trainable in cost.parameter_shapes(resolved)}
    assert sum(p.numel() for p in draft.parameters()) == cost.total_params(resolved)
    assert sum(p.numel() for p in draft.trainable_parameters()) == cost.trainable_params(resolved)
    matrices = [m for m in draft.modules() if isinstance(m, nn.Linear)]
    assert cost.flops_per_token(resolved) == sum(2 * m.weight.numel() for m in matrices)


@given(draft_specs())
def test_shapes_hold(spec: DraftSpec) -> None:
    draft = make(spec)
    tokens, aux = inputs(draft.spec, batch=2)
    h = draft.spec.hidden_size
    assert draft.project(aux).shape == (2, ROWS, h)
    for state in unroll(draft, tokens, aux, STEPS):
        assert state.shape == draft.feed_back(state).shape == draft.read_out(state).shape == (2, ROWS, h)
        assert draft.logits(state).shape == (2, ROWS, draft.spec.head.vocab_size)
        assert torch.isfinite(draft.logits(state)).all()


@given(draft_specs())
def test_gradients_reach_every_trainable_parameter(spec: DraftSpec) -> None:
    draft = make(spec)
    tokens, aux = inputs(draft.spec, batch=2)
    logits = draft.logits(states(draft, tokens, aux))
    generator = torch.Generator().manual_seed(3)
    (logits * torch.randn(logits.shape, generator=generator, dtype=DTYPE)).sum().backward()  # type: ignore[no-untyped-call]
    largest = max(p.grad.abs().max().item() for p in draft.trainable_parameters() if p.grad is not None)
    for name, parameter in draft.named_parameters():
        if not parameter.requires_grad:
            assert parameter.grad is None, f"{name} is frozen"
        else:
            assert parameter.grad is not None, f"{name} is not read"
            # Rounding noise of a gradient that is zero by mathematics stays near 1e-17 of the largest gradient.
            assert parameter.grad.abs().max() > 1e-14 * largest, f"the gradient of {name} vanishes"


@given(draft_specs())
def test_a_row_never_depends_on_what_it_may_not_see(spec: DraftSpec) -> None:
    """Batch entry c is changed from row c on (what is ahead) or up to row c (what a window hides).

    Unchanged means bit for bit, so both runs must have the same memory layout: entries are copies, not one view.
    """
    draft = make(spec)
    tokens, aux = inputs(draft.spec)
    tokens, aux = tokens.repeat(ROWS, 1), aux.repeat(ROWS, 1, 1, 1)
    other_tokens, other_aux = (tokens + 1) % TOY.vocab_size, -aux
    rows = torch.arange(ROWS)
    cut, row, step = rows[None, :, None], rows[None, None, :], torch.arange(STEPS)[:, None, None]
    base = states(draft, tokens, aux)

    ahead = rows[None, :] >= rows[:, None]
    changed = states(draft, torch.where(ahead, other_tokens, tokens), aux)
    blind = row + step < cut
    assert torch.equal(base[blind], changed[blind]), "a row depends on tokens after the one that it was given"

    changed = states(draft, tokens, torch.where(ahead[..., None, None], other_aux, aux))
    blind = (row < cut).expand(STEPS, -1, -1)
    assert torch.equal(base[blind], changed[blind]), "a row depends on target states of later rows"

    behind = rows[None, :] <= rows[:, None]
    changed = states(
        draft, torch.where(behind, other_tokens, tokens), torch.where(behind[..., None, None], other_aux, aux)
    )
    blind = (row > cut + reach(draft.spec)).expand(STEPS, -1, -1)
    assert torch.equal(base[blind], changed[blind]), "a row sees further back than its windows allow"


@given(draft_specs())
def test_a_row_depends_on_what_it_should(spec: DraftSpec) -> None:
    draft = make(spec)
    tokens, aux = inputs(draft.spec)
    base, t = states(draft, tokens, aux)[:, 0], 3
    far = min(reach(draft.spec), t)
    seen = int(t - far)  # the earliest row that row t sees at step 0

    for step in range(STEPS):
        other = tokens.clone()
        other[0, t + step] = (other[0, t + step] + 1) % TOY.vocab_size
        moved = (states(draft, other, aux)[step, 0, t] - base[step, t]).abs().max()
        assert moved > 1e-9, f"step {step} and the token that it was just given"

    own, first = aux.clone(), aux.clone()
    own[0, t] *= -1
    first[0, seen] *= -1
    assert ((states(draft, tokens, own)[:, 0, t] - base[:, t]).abs().amax(-1) > 1e-9).all(), "its own target state"
    assert (states(draft, tokens, first)[0, 0, t] - base[0, t]).abs().max() > 1e-12, "the earliest row within reach"


@given(draft_specs())
def test_chain_decoding_equals_the_unroll(spec: DraftSpec) -> None:
    """Cycles that start at rows 1, 2 and 4: rows are added with the target's states, the chain is forgotten again."""
    draft = make(spec)
    tokens, aux = inputs(draft.spec)
    expected = states(draft, tokens, aux)[:, 0]
    cache, kept = ChainCache(), 0
    positions = torch.arange(ROWS)[None]
    for row in (1, 2, 4):
        new = slice(kept, row + 1)
        state = draft(tokens[:, new], draft.project(aux[:, new]), positions[:, new], cache)
        torch.testing.assert_close(state[0], expected[0, new], rtol=1e-9, atol=1e-9)
        state = state[:, -1:]
        for step in range(1, STEPS):
            at = slice(row + step, row + step + 1)
            state = draft(tokens[:, at], draft.feed_back(state), positions[:, at], cache)
            torch.testing.assert_close(state[0, 0], expected[step, row], rtol=1e-9, atol=1e-9)
        kept = row + 1
        cache.truncate(kept)
        assert len(cache) == (kept if any(layer.attention for layer in draft.spec.layers) else 0)


@given(draft_specs())
def test_packed_documents_equal_separate_rows(spec: DraftSpec) -> None:
    """Documents of 4 rows each in one row of 8; the rows whose token lies in the next document do not count."""
    draft = make(spec)
    tokens, aux = inputs(draft.spec)
    documents = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    allowed = (documents[:, None] == documents[None, :])[None]
    packed = states(draft, tokens, aux, allowed)[:, 0]
    for start, end in ((0, 4), (4, 8)):
        alone = states(draft, tokens[:, start:end], aux[:, start:end])[:, 0]
        for step in range(STEPS):
            counted = end - start - step
            # Only differences of positions matter, but their angles are rounded to fp32.
            torch.testing.assert_close(
                packed[step, start : start + counted], alone[step, :counted], rtol=1e-4, atol=1e-4
            )


@given(draft_specs())
def test_a_batch_equals_its_members(spec: DraftSpec) -> None:
    draft = make(spec)
    tokens, aux = inputs(draft.spec, batch=3)
    together = states(draft, tokens, aux)
    for i in range(3):
        alone = states(draft, tokens[i : i + 1], aux[i : i + 1])
        torch.testing.assert_close(together[:, i], alone[:, 0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("window", [None, 3])
def test_the_check_of_reach_is_not_empty(window: int | None) -> None:
    """With one layer of window 3, row t sees rows t-2 … t; without a window all."""
    spec = DraftSpec.model_validate({"name": "w", "layers": [{"fusion": "concat", "attention": {"window": window}}]})
    assert reach(resolve(spec, TOY)) == (math.inf if window is None else 2)
