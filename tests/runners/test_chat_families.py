"""What counts as generated under the templates of known families: the whole text, generated parts in «».

Catches: a header or what follows the closing token in the mask, a lost closing token, a turn lost because the system
prompt moved or thoughts were dropped behind it, calls cut at their first special token, and any difference between
templates with markers and without.
"""

from collections.abc import Iterator

import pytest

from runners.features.chat import tokenize
from tests.runners.templates import FAMILIES, answer, chat, family_tokenizer, picture, result, user

CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}

ROWS = {
    "single": chat(user("Hi"), answer("Yo")),
    "many": chat(user("Hi"), answer("Yo"), user("Yo"), answer("Yo"), user("Bye"), answer("See you")),
    "system": chat({"role": "system", "content": "Be kind."}, user("Hi"), answer("Yo"), user("Bye"), answer("So long")),
    "tools": chat(
        *(user("Rome?"), answer(None, tool_calls=[CALL], thinking="Ask."), result("18"), answer("Mild.")),
        *(user("Ta"), answer("Bye")),
        tools=[{"name": "weather"}],
    ),
    "calls_last": chat(user("Rome?"), answer("", tool_calls=[CALL], thinking="Ask."), tools=[{"name": "weather"}]),
    "thought": chat(
        *(user("Hi"), answer("Yo", reasoning_content="Greet.")),
        *(user("Bye"), answer("So long", reasoning_content="Part.")),
    ),
}

# ⏎ is a line break in the text; the line breaks here are none.
PICTURES = {
    "llama3": """
== single
<|begin_of_text|>
<|start_header_id|>system<|end_header_id|>⏎⏎Cutting Knowledge.⏎<|eot_id|>
<|start_header_id|>user<|end_header_id|>⏎⏎Hi<|eot_id|>
<|start_header_id|>assistant<|end_header_id|>⏎⏎«Yo<|eot_id|>»
== many
<|begin_of_text|>
<|start_header_id|>system<|end_header_id|>⏎⏎Cutting Knowledge.⏎<|eot_id|>
<|start_header_id|>user<|end_header_id|>⏎⏎Hi<|eot_id|>
<|start_header_id|>assistant<|end_header_id|>⏎⏎«Yo<|eot_id|>»
<|start_header_id|>user<|end_header_id|>⏎⏎Yo<|eot_id|>
<|start_header_id|>assistant<|end_header_id|>⏎⏎«Yo<|eot_id|>»
<|start_header_id|>user<|end_header_id|>⏎⏎Bye<|eot_id|>
<|start_header_id|>assistant<|end_header_id|>⏎⏎«See you<|eot_id|>»
== system
<|begin_of_text|>
<|start_header_id|>system<|end_header_id|>⏎⏎Cutting Knowledge.⏎Be kind.<|eot_id|>
<|start_header_id|>user<|end_header_id|>⏎⏎Hi<|eot_id|>
<|start_header_id|>assistant<|end_header_id|>⏎⏎«Yo<|eot_id|>»
<|start_header_id|>user<|end_header_id|>⏎⏎Bye<|eot_id|>
<|start_header_id|>assistant<|end_header_id|>⏎⏎«So long<|eot_id|>»
== tools
<|begin_of_text|>
<|start_header_id|>system<|end_header_id|>⏎⏎Cutting Knowledge.⏎<|eot_id|>
<|start_header_id|>user<|end_header_id|>⏎⏎Rome?<|eot_id|>
<|start_header_id|>assistant<|end_header_id|>⏎⏎
«<|python_tag|>{"name": "weather", "parameters": {"city": "Rome"}}<|eom_id|>»
<|start_header_id|>ipython<|end_header_id|>⏎⏎"18"<|eot_id|>
<|start_header_id|>assistant<|end_header_id|>⏎⏎«Mild.<|eot_id|>»
<|start_header_id|>user<|end_header_id|>⏎⏎Ta<|eot_id|>
<|start_header_id|>assistant<|end_header_id|>⏎⏎«Bye<|eot_id|>»
== calls_last
<|begin_of_text|>
<|start_header_id|>system<|end_header_id|>⏎⏎Cutting Knowledge.⏎<|eot_id|>
<|start_header_id|>user<|end_header_id|>⏎⏎Rome?<|eot_id|>
<|start_header_id|>assistant<|end_header_id|>⏎⏎
«<|python_tag|>{"name": "weather", "parameters": {"city": "Rome"}}<|eom_id|>»
== thought
<|begin_of_text|>
<|start_header_id|>system<|end_header_id|>⏎⏎Cutting Knowledge.⏎<|eot_id|>
<|start_header_id|>user<|end_header_id|>⏎⏎Hi<|eot_id|>
<|start_header_id|>assistant<|end_header_id|>⏎⏎«Yo<|eot_id|>»
<|start_header_id|>user<|end_header_id|>⏎⏎Bye<|eot_id|>
<|start_header_id|>assistant<|end_header_id|>⏎⏎«So long<|eot_id|>»
""",
    "qwen3": """
== single
<|im_start|>user⏎Hi<|im_end|>⏎
<|im_start|>assistant⏎«<think>⏎⏎</think>⏎⏎Yo<|im_end|>»⏎
== many
<|im_start|>user⏎Hi<|im_end|>⏎
<|im_start|>assistant⏎«Yo<|im_end|>»⏎
<|im_start|>user⏎Yo<|im_end|>⏎
<|im_start|>assistant⏎«Yo<|im_end|>»⏎
<|im_start|>user⏎Bye<|im_end|>⏎
<|im_start|>assistant⏎«<think>⏎⏎</think>⏎⏎See you<|im_end|>»⏎
== system
<|im_start|>system⏎Be kind.<|im_end|>⏎
<|im_start|>user⏎Hi<|im_end|>⏎
<|im_start|>assistant⏎«Yo<|im_end|>»⏎
<|im_start|>user⏎Bye<|im_end|>⏎
<|im_start|>assistant⏎«<think>⏎⏎</think>⏎⏎So long<|im_end|>»⏎
== tools
<|im_start|>system⏎⏎{"name": "weather"}<|im_end|>⏎
<|im_start|>user⏎Rome?<|im_end|>⏎
<|im_start|>assistant⏎«<tool_call>⏎{"name": "weather", "arguments": {"city": "Rome"}}⏎</tool_call><|im_end|>»⏎
<|im_start|>user⏎<tool_response>⏎18⏎</tool_response><|im_end|>⏎
<|im_start|>assistant⏎«Mild.<|im_end|>»⏎
<|im_start|>user⏎Ta<|im_end|>⏎
<|im_start|>assistant⏎«<think>⏎⏎</think>⏎⏎Bye<|im_end|>»⏎
== calls_last
<|im_start|>system⏎⏎{"name": "weather"}<|im_end|>⏎
<|im_start|>user⏎Rome?<|im_end|>⏎
<|im_start|>assistant⏎«<think>⏎Ask.⏎</think>⏎⏎
<tool_call>⏎{"name": "weather", "arguments": {"city": "Rome"}}⏎</tool_call><|im_end|>»⏎
== thought
<|im_start|>user⏎Hi<|im_end|>⏎
<|im_start|>assistant⏎«Yo<|im_end|>»⏎
<|im_start|>user⏎Bye<|im_end|>⏎
<|im_start|>assistant⏎«<think>⏎Part.⏎</think>⏎⏎So long<|im_end|>»⏎
""",
    "gemma": """
== single
<bos>
<start_of_turn>user⏎Hi<end_of_turn>⏎
<start_of_turn>model⏎«Yo<end_of_turn>»⏎
== many
<bos>
<start_of_turn>user⏎Hi<end_of_turn>⏎
<start_of_turn>model⏎«Yo<end_of_turn>»⏎
<start_of_turn>user⏎Yo<end_of_turn>⏎
<start_of_turn>model⏎«Yo<end_of_turn>»⏎
<start_of_turn>user⏎Bye<end_of_turn>⏎
<start_of_turn>model⏎«See you<end_of_turn>»⏎
== system
<bos>
<start_of_turn>user⏎Be kind.⏎⏎Hi<end_of_turn>⏎
<start_of_turn>model⏎«Yo<end_of_turn>»⏎
<start_of_turn>user⏎Bye<end_of_turn>⏎
<start_of_turn>model⏎«So long<end_of_turn>»⏎
== thought
<bos>
<start_of_turn>user⏎Hi<end_of_turn>⏎
<start_of_turn>model⏎«Yo<end_of_turn>»⏎
<start_of_turn>user⏎Bye<end_of_turn>⏎
<start_of_turn>model⏎«So long<end_of_turn>»⏎
""",
    "mistral": """
== single
<s>
[INST] Hi[/INST]« Yo</s>»
== many
<s>
[INST] Hi[/INST]« Yo</s>»
[INST] Yo[/INST]« Yo</s>»
[INST] Bye[/INST]« See you</s>»
== system
<s>
[INST] Hi[/INST]« Yo</s>»
[INST] Be kind.⏎⏎Bye[/INST]« So long</s>»
== tools
<s>
[INST] Rome?[/INST]«[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}}]</s>»
[TOOL_RESULTS]{"content": "18", "call_id": "call00001"}[/TOOL_RESULTS]« Mild.</s>»
[AVAILABLE_TOOLS][{"name": "weather"}][/AVAILABLE_TOOLS][INST] Ta[/INST]« Bye</s>»
== calls_last
<s>
[AVAILABLE_TOOLS][{"name": "weather"}][/AVAILABLE_TOOLS][INST] Rome?[/INST]
«[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}}]</s>»
== thought
<s>
[INST] Hi[/INST]« Yo</s>»
[INST] Bye[/INST]« So long</s>»
""",
    "phi": """
== single
<|user|>Hi<|end|>
<|assistant|>«Yo<|end|>»
<|endoftext|>
== many
<|user|>Hi<|end|>
<|assistant|>«Yo<|end|>»
<|user|>Yo<|end|>
<|assistant|>«Yo<|end|>»
<|user|>Bye<|end|>
<|assistant|>«See you<|end|>»
<|endoftext|>
== system
<|system|>Be kind.<|end|>
<|user|>Hi<|end|>
<|assistant|>«Yo<|end|>»
<|user|>Bye<|end|>
<|assistant|>«So long<|end|>»
<|endoftext|>
== tools
<|user|><|tool|>[{"name": "weather"}]<|/tool|>Rome?<|end|>
<|assistant|>«<|tool_call|>[{"name": "weather", "arguments": {"city": "Rome"}}]<|/tool_call|><|end|>»
<|tool|>18<|end|>
<|assistant|>«Mild.<|end|>»
<|user|>Ta<|end|>
<|assistant|>«Bye<|end|>»
<|endoftext|>
== calls_last
<|user|><|tool|>[{"name": "weather"}]<|/tool|>Rome?<|end|>
<|assistant|>«<|tool_call|>[{"name": "weather", "arguments": {"city": "Rome"}}]<|/tool_call|><|end|>»
<|endoftext|>
== thought
<|user|>Hi<|end|>
<|assistant|>«Yo<|end|>»
<|user|>Bye<|end|>
<|assistant|>«So long<|end|>»
<|endoftext|>
""",
    "gpt_oss": """
== single
<|start|>system<|message|>Small.<|end|>
<|start|>user<|message|>Hi<|end|>
<|start|>assistant«<|channel|>final<|message|>Yo<|return|>»
== many
<|start|>system<|message|>Small.<|end|>
<|start|>user<|message|>Hi<|end|>
<|start|>assistant«<|channel|>final<|message|>Yo<|end|>»
<|start|>user<|message|>Yo<|end|>
<|start|>assistant«<|channel|>final<|message|>Yo<|end|>»
<|start|>user<|message|>Bye<|end|>
<|start|>assistant«<|channel|>final<|message|>See you<|return|>»
== system
<|start|>system<|message|>Small.<|end|>
<|start|>developer<|message|>Be kind.<|end|>
<|start|>user<|message|>Hi<|end|>
<|start|>assistant«<|channel|>final<|message|>Yo<|end|>»
<|start|>user<|message|>Bye<|end|>
<|start|>assistant«<|channel|>final<|message|>So long<|return|>»
== tools
<|start|>system<|message|>Small.<|end|>
<|start|>user<|message|>Rome?<|end|>
<|start|>assistant« to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>»
<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"18"<|end|>
<|start|>assistant«<|channel|>final<|message|>Mild.<|end|>»
<|start|>user<|message|>Ta<|end|>
<|start|>assistant«<|channel|>final<|message|>Bye<|return|>»
== calls_last
<|start|>system<|message|>Small.<|end|>
<|start|>user<|message|>Rome?<|end|>
<|start|>assistant«<|channel|>analysis<|message|>Ask.<|end|>
<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>»
== thought
<|start|>system<|message|>Small.<|end|>
<|start|>user<|message|>Hi<|end|>
<|start|>assistant«<|channel|>final<|message|>Yo<|end|>»
<|start|>user<|message|>Bye<|end|>
<|start|>assistant«<|channel|>analysis<|message|>Part.<|end|>
<|start|>assistant<|channel|>final<|message|>So long<|return|>»
""",
    "smollm2": """
== single
<|im_start|>system⏎Default.<|im_end|>⏎
<|im_start|>user⏎Hi<|im_end|>⏎
<|im_start|>assistant⏎«Yo<|im_end|>»⏎
== many
<|im_start|>system⏎Default.<|im_end|>⏎
<|im_start|>user⏎Hi<|im_end|>⏎
<|im_start|>assistant⏎«Yo<|im_end|>»⏎
<|im_start|>user⏎Yo<|im_end|>⏎
<|im_start|>assistant⏎«Yo<|im_end|>»⏎
<|im_start|>user⏎Bye<|im_end|>⏎
<|im_start|>assistant⏎«See you<|im_end|>»⏎
== system
<|im_start|>system⏎Be kind.<|im_end|>⏎
<|im_start|>user⏎Hi<|im_end|>⏎
<|im_start|>assistant⏎«Yo<|im_end|>»⏎
<|im_start|>user⏎Bye<|im_end|>⏎
<|im_start|>assistant⏎«So long<|im_end|>»⏎
== thought
<|im_start|>system⏎Default.<|im_end|>⏎
<|im_start|>user⏎Hi<|im_end|>⏎
<|im_start|>assistant⏎«Yo<|im_end|>»⏎
<|im_start|>user⏎Bye<|im_end|>⏎
<|im_start|>assistant⏎«So long<|im_end|>»⏎
""",
}


def read_pictures() -> Iterator[tuple[str, str, str]]:
    """(family, conversation, expected picture) of every picture."""
    for family, pictures in PICTURES.items():
        for block in pictures.split("\n== ")[1:]:
            name, *lines = block.strip("\n").split("\n")
            yield family, name, "".join(lines).replace("⏎", "\n")


CASES = list(read_pictures())


@pytest.mark.parametrize("marked", [False, True], ids=["unmarked", "marked"])
@pytest.mark.parametrize(("family", "row", "expected"), CASES, ids=[f"{family}-{row}" for family, row, _ in CASES])
def test_generated_parts(family: str, row: str, expected: str, marked: bool) -> None:
    tokenizer = family_tokenizer(FAMILIES[family], marked)
    assert picture(tokenizer, tokenize(ROWS[row], tokenizer, 4096)) == expected


def test_every_family_has_every_picture() -> None:
    """Two families have no tools."""
    assert {(family, row) for family, row, _ in CASES} == {
        (family, row)
        for family in FAMILIES
        for row in ROWS
        if family not in {"gemma", "smollm2"} or row not in {"tools", "calls_last"}
    }
