"""The original EAGLE-1 and EAGLE-2 layout: ``layers.N.*`` behind one fusing ``fc``, without norms around it.

Embedding and the target's last normed state go through ``fc``; layer 0 has no norm before attention; there is no final
norm; head and final norm are the target's own, so a checkpoint holds neither.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from archspec.facts import TargetFacts
from archspec.foreign_config import LlamaKeys, attention_data, target_of
from archspec.layouts import Layout, unpack
from archspec.resolve import ResolvedSpec
from archspec.schema import Document

LAYOUT = Layout("EAGLE-1", lambda i: f"layers.{i}")
FROM_TARGET = ("lm_head.weight", "inputs.norms.0.weight")


def read(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: TargetFacts | None, source: str
) -> tuple[ResolvedSpec, dict[str, Tensor]]:
    """Spec and state dict from a config dict and tensors under the layout's names; ``source`` is named in messages.

    The state lacks ``FROM_TARGET``, which the caller takes from the target.

    Raises:
        ArchspecError: the config describes no such draft, or a tensor is missing, extra or misshapen.
    """
    keys = Document(config, source).validate(LlamaKeys)
    facts = target_of(config, target, source)
    deeper = {
        "fusion": "none",
        "attention": attention_data(keys),
        "mlp": {"intermediate_size": keys.intermediate_size},
    }
    first = {
        "fusion": "project",
        "fusion_bias": "fc.bias" in tensors,
        "attention": attention_data(keys, norm="none"),
        "mlp": {"intermediate_size": keys.intermediate_size},
    }
    data = {
        "name": "eagle1",
        "inputs": {"aux_layers": (facts.num_layers,), "norm": "target", "projection": "none"},
        "hidden_size": keys.hidden_size,
        "layers": [first, *[deeper] * (keys.num_hidden_layers - 1)],
        "head": {"vocab_size": keys.vocab_size, "weights": "target", "norm": "none"},
        "rope_theta": keys.theta,
        "norm_eps": keys.rms_norm_eps,
        "target": facts,
    }
    spec = Document(data, source).validate(ResolvedSpec)
    return spec, unpack(spec, LAYOUT, tensors, source, absent=FROM_TARGET)
