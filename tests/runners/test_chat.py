"""Masks: the answer and the token that closes it, for templates with and without markers, and clear refusals."""

from typing import Any

import pytest

from archspec.errors import ArchspecError
from runners.features.chat import Tokenized, prompt_tokens, template_hash, tokenize, tokenize_all
from runners.features.conversations import Conversation, Generation
from tests.runners.tiny import CHATML, MARKED, conversation, tiny_tokenizer

# Writes an end-of-document token after the last turn only, as Phi-3 does.
PHI = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% else %}{{ '<|endoftext|>' }}{% endif %}"
)
BARE = (  # no header before answers
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[' + m['content'] + ']' }}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
)
TRIMS = CHATML.replace("message['content']", "message['content'] | trim")
FORGETS = (  # drops answers that are not the last, as reasoning templates do with thoughts
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'user' or loop.last %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
REFUSES = "{{ raise_exception('roles must alternate') }}"
TWO_TURNS = conversation("Hi", "Hello!", "Bye", "See you", system="Be kind.")


def marked(tokenizer: Any, tokenized: Tokenized) -> list[str]:
    return [tokenizer.decode(tokenized.tokens[start:end]) for start, end in tokenized.spans]


@pytest.mark.parametrize(
    "template", [CHATML, MARKED, PHI, BARE, TRIMS], ids=["chatml", "marked", "phi", "bare", "trims"]
)
def test_every_answer_and_its_closing_token_is_marked(template: str) -> None:
    tokenizer = tiny_tokenizer(template)
    tokenized = tokenize(TWO_TURNS, tokenizer, 512)
    assert marked(tokenizer, tokenized) == ["Hello!<|im_end|>", "See you<|im_end|>"]
    assert int(tokenized.response_mask.sum()) == len("Hello!") + 1 + len("See you") + 1  # one token a byte
    assert not tokenized.own


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["chatml", "marked"])
def test_text_and_mask_side_by_side(template: str) -> None:
    tokenizer = tiny_tokenizer(template)
    tokenized = tokenize(conversation("Hi", "Yo", system="S"), tokenizer, 512)
    text = "".join(tokenizer.decode(token) for token in tokenized.tokens)
    assert (
        text == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n"
    )
    expected = [False] * (len(tokenized.tokens) - 4) + [True, True, True, False]  # Y, o, end; not the newline
    assert tokenized.response_mask.tolist() == expected


def test_characters_of_several_tokens_and_blanks_at_the_edges() -> None:
    tokenizer = tiny_tokenizer()
    tokenized = tokenize(conversation("¿Qué?", "  größer ☂ \n"), tokenizer, 512)
    assert marked(tokenizer, tokenized) == ["  größer ☂ \n<|im_end|>"]


def test_an_answer_that_repeats_the_question() -> None:
    tokenizer = tiny_tokenizer()
    assert (
        marked(tokenizer, tokenize(conversation("yes", "yes", "yes", "yes"), tokenizer, 512)) == ["yes<|im_end|>"] * 2
    )


def test_recorded_tokens_are_taken_as_they_are() -> None:
    tokenizer = tiny_tokenizer()
    generation = Generation(token_ids=(80, 81, 2), target="ours")
    row = TWO_TURNS.model_copy(update={"generation": generation})
    tokenized = tokenize(row, tokenizer, 512, fingerprint="ours")
    prompt = prompt_tokens(row, tokenizer)
    assert tokenized.tokens.tolist() == [*prompt, 80, 81, 2]
    assert tokenized.spans == ((len(prompt), len(prompt) + 3),)
    assert tokenized.own
    foreign = tokenize(row, tokenizer, 512, fingerprint="another")
    assert not foreign.own
    assert marked(tokenizer, foreign) == ["Hello!<|im_end|>", "See you<|im_end|>"]


def test_truncation_keeps_the_mask_right_and_counts_what_is_lost() -> None:
    tokenizer = tiny_tokenizer()
    whole = tokenize(TWO_TURNS, tokenizer, 512)
    first_end = whole.spans[0][1]
    cut = tokenize(TWO_TURNS, tokenizer, first_end - 3)
    assert cut.tokens.tolist() == whole.tokens[: first_end - 3].tolist()
    assert cut.response_mask.tolist() == whole.response_mask[: first_end - 3].tolist()
    long = conversation("q" * 300, "late")
    texts = tokenize_all([TWO_TURNS, long, conversation("open")], tokenizer, 200)
    assert [row.id for row, _ in texts.kept] == [TWO_TURNS.id]
    assert (texts.unanswered, texts.truncated_away) == (1, 1)


def test_nothing_left_is_an_error() -> None:
    rows = [conversation("q" * 300, "late"), conversation("open")]
    with pytest.raises(
        ArchspecError, match=r"no conversation has response tokens: 1 of 2 have no answer, 1 have none within"
    ):
        tokenize_all(rows, tiny_tokenizer(), 200)


@pytest.mark.parametrize(
    ("template", "row", "message"),
    [
        (FORGETS, TWO_TURNS, r"conversation \w+: turn 2: the chat template leaves its text out"),
        (
            CHATML.replace("message['content']", "message['content'] | upper"),
            TWO_TURNS,
            r"turn 2: the chat template changes its text",
        ),
        (REFUSES, TWO_TURNS, r"conversation \w+: the chat template refuses it \(roles must alternate\)"),
        (
            REFUSES.replace("roles", "{% generation %}{% endgeneration %}roles"),
            TWO_TURNS,
            r"the chat template refuses it",
        ),
        (CHATML, conversation("Hi"), r"conversation \w+: has no assistant turn; generate answers first"),
        (CHATML + "{% generation %}{% endgeneration %}", TWO_TURNS, r"the chat template marks no response token"),
        (None, TWO_TURNS, r"has no chat template, so responses cannot be told from prompts"),
    ],
    ids=["forgets", "upper", "refuses", "refuses-marked", "unanswered", "empty-marker", "none"],
)
def test_what_cannot_be_masked_is_refused(template: str | None, row: Conversation, message: str) -> None:
    with pytest.raises(ArchspecError, match=message):
        tokenize(row, tiny_tokenizer(template), 512)


def test_template_hash_follows_the_template() -> None:
    assert template_hash(tiny_tokenizer()) == template_hash(tiny_tokenizer()) != template_hash(tiny_tokenizer(MARKED))
