"""speculators' EAGLE-3 layout (``Eagle3DraftModel``): ``layers.N.*``, sizes nested in ``transformer_layer_config``.

``norm_output`` means that the state after the final norm is fed back. ``norm_before_residual`` is written always, since
vLLM takes a missing one for true. The head is a frozen copy of the target's rows. Keys from speculators 0.9.0.
"""

from collections.abc import Mapping
from typing import Any

from archspec.errors import ArchspecError
from archspec.foreign_config import AUX_KEY, Choices, aux_layers_of, flag_of, input_norm_of, mapping_of
from archspec.format import Eagle3, layer_keys
from archspec.layouts import Layout
from archspec.limits import Holds
from archspec.resolve import ResolvedSpec

SPECULATIVE_TOKENS = 3
"""Tokens drafted in a cycle where the checkpoint itself is served; engines let the user say otherwise."""


class Speculators(Eagle3):
    """See the module."""

    name, project = "speculators", "speculators"
    holds = Holds(
        project="speculators",
        qk_norm=True,
        bias=True,
        biased_qk_norm=True,
        window=True,
        mixed_windows=True,
        embedding_id=True,
        other_width=False,
    )
    written = Layout(lambda i: f"layers.{i}")

    def config(self, spec: ResolvedSpec, verifier: str | None = None) -> dict[str, Any]:
        """See ``Format.config``. The count of aux layers stands where vLLM looks for it, among the sizes."""
        ids = list(spec.inputs.aux_layers)
        return {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.9.0",
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [
                    {
                        "proposal_type": "greedy",
                        "speculative_tokens": SPECULATIVE_TOKENS,
                        "verifier_accept_k": 1,
                        "accept_tolerance": 0.0,
                    }
                ],
                "verifier": {"name_or_path": verifier, "architectures": []},
            },
            "transformer_layer_config": {**layer_keys(spec), "num_aux_hidden_states": len(ids)},
            "draft_vocab_size": spec.head.vocab_size,
            "target_hidden_size": None,
            AUX_KEY: ids,
            "fc_norm": spec.inputs.norm == "each",
            "norm_before_fc": spec.inputs.norm == "joint",
            "norm_before_residual": spec.layers[0].residual_from == "normed",
            "norm_output": spec.feedback == "post_norm",
            "embed_requires_grad": spec.embedding == "trained",
            "tie_word_embeddings": False,
        }

    def sizes(self, config: Mapping[str, Any], source: str, /) -> Mapping[str, Any]:
        """See ``Eagle3.sizes``."""
        outside = {key: config.get(key) for key in ("draft_vocab_size", "target_hidden_size")}
        return {**mapping_of(config, "transformer_layer_config", source), **outside}

    def choices(self, config: Mapping[str, Any], source: str) -> Choices:
        """See ``Eagle3.choices``."""
        kind = config.get("speculators_model_type")
        if kind != "eagle3":
            raise ArchspecError(f"{source}: speculators_model_type = {kind!r}: only eagle3 drafts can be read")
        return Choices(
            aux_layers=aux_layers_of(config, source),
            input_norm=input_norm_of(config, source),
            residual_from="normed" if flag_of(config, "norm_before_residual", True, source) else "raw",
            feedback="post_norm" if flag_of(config, "norm_output", False, source) else "pre_norm",
            embedding="trained" if flag_of(config, "embed_requires_grad", False, source) else None,
            frozen_head=True,
        )
