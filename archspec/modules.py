"""The draft as torch modules, from the whole down to the parts; ``archspec.builder`` puts them together from a spec.

Shapes: B batch, T rows, M aux layers, E embedding width (= h), W stream width (h or 2h), V draft vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from archspec.attention import Attention, Memory
from archspec.resolve import ResolvedSpec


class Draft(nn.Module):
    """A draft model: reads the next token's embedding and a state, gives the state from which the head proposes.

    ``d2t`` holds offsets (target id = draft id + d2t[draft id]), ``t2d`` the mask of target ids that the draft has;
    both are None with a full vocabulary.
    """

    d2t: Tensor | None
    t2d: Tensor | None

    def __init__(
        self,
        spec: ResolvedSpec,
        *,
        embed_tokens: nn.Embedding,
        inputs: "Inputs",
        rotaries: nn.ModuleDict,
        layers: "list[DraftLayer]",
        narrow: nn.Module,
        norm: nn.Module,
        lm_head: nn.Linear,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.embed_tokens, self.inputs, self.rotaries = embed_tokens, inputs, rotaries
        self.layers = nn.ModuleList(layers)
        self.narrow, self.norm, self.lm_head = narrow, norm, lm_head
        ids = torch.arange(spec.head.vocab_size)
        self.register_buffer("d2t", torch.zeros_like(ids) if spec.reduced_vocab else None)
        self.register_buffer("t2d", torch.arange(spec.target.vocab_size) < len(ids) if spec.reduced_vocab else None)

    def project(self, aux_BTMh: Tensor) -> Tensor:
        """The target's aux states [B, T, M, h_t] -> the first state u [B, T, h]."""
        u_BTh: Tensor = self.inputs(aux_BTMh)
        return u_BTh

    def forward(self, tokens_BT: Tensor, u_BTh: Tensor, positions_BT: Tensor, memory: Memory) -> Tensor:
        """One draft step: the state [B, T, h] before the final norm.

        ``tokens`` are target ids, ``u`` is the projected state or the state fed back from the step before, and
        ``positions`` [B or 1, T] are rotary positions.
        """
        e_BTE = self.embed_tokens(tokens_BT)
        rotary = {size: rotary(positions_BT) for size, rotary in self.rotaries.items()}
        x_BTW = u_BTh
        for layer in self.layers:
            x_BTW = layer(e_BTE, x_BTW, rotary, memory)
        state_BTh: Tensor = self.narrow(x_BTW)
        return state_BTh

    def feed_back(self, state_BTh: Tensor) -> Tensor:
        """What the next draft step reads as its ``u``."""
        return self.read_out(state_BTh) if self.spec.feedback == "post_norm" else state_BTh

    def read_out(self, state_BTh: Tensor) -> Tensor:
        """The head's input: the state after the final norm, if the draft has one."""
        normed: Tensor = self.norm(state_BTh)
        return normed

    def logits(self, state_BTh: Tensor) -> Tensor:
        """Logits over the draft vocabulary, [..., V]."""
        logits: Tensor = self.lm_head(self.read_out(state_BTh))
        return logits

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Target token ids of draft token ids, any shape."""
        return draft_ids if self.d2t is None else draft_ids + self.d2t[draft_ids]

    @property
    def vocab_ids(self) -> Tensor:
        """Target id of every draft id, [V], rising."""
        return self.target_ids(torch.arange(self.spec.head.vocab_size, device=self.lm_head.weight.device))

    def trainable_parameters(self) -> list[nn.Parameter]:
        """Parameters that training changes, in a fixed order."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]


class Inputs(nn.Module):
    """Norm and join the aux states, then project them to the draft's width."""

    def __init__(self, *, norms: list[nn.Module], joint_norm: nn.Module, fc: nn.Module) -> None:
        super().__init__()
        self.norms = nn.ModuleList(norms)
        self.joint_norm, self.fc = joint_norm, fc

    def forward(self, aux_BTMh: Tensor) -> Tensor:
        """[B, T, M, h_t] -> [B, T, h]."""
        if self.norms:
            aux_BTMh = torch.stack([norm(aux_BTMh[..., i, :]) for i, norm in enumerate(self.norms)], dim=-2)
        u_BTh: Tensor = self.fc(self.joint_norm(aux_BTMh.flatten(-2)))
        return u_BTh


class DraftLayer(nn.Module):
    """One draft layer: fuse the embedding, attend, then the MLPs.

    Parts that a spec leaves out are ``nn.Identity``. ``concat`` and ``widen`` say what is concatenated: what attention
    reads, and the residual of an h-wide stream that leaves 2h wide.
    """

    def __init__(
        self,
        *,
        project: nn.Module | None,
        embed_norm: nn.Module,
        state_norm: nn.Module,
        concat: bool,
        embed_map: nn.Module | None,
        attention: Attention | None,
        normed_residual: bool,
        widen: bool,
        residual_map: nn.Module,
        mlps: "MlpStack | nn.Identity",
    ) -> None:
        super().__init__()
        self.project, self.embed_map, self.attention = project, embed_map, attention
        self.embed_norm, self.state_norm, self.residual_map, self.mlps = embed_norm, state_norm, residual_map, mlps
        self.concat, self.normed_residual, self.widen = concat, normed_residual, widen

    def forward(self, e_BTE: Tensor, x_BTW: Tensor, rotary: dict[str, tuple[Tensor, Tensor]], memory: Memory) -> Tensor:
        """Embedding [B, T, E] and stream [B, T, W_in] -> stream [B, T, W_out]."""
        if self.project is not None:
            x_BTW = self.project(torch.cat((e_BTE, x_BTW), dim=-1))
        if self.attention is None:
            x_BTW = self.residual_map(x_BTW)
        else:
            read, residual = self._read(e_BTE, x_BTW)
            x_BTW = residual + self.attention(read, rotary[str(self.attention.head_dim)], memory)
        out_BTW: Tensor = self.mlps(x_BTW)
        return out_BTW

    def _read(self, e_BTE: Tensor, x_BTW: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads, and the residual that its output is added to."""
        e_normed, x_normed = self.embed_norm(e_BTE), self.state_norm(x_BTW)
        if self.concat:
            read = torch.cat((e_normed, x_normed), dim=-1)
        elif self.embed_map is not None:
            read = x_normed + self.embed_map(e_normed)
        else:
            read = x_normed
        e_kept, x_kept = (e_normed, x_normed) if self.normed_residual else (e_BTE, x_BTW)
        return read, torch.cat((e_kept, x_kept), dim=-1) if self.widen else self.residual_map(x_kept)


class RmsNorm(nn.RMSNorm):
    """RMSNorm in its weight's precision, whatever autocast made of the input."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        return super().forward(x.to(self.weight.dtype))


class MlpStack(nn.Module):
    """Gated MLPs in a row: a residual around each, or one around a bare stack."""

    def __init__(self, norms: list[nn.Module], mlps: "list[GatedMlp]", *, residual: bool) -> None:
        super().__init__()
        self.norms, self.mlps, self.residual = nn.ModuleList(norms), nn.ModuleList(mlps), residual

    def forward(self, x_BTW: Tensor) -> Tensor:
        """[B, T, W] -> [B, T, W]. With fewer norms than MLPs the only norm is shared."""
        if self.residual:
            for i, mlp in enumerate(self.mlps):
                x_BTW = x_BTW + mlp(self.norms[min(i, len(self.norms) - 1)](x_BTW))
            return x_BTW
        inner: Tensor = self.norms[0](x_BTW)
        for mlp in self.mlps:
            inner = mlp(inner)
        return x_BTW + inner


class GatedMlp(nn.Module):
    """``down(silu(gate(x)) * up(x))``, without biases."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x_BTW: Tensor) -> Tensor:
        """[B, T, width] -> [B, T, width]."""
        out_BTW: Tensor = self.down_proj(F.silu(self.gate_proj(x_BTW)) * self.up_proj(x_BTW))
        return out_BTW
