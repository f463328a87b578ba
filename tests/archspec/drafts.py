"""Small drafts with random weights for ``TOY``, and a target that they can copy tensors from."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from archspec.builder import build_draft, set_vocabulary
from archspec.checkpoints import load
from archspec.errors import ArchspecError
from archspec.modules import Draft
from archspec.presets import load_preset
from archspec.resolve import ResolvedSpec, resolve
from archspec.spec import DraftSpec
from archspec.unroll import unroll
from tests.archspec.strategies import TOY

CONCAT: dict[str, Any] = {"fusion": "concat"}


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


@dataclass(frozen=True)
class ToyTarget:
    """``TargetTensors`` of ``TOY``; embedding and head differ, so that a mix-up shows."""

    embed_tokens: Tensor = field(default_factory=lambda: _random(TOY.vocab_size, TOY.hidden_size))
    lm_head: Tensor = field(default_factory=lambda: _random(TOY.hidden_size, TOY.vocab_size).T.contiguous())
    norm_weight: Tensor = field(default_factory=lambda: _random(TOY.hidden_size))
    norm_kind: str = "rms"


def target_of(draft: Draft) -> ToyTarget:
    """A target whose tensors a draft's frozen copies are."""
    target = ToyTarget()
    if draft.spec.hidden_size != TOY.hidden_size:
        return target
    head = target.lm_head.clone()
    head[draft.vocab_ids] = draft.lm_head.weight.detach()
    norms = [norm.weight for norm in draft.inputs.norms] if draft.spec.inputs.norm == "target" else []
    norm = next((weight for weight in norms if isinstance(weight, Tensor)), target.norm_weight)
    return ToyTarget(draft.embed_tokens.weight.detach(), head, norm.detach())


def make(**fields: Any) -> ResolvedSpec:
    """One fused layer and 20 of the target's tokens, but for ``fields``."""
    data = {"name": "draft", "layers": [CONCAT], "head": {"vocab_size": 20}, **fields}
    return resolve(DraftSpec.model_validate(data), TOY)


def preset(name: str) -> ResolvedSpec:
    """A preset with a vocabulary that fits ``TOY``."""
    spec = load_preset(name)
    size = "full" if spec.head.vocab_size == "full" else 20
    return resolve(spec.model_copy(update={"head": spec.head.model_copy(update={"vocab_size": size})}), TOY)


def make_draft(spec: ResolvedSpec) -> Draft:
    """Random weights everywhere, norms and biases included, so that a tensor in the wrong place shows."""
    torch.manual_seed(0)
    draft = build_draft(spec)
    for parameter in draft.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    if spec.reduced_vocab:
        set_vocabulary(draft, torch.randperm(TOY.vocab_size)[: spec.head.vocab_size].sort().values)
    return draft


def logits(draft: Draft) -> list[Tensor]:
    """Of three draft steps on fixed random tokens and states."""
    torch.manual_seed(1)
    tokens = torch.randint(TOY.vocab_size, (2, 7))
    aux = torch.randn(2, 7, len(draft.spec.inputs.aux_layers), TOY.hidden_size)
    with torch.no_grad():
        return [draft.logits(state) for state in unroll(draft, tokens, aux, 3)]


def assert_same(draft: Draft, again: Draft) -> None:
    """Spec, tensors, what is trained, and logits are equal."""
    assert again.spec.hash == draft.spec.hash
    assert (again.spec.name, again.spec.target) == (draft.spec.name, draft.spec.target)
    assert {name: p.requires_grad for name, p in again.named_parameters()} == {
        name: p.requires_grad for name, p in draft.named_parameters()
    }
    assert again.state_dict().keys() == draft.state_dict().keys()
    for name, tensor in draft.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    for ours, theirs in zip(logits(draft), logits(again), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)  # sums go by where in memory weights lie


def refused(folder: Path, *arguments: Any, **more: Any) -> str:
    """The message with which ``checkpoints.load`` refuses, without the folder that it must begin with."""
    with pytest.raises(ArchspecError) as caught:
        load(folder, *arguments, **more)
    lines = str(caught.value).splitlines()
    assert all(line.startswith(str(folder)) for line in lines)
    return "\n".join(line.removeprefix(str(folder)).removeprefix(": ") for line in lines)
