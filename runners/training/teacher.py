"""The target's next-token distribution, recomputed from stored last states for the tokens that a draft can propose."""

from dataclasses import replace

import torch
from torch import Tensor

from runners.features.frozen import FrozenWeights


class Teacher:
    """Log-probabilities over the draft vocabulary V, renormalised, at any temperature; always computed in fp32.

    Tokens outside the draft vocabulary are left out of the distribution, not out of the loss: a row whose top token the
    draft cannot propose still teaches the order of the others (as speculators and ModelOpt do).
    """

    def __init__(self, weights: FrozenWeights, vocab_ids_V: Tensor | None = None, device: str = "cpu") -> None:
        rows, bias = weights.lm_head, weights.lm_head_bias
        if vocab_ids_V is not None:
            ids = vocab_ids_V.to(rows.device)
            rows, bias = rows[ids], None if bias is None else bias[ids]
        # A teacher reads no embeddings: naming the rows for them too keeps the target's own from being copied.
        chosen = replace(weights, embed_tokens=rows, lm_head=rows, lm_head_bias=bias)
        self._weights = chosen.to(device, torch.float32)
        self._device_type = torch.device(device).type

    def logits(self, last_PH: Tensor) -> Tensor:
        """Last states [P, h_t] -> logits [P, V] in fp32."""
        with torch.autocast(self._device_type, enabled=False):
            return self._weights.logits(last_PH.float())

    def log_probs(self, last_PH: Tensor, temperature: float = 1.0) -> Tensor:
        """Last states [P, h_t] -> log-probabilities [P, V] in fp32."""
        logits = self.logits(last_PH)
        if temperature != 1.0:
            logits /= temperature
        return logits.sub_(logits.logsumexp(-1, keepdim=True))
