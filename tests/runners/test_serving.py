"""The engine check without an engine: on what a real vLLM answered, and on processes that end as engines do."""

import json
from dataclasses import replace
from functools import cache, reduce
from operator import add
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from runners.display.serving import serve_report
from runners.features.store import FeatureStore
from runners.features.target import Target
from runners.serving.check import Expected, ServeCheck, compare, length_interval, share_interval
from runners.serving.engine import Answer, Counters
from runners.serving.replay import Replay, replay
from runners.training.acceptance import Counts, acceptance_chances, count_cycles
from runners.training.settings import EvalSettings
from tests.runners.drafts import everything, tiny_spec, trained_draft
from tests.runners.served import DRAFT, DRAFT_LENGTH, RECORDED, served_draft, served_prompts, served_target

EXPECTED = Expected(aux_layers=(1, 3, 4), num_layers=5, vocabulary=None)


@cache
def recorded() -> Answer:
    return Answer.model_validate_json(RECORDED.read_bytes())


@cache
def replayed() -> Replay:
    draft, pairs = served_draft(DRAFT), zip(served_prompts(), recorded().responses, strict=True)
    return reduce(add, (replay(served_target(), draft, prompt, text, DRAFT_LENGTH) for prompt, text in pairs))


def checked(
    answer: Answer | None = None,
    plain: Any = None,
    ours: Replay | None = None,
    expected: Expected = EXPECTED,
    **more: Any,
) -> ServeCheck:
    return compare(
        answer or recorded(),
        recorded().responses if plain is None else plain,
        ours or replayed(),
        expected,
        draft="exported",
        draft_length=DRAFT_LENGTH,
        engine="vLLM 0.32.0",
        **more,
    )


def counted(cycles: int, *accepted: int) -> Answer:
    """The recorded answer with other counters."""
    counters = Counters(
        num_drafts=cycles,
        num_draft_tokens=DRAFT_LENGTH * cycles,
        num_accepted_tokens=sum(accepted),
        num_accepted_tokens_per_pos=accepted,
    )
    return recorded().model_copy(update={"counters": counters})


def unseen(reason: str) -> Answer:
    """The recorded answer of an engine that hides its insides."""
    return recorded().model_copy(update={"missing": None, "unused": None, "aux_layers": None, "hidden": reason})


def counts(cycles: int, *accepted: int) -> Replay:
    return Replay(Counts(float(cycles), np.ones(len(accepted)), np.array(accepted, dtype=float)), 100, 100)


# The evaluator on the engine's text


def test_the_evaluator_counts_what_vllm_counted() -> None:
    """To the last token, through responses that end at once, at an end token and at the limit."""
    lengths = {len(text) for text in recorded().responses}
    assert {1, 2, 16} < lengths
    counters = recorded().counters
    assert replayed().counts.cycles == counters.num_drafts
    assert tuple(replayed().counts.accepted) == counters.num_accepted_tokens_per_pos
    assert replayed().argmax == replayed().tokens == sum(map(len, recorded().responses))
    assert checked().identical


def test_tokens_beyond_the_end_of_a_response_count_as_vllm_counts_them() -> None:
    """Without their continuation three of the accepted tokens would be missing."""
    draft, kept = served_draft(DRAFT), 0.0
    for prompt, text in zip(served_prompts(), recorded().responses, strict=True):
        kept += accepted_inside(draft, prompt, text)
    assert sum(replayed().counts.accepted) - kept == 3


def accepted_inside(draft: Any, prompt: list[int], text: tuple[int, ...]) -> float:
    """Accepted tokens as the evaluator of training counts them: walked with the engine's text alone."""
    from runners.serving.replay import _chances, _read

    if len(text) < 2:
        return 0.0
    tokens, aux, _ = _read(served_target(), [*prompt, *text], DRAFT_LENGTH - 1, draft.spec.inputs.aux_layers)
    chances = _chances(draft, tokens, aux, slice(len(prompt) - 1, len(prompt) + len(text) - 2), DRAFT_LENGTH)
    inside = np.arange(len(chances))[:, None] + 1 + np.arange(DRAFT_LENGTH)[None] < len(text)
    return float(count_cycles(np.where(inside, chances, 0.0)).accepted.sum())


def test_a_replay_walks_the_cycles_of_the_evaluator(target: Target, tiny_store: FeatureStore) -> None:
    """With one drafted token nothing can lie beyond the end, so all counts are the same; with more, the cycles are."""
    draft = trained_draft(tiny_store, tiny_spec(tiny_store.facts), indices=everything(tiny_store)[:6])
    for draft_length in (1, 3):
        settings = EvalSettings(draft_length=draft_length)
        for index, chances in acceptance_chances(draft, tiny_store, everything(tiny_store)[:4], settings):
            features = tiny_store.read(index, ())
            first = int(features.response_mask.nonzero()[0])
            prompt, text = features.tokens[:first].tolist(), features.tokens[first:].tolist()
            ours, wanted = replay(target, draft, prompt, text, draft_length).counts, count_cycles(chances)
            assert ours.cycles == wanted.cycles
            assert wanted.accepted.sum() > 0
            surplus = ours.accepted.sum() - wanted.accepted.sum()
            assert 0 <= surplus <= draft_length - 1


# The verdict


def test_an_engine_that_counts_the_same_agrees() -> None:
    check = checked()
    assert check.agrees
    assert check.problems == check.notes == ()
    assert check.length.engine == pytest.approx(1 + 47 / 377)
    assert [one.engine for one in check.positions] == pytest.approx([33 / 377, 9 / 377, 5 / 377])
    assert check.power == (
        "over 377 cycles, differences above 0.029 at the first position (33% of it) and above 0.046 in length are "
        "noticed; these are few cycles: ask for more prompts or more new tokens"
    )
    data = json.loads(json.dumps(check.as_dict()))
    assert data["agrees"]
    assert data["identical"]
    assert data["positions"][0] == {
        "name": "position 1",
        "engine": pytest.approx(33 / 377),
        "ours": pytest.approx(33 / 377),
        "allowed": pytest.approx(share_interval(33 / 377, 377)),
        "agrees": True,
    }


def test_intervals() -> None:
    """Wilson's at 50 of 100 is 0.404 … 0.596; a length with one drafted token is 1 + a share."""
    assert share_interval(0.5, 100) == pytest.approx(0.0962, abs=5e-5)
    assert share_interval(0.0, 400) == pytest.approx(3.8415 / (2 * (400 + 3.8415)), rel=1e-4)
    assert length_interval([0.5], 100) == pytest.approx(1.96 * 0.05, rel=1e-4)
    assert length_interval([1.0, 1.0], 50) == 0  # every cycle has the same length
    assert share_interval(0.5, 0) == 1
    assert length_interval([0.5, 0.1], 0) == 2


def test_figures_may_differ_by_the_wider_of_tolerance_and_interval() -> None:
    ours = counts(100_000, 40_000, 10_000, 2_000)
    first = checked(counted(100_000, 40_350, 10_000, 2_000), ours=ours).positions[0]
    assert first.allowed == pytest.approx(0.004)  # one per cent of 0.4; the interval is 0.0030
    assert first.agrees
    assert not checked(counted(100_000, 40_450, 10_000, 2_000), ours=ours).agrees
    assert checked(counted(100_000, 40_450, 10_000, 2_000), ours=ours, tolerance=0.02).agrees
    few = checked(counted(1_000, 425, 100, 20), ours=counts(1_000, 400, 100, 20))
    assert few.positions[0].allowed == pytest.approx(0.0303, abs=1e-4)
    assert few.agrees


AGREEING = counts(1_000, 400, 100, 20)
LIKELY = {
    "nothing fits": (
        counted(1_398, 2, 0, 0),
        EXPECTED,
        "likely: a length of about 1 means that hardly anything fits: a norm flag",
    ),
    "fed back": (counted(1_100, 440, 20, 0), EXPECTED, "so the state that is fed back is another (norm_output)"),
    "some fit": (
        counted(1_200, 300, 30, 1),
        EXPECTED,
        "look at norm flags (norm_before_residual, fc_norm, norm_before_fc)",
    ),
}


@pytest.mark.parametrize("name", LIKELY)
def test_figures_that_differ_are_told_with_a_likely_cause(name: str) -> None:
    answer, expected, cause = LIKELY[name]
    check = checked(answer, ours=AGREEING, expected=expected)
    assert cause in check.problems[-1]
    assert any(problem.startswith("length: the engine says 1.") for problem in check.problems)
    assert "the evaluator 1.5200; they may differ by 0.0" in check.problems[0]


def test_text_that_differs_is_told_with_its_first_place() -> None:
    plain = [list(text) for text in recorded().responses]
    plain[3][5] = 9
    plain[7] = plain[7][:-1]
    check = checked(plain=plain)
    assert check.same_text == 38
    assert len(check.problems) == 1
    assert check.problems[0] == (
        "greedy text with the draft differs from text without it in 2 of 40 responses, first in response 4 at its "
        "token 6: token 15 and token 9"
    )
    plain = [list(text) for text in recorded().responses]
    del plain[7][-1]
    assert checked(plain=plain).problems[0].endswith("first in response 8 at its token 16: token 1 and the end")


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ((0, 2, 3), ": each is one less, so the config counts layers from 0, and vLLM from 1"),
        ((2, 4, 5), ": each is one more, so the config counts layers from 2, and vLLM from 1"),
        ((2, 2, 2), ": these are vLLM's default, so eagle_aux_hidden_state_layer_ids is not where vLLM looks"),
        ((1, 3, 5), "reads aux layers 1, 3, 5, but the draft was trained on 1, 3, 4"),
        ((1, 3), "reads aux layers 1, 3, but the draft was trained on 1, 3, 4"),
    ],
)
def test_other_aux_layers_disagree_whatever_the_figures_say(found: tuple[int, ...], told: str) -> None:
    check = checked(recorded().model_copy(update={"aux_layers": found}))
    assert len(check.problems) == 1
    assert told in check.problems[0]


def test_missing_tensors_disagree() -> None:
    check = checked(recorded().model_copy(update={"missing": ("d2t", "fc.weight")}))
    assert check.problems == ("the engine found no d2t, fc.weight in the draft; such parameters stay unset",)


@pytest.mark.parametrize(("found", "meant"), [(None, "0123"), ("0123", None), ("0123", "4567")])
def test_another_vocabulary_disagrees(found: str | None, meant: str | None) -> None:
    """A map of zeros stands for the first ids, among which are the commonest: acceptance falls, and not to nothing."""
    check = checked(recorded().model_copy(update={"vocabulary": found}), expected=replace(EXPECTED, vocabulary=meant))
    assert check.problems == ("the engine's map from draft ids to target ids (d2t) is not the draft's",)
    assert checked(expected=replace(EXPECTED, vocabulary=None)).agrees


def test_unused_tensors_disagree() -> None:
    """A bias that vLLM has no parameter for changes a briefly trained draft by a token or two."""
    check = checked(recorded().model_copy(update={"unused": ("layers.0.self_attn.q_proj.bias",)}))
    assert check.problems == (
        "the engine has no place for layers.0.self_attn.q_proj.bias and dropped them without a word",
    )


def test_another_target_in_the_engine_is_told() -> None:
    told = checked(ours=replace(replayed(), argmax=400)).problems[0]
    assert told.startswith("400 of 457 tokens that the engine wrote are what the target says here; the engine runs")


def test_too_few_accepted_tokens_decide_nothing() -> None:
    check = checked(counted(100, 3, 0, 0), ours=counts(100, 3, 0, 0))
    assert check.problems[0].startswith("3 accepted first tokens in 100 cycles are too few to tell a draft that works")
    assert check.problems[0].endswith("ask for more prompts or more new tokens, or train the draft further")
    assert len(check.problems) == 1
    none = checked(counted(0), ours=counts(0, 0, 0, 0))
    assert none.problems[0] == "the engine counted no cycle, so nothing was compared; ask for more new tokens"
    assert none.power == "no difference could have been noticed"


def test_notes_tell_what_was_not_checked_and_what_looks_odd() -> None:
    hidden = unseen("AttributeError: drafter")
    check = checked(hidden)
    assert check.agrees
    assert check.notes == (
        "tensors and aux layers were not checked, for the engine hides them (AttributeError: drafter)",
    )
    shortened = counted(377, 33, 9, 5).model_copy(
        update={"counters": recorded().counters.model_copy(update={"num_draft_tokens": 1_100})}
    )
    assert checked(shortened).notes == ("the engine drafted 1100 tokens in place of 1131; it shortened some cycles",)
    near = checked(counted(1_012, 390, 98, 20), ours=AGREEING)
    assert near.agrees
    assert near.notes[0].startswith(
        "on this very text the engine took 1012 cycles and the evaluator takes 1000; one draft in float32 takes the "
        "same number, to within a few, so these are two drafts"
    )


def shown(check: ServeCheck) -> str:
    console = Console(width=200, force_terminal=False)
    with console.capture() as capture:
        console.print(serve_report(check))
    return capture.get()


def test_what_is_shown() -> None:
    text = shown(checked())
    assert "vLLM 0.32.0 agrees with the evaluator, to the last token" in text
    assert ["position", "1", "0.0875", "0.0875", "0.0287", "agrees"] in [line.split() for line in text.splitlines()]
    assert "aux layers       1, 3, 4; the draft was trained on 1, 3, 4" in text
    assert "missing tensors  none" in text
    wrong = shown(checked(unseen("x"), plain=[()] * 40))
    assert "vLLM 0.32.0 disagrees with the evaluator" in wrong
    assert wrong.count("not shown by the engine") == 3
    assert "note: tensors and aux layers were not checked" in wrong
    assert "greedy text with the draft differs" in wrong
