"""From a resolved spec to a torch module, and from the target's tensors to a draft's first weights."""

from typing import Protocol

import torch
from torch import Tensor, nn

from archspec.attention import Attention, Rotary
from archspec.errors import ArchspecError
from archspec.modules import Draft, DraftLayer, GatedMlp, Inputs, MlpStack, RmsNorm
from archspec.resolve import ResolvedAttention, ResolvedLayer, ResolvedMlp, ResolvedSpec


class TargetTensors(Protocol):
    """The target's tensors that a draft copies: embedding and head rows [V, h_t], final RMSNorm weight [h_t]."""

    @property
    def embed_tokens(self) -> Tensor:
        """One row for each token, [V, h_t]."""
        ...

    @property
    def lm_head(self) -> Tensor:
        """One row for each token, [V, h_t]."""
        ...

    @property
    def norm_weight(self) -> Tensor:
        """The factor that the final norm applies, [h_t]."""
        ...

    @property
    def norm_kind(self) -> str:
        """``rms`` for an RMSNorm."""
        ...


def build_draft(spec: ResolvedSpec) -> Draft:
    """Compile a spec into an untrained draft with random weights; ``adopt_target`` puts the target's in their places.

    Copies of the target's tensors (frozen embedding, target head, the target's norm) do not require gradients.
    """
    h, target = spec.hidden_size, spec.target
    head_sizes = sorted({layer.attention.head_dim for layer in spec.layers if layer.attention is not None})
    last_width = spec.widths[-1][1]
    scaling = None if spec.rope_scaling == "none" else spec.rope_scaling
    draft = Draft(
        spec,
        embed_tokens=nn.Embedding(target.vocab_size, h),
        inputs=_build_inputs(spec),
        rotaries=nn.ModuleDict({str(size): Rotary(size, spec.rope_theta, scaling) for size in head_sizes}),
        layers=[build_layer(i, layer, spec) for i, layer in enumerate(spec.layers)],
        narrow=nn.Identity() if last_width == h else nn.Linear(last_width, h, bias=False),
        norm=RmsNorm(h, eps=spec.norm_eps) if spec.head.norm == "own" else nn.Identity(),
        lm_head=nn.Linear(h, spec.head.vocab_size, bias=False),
    )
    draft.embed_tokens.requires_grad_(spec.embedding == "trained")
    draft.lm_head.requires_grad_(spec.head.weights == "own")
    return draft


def build_layer(index: int, layer: ResolvedLayer, spec: ResolvedSpec) -> DraftLayer:
    """The ``index``-th layer; its widths follow from the layers before it."""
    h, (width_in, width_out) = spec.hidden_size, spec.widths[index]
    fusion, attention = layer.fusion, layer.attention
    project = nn.Linear(h + width_in, width_out, bias=layer.fusion_bias) if fusion == "project" else None
    width = width_out if project is not None else width_in
    widen = fusion == "concat" and width == h and width_out == 2 * h
    fuses = fusion in ("concat", "add")
    normed = attention is not None and attention.norm == "own"
    return DraftLayer(
        project=project,
        embed_norm=RmsNorm(h, eps=spec.norm_eps) if fuses and normed else nn.Identity(),
        state_norm=RmsNorm(width, eps=spec.norm_eps) if normed else nn.Identity(),
        concat=fusion == "concat",
        embed_map=nn.Linear(h, width, bias=layer.fusion_bias) if fusion == "add" else None,
        attention=_build_attention(index, attention, width + h * (fusion == "concat"), width_out, spec.norm_eps),
        normed_residual=layer.residual_from == "normed",
        widen=widen,
        residual_map=nn.Identity() if widen or width == width_out else nn.Linear(width, width_out, bias=False),
        mlps=_build_mlps(layer.mlp, width_out, spec.norm_eps),
    )


def _build_inputs(spec: ResolvedSpec) -> Inputs:
    inputs, h_t = spec.inputs, spec.target.hidden_size
    count = len(inputs.aux_layers)
    eps = spec.target.norm_eps if inputs.norm == "target" else spec.norm_eps
    norms: list[nn.Module] = [RmsNorm(h_t, eps=eps) for _ in range(count)] if inputs.norm in ("each", "target") else []
    for norm in norms:
        norm.requires_grad_(inputs.norm == "each")
    return Inputs(
        norms=norms,
        joint_norm=RmsNorm(count * h_t, eps=eps) if inputs.norm == "joint" else nn.Identity(),
        fc=nn.Linear(count * h_t, spec.hidden_size, inputs.bias) if inputs.projection == "linear" else nn.Identity(),
    )


def _build_attention(index: int, spec: ResolvedAttention | None, read: int, write: int, eps: float) -> Attention | None:
    if spec is None:
        return None
    return Attention(
        index,
        read,
        write,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        bias=spec.bias,
        window=spec.window,
        q_norm=RmsNorm(spec.head_dim, eps=eps) if spec.qk_norm else nn.Identity(),
        k_norm=RmsNorm(spec.head_dim, eps=eps) if spec.qk_norm else nn.Identity(),
    )


def _build_mlps(spec: ResolvedMlp, width: int, eps: float) -> MlpStack | nn.Identity:
    if spec.depth == 0:
        return nn.Identity()
    norms = spec.depth if spec.residual and spec.norm == "own" else 1
    return MlpStack(
        [RmsNorm(width, eps=eps) for _ in range(norms)],
        [GatedMlp(width, spec.intermediate_size) for _ in range(spec.depth)],
        residual=spec.residual,
    )


@torch.no_grad()
def adopt_target(draft: Draft, target: TargetTensors, vocab_ids: Tensor | None) -> None:
    """Give ``draft`` the target's tensors where it copies them, and start its own from them where the widths agree.

    Where the draft is as wide as the target, its head starts from the target's rows and ``fc`` hands on the highest
    aux layer as it is (docs/decisions/0002-first-weights.md has the measurements). Otherwise a trained embedding starts
    from the target's leading principal directions and the rest is random. ``vocab_ids`` [D], rising, are the target ids
    that a reduced vocabulary holds.

    Raises:
        ArchspecError: ``vocab_ids`` do not fit the spec, or the draft reads a target norm that is no RMSNorm.
    """
    spec = draft.spec
    if spec.reduced_vocab:
        set_vocabulary(draft, vocab_ids)
    if spec.inputs.norm == "target":
        if target.norm_kind != "rms":
            raise ArchspecError(
                "inputs.norm: target needs a target whose final norm is an RMSNorm; use none, joint or each"
            )
        for norm in draft.inputs.norms:
            norm.weight.copy_(target.norm_weight)  # type: ignore[operator]
    if spec.hidden_size == spec.target.hidden_size:
        draft.embed_tokens.weight.copy_(target.embed_tokens)
        draft.lm_head.weight.copy_(target.lm_head[draft.vocab_ids.to(target.lm_head.device)])
        _pass_through_last_layer(draft)
    else:
        draft.embed_tokens.weight.copy_(_principal_directions(target.embed_tokens.float(), spec.hidden_size))


def _pass_through_last_layer(draft: Draft) -> None:
    """Let ``fc`` begin as [0 … 0, 1]: the first state u is the (normed) highest aux state itself."""
    fc = draft.inputs.fc
    if isinstance(fc, nn.Linear):
        fc.weight.zero_()
        fc.weight[:, -fc.weight.shape[0] :].fill_diagonal_(1.0)
        if fc.bias is not None:
            fc.bias.zero_()


def set_vocabulary(draft: Draft, vocab_ids: Tensor | None) -> None:
    """Write d2t and t2d for the target ids [D] that the draft can propose.

    Raises:
        ArchspecError: the ids are missing, not D of them, not rising, or beyond the target's vocabulary.
    """
    size, target_size = draft.spec.head.vocab_size, draft.spec.target.vocab_size
    if vocab_ids is None:
        raise ArchspecError(
            f"a draft vocabulary of {size} of {target_size} tokens needs token counts to choose them by"
        )
    low, high = (int(vocab_ids.min()), int(vocab_ids.max())) if len(vocab_ids) else (-1, -1)
    if len(vocab_ids) != size or low < 0 or high >= target_size or bool((vocab_ids.diff() <= 0).any()):
        got = f"{len(vocab_ids)} ids from {low} to {high}"
        raise ArchspecError(f"the draft vocabulary must be {size} rising token ids below {target_size}, but got {got}")
    assert draft.d2t is not None
    assert draft.t2d is not None
    draft.d2t.copy_(vocab_ids - torch.arange(size, device=vocab_ids.device))
    draft.t2d.zero_()[vocab_ids] = True


def _principal_directions(rows_VH: Tensor, width: int) -> Tensor:
    """The rows in the basis of their ``width`` leading principal directions, padded with zeros if there are fewer."""
    _, basis = torch.linalg.eigh(rows_VH.T @ rows_VH)
    projected = rows_VH @ basis.flip(-1)[:, :width]
    return torch.nn.functional.pad(projected, (0, width - projected.shape[1]))
