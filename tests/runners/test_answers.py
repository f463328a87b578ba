"""Answers of many workers: those of one, in one file, and none is given twice."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from archspec.errors import ArchspecError
from archspec.files import exclusive
from runners.features.answers import AnswerOrder, answer_prompts
from runners.features.conversations import read_conversations
from runners.features.generate import Generated
from runners.features.target import Target
from runners.features.work import Here, Order, Tell
from tests.runners.tiny import conversation, tiny_target

PROMPTS = [conversation("word " * (1 + 3 * number % 7), name=f"p{number}") for number in range(9)]


class Two(Here):
    """This process in place of two workers."""

    count = 2


class Stopped(BaseException):
    """The run was interrupted."""


def answer(out: Path, workers: Here | None = None, temperature: float = 0.0, **options: Any) -> Generated:
    return answer_prompts(tiny_target(), PROMPTS, 8, temperature, 2, 0, out, workers=workers, **options)


def interrupted(out: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stop a run of two workers in the middle of its second order; returns the folder of what it left."""
    right = AnswerOrder.run

    def run(order: AnswerOrder, target: Target, tell: Tell) -> None:
        if order.number == 1:
            raise Stopped
        right(order, target, tell)

    with monkeypatch.context() as patched:
        patched.setattr(AnswerOrder, "run", run)
        with pytest.raises(Stopped):
            answer(out, Two())
    assert not out.exists()
    return out.with_name(f".{out.name}.parts")


def test_two_workers_answer_as_one_does(tmp_path: Path) -> None:
    told: list[tuple[int, ...]] = []
    one, two = answer(tmp_path / "one"), answer(tmp_path / "two", Two(), on_progress=lambda *now: told.append(now))
    assert (tmp_path / "one").read_text() == (tmp_path / "two").read_text()
    assert (two.answered, two.skipped, two.unfinished, two.tokens) == (9, 0, one.unfinished, one.tokens)
    assert told[-1] == (9, 9, 0)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["one", "two"]
    again = answer(tmp_path / "two", Two())
    assert (again.answered, again.skipped) == (0, 9)


@pytest.mark.parametrize("workers", [None, Two()])
def test_an_interrupted_run_goes_on_with_any_number_of_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: Here | None
) -> None:
    folder = interrupted(tmp_path / "out", monkeypatch)
    (left,) = folder.glob("0000-*.jsonl")
    with left.open("a") as file:
        file.write('{"id": "p1", "mess')  # killed while it wrote
    done = answer(tmp_path / "out", workers)
    assert (done.answered, done.skipped) == (7, 2)
    answer(tmp_path / "whole")
    whole = {row.id: row for row in read_conversations(tmp_path / "whole")}
    assert {row.id: row for row in read_conversations(tmp_path / "out")} == whole
    assert not folder.exists()


def test_another_attempt_answers_what_the_first_did_not(tmp_path: Path) -> None:
    """The first attempt at every order dies after a batch."""

    class Dying(Two):
        def carry_out(self, target: Target, orders: Sequence[Order], tell: Tell) -> None:
            def dies(done: int) -> None:
                raise Stopped

            for order in orders:
                with pytest.raises(Stopped):
                    order.run(target, dies)
            super().carry_out(target, orders, tell)

    order = AnswerOrder(0, 1, tuple(PROMPTS), tmp_path, 99, 8, 0.0, 2, 0)
    told: list[int] = []
    Dying().carry_out(tiny_target(), [order], told.append)
    rows = [len(read_conversations(path)) for path in tmp_path.glob("0000-*.jsonl")]
    assert sorted(rows) == [2, 7]
    assert told == [4, 6, 8, 9]
    assert answer(tmp_path / "out", Dying()).answered == 9


def test_answers_at_another_temperature_are_not_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = interrupted(tmp_path / "out", monkeypatch)
    with pytest.raises(
        ArchspecError, match=r"\.out\.parts/0000-\w+\.jsonl: .* was generated at temperature 0\.0, not 1"
    ):
        answer(tmp_path / "out", Two(), temperature=1.0)
    assert not (tmp_path / "out").exists()
    assert [*folder.glob("0000-*.jsonl")]


def test_answers_that_workers_leave_out_are_told(tmp_path: Path) -> None:
    class Lazy(Two):
        def carry_out(self, target: Target, orders: Sequence[Order], tell: Tell) -> None:
            super().carry_out(target, orders[1:], tell)

    with pytest.raises(ArchspecError, match="out: 2 answers are missing; the same command makes them"):
        answer(tmp_path / "out", Lazy())
    assert answer(tmp_path / "out", Two()).answered == 2


def test_two_processes_do_not_answer_into_one_file(tmp_path: Path) -> None:
    with (
        exclusive(tmp_path / ".out.parts", "held by the test"),
        pytest.raises(ArchspecError, match=r"another process writes answers for .*out$"),
    ):
        answer(tmp_path / "out", Two())
