"""Turns that are hard to find, and templates that leave a turn's place in doubt: each is refused by name."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from transformers import ByT5Tokenizer

from archspec.errors import ArchspecError
from runners.features.chat import prompt_tokens, template_hash, tokenize
from runners.features.conversations import Conversation, Generation, Message, ToolCall
from runners.features.spans import assistant_spans, special_pattern
from tests.runners.templates import (
    FAMILIES,
    GEMMA,
    GPT_OSS,
    LLAMA3,
    MISTRAL,
    PHI,
    QWEN3,
    SMOLLM2,
    Family,
    answer,
    chat,
    family_tokenizer,
    picture,
    result,
    user,
)

ASK = "{% if add_generation_prompt %}"


def changed(family: Family, old: str, new: str) -> Family:
    assert old in family.template
    return replace(family, template=family.template.replace(old, new))


def call(city: str, identity: str = "call00001") -> dict[str, object]:
    return {"id": identity, "function": {"name": "weather", "arguments": {"city": city}}}


def drawn(family: Family, row: Conversation, marked: bool = False) -> str:
    tokenizer = family_tokenizer(family, marked)
    return picture(tokenizer, tokenize(row, tokenizer, 4096))


CALLED = chat(user("Rome?"), answer("Look.", tool_calls=[call("Rome")]), result("18"), answer("Mild."))
CALLS_LAST = chat(user("Rome?"), answer("", tool_calls=[call("Rome")]))
SYSTEM = chat({"role": "system", "content": "S."}, user("Hi"), answer("Yo"), user("Bye"), answer("So long"))


# Found


@pytest.mark.parametrize("marked", [False, True], ids=["unmarked", "marked"])
def test_two_calls_at_once_and_two_results(marked: bool) -> None:
    row = chat(
        *(user("Rome, Oslo?"), answer("Both.", tool_calls=[call("Rome"), call("Oslo", "call00002")])),
        *(result("18"), result("3", "call00002"), answer("Mild, cold.")),
    )
    assert drawn(QWEN3, row, marked) == (
        "<|im_start|>user\nRome, Oslo?<|im_end|>\n<|im_start|>assistant\n«Both.\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>»\n'
        "<|im_start|>user\n<tool_response>\n18\n</tool_response>\n<tool_response>\n3\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n«<think>\n\n</think>\n\nMild, cold.<|im_end|>»\n"
    )
    assert drawn(MISTRAL, row, marked) == (
        '<s>[INST] Rome, Oslo?[/INST]«[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}}, '
        '{"name": "weather", "arguments": {"city": "Oslo"}}]</s>»'
        '[TOOL_RESULTS]{"content": "18", "call_id": "call00001"}[/TOOL_RESULTS]'
        '[TOOL_RESULTS]{"content": "3", "call_id": "call00002"}[/TOOL_RESULTS]« Mild, cold.</s>»'
    )


@pytest.mark.parametrize("marked", [False, True], ids=["unmarked", "marked"])
def test_a_call_beside_text_goes_on_behind_the_token_after_the_text(marked: bool) -> None:
    assert drawn(PHI, CALLED, marked) == (
        "<|user|>Rome?<|end|>"
        '<|assistant|>«Look.<|tool_call|>[{"name": "weather", "arguments": {"city": "Rome"}}]<|/tool_call|><|end|>»'
        "<|tool|>18<|end|><|assistant|>«Mild.<|end|>»<|endoftext|>"
    )


def test_an_answer_ends_with_the_first_of_several_tokens() -> None:
    """The end of the text follows every turn here, with a header that the target writes and without one."""
    for header in ("", "<think></think>"):
        family = changed(SMOLLM2, "{{ m.content }}{% endgeneration %}", header + "{{ m.content }}<|im_end|>")
        family = replace(family, template=family.template.replace("{% generation %}", ""))
        row = chat({"role": "system", "content": "S."}, user("Hi"), answer("Yo"), user("Bye"), answer("So long"))
        assert f"assistant\n«{header}Yo<|im_end|>»<|im_end|>\n<|im_start|>user\nBye" in drawn(family, row)


def test_spans_are_exact_in_characters() -> None:
    """The last turn's closing token begins as that of an earlier turn does, which tokens alone would not show."""
    tokenizer, row = family_tokenizer(GPT_OSS), chat(user("Hi"), answer("Yo"), user("Bye"), answer("So long"))

    def render(messages: Sequence[Message], prompt: bool = False) -> str:
        rows = [message.row() for message in messages]
        return str(tokenizer.apply_chat_template(rows, tokenize=False, add_generation_prompt=prompt))

    text = render(row.messages)
    spans = assistant_spans(row.id, row.messages, render, special_pattern(frozenset(GPT_OSS.specials)))
    assert [text[start:end] for start, end in spans] == [
        "<|channel|>final<|message|>Yo<|end|>",
        "<|channel|>final<|message|>So long<|return|>",
    ]


@pytest.mark.parametrize("marked", [False, True], ids=["unmarked", "marked"])
def test_thoughts_of_a_call_are_dropped_behind_the_answer(marked: bool) -> None:
    """The prompt of the second turn still holds them, so it is not how the whole begins."""
    row = chat(user("Rome?"), answer(None, tool_calls=[call("Rome")], thinking="Ask."), result("18"), answer("Mild."))
    assert drawn(GPT_OSS, row, marked) == (
        "<|start|>system<|message|>Small.<|end|><|start|>user<|message|>Rome?<|end|>"
        '<|start|>assistant« to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>»'
        '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"18"<|end|>'
        "<|start|>assistant«<|channel|>final<|message|>Mild.<|return|>»"
    )


@pytest.mark.parametrize("marked", [False, True], ids=["unmarked", "marked"])
def test_thoughts_inside_of_the_content(marked: bool) -> None:
    row = chat(user("Hi"), answer("<think>\nA.\n</think>\n\nYo"), user("Bye"), answer("<think>B.</think>So long"))
    assert drawn(QWEN3, row, marked) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n«Yo<|im_end|>»\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n«<think>\nB.\n</think>\n\nSo long<|im_end|>»\n"
    )


@pytest.mark.parametrize("opened", ["<think>\n", "<think>\n\n</think>\n\n"], ids=["opened", "empty"])
def test_a_generation_prompt_that_writes_thoughts(opened: str) -> None:
    """What the prompt writes is not generated; earlier turns lack it, and there the header is shorter."""
    family = changed(
        QWEN3, ASK + "{{ '<|im_start|>assistant\n' }}", ASK + "{{ '<|im_start|>assistant\n" + opened + "' }}"
    )
    thought = "" if opened.endswith("</think>\n\n") else "Part."
    row = chat(user("Hi"), answer("Yo", thinking="Greet."), user("Bye"), answer("So long", thinking=thought))
    rest = "So long" if not thought else "Part.\n</think>\n\nSo long"
    assert drawn(family, row) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n«Yo<|im_end|>»\n"
        f"<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n{opened}«{rest}<|im_end|>»\n"
    )


@pytest.mark.parametrize("marked", [False, True], ids=["unmarked", "marked"])
def test_several_system_prompts(marked: bool) -> None:
    row = chat(
        *({"role": "system", "content": "A."}, {"role": "developer", "content": "B."}, user("Hi"), answer("Yo")),
        *({"role": "system", "content": "C."}, user("Bye"), answer("So long")),
    )
    assert drawn(GPT_OSS, row, marked) == (
        "<|start|>system<|message|>Small.<|end|>"
        "<|start|>developer<|message|>A.<|end|><|start|>developer<|message|>B.<|end|>"
        "<|start|>user<|message|>Hi<|end|><|start|>assistant«<|channel|>final<|message|>Yo<|end|>»"
        "<|start|>developer<|message|>C.<|end|>"
        "<|start|>user<|message|>Bye<|end|><|start|>assistant«<|channel|>final<|message|>So long<|return|>»"
    )


@pytest.mark.parametrize("marked", [False, True], ids=["unmarked", "marked"])
def test_an_empty_answer_is_its_closing_token(marked: bool) -> None:
    row = chat(user("Hi"), answer(""), user("Bye"), answer("So long"))
    if marked:  # an empty marker marks nothing
        assert "«So long<|im_end|>»" in drawn(SMOLLM2, row, marked)
    else:
        assert "assistant\n«<|im_end|>»\n<|im_start|>user\nBye" in drawn(SMOLLM2, row, marked)


NEXT_HEADER = Family(  # the target stops by writing the next header, as GLM-4 does
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
    ("<|user|>", "<|assistant|>"),
)
NO_TOKENS = Family(
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
    ("<end>",),
)


def test_turns_without_a_closing_token_of_their_own() -> None:
    row = chat(user("Hi"), answer("Yo"), user("Bye"), answer("So long"))
    assert drawn(NEXT_HEADER, row) == "<|user|>\nHi<|assistant|>\n«Yo<|user|>»\nBye<|assistant|>\n«So long»"
    assert drawn(NO_TOKENS, row) == "user: Hi\nassistant: «Yo»\nuser: Bye\nassistant: «So long»\n"


def random_chat(draw: random.Random) -> Conversation:
    texts = [
        "Hi",
        "yes",
        "yes",
        " a \n",
        "aXmarkedYa",
        "<think>\nq\n</think>\n\nr",
        "[INST",
        "}}",
        '"',
        '\\n"}',
        "größe ☂",
    ]
    messages = [Message(role="system", content=draw.choice(texts))] if draw.random() < 0.4 else []
    for _ in range(draw.randint(1, 3)):
        messages.append(Message(role="user", content=draw.choice(texts)))
        while draw.random() < 0.3:
            arguments = draw.choice([{}, {"a": 1}, {"a": draw.choice(texts)}, {"a": {"b": None}}])
            made = ToolCall(name="weather", arguments=arguments, id=f"call{draw.randint(10000, 99999)}")
            thought = draw.choice([None, draw.choice(texts)])
            messages += [
                Message(role="assistant", content="", tool_calls=(made,), reasoning_content=thought),
                Message(role="tool", content=draw.choice(texts), name="weather", tool_call_id=made.id),
            ]
        thought = draw.choice([None, draw.choice(texts)])
        messages.append(Message(role="assistant", content=draw.choice(texts), reasoning_content=thought))
    return Conversation(id="drawn", messages=tuple(messages), tools=({"name": "weather"},))


@pytest.mark.parametrize(
    "family", [LLAMA3, QWEN3, MISTRAL, PHI, GPT_OSS], ids=["llama3", "qwen3", "mistral", "phi", "gpt_oss"]
)
def test_markers_and_their_absence_agree_on_any_conversation(family: Family) -> None:
    draw = random.Random(0)
    for _ in range(25):
        row = random_chat(draw)
        assert drawn(family, row) == drawn(family, row, marked=True)


# Own text


@pytest.mark.parametrize("name", FAMILIES)
def test_own_text_follows_the_prompt_as_recorded(name: str) -> None:
    """Earlier turns are rendered as the template renders them, and not marked."""
    tokenizer = family_tokenizer(FAMILIES[name])
    ids = tuple(tokenizer("So long")["input_ids"])
    row = chat(user("Hi"), answer("Yo", thinking="Greet."), user("Bye"), answer("other"))
    own = row.model_copy(update={"generation": Generation(token_ids=ids, target="us")})
    prompt = tokenizer.apply_chat_template(
        [message.row() for message in row.messages[:3]], tokenize=False, add_generation_prompt=True
    )
    tokenized = tokenize(own, tokenizer, 4096, "us")
    assert tokenizer.decode(prompt_tokens(own, tokenizer)) == prompt
    assert picture(tokenizer, tokenized) == f"{prompt}«So long»"
    assert tokenized.own


def test_tools_reach_the_prompt_and_choose_the_template() -> None:
    row = chat(user("Rome?"), tools=[{"name": "weather"}])
    tokenizer = family_tokenizer(PHI)
    assert tokenizer.decode(prompt_tokens(row, tokenizer)) == (
        '<|user|><|tool|>[{"name": "weather"}]<|/tool|>Rome?<|end|><|assistant|>'
    )
    two = family_tokenizer(replace(PHI, bos="<|user|>"))
    two.chat_template = {"default": "{{ 'plain' }}", "tool_use": "{{ 'tools' }}"}
    assert [two.decode(prompt_tokens(one, two)) for one in (row, chat(user("Hi")))] == ["tools", "plain"]
    before = template_hash(two)
    two.chat_template = {"default": "{{ 'plain' }}", "tool_use": "{{ 'other' }}"}
    assert template_hash(two) != before
    two.chat_template = {"tool_use": "{{ 'tools' }}"}
    with pytest.raises(ArchspecError, match=r"tokenizer .*: has no default chat template \("):
        template_hash(two)


# Refused


@pytest.mark.parametrize("marked", [False, True], ids=["unmarked", "marked"])
@pytest.mark.parametrize("row", [CALLED, CALLS_LAST], ids=["beside text", "alone"])
def test_a_template_that_leaves_calls_out(row: Conversation, marked: bool) -> None:
    with pytest.raises(
        ArchspecError,
        match=r"conversation \w+: turn 1: the chat template leaves out a call of weather; use a target whose template",
    ):
        drawn(SMOLLM2, row, marked)


def test_no_more_calls_may_follow_where_one_is_written() -> None:
    row = chat(user("Rome, Oslo?"), answer("", tool_calls=[call("Rome"), call("Oslo")]))
    for marked in (False, True):
        with pytest.raises(ArchspecError, match=r"turn 1: the chat template (leaves out a call of weather|refuses)"):
            drawn(LLAMA3, row, marked)


@pytest.mark.parametrize(
    ("family", "row", "message"),
    [
        (
            changed(SMOLLM2, "{{ '<|im_start|>assistant\n' }}", ""),
            SYSTEM,
            r"turn 2: the chat template writes '<\|im_start\|>assistant\\n' before it, but has no generation prompt",
        ),
        (
            changed(
                GPT_OSS, "'<|return|>' if loop.last and not add_generation_prompt", "'<|call|>' if 'Yo' in m.content"
            ),
            SYSTEM,
            r"turn 2: the chat template lets its text change what follows it",
        ),
        (
            changed(
                PHI,
                "{% if m.tool_calls %}",
                "{% if m.tool_calls %}{% if not loop.last %}{{ raise_exception('') }}{% endif %}",
            ),
            CALLS_LAST,
            r"turn 1: the chat template allows no other continuation of it and writes '.*' after it",
        ),
        (
            changed(MISTRAL, "+ m.content + '[/INST]'", "+ '[/INST]'"),
            SYSTEM,
            r"turn 2: the chat template changes what stands around turn 1 with the text of that turn",
        ),
        (
            replace(MISTRAL, template=MISTRAL.template + ASK + "{{ '[ASK]' }}{% endif %}"),
            SYSTEM,
            r"turn 2: the chat template writes '\[/INST\] Yo</s>.*' before it, but '\[/INST\]\[ASK\]' where it asks",
        ),
        (
            changed(QWEN3, "{{ text }}", "{{ text if loop.last else '' }}"),
            SYSTEM,
            r"turn 2: .* leaves its text out, so .*; use a template with .* markers, or end the conversation before",
        ),
        (
            QWEN3,
            chat(user("Hi"), answer("<think>\nA.\n</think>\n\n"), user("Bye"), answer("So long")),
            r"turn 1: the chat template leaves its text out",
        ),
        (
            changed(LLAMA3, "{{ m.content | trim }}", "{{ m.content | upper }}"),
            SYSTEM,
            r"turn 2: the chat template changes its text",
        ),
        (
            changed(PHI, "{{ call.function | tojson }}", "{{ call.function | tojson | upper }}"),
            CALLED,
            r"turn 1: the chat template changes its text",
        ),
        (
            SMOLLM2,
            chat(answer("Welcome."), user("Hi"), answer("Yo")),
            r"conversation \w+: turn 0 is the assistant's, so nothing asks for it; begin with a user turn",
        ),
        (GEMMA, CALLED, r"conversation \w+: the chat template refuses it \(roles must alternate\)"),
    ],
    ids=[
        *("no generation prompt", "closer by text", "no continuation", "no question", "two headers"),
        *("forgets", "thoughts only", "upper", "call in upper case", "greeting", "refuses"),
    ],
)
def test_what_is_in_doubt_is_refused(family: Family, row: Conversation, message: str) -> None:
    with pytest.raises(ArchspecError, match=message):
        drawn(family, row)


def test_one_closing_token_is_sure_even_where_nothing_may_follow() -> None:
    only = changed(
        MISTRAL,
        "{{ '[TOOL_CALLS][' }}",
        "{% if not loop.last %}{{ raise_exception('') }}{% endif %}{{ '[TOOL_CALLS][' }}",
    )
    expected = '«[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}}]</s>»'
    assert drawn(only, CALLS_LAST) == "<s>[INST] Rome?[/INST]" + expected


@pytest.mark.parametrize("template", [SMOLLM2.template, NEXT_HEADER.template], ids=["marked", "unmarked"])
def test_a_slow_tokenizer(template: str) -> None:
    tokenizer = ByT5Tokenizer(chat_template=template)
    with pytest.raises(ArchspecError, match=r"is not a fast tokenizer, so characters cannot be mapped to tokens"):
        tokenize(SYSTEM, tokenizer, 512)
