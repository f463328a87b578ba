"""Chat templates that behave as those of known families do, written for the tests, and a tokenizer for each.

``{% generation %}`` markers stand in all of them; some leave the closing token out, some go past it. Without markers
the same text is written.
"""

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from runners.features.chat import Tokenized
from runners.features.conversations import Conversation, parse_row


@dataclass(frozen=True)
class Family:
    """``specials`` are one token each; any other byte is a token of its own. The last of ``specials`` ends a text."""

    template: str
    specials: tuple[str, ...]
    bos: str | None = None


@cache
def family_tokenizer(family: Family, marked: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer with the family's template, with or without its markers."""
    words = [*family.specials, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(family.specials))
    named = {"eos_token": family.specials[-1]} | ({"bos_token": family.bos} if family.bos else {})
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)
    fast.chat_template = family.template if marked else re.sub(r"{% (end)?generation %}", "", family.template)
    return fast


# Content is trimmed; calls follow a tag and end with a token of their own; results come from "ipython".
LLAMA3 = Family(
    "{% macro head(role) %}{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}{% endmacro %}"
    "{{ bos_token }}{% set first = messages[0].content if messages[0].role == 'system' else '' %}"
    "{{ head('system') + 'Cutting Knowledge.\n' + first | trim + '<|eot_id|>' }}"
    "{% for m in messages %}{% if m.role == 'assistant' and 'tool_calls' in m %}"
    "{% set f = m.tool_calls[0].function %}"
    "{{ head('assistant') }}{% generation %}{{ '<|python_tag|>{\"name\": \"' + f.name + '\", \"parameters\": ' }}"
    "{{ f.arguments | tojson + '}' }}{% endgeneration %}{{ '<|eom_id|>' }}"
    "{% elif m.role == 'assistant' %}"
    "{{ head('assistant') }}{% generation %}{{ m.content | trim }}{% endgeneration %}{{ '<|eot_id|>' }}"
    "{% elif m.role == 'tool' %}{{ head('ipython') + m.content | tojson + '<|eot_id|>' }}"
    "{% elif not (loop.first and m.role == 'system') %}{{ head(m.role) + m.content | trim + '<|eot_id|>' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ head('assistant') }}{% endif %}",
    ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>", "<|eom_id|>", "<|eot_id|>"),
    bos="<|begin_of_text|>",
)

# Thoughts are kept after the last question only, where an answer without any gets an empty block; results in a row
# share one user turn. The markers go past the closing token.
QWEN3 = Family(
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% if tools or messages[0].role == 'system' %}{{ '<|im_start|>system\n' }}"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    "{% for tool in tools or [] %}{{ '\n' + tool | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' or m.role == 'system' and not loop.first %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% elif m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}{% generation %}"
    "{% set text = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% if m.reasoning_content is string %}{% set thought = m.reasoning_content %}"
    "{% elif '</think>' in m.content %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% else %}{% set thought = '' %}{% endif %}"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}{{ text }}"
    "{% for call in m.tool_calls or [] %}{% if text or not loop.first %}{{ '\n' }}{% endif %}"
    '{{ \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson + '}\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endgeneration %}"
    "{% elif m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    ("<|im_start|>", "<|im_end|>"),
)

# The system prompt is folded into the first question, roles must alternate, and there are no tools.
GEMMA = Family(
    "{{ bos_token }}{% set ns = namespace(lead='', rest=messages) %}{% if messages[0].role == 'system' %}"
    "{% set ns.lead = messages[0].content + '\n\n' %}{% set ns.rest = messages[1:] %}{% endif %}"
    "{% for m in ns.rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'assistant' %}{{ '<start_of_turn>model\n' }}"
    "{% generation %}{{ m.content | trim + '<end_of_turn>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ '<start_of_turn>user\n' + (ns.lead if loop.first else '') + m.content | trim }}"
    "{{ '<end_of_turn>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
    ("<bos>", "<start_of_turn>", "<end_of_turn>", "<eos>"),
    bos="<bos>",
)

# System prompt and tools stand before the last question, wherever that is; there is no generation prompt.
MISTRAL = Family(
    "{{ bos_token }}{% set ns = namespace(last=0, system='') %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% elif m.role == 'system' %}{% set ns.system = m.content + '\n\n' %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set final = loop.index0 == ns.last %}"
    "{% if tools and final %}{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{{ '[INST] ' + (ns.system if final else '') + m.content + '[/INST]' }}"
    "{% elif m.tool_calls %}{% generation %}{{ '[TOOL_CALLS][' }}{% for call in m.tool_calls %}"
    "{% if call.id is not defined or call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
    "{{ call.function | tojson }}{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}"
    "{{ ']' }}{% endgeneration %}{{ eos_token }}"
    "{% elif m.role == 'assistant' %}{% generation %}{{ ' ' + m.content }}{% endgeneration %}{{ eos_token }}"
    "{% elif m.role == 'tool' %}"
    '{{ \'[TOOL_RESULTS]{"content": \' + m.content | tojson + \', "call_id": "\' + m.tool_call_id }}'
    "{{ '\"}[/TOOL_RESULTS]' }}{% endif %}{% endfor %}",
    (
        *("<s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
        *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "</s>"),
    ),
    bos="<s>",
)

# Calls stand between special tokens; the end of the text follows the last closing token at once.
PHI = Family(
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}"
    "{% if loop.first and tools %}{{ '<|tool|>' + tools | tojson + '<|/tool|>' }}{% endif %}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% if m.tool_calls %}{{ '<|tool_call|>[' }}"
    "{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}{{ ']<|/tool_call|>' }}{% endif %}"
    "{{ '<|end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}",
    (
        *("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|/tool|>", "<|tool_call|>", "<|/tool_call|>"),
        *("<|end|>", "<|endoftext|>"),
    ),
)

# Thoughts, calls and answers are messages in channels of their own; thoughts stay only while no answer follows, and
# the last answer is closed by another token than the earlier ones.
GPT_OSS = Family(
    "{{ '<|start|>system<|message|>Small.<|end|>' }}{% set ns = namespace(answer=-1, call='') %}"
    "{% for m in messages %}{% if m.role == 'assistant' and not m.tool_calls %}"
    "{% set ns.answer = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}{{ '<|start|>assistant' }}{% generation %}"
    "{% if m.thinking and loop.index0 >= ns.answer and not (add_generation_prompt and not m.tool_calls) %}"
    "{{ '<|channel|>analysis<|message|>' + m.thinking + '<|end|><|start|>assistant' }}{% endif %}"
    "{% if m.tool_calls %}{% set call = m.tool_calls[0].function %}{% set ns.call = call.name %}"
    "{{ ' to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}"
    "{{ call.arguments | tojson + '<|call|>' }}"
    "{% else %}{{ '<|channel|>final<|message|>' + m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}{% endgeneration %}"
    "{% elif m.role == 'tool' %}"
    "{% if not ns.call %}{{ raise_exception('a result needs a call') }}{% endif %}"
    "{{ '<|start|>functions.' + ns.call + ' to=assistant<|channel|>commentary<|message|>' }}"
    "{{ m.content | tojson + '<|end|>' }}"
    "{% else %}{{ '<|start|>' + ('user' if m.role == 'user' else 'developer') + '<|message|>' + m.content }}"
    "{{ '<|end|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}",
    ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
)

# A default system prompt, and neither tools nor thoughts.
SMOLLM2 = Family(
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "{{ '<|im_start|>system\nDefault.<|im_end|>\n' }}{% endif %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    ("<|im_start|>", "<|im_end|>"),
)

FAMILIES = {
    "llama3": LLAMA3,
    "qwen3": QWEN3,
    "gemma": GEMMA,
    "mistral": MISTRAL,
    "phi": PHI,
    "gpt_oss": GPT_OSS,
    "smollm2": SMOLLM2,
}


def chat(*turns: dict[str, Any], **more: Any) -> Conversation:
    return parse_row({"messages": list(turns), **more}, "test")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def result(text: str, call: str = "call00001") -> dict[str, Any]:
    return {"role": "tool", "content": text, "name": "weather", "tool_call_id": call}


def picture(tokenizer: Any, tokenized: Tokenized) -> str:
    """The whole text, with what counts as generated in «»."""
    parts, at = [], 0
    for start, end in tokenized.spans:
        parts += [tokenizer.decode(tokenized.tokens[at:start]), "«", tokenizer.decode(tokenized.tokens[start:end]), "»"]
        at = end
    return "".join([*parts, tokenizer.decode(tokenized.tokens[at:])])
