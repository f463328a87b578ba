"""The part of a target that training needs after capture: embeddings, final norm and head, without the model.

Shapes: B batch, T positions, H hidden size of the target, V vocabulary, R chosen rows of the vocabulary.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn

from archspec.errors import ArchspecError
from archspec.files import save_tensors

NormKind = Literal["rms", "layer"]
Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class FrozenWeights:
    """What turns the target's last state into its logits, and its token embeddings.

    ``embed_tokens`` and ``lm_head`` are [V, H] and the same tensor where the target ties them. ``norm_weight`` is the
    factor that is really applied: for norms that store ``w`` and apply ``1 + w`` it holds ``1 + w``.
    ``reads_normed`` says that the last states at hand went through the final norm already; it belongs to the states, so
    it is the store that sets it, and it is not saved.
    """

    embed_tokens: Tensor
    lm_head: Tensor
    norm_weight: Tensor
    norm_eps: float
    norm_kind: NormKind = "rms"
    norm_bias: Tensor | None = None
    lm_head_bias: Tensor | None = None
    logit_scale: float = 1.0
    softcap: float | None = None
    reads_normed: bool = False

    @property
    def tied(self) -> bool:
        """Whether embedding and head share one tensor."""
        return self.lm_head is self.embed_tokens

    def normed(self, last: Tensor) -> Tensor:
        """Apply the final norm to states [..., H] taken before it; the mean is taken in float32."""
        x = last.float()
        if self.norm_kind == "layer":
            x = x - x.mean(-1, keepdim=True)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.norm_eps)
        x = x.to(self.norm_weight.dtype) * self.norm_weight
        return x if self.norm_bias is None else x + self.norm_bias

    def logits(self, last: Tensor, rows: Tensor | None = None, linear: Linear = nn.functional.linear) -> Tensor:
        """Return the target's logits [..., V] for last states [..., H], normed first unless ``reads_normed``.

        ``rows`` [R] int64 picks vocabulary entries; the result is then [..., R], in that order. ``linear`` multiplies.
        """
        head, bias = self.lm_head, self.lm_head_bias
        if rows is not None:
            head, bias = head[rows], None if bias is None else bias[rows]
        normed = last if self.reads_normed else self.normed(last)
        logits = linear(normed.to(head.dtype), head, bias)
        logits = logits if self.logit_scale == 1 else logits * self.logit_scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "FrozenWeights":
        """Return a copy on ``device`` (and in ``dtype``); tied tensors stay tied."""

        def move(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device=device, dtype=dtype or tensor.dtype)

        embed = self.embed_tokens.to(device=device, dtype=dtype or self.embed_tokens.dtype)
        head = embed if self.tied else self.lm_head.to(device=device, dtype=dtype or self.lm_head.dtype)
        norm = self.norm_weight.to(device=device, dtype=dtype or self.norm_weight.dtype)
        return FrozenWeights(
            embed_tokens=embed,
            lm_head=head,
            norm_weight=norm,
            norm_eps=self.norm_eps,
            norm_kind=self.norm_kind,
            norm_bias=move(self.norm_bias),
            lm_head_bias=move(self.lm_head_bias),
            logit_scale=self.logit_scale,
            softcap=self.softcap,
            reads_normed=self.reads_normed,
        )

    def save(self, path: Path) -> None:
        """Write one safetensors file; a tied head is written once."""
        tensors = {"embed_tokens": self.embed_tokens, "norm_weight": self.norm_weight}
        if not self.tied:
            tensors["lm_head"] = self.lm_head
        if self.norm_bias is not None:
            tensors["norm_bias"] = self.norm_bias
        if self.lm_head_bias is not None:
            tensors["lm_head_bias"] = self.lm_head_bias
        numbers = {
            "norm_eps": self.norm_eps,
            "norm_kind": self.norm_kind,
            "logit_scale": self.logit_scale,
            "softcap": self.softcap,
        }
        save_tensors(
            path, {name: tensor.detach().cpu() for name, tensor in tensors.items()}, {"frozen": json.dumps(numbers)}
        )

    @classmethod
    def load(cls, path: Path) -> Self:
        """Memory-map a file that :meth:`save` wrote.

        Raises:
            ArchspecError: the file is missing, damaged, or not one of ours.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(path), framework="pt") as file:
                numbers = json.loads((file.metadata() or {})["frozen"])
                names = file.keys()
                tensors = {name: file.get_tensor(name) for name in names}
            tensors.setdefault("lm_head", tensors["embed_tokens"])
            return cls(**tensors, **numbers)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ArchspecError(
                f"{path}: not a readable file of frozen target weights ({error}); capture again into a new folder"
            ) from error


def freeze(embed_tokens: nn.Module, norm: nn.Module, lm_head: nn.Module, config: Any) -> FrozenWeights:
    """Take embedding, final norm and head of a transformers model as plain tensors.

    ``config`` is the text config; it holds the logit scale (Cohere ``logit_scale`` multiplies, Granite
    ``logits_scaling`` divides) and Gemma's ``final_logit_softcapping``.

    Raises:
        ArchspecError: the final norm is neither an RMSNorm, a ``1 + w`` RMSNorm nor a LayerNorm.
    """
    embed_weight, head_weight = _parameter(embed_tokens, "weight"), _parameter(lm_head, "weight")
    assert embed_weight is not None
    assert head_weight is not None
    tied = embed_weight.data_ptr() == head_weight.data_ptr() and embed_weight.shape == head_weight.shape
    kind, weight, eps = _norm_terms(norm, embed_weight)
    softcap = getattr(config, "final_logit_softcapping", None)
    return FrozenWeights(
        embed_tokens=embed_weight,
        lm_head=embed_weight if tied else head_weight,
        norm_weight=weight,
        norm_eps=eps,
        norm_kind=kind,
        norm_bias=_parameter(norm, "bias"),
        lm_head_bias=_parameter(lm_head, "bias"),
        logit_scale=float(getattr(config, "logit_scale", None) or 1.0)
        / float(getattr(config, "logits_scaling", None) or 1.0),
        softcap=None if softcap is None else float(softcap),
    )


def _parameter(module: nn.Module, name: str) -> Tensor | None:
    parameter = getattr(module, name, None)
    return parameter.detach() if isinstance(parameter, Tensor) else None


def _norm_terms(norm: nn.Module, like: Tensor) -> tuple[NormKind, Tensor, float]:
    """Find kind, effective weight [H] and epsilon of ``norm`` by trying each kind on a probe state."""
    stored = _parameter(norm, "weight")
    eps = next(
        (
            float(getattr(norm, name))
            for name in ("variance_epsilon", "eps", "epsilon")
            if isinstance(getattr(norm, name, None), float)
        ),
        1e-6,
    )
    size = like.shape[1]
    probe = torch.linspace(-2.0, 3.0, size, device=like.device).sin().mul(3.0).add(0.5).to(like.dtype)[None]
    with torch.no_grad():
        expected = norm(probe).float()
    ones = torch.ones(size, device=like.device, dtype=like.dtype)
    weights = [ones] if stored is None else [stored, 1.0 + stored.float()]
    tolerance = 1e-4 if like.dtype == torch.float32 else 3e-2
    for weight in weights:
        for kind in get_args(NormKind):
            trial = FrozenWeights(like, like, weight, eps, kind, _parameter(norm, "bias"))
            if torch.allclose(trial.normed(probe).float(), expected, rtol=tolerance, atol=tolerance):
                return kind, weight, eps
    raise ArchspecError(
        f"the target's final norm {type(norm).__name__} is not an RMSNorm or LayerNorm that can be "
        "recomputed from stored states; this target is not supported"
    )
