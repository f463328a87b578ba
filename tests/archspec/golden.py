"""Outputs of reference implementations: which draft made them, and the same computation by this project.

A golden is a JSON file beside a safetensors file of weights, inputs, outputs and gradients. Config and weight names are
mapped by the importers in ``archspec``; what is here is how each project pads, packs, shifts and weighs.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from archspec import checkpoints
from archspec.attention import Attention, ChainCache, UnrollMemory
from archspec.facts import TargetFacts
from archspec.formats import FORMATS
from archspec.layouts import Layout, tensor_names
from archspec.modules import Draft
from archspec.resolve import ResolvedLayer, ResolvedSpec
from archspec.unroll import unroll

AUX_KEY = "eagle_aux_hidden_state_layer_ids"


@dataclass
class Golden:
    """One reference run; ``kind`` is the project whose conventions it follows."""

    data: dict[str, Any]
    tensors: dict[str, Tensor]
    kind: str
    spec: ResolvedSpec
    state: dict[str, Tensor]
    layout: Layout

    @cached_property
    def draft(self) -> Draft:
        """The reference's draft, with every parameter open to gradients."""
        draft = checkpoints.assemble(self.spec, self.state)
        for parameter in draft.parameters():
            parameter.requires_grad_(True)
        return draft

    @cached_property
    def run(self) -> "Run":
        """The reference's computation by this project, made once."""
        return RUNS[self.kind](self)

    @property
    def names(self) -> dict[str, str]:
        """Name in the reference -> name of ours, for every tensor of the draft."""
        return {theirs: ours for ours, theirs in tensor_names(self.spec, self.layout).items()}


@dataclass
class Run:
    """``steps`` holds one dict of states for each draft step (``logits``, ``hidden``, …) in the reference's shapes."""

    projected: Tensor
    steps: list[dict[str, Tensor]]


def refusal(data: dict[str, Any]) -> str | None:
    """Why a golden holds no draft of the EAGLE-1/3 kind; None if it does."""
    if "classes" not in data:
        return "tables, not a draft"
    config = data.get("config_json_as_saved", data.get("config", {}))
    if "speculators_model_type" in config:
        kind = config["speculators_model_type"]
        return None if kind == "eagle3" else f"a draft of speculators' kind {kind}"
    model = data["classes"][0]
    return None if "Eagle3" in model or ".cnets" in model else f"a draft of class {model}"


def load(path: Path) -> Golden:
    """The golden of ``path``, mapped to a spec."""
    data = json.loads(path.read_text(encoding="utf-8"))
    tensors = load_file(path.with_suffix(".safetensors"))
    weights = {name.removeprefix("weight."): tensor for name, tensor in tensors.items() if name.startswith("weight.")}
    config = data.get("config_json_as_saved", data.get("config"))
    target = _target(config)
    if "lm_head.weight" not in weights:
        golden = _golden("eagle1", "eagle1", data, tensors, config, weights, target, path.stem)
        golden.state["lm_head.weight"] = tensors["input.target_lm_head.weight"]
        golden.state["inputs.norms.0.weight"] = torch.ones(target.hidden_size)
        return golden
    if not _aux_ids(config):
        count = weights["fc.weight"].shape[1] // target.hidden_size
        ids = [2, 8, 13] if count == 3 else list(range(1, count + 1))
        config = {**config, AUX_KEY: ids, "eagle_config": {AUX_KEY: [i - 1 for i in ids]}}
    if "speculators_model_type" in config:
        own = {name: tensor for name, tensor in weights.items() if not name.startswith("verifier_")}
        return _golden("speculators", "speculators", data, tensors, config, own, target, path.stem)
    kind = "specforge" if "runs" in data else "decoding"
    return _stacked_as_computed(_golden("specforge", kind, data, tensors, config, weights, target, path.stem))


def _golden(
    form: str,
    kind: str,
    data: dict[str, Any],
    tensors: dict[str, Tensor],
    config: dict[str, Any],
    weights: dict[str, Tensor],
    target: TargetFacts,
    source: str,
) -> Golden:
    spec, state = checkpoints.read(FORMATS[form], config, weights, target, source)
    return Golden(data, tensors, kind, spec, state, FORMATS[form].layout(weights))


def _stacked_as_computed(golden: Golden) -> Golden:
    """Of a stack of MLPs neither names nor config say whether a residual goes around each; the first logits do."""
    if all(layer.mlp.depth == 1 for layer in golden.spec.layers):
        return golden

    def with_residuals(layer: ResolvedLayer) -> ResolvedLayer:
        return layer.model_copy(update={"mlp": layer.mlp.model_copy(update={"residual": True, "norm": "shared"})})

    spec = golden.spec.model_copy(update={"layers": tuple(with_residuals(layer) for layer in golden.spec.layers)})
    other = Golden(golden.data, golden.tensors, golden.kind, spec, golden.state, golden.layout)
    first = golden.tensors["output.logits"][0]
    return min((golden, other), key=lambda g: float((g.run.steps[0]["logits"] - first).detach().abs().max()))


def _aux_ids(config: dict[str, Any]) -> list[int]:
    return config.get(AUX_KEY) or (config.get("eagle_config") or {}).get(AUX_KEY) or []


def _target(config: dict[str, Any]) -> TargetFacts:
    """A target for a reference that had none: of the draft's sizes where its config says nothing else."""
    sizes = config.get("transformer_layer_config", config)
    heads = sizes["num_attention_heads"]
    return TargetFacts(
        model_type="llama",
        hidden_size=config.get("target_hidden_size") or sizes["hidden_size"],
        num_layers=max(16, *_aux_ids(config), 0) + 1,
        vocab_size=sizes["vocab_size"],
        heads=heads,
        kv_heads=sizes.get("num_key_value_heads") or heads,
        head_dim=sizes.get("head_dim") or sizes["hidden_size"] // heads,
        intermediate_size=sizes["intermediate_size"],
    )


class Recorder:
    """What layers and attentions give while a draft runs, one entry a call."""

    def __init__(self, draft: Draft) -> None:
        self.seen: dict[str, list[Tensor]] = {}
        for i, layer in enumerate(draft.layers):
            layer.register_forward_hook(self._keep(f"layer{i}"))
            if i == 0 and isinstance(layer.attention, Attention):
                layer.attention.register_forward_hook(self._keep("attn"))

    def _keep(self, name: str) -> Callable[..., None]:
        return lambda module, arguments, output: self.seen.setdefault(name, []).append(output)


class PlainDeeperLayers(UnrollMemory):
    """Pull request 449 as written: layers after the first see this step's rows only, causally, at every step.

    Its positions do not advance there either, which changes nothing: only differences of positions within a step count.
    """

    def attend(self, layer: int, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, window: int | None) -> Tensor:
        if layer == 0 or self.step == 0:
            return super().attend(layer, q_BHTD, k_BKTD, v_BKTD, window)
        mask = self._mask(window, q_BHTD)[:, None]
        return F.scaled_dot_product_attention(q_BHTD, k_BKTD, v_BKTD, attn_mask=mask, enable_gqa=True)


class KeepingMemory(UnrollMemory):
    """Lets a test look at the last keys and values that came in, [B, K, T, D] each."""

    def attend(self, layer: int, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, window: int | None) -> Tensor:
        self.key, self.value = k_BKTD, v_BKTD
        return super().attend(layer, q_BHTD, k_BKTD, v_BKTD, window)


def _states(
    golden: Golden, tokens_BT: Tensor, aux_BTMh: Tensor, positions_BT: Tensor, allowed_BTT: Tensor
) -> Iterator[Tensor]:
    """``unroll``; by hand for the two references whose later steps deviate: #449, and a commit with fixed positions."""
    draft, steps = golden.draft, golden.data.get("ttt_length") or golden.data["ttt_steps"]
    fixed_positions = golden.data["source"].get("commit", "").startswith("c0ebfcfe")
    plain_deeper = golden.layout.layer(0) == "fuse_layer"
    if not fixed_positions and not plain_deeper:
        yield from unroll(draft, tokens_BT, aux_BTMh, steps, positions_BT=positions_BT, allowed_BTT=allowed_BTT)
        return
    memory = PlainDeeperLayers(allowed_BTT) if plain_deeper else UnrollMemory(allowed_BTT)
    u_BTh = draft.project(aux_BTMh)
    for step in range(steps):
        positions = positions_BT if fixed_positions else positions_BT + step
        state_BTh = draft(F.pad(tokens_BT, (0, step))[:, step:], u_BTh, positions, memory)
        yield state_BTh
        memory.next_step()
        u_BTh = draft.feed_back(state_BTh)


def _apart(golden: Golden, aux_BTA: Tensor) -> Tensor:
    """Aux states that a reference stores side by side, as [B, T, M, h_t]."""
    return aux_BTA.view(*aux_BTA.shape[:-1], -1, golden.spec.target.hidden_size)


def _run(golden: Golden, tokens_BT: Tensor, aux_BTA: Tensor, positions_BT: Tensor, allowed_BTT: Tensor) -> Run:
    draft = golden.draft
    recorder = Recorder(draft)
    aux_BTMh = _apart(golden, aux_BTA)
    steps = []
    for i, state in enumerate(_states(golden, tokens_BT, aux_BTMh, positions_BT, allowed_BTT)):
        inner = {name: calls[i] for name, calls in recorder.seen.items()}
        steps.append({"hidden": state, "normed": draft.read_out(state), "logits": draft.logits(state), **inner})
    return Run(draft.project(aux_BTMh), steps)


def _run_specforge(golden: Golden) -> Run:
    """Padded rows: keys of padding are hidden from every row, padding rows included."""
    given = golden.tensors
    tokens = given["input.forward.input_ids"]
    aux = given.get("input.batch.hidden_state", given.get("input.forward.hidden_states"))
    mask = given.get("input.batch.attention_mask", given.get("input.forward.attention_mask"))
    assert aux is not None
    assert mask is not None
    allowed = mask.bool()[:, None, :].expand(-1, tokens.shape[1], -1)
    return _run(golden, tokens, aux, torch.arange(tokens.shape[1])[None], allowed)


def _run_speculators(golden: Golden) -> Run:
    """One packed row: a document sees itself, padding rows see only themselves. Outputs have no batch dimension."""
    given = golden.tensors
    documents = given["input.batch.document_ids"]
    same = (documents[:, :, None] == documents[:, None, :]) & (documents != -1)[:, :, None]
    allowed = same | torch.eye(documents.shape[1], dtype=torch.bool)
    positions = given["input.batch.position_ids"]
    run = _run(golden, given["input.batch.input_ids"], given["input.batch.hidden_states"], positions, allowed)
    return Run(run.projected[0], [{name: state[0] for name, state in step.items()} for step in run.steps])


def _run_eagle1(golden: Golden) -> Run:
    """One step; the given hidden states are normed already, so they take the place of the projected ones."""
    given, draft = golden.tensors, golden.draft
    tokens, u_BTh = given["input.input_ids"], given["input.hidden_states"]
    allowed = given["input.attention_mask"].bool()[:, None, :].expand(-1, tokens.shape[1], -1)
    state = draft(tokens, u_BTh, torch.arange(tokens.shape[1])[None], UnrollMemory(allowed))
    return Run(u_BTh, [{"hidden": state, "logits": draft.logits(state)}])


def _run_prefill(golden: Golden) -> Run:
    """The first step of the original EAGLE-3's inference model."""
    given, draft = golden.tensors, golden.draft
    tokens, aux_BTA = given["input.prefill.input_ids"], given["input.prefill.hidden_states"]
    allowed = given["input.prefill.attention_mask"].bool()[:, None, :].expand(-1, tokens.shape[1], -1)
    u_BTh = draft.project(_apart(golden, aux_BTA))
    memory = KeepingMemory(allowed)
    state = draft(tokens, u_BTh, torch.arange(tokens.shape[1])[None], memory)
    return Run(u_BTh, [{"hidden": state, "logits": draft.logits(state), "key": memory.key, "value": memory.value}])


def decode_chain(golden: Golden, length: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Greedy (target id, state [h], logits [D]) of ``length`` draft steps after the golden's own prompt, with a cache.

    The prompt's first token has no state before it and is left out.
    """
    given, draft, cache = golden.tensors, golden.draft, ChainCache()
    tokens = given["input.tree.input_ids"][:, 1:]
    aux_BTMh = _apart(golden, given["input.tree.hidden_states"])
    state = draft(tokens, draft.project(aux_BTMh), torch.arange(tokens.shape[1])[None], cache)[:, -1:]
    for _ in range(length):
        logits = draft.logits(state)
        token = draft.target_ids(logits.argmax(-1))
        yield int(token), state[0, 0], logits[0, 0]
        state = draft(token, draft.feed_back(state), torch.tensor([[len(cache)]]), cache)


RUNS: dict[str, Callable[[Golden], Run]] = {
    "specforge": _run_specforge,
    "speculators": _run_speculators,
    "eagle1": _run_eagle1,
    "decoding": _run_prefill,
}
