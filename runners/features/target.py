"""The frozen target: loading it, its dimensions, its hidden states under our layer ids, and its fingerprint.

Shapes: B batch, T positions, H hidden size, V vocabulary. Layer ids follow the design: 0 is the embedding output, i the
output of layer i counted from 1, n the last layer's output before the final norm.
"""

import hashlib
import inspect
import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from archspec.errors import ArchspecError, nearest
from archspec.facts import TargetFacts
from archspec.rope import Rope, rope_keys, target_rope
from runners.features.frozen import FrozenWeights, freeze
from runners.features.gguf_header import as_written, gguf_facts, gguf_rope
from runners.features.locate import Location, find_packaged_gguf, locate
from runners.features.onednn import linear, use_onednn

__all__ = ["FrozenWeights", "Target", "find_packaged_gguf", "load_target", "target_facts"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NORM_NAMES = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "final_norm", "norm_f")
_SAMPLES_PER_TENSOR = 4096


class Target:
    """A transformers causal LM in eval mode without gradients, read through our layer ids.

    Args:
        model: the causal LM; its parameters are frozen here.
        tokenizer: a fast tokenizer, with the chat template.
        path: where it was loaded from, for messages and records.

    Raises:
        ArchspecError: the model's decoder layers, final norm or head cannot be found.
    """

    def __init__(self, model: Any, tokenizer: Any, path: str) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.path = path
        self.facts = facts_of(model.config, path)
        self._decoder, self._layers, self._norm = _parts(model, self.facts.num_layers, path)
        self._cache_name = (
            "cache" if "cache" in inspect.signature(self._decoder.forward).parameters else "past_key_values"
        )

    @property
    def device(self) -> torch.device:
        """Where inputs belong: the device of the embeddings."""
        return self._embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """The type that states come in."""
        return self._embedding.dtype

    @property
    def _embedding(self) -> Tensor:
        embedding: Tensor = self.model.get_input_embeddings().weight
        return embedding

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a turn, from generation config, model config and tokenizer together."""
        found: set[int] = set()
        for source in (getattr(self.model, "generation_config", None), self.model.config, self.tokenizer):
            ids = getattr(source, "eos_token_id", None)
            found.update(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
        return frozenset(int(token) for token in found)

    @property
    def window(self) -> int | None:
        """How many tokens back some layers see at most, None if all see everything."""
        config = self.model.config.get_text_config()
        kinds = getattr(config, "layer_types", None)
        if kinds is None:
            used = getattr(config, "use_sliding_window", True)
            return getattr(config, "sliding_window", None) if used else None
        sizes = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
        found = [getattr(config, sizes[kind], None) for kind in set(kinds) & set(sizes)]
        return min((size for size in found if size is not None), default=None)

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits over the dimensions and a sample of every tensor; the same in every float type it loads in.

        Samples are rounded to bfloat16 first, so that one checkpoint loaded as float32 and as bfloat16 is one target.
        """
        digest = hashlib.sha256(json.dumps(self.facts.model_dump(), sort_keys=True).encode())
        for name, tensor in sorted(self.model.state_dict().items()):
            flat = tensor.detach().reshape(-1)
            step = max(1, flat.numel() // _SAMPLES_PER_TENSOR)
            sample = torch.cat([flat[:64], flat[::step], flat[-64:]]).cpu().to(torch.bfloat16)
            digest.update(f"{name}{tuple(tensor.shape)}".encode())
            digest.update(sample.view(torch.int16).numpy().tobytes())
        return digest.hexdigest()[:16]

    @cached_property
    def weights(self) -> FrozenWeights:
        """Embedding, final norm and head, proved once to give the model's own logits.

        Raises:
            ArchspecError: logits recomputed from the last state differ from the model's.
        """
        weights = freeze(
            self.model.get_input_embeddings(),
            self._norm,
            self.model.get_output_embeddings(),
            self.model.config.get_text_config(),
        )
        self._check(weights)
        return weights

    @torch.no_grad()
    def states(
        self,
        input_ids_BT: Tensor,
        layer_ids: Sequence[int],
        attention_mask_BT: Tensor | None = None,
        past_key_values: Any = None,
        position_ids: Tensor | None = None,
    ) -> dict[int, Tensor]:
        """Run the decoder stack, never the head, and return the states [B, T, H] of ``layer_ids``.

        States are taken by hooks at the layers, because transformers' own ``hidden_states[n]`` is already normed in
        some models. ``past_key_values`` is a transformers cache that this call extends.

        Raises:
            ArchspecError: a layer id outside 0 … n.
        """
        self.check_layers(layer_ids)
        wanted = set(layer_ids)
        found: dict[int, Tensor] = {}
        hooks = []
        if 0 in wanted:
            hooks.append(self._layers[0].register_forward_pre_hook(_keep_input(found), with_kwargs=True))
        hooks += [
            self._layers[layer_id - 1].register_forward_hook(_keep_output(found, layer_id)) for layer_id in wanted - {0}
        ]
        try:
            self._decoder(
                input_ids=input_ids_BT,
                attention_mask=attention_mask_BT,
                position_ids=position_ids,
                use_cache=past_key_values is not None,
                **{self._cache_name: past_key_values},
            )
        finally:
            for hook in hooks:
                hook.remove()
        return found

    def check_layers(self, layer_ids: Sequence[int]) -> None:
        """Refuse layer ids outside 0 … n.

        Raises:
            ArchspecError: naming the first bad id and the ids that exist.
        """
        if bad := sorted(layer for layer in layer_ids if not 0 <= layer <= self.facts.num_layers):
            raise ArchspecError(
                f"layer id {bad[0]}: must be 0 (embeddings) to {self.facts.num_layers} (last layer) "
                f"of target {self.path}"
            )

    def logits(self, last_BTH: Tensor) -> Tensor:
        """Return logits [..., V] for states [..., H] of layer n, with the model's scale and soft cap."""
        return self.weights.logits(last_BTH, linear=linear)

    @torch.no_grad()
    def _check(self, weights: FrozenWeights) -> None:
        ids = torch.arange(8, device=self.device).mul(37).remainder(self.facts.vocab_size)[None]
        own = self.model(input_ids=ids, use_cache=False).logits.float()
        last = self.facts.num_layers
        ours = weights.logits(self.states(ids, [last])[last]).float()
        error = float((own - ours).abs().max() / own.abs().max().clamp_min(1e-6))
        if error > (1e-4 if self.dtype == torch.float32 else 5e-2):
            raise ArchspecError(
                f"target {self.path}: logits recomputed from its last state differ from its own by "
                f"{error:.1e} of their size; {self.facts.model_type} does something after the last "
                "layer that is not supported"
            )


def load_target(model: str, dtype: str = "float32", device: str = "cpu", trust_remote_code: bool = False) -> Target:
    """Load a target from a folder, a ``.gguf`` file, ``package:NAME`` or a hub name.

    Raises:
        ArchspecError: it does not exist, is damaged or incomplete, is no causal LM, or has no usable tokenizer.
    """
    if dtype not in DTYPES:
        raise ArchspecError(f"target dtype {dtype!r}: {nearest(dtype, DTYPES)}")
    place = locate(model)
    options: dict[str, Any] = {"gguf_file": place.gguf} if place.gguf else {}
    options["trust_remote_code"] = trust_remote_code
    rope: Rope | str = "none"
    if place.gguf:
        rope = gguf_rope(Path(place.path))  # a damaged file is told at once
        _need_for_gguf(model, "gguf", "accelerate")
        if not isinstance(rope, str):
            options["config"] = _with_rope(_read_config(place, model, trust_remote_code), rope)
    else:
        _check_causal(_read_config(place, model, trust_remote_code), model, trust_remote_code)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        with _quiet():
            loaded, info = AutoModelForCausalLM.from_pretrained(
                place.folder, dtype=DTYPES[dtype], output_loading_info=True, **options
            )
        if missing := sorted(info.get("missing_keys", ())):
            raise ValueError(f"{len(missing)} weights are missing from the checkpoint, e.g. {missing[0]}")
        tokenizer = AutoTokenizer.from_pretrained(place.folder, **options)
    except Exception as error:  # damaged files raise whatever their reader raises
        raise ArchspecError(f"target {model}: cannot be loaded ({_first_line(error)})") from error
    target = Target(loaded.to(device), tokenizer, place.path)
    if rope != "none":
        target.facts = target.facts.model_copy(update={"rope_scaling": rope})
    use_onednn(target.model)
    return target


def target_facts(model: str, trust_remote_code: bool = False) -> TargetFacts:
    """Read a target's dimensions from ``config.json`` or the GGUF header, without its weights.

    Raises:
        ArchspecError: as :func:`load_target`, except for damage in the weights, which is not looked at.
    """
    place = locate(model)
    if place.gguf and (facts := gguf_facts(Path(place.path))) is not None:
        return facts
    config = _read_config(place, model, trust_remote_code)
    _check_causal(config, model, trust_remote_code)
    return facts_of(config, model)


def facts_of(config: Any, model: str) -> TargetFacts:
    """Translate a transformers config; ``model`` names it in messages.

    Positions in three parts (``mrope_section``) are plain ones for text, and are called so.
    """
    text = config.get_text_config()
    max_positions = _first(text, ["max_position_embeddings", "n_positions"], 4096)
    try:
        hidden, heads = int(text.hidden_size), int(text.num_attention_heads)
        return TargetFacts(
            model_type=str(text.model_type),
            hidden_size=hidden,
            num_layers=int(text.num_hidden_layers),
            vocab_size=int(text.vocab_size),
            heads=heads,
            kv_heads=int(_first(text, ["num_key_value_heads"], heads)),
            head_dim=int(_first(text, ["head_dim"], hidden // heads)),
            intermediate_size=int(_first(text, ["intermediate_size", "ffn_dim", "n_inner"], 4 * hidden)),
            rope_theta=as_written(_rope(text).get("rope_theta") or getattr(text, "rope_theta", None) or 10_000.0),
            rope_scaling=target_rope(_rope(text), max_positions),
            norm_eps=as_written(
                _first(text, ["rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps"], 1e-5)
            ),
            max_positions=int(max_positions),
        )
    except (AttributeError, TypeError, ValueError) as error:
        raise ArchspecError(
            f"target {model}: its config lacks a dimension that a draft needs ({_first_line(error)})"
        ) from error


def _first(config: Any, names: Sequence[str], default: Any) -> Any:
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if value is not None), default)


def _rope(config: Any) -> dict[str, Any]:
    """The rotary keys, those of full attention where kinds of attention differ."""
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if rope and all(isinstance(entry, dict) for entry in rope.values()):
        rope = rope.get("full_attention") or next(iter(rope.values()))
    return rope


def _with_rope(config: Any, rope: Rope) -> Any:
    """Transformers (5.24) leaves the scaling in a GGUF file of these architectures out, so the file's is put in."""
    config.rope_parameters = {**rope_keys(rope), "rope_theta": _rope(config)["rope_theta"]}
    return config


def _read_config(place: Location, model: str, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    options: dict[str, Any] = {"gguf_file": place.gguf} if place.gguf else {}
    if place.gguf:
        _need_for_gguf(model, "gguf")
    try:
        return AutoConfig.from_pretrained(place.folder, trust_remote_code=trust_remote_code, **options)
    except Exception as error:  # damaged files raise whatever their reader raises
        raise ArchspecError(f"target {model}: its config cannot be read ({_first_line(error)})") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' progress bars and load reports off the terminal; what matters in them is raised instead."""
    from transformers.utils import logging as transformers_logging

    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):  # the bar of GGUF conversion listens to nothing else
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def _need_for_gguf(model: str, *packages: str) -> None:
    for package in packages:
        if find_spec(package) is None:
            raise ArchspecError(
                f"target {model}: reading a GGUF file needs the package {package}; pip install {package}"
            )


def _check_causal(config: Any, model: str, trust_remote_code: bool) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return
    entry = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    known = {entry} if isinstance(entry, str) else set(entry or ())
    written = getattr(config, "architectures", None) or sorted(known)
    if not known.intersection(written):
        what = ", ".join(written) or config.model_type
        raise ArchspecError(
            f"target {model}: {what} is not a causal language model; "
            "a target must be one that AutoModelForCausalLM loads"
        )


def _parts(model: Any, num_layers: int, path: str) -> tuple[Any, nn.ModuleList, nn.Module]:
    """Return the decoder stack, its layers and its final norm."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    lists = [child for child in decoder.children() if isinstance(child, nn.ModuleList) and len(child) == num_layers]
    norms = [getattr(decoder, name) for name in _NORM_NAMES if isinstance(getattr(decoder, name, None), nn.Module)]
    if len(lists) != 1 or not norms or model.get_output_embeddings() is None:
        raise ArchspecError(
            f"target {path}: cannot tell the layers, final norm and head of {type(model).__name__} apart; "
            "this kind of model is not supported"
        )
    return decoder, lists[0], norms[0]


def _keep_input(found: dict[int, Tensor]) -> Any:
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found[0] = args[0] if args else kwargs["hidden_states"]

    return hook


def _keep_output(found: dict[int, Tensor], layer_id: int) -> Any:
    def hook(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        found[layer_id] = output[0] if isinstance(output, tuple) else output

    return hook


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0][:300]}"
