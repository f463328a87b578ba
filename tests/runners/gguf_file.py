"""A whole GGUF file of a tiny Llama, as llama.cpp's converter writes one: metadata, a byte-level tokenizer, weights."""

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from tests.runners.tiny import tiny_tokenizer

Array = NDArray[np.float32]
_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def save_gguf(path: Path, model: Any, scaling: dict[str, Any] | None = None, divisors: Array | None = None) -> Path:
    """Save a Llama; ``scaling`` are keys below ``rope.scaling``, ``divisors`` the tensor ``rope_freqs.weight``."""
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    sizes = {
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "feed_forward_length": config.intermediate_size,
        "context_length": config.max_position_embeddings,
    }
    reals = {
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
    }
    scalings = {f"rope.scaling.{name}": value for name, value in (scaling or {}).items()}
    for name, value in {**sizes, **reals, **scalings}.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"llama.{name}", value)
    vocabulary = tiny_tokenizer().get_vocab()
    tokens = [*sorted(vocabulary, key=lambda token: vocabulary[token]), "ab"]
    tokens += [f"<{i}>" for i in range(config.vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, tensor in model.state_dict().items():
        writer.add_tensor(*_as_llama_cpp(name, tensor.detach().float().numpy(), config))
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _as_llama_cpp(name: str, values: Array, config: Any) -> tuple[str, Array]:
    """Its name, and the rows of q and k in the order of its rotation, which turns neighbours."""
    known = name.removesuffix(".weight")
    if known in _WHOLE:
        return f"{_WHOLE[known]}.weight", values
    _, _, layer, part = known.split(".", 3)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(_LAYER[part])
    if heads is not None:
        halves = values.reshape(heads, 2, -1, values.shape[1])
        values = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
    return f"blk.{layer}.{_LAYER[part]}.weight", values


def llama3_divisors(head_dim: int, theta: float, factor: float, low: float, high: float, original: int) -> Array:
    """What llama.cpp's converter makes of Llama 3.1's rule: by wavelengths, with its three cases."""
    divisors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * pair / head_dim)
        smooth = (original / wavelength - low) / (high - low)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, dtype=np.float32)
