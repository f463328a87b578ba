"""What vLLM serves: a plain EAGLE-3 config with Llama layers, or Qwen3's where q and k are normed.

The norm before the attention of deeper layers is ``input_layernorm``. It is written a second time as ``hidden_norm``,
which vLLM loads and does not use and SGLang reads, so that one checkpoint serves both.
"""

from collections.abc import Collection

from archspec.format import Plain, renamed_norms
from archspec.limits import Holds
from archspec.resolve import ResolvedSpec


class Vllm(Plain):
    """See the module."""

    name, project = "vllm", "vLLM"
    short_alone = 0
    holds = Holds(project="vLLM", qk_norm=True, bias=True, window=True, embedding_id=True)

    def copies(self, spec: ResolvedSpec, /) -> dict[str, str]:
        """See the module."""
        return renamed_norms(spec, self.written, "hidden_norm")

    def absent(self, spec: ResolvedSpec, /) -> Collection[str]:
        """See ``Format.absent``; vLLM also takes the target's head where the draft has the whole vocabulary."""
        shares = spec.hidden_size == spec.target.hidden_size and not spec.reduced_vocab
        return (*super().absent(spec), "lm_head.weight") if shares else super().absent(spec)
