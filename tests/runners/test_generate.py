"""Generation: batches equal single runs, a stopped run goes on, the file keeps exact tokens."""

import json
from pathlib import Path

import pytest
import torch

from archspec.errors import ArchspecError
from runners.features.chat import prompt_tokens
from runners.features.conversations import Conversation, read_conversations
from runners.features.generate import Generated, generate_responses
from runners.features.target import Target
from tests.runners.tiny import conversation, tiny_target

PROMPTS = [conversation("word " * count, category="chat", name=f"p{count}") for count in (1, 7, 3, 12, 5)]
NEW_TOKENS = 20


def generate(
    out: Path,
    rows: list[Conversation] = PROMPTS,
    batch: int = 3,
    temperature: float = 0.0,
    target: Target | None = None,
) -> Generated:
    return generate_responses(target or tiny_target(), rows, NEW_TOKENS, temperature, batch, 0, out)


def answers(out: Path) -> dict[str, tuple[int, ...]]:
    return {row.id: row.generation.token_ids for row in read_conversations(out) if row.generation}


def transformers_greedy(row: Conversation) -> tuple[int, ...]:
    target = tiny_target()
    prompt = torch.tensor([prompt_tokens(row, target.tokenizer)])
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    whole = target.model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    return tuple(whole[0, prompt.shape[1] :].tolist())


def test_batched_greedy_equals_transformers_one_by_one(tmp_path: Path) -> None:
    generate(tmp_path / "out.jsonl")
    assert answers(tmp_path / "out.jsonl") == {row.id: transformers_greedy(row) for row in PROMPTS}


def test_rows_say_what_was_done(tmp_path: Path) -> None:
    lines: list[tuple[int, int, int]] = []
    done = generate_responses(
        tiny_target(), PROMPTS, NEW_TOKENS, 0.0, 2, 0, tmp_path / "out.jsonl", lambda *numbers: lines.append(numbers)
    )
    rows = read_conversations(tmp_path / "out.jsonl")
    assert [line[:2] for line in lines] == [(2, 5), (4, 5), (5, 5)]
    assert done.tokens == lines[-1][2] == sum(map(len, answers(tmp_path / "out.jsonl").values()))
    assert (done.answered, done.skipped) == (5, 0)
    assert done.unfinished == sum(not row.generation.finished for row in rows if row.generation)
    for row in rows:
        assert row.generation is not None
        assert row.category == "chat"
        assert row.generation.target == tiny_target().fingerprint
        assert row.generation.finished is (row.generation.token_ids[-1] == 2)
        assert row.messages[-1].content == tiny_target().tokenizer.decode(
            row.generation.token_ids, skip_special_tokens=True
        )


def test_finished_rows_leave_the_batch_at_their_end_token(tmp_path: Path) -> None:
    target = tiny_target()
    generate(tmp_path / "free.jsonl")
    free = answers(tmp_path / "free.jsonl")
    stop = free["p7"][3]
    stopping = Target(target.model, target.tokenizer, "stopping")
    stopping.__dict__["eos_token_ids"] = frozenset({stop})
    generate(tmp_path / "stop.jsonl", target=stopping)
    for name, tokens in answers(tmp_path / "stop.jsonl").items():
        expected = free[name]
        assert tokens == (expected[: expected.index(stop) + 1] if stop in expected else expected)


def test_a_stopped_run_goes_on(tmp_path: Path) -> None:
    out, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    generate(whole)
    generate(out, PROMPTS[:2])
    with out.open("a") as file:
        file.write('{"id": "p12", "messa')  # killed while it wrote
    done = generate(out)
    assert (done.answered, done.skipped) == (3, 2)
    assert answers(out) == answers(whole)
    assert generate(out).answered == 0


def test_sampled_text_depends_on_seed_and_id_only(tmp_path: Path) -> None:
    generate(tmp_path / "a.jsonl", temperature=1.0, batch=5)
    generate(tmp_path / "b.jsonl", PROMPTS[::-1], temperature=1.0, batch=2)
    generate(tmp_path / "greedy.jsonl")
    assert answers(tmp_path / "a.jsonl") == answers(tmp_path / "b.jsonl") != answers(tmp_path / "greedy.jsonl")


def test_sampling_follows_the_targets_distribution(tmp_path: Path) -> None:
    target, rows = tiny_target(), [conversation("x", name=f"n{index}") for index in range(400)]
    generate_responses(target, rows, 1, 0.5, 400, 0, tmp_path / "out.jsonl")
    drawn = torch.tensor([tokens[0] for tokens in answers(tmp_path / "out.jsonl").values()])
    prompt = torch.tensor([prompt_tokens(rows[0], target.tokenizer)])
    log_p = (target.model(prompt).logits[0, -1] / 0.5).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum()
    spread = (log_p.exp() * (log_p + entropy) ** 2).sum().sqrt() / 400**0.5
    assert abs(float(log_p[drawn].mean() + entropy)) < 4 * float(spread)  # the mean of log p over draws from p is -H


def test_an_answer_that_is_there_is_replaced(tmp_path: Path) -> None:
    generate(tmp_path / "out.jsonl", [conversation("Hi", "old answer", name="a")])
    row = read_conversations(tmp_path / "out.jsonl")[0]
    assert [message.role for message in row.messages] == ["user", "assistant"]
    assert row.messages[1].content != "old answer"


def test_answers_of_another_target_or_temperature_are_not_mixed(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    generate(out, PROMPTS[:1])
    with pytest.raises(
        ArchspecError, match=r"conversation p1 was generated at temperature 0\.0, not 1\.0; write .* new file"
    ):
        generate(out, temperature=1.0)
    with pytest.raises(ArchspecError, match=r"conversation p1 holds an answer of target \w{16}, not of \w{16}"):
        generate(out, target=tiny_target(seed=1))
    out.write_text(json.dumps(conversation("Hi", "there", name="g").row()) + "\n")
    with pytest.raises(ArchspecError, match=r"conversation g holds an answer of given text"):
        generate(out)


def test_a_prompt_without_room_for_an_answer(tmp_path: Path) -> None:
    with pytest.raises(
        ArchspecError, match=r"conversation long: its prompt has \d+ tokens, which leaves no room .* 512 positions"
    ):
        generate(tmp_path / "out.jsonl", [conversation("q" * 600, name="long")])


def test_options_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ArchspecError, match=r"batch_size must be at least 1 .* but got 20, 0, 0\.0"):
        generate(tmp_path / "out.jsonl", batch=0)


def test_an_id_that_stands_for_another_prompt_is_refused(tmp_path: Path) -> None:
    """Skipping it as answered would pair the new prompt's id with the old prompt's answer."""
    generate(tmp_path / "out.jsonl", PROMPTS[:1])
    changed = PROMPTS[0].model_copy(update={"messages": PROMPTS[1].messages})
    with pytest.raises(ArchspecError, match=r"out.jsonl: conversation p1 answers another prompt; write to a new file"):
        generate(tmp_path / "out.jsonl", [changed])
