"""Small real parts for tests: a byte-level tokenizer with a ChatML template, and causal LMs with random weights."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from runners.features.conversations import Conversation, Message, content_id
from runners.features.target import Target

START, END, TEXT_END = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
SYSTEM = "You are a small test."
CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    + SYSTEM
    + "<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """One token a byte, then three special tokens; ids 0 to 2 are the special ones, as in SmolLM2."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([TEXT_END, START, END, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([TEXT_END, START, END])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=START, eos_token=END, unk_token=TEXT_END)
    fast.chat_template = template
    return fast


def tiny_config(**changes: Any) -> LlamaConfig:
    """Three layers, 32 wide, 4 heads over 2 key-value heads, 264 tokens, tied head."""
    sizes = {
        "vocab_size": 264,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    return LlamaConfig(**{**sizes, **changes})


def tiny_model(config: Any | None = None, seed: int = 0) -> Any:
    """A causal LM with random weights; norms are randomised too, so that a norm left out shows."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config or tiny_config())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_" in name:
                parameter.add_(torch.rand_like(parameter))
    return model.eval()


@cache
def tiny_target(seed: int = 0) -> Target:
    """A target around :func:`tiny_model`; shared, so do not change it."""
    return Target(tiny_model(seed=seed), tiny_tokenizer(), f"tiny-{seed}")


def save_tiny(folder: Path, seed: int = 0) -> Path:
    """Write the tiny target as a model folder."""
    target = tiny_target(seed)
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return folder


def conversation(
    *turns: str, system: str | None = None, category: str | None = None, name: str | None = None
) -> Conversation:
    """Turns alternate between user and assistant, the user first."""
    roles = ("user", "assistant")
    messages = [Message(role="system", content=system)] if system else []
    messages += [Message(role=roles[index % 2], content=text) for index, text in enumerate(turns)]
    return Conversation(id=name or content_id(messages), category=category, messages=tuple(messages))
