"""What a fresh draft starts from, what it copies from its target, and its vocabulary."""

import types
from typing import Any

import pytest
import torch
from torch import nn

from archspec.builder import TargetTensors, adopt_target, build_draft, set_vocabulary
from archspec.errors import ArchspecError
from archspec.modules import Draft
from archspec.resolve import resolve
from archspec.spec import DraftSpec
from tests.archspec.strategies import TOY


def make(**fields: Any) -> Draft:
    torch.manual_seed(0)
    data = {"name": "test", "layers": [{"fusion": "concat"}]} | fields
    return build_draft(resolve(DraftSpec.model_validate(data), TOY))


def target(norm_kind: str = "rms") -> TargetTensors:
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(2, TOY.vocab_size, TOY.hidden_size, generator=generator)
    weight = torch.rand(TOY.hidden_size, generator=generator)
    return types.SimpleNamespace(embed_tokens=rows[0], lm_head=rows[1], norm_weight=weight, norm_kind=norm_kind)


VOCAB_IDS = torch.tensor([0, 3, 4, 11, 40, 47])


def test_equal_seeds_give_equal_weights() -> None:
    one, other = make(), make()
    assert one.state_dict().keys() == other.state_dict().keys()
    assert all(torch.equal(one.state_dict()[name], other.state_dict()[name]) for name in one.state_dict())
    torch.manual_seed(1)
    different = build_draft(one.spec)
    assert not torch.equal(one.lm_head.weight, different.lm_head.weight)


def test_what_is_frozen() -> None:
    """Copies of the target's tensors, and nothing else."""
    copies = make(inputs={"aux_layers": ["last"], "norm": "target"}, embedding="frozen", head={"weights": "target"})
    frozen = {name for name, parameter in copies.named_parameters() if not parameter.requires_grad}
    assert frozen == {"embed_tokens.weight", "inputs.norms.0.weight", "lm_head.weight"}
    own = make(inputs={"norm": "each"}, embedding="trained")
    assert all(parameter.requires_grad for parameter in own.parameters())
    assert len(own.trainable_parameters()) == len(list(own.parameters()))


def test_epsilons_are_the_specs_and_the_targets() -> None:
    """The target's final norm keeps the target's epsilon; every other norm has the draft's."""
    draft = make(
        norm_eps=0.5,
        inputs={"aux_layers": ["last"], "norm": "target"},
        layers=[{"fusion": "concat", "attention": {"qk_norm": True}}],
    )
    epsilons = {name: module.eps for name, module in draft.named_modules() if isinstance(module, nn.RMSNorm)}
    assert epsilons.pop("inputs.norms.0") == TOY.norm_eps
    assert len(epsilons) == 6
    assert set(epsilons.values()) == {0.5}


def test_the_targets_tensors_are_copied() -> None:
    draft, tensors = make(), target()
    adopt_target(draft, tensors, None)
    assert torch.equal(draft.embed_tokens.weight, tensors.embed_tokens)
    assert torch.equal(draft.lm_head.weight, tensors.lm_head)
    assert not draft.embed_tokens.weight.requires_grad
    assert draft.lm_head.weight.requires_grad
    tensors.embed_tokens.zero_()
    assert draft.embed_tokens.weight.abs().sum() > 0, "a copy, not a view"


def test_the_final_norm_of_the_target_in_front() -> None:
    draft, tensors = make(inputs={"aux_layers": ["last"], "norm": "target", "projection": "none"}), target()
    adopt_target(draft, tensors, None)
    aux = torch.randn(1, 3, 1, TOY.hidden_size)
    rms = (aux.pow(2).mean(-1, keepdim=True) + TOY.norm_eps).sqrt()
    torch.testing.assert_close(draft.project(aux), (aux / rms * tensors.norm_weight)[:, :, 0])


def test_a_target_without_rms_norm_has_no_norm_to_copy() -> None:
    draft = make(inputs={"aux_layers": ["last"], "norm": "target"})
    with pytest.raises(ArchspecError) as caught:
        adopt_target(draft, target("layer"), None)
    assert str(caught.value) == (
        "inputs.norm: target needs a target whose final norm is an RMSNorm; use none, joint or each"
    )


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_the_drafts_final_norm_starts_at_ones(kind: str) -> None:
    """Whatever the target's is: its weights belong to the target's last state, not to the draft's."""
    draft = make()
    adopt_target(draft, target(kind), None)
    assert isinstance(draft.norm, nn.RMSNorm)
    assert torch.equal(draft.norm.weight, torch.ones(TOY.hidden_size))


def test_a_draft_without_final_norm_adopts_too() -> None:
    draft = make(head={"norm": "none"})
    adopt_target(draft, target(), None)
    state = torch.randn(2, TOY.hidden_size)
    assert torch.equal(draft.read_out(state), state)


# The projection of the aux states starts as a pass-through.


@pytest.mark.parametrize("aux_layers", [["low", "middle", "high"], [3, 8], ["last"]])
def test_the_first_state_is_the_highest_aux_state(aux_layers: list[Any]) -> None:
    draft = make(inputs={"aux_layers": aux_layers})
    adopt_target(draft, target(), None)
    aux = torch.randn(2, 3, len(aux_layers), TOY.hidden_size)
    torch.testing.assert_close(draft.project(aux), aux[..., -1, :], rtol=0, atol=0)
    assert all(parameter.requires_grad for parameter in draft.inputs.parameters())


def test_a_normed_highest_aux_state_passes_normed() -> None:
    draft = make(inputs={"norm": "each"})
    adopt_target(draft, target(), None)
    aux = torch.randn(1, 3, 3, TOY.hidden_size)
    torch.testing.assert_close(draft.project(aux), draft.inputs.norms[-1](aux[..., -1, :]))


def test_a_projection_to_another_width_stays_random() -> None:
    draft = make(hidden_size=8, embedding="trained")
    before = {name: tensor.clone() for name, tensor in draft.inputs.state_dict().items()}
    adopt_target(draft, target(), None)
    assert before
    assert all(torch.equal(tensor, before[name]) for name, tensor in draft.inputs.state_dict().items())


# A reduced vocabulary.


def test_head_rows_follow_the_vocabulary() -> None:
    draft, tensors = make(head={"vocab_size": 6, "weights": "target"}), target()
    adopt_target(draft, tensors, VOCAB_IDS)
    assert torch.equal(draft.lm_head.weight, tensors.lm_head[VOCAB_IDS])
    assert torch.equal(draft.embed_tokens.weight, tensors.embed_tokens)


def test_d2t_and_t2d_say_the_same() -> None:
    draft = make(head={"vocab_size": 6})
    set_vocabulary(draft, VOCAB_IDS)
    assert draft.d2t is not None
    assert draft.t2d is not None
    assert draft.d2t.tolist() == [0, 2, 2, 8, 36, 42]
    assert torch.equal(draft.t2d.nonzero().flatten(), VOCAB_IDS)
    assert (draft.t2d.shape, draft.t2d.dtype) == ((TOY.vocab_size,), torch.bool)
    assert torch.equal(draft.vocab_ids, VOCAB_IDS)
    assert draft.target_ids(torch.tensor([[5, 0], [1, 1]])).tolist() == [[47, 0], [3, 3]]


def test_setting_a_vocabulary_again_forgets_the_first() -> None:
    draft = make(head={"vocab_size": 6})
    set_vocabulary(draft, VOCAB_IDS)
    set_vocabulary(draft, torch.arange(6))
    assert draft.t2d is not None
    assert int(draft.t2d.sum()) == 6
    assert torch.equal(draft.vocab_ids, torch.arange(6))


def test_maps_travel_with_the_weights() -> None:
    draft, other = make(head={"vocab_size": 6}), make(head={"vocab_size": 6})
    set_vocabulary(draft, VOCAB_IDS)
    other.load_state_dict(draft.state_dict())
    assert torch.equal(other.vocab_ids, VOCAB_IDS)


def test_a_full_vocabulary_has_no_maps() -> None:
    draft = make()
    assert draft.d2t is None
    assert draft.t2d is None
    assert "d2t" not in draft.state_dict()
    ids = torch.tensor([4, 1])
    assert torch.equal(draft.target_ids(ids), ids)
    assert torch.equal(draft.vocab_ids, torch.arange(TOY.vocab_size))


def test_a_reduced_vocabulary_needs_counts() -> None:
    with pytest.raises(ArchspecError) as caught:
        adopt_target(make(head={"vocab_size": 6}), target(), None)
    assert str(caught.value) == "a draft vocabulary of 6 of 48 tokens needs token counts to choose them by"


@pytest.mark.parametrize(
    ("ids", "got"),
    [
        ([0, 1, 2, 3, 4], "5 ids from 0 to 4"),
        ([0, 1, 2, 3, 4, 5, 6], "7 ids from 0 to 6"),
        ([0, 3, 4, 11, 40, 48], "6 ids from 0 to 48"),
        ([-1, 3, 4, 11, 40, 47], "6 ids from -1 to 47"),
        ([0, 4, 3, 11, 40, 47], "6 ids from 0 to 47"),
        ([0, 3, 3, 11, 40, 47], "6 ids from 0 to 47"),
    ],
)
def test_ids_that_are_no_vocabulary(ids: list[int], got: str) -> None:
    with pytest.raises(ArchspecError) as caught:
        set_vocabulary(make(head={"vocab_size": 6}), torch.tensor(ids))
    assert str(caught.value) == f"the draft vocabulary must be 6 rising token ids below 48, but got {got}"


def test_no_ids_are_no_vocabulary() -> None:
    with pytest.raises(ArchspecError, match=r"^the draft vocabulary must be 6 rising token ids below 48, but got "):
        set_vocabulary(make(head={"vocab_size": 6}), torch.tensor([], dtype=torch.long))


# Another hidden size.


def test_a_narrow_embedding_keeps_the_leading_directions() -> None:
    """No other 8 directions explain more of the target's rows: what is lost is the tail of the singular values."""
    draft, tensors = make(hidden_size=8, embedding="trained"), target()
    adopt_target(draft, tensors, None)
    rows = draft.embed_tokens.weight.detach()
    values = torch.linalg.svdvals(tensors.embed_tokens)
    assert rows.pow(2).sum() == pytest.approx(values[:8].pow(2).sum().item(), rel=1e-4)
    torch.testing.assert_close(rows.T @ rows, values[:8].pow(2).diag(), rtol=1e-3, atol=1e-3)


def test_a_wide_embedding_keeps_the_rows_geometry() -> None:
    draft, tensors = make(hidden_size=24, embedding="trained"), target()
    head = draft.lm_head.weight.clone()
    adopt_target(draft, tensors, None)
    rows = draft.embed_tokens.weight
    torch.testing.assert_close(rows @ rows.T, tensors.embed_tokens @ tensors.embed_tokens.T, rtol=1e-3, atol=1e-3)
    assert torch.equal(draft.lm_head.weight, head), "a head of another width stays random"
