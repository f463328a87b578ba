"""How much a search may spend: what budget and stages come to, and every message about them."""

from typing import Any

import pytest

from archspec.errors import ArchspecError
from archspec.schema import Document
from runners.search.search_file import SearchFile

HEAD = "target: {model: m}\ndata: {conversations: [t.jsonl]}\nfeatures: f\nspace: norms\n"  # four lines
SPEED = "speed: {accelerator: H100-SXM}\n"
FUNNEL = """stages:
  - {candidates: 9, tokens: 20e3}
  - {candidates: 3, tokens: 60e3}
  - {candidates: 2, tokens: 180e3, seeds: 3}
"""


def parse(text: str) -> SearchFile:
    return Document.parse(HEAD + text, "s.yaml").validate(SearchFile)


def refused(text: str) -> str:
    with pytest.raises(ArchspecError) as caught:
        parse(text)
    return str(caught.value)


def test_rungs_without_stages_stop_candidates_one_by_one() -> None:
    plan = parse("budget: {trials: 8, rungs: [100, 200, 400], seeds: 3, finalists: 2}\n").plan
    assert (plan.trials, plan.rungs, plan.seeds, plan.finalists, plan.keep) == (8, (100, 200, 400), 3, 2, None)
    assert plan.stage_tokens == 0


def test_stages_say_what_a_budget_would() -> None:
    plan = parse(FUNNEL).plan
    assert (plan.trials, plan.rungs, plan.seeds, plan.finalists) == (9, (20_000, 60_000, 180_000), 3, 2)
    assert plan.keep == (9, 3, 2)
    assert plan.stage_tokens == 9 * 20_000 + 3 * 40_000 + 2 * 120_000


def test_what_stages_do_not_say_is_the_budgets() -> None:
    file = parse(FUNNEL + "budget: {hours: 2, rung_minutes: 5, retries: 0, max_failures_in_a_row: 2}\n")
    assert (file.budget.hours, file.budget.rung_minutes, file.budget.retries) == (2, 5, 0)
    assert file.plan == parse(FUNNEL).plan


def test_one_stage_may_be_all() -> None:
    plan = parse("stages: [{candidates: 4, tokens: 100, seeds: 2}]\n").plan
    assert (plan.trials, plan.rungs, plan.seeds, plan.finalists, plan.keep) == (4, (100,), 2, 4, (4,))


@pytest.mark.parametrize("text", [FUNNEL, "budget: {trials: 8, rungs: [100, 200], seeds: 2}\n"])
def test_what_was_resolved_is_the_same_again(text: str) -> None:
    """A dump writes every default out, also those that stages would say otherwise."""
    file = parse(text)
    again = Document.parse(file.dump(), "again.yaml").validate(SearchFile)
    assert again == file
    assert (again.plan, again.dump()) == (file.plan, file.dump())


def test_a_changed_budget_changes_the_plan() -> None:
    file = parse("budget: {trials: 8, rungs: [100, 200]}\n")
    assert file.plan.trials == 8
    assert file.model_copy(update={"budget": file.budget.model_copy(update={"trials": 3})}).plan.trials == 3


STAGES = "stages:\n  - {candidates: 9, tokens: 100}\n  - "


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "s.yaml:1: budget.trials: trials is missing; give trials and rungs here, or stages beside budget"),
        (
            "budget:\n  trials: 3\n",
            "s.yaml:5: budget.rungs: rungs is missing; give trials and rungs here, or stages beside budget",
        ),
        (
            "budget: {trials: 3, rungs: [200, 100]}\n",
            "s.yaml:5: budget: rungs must be rising token counts, for example [20e3, 60e3, 180e3], but are [200, 100]",
        ),
        (
            "budget:\n  rungs: [100]\n" + STAGES + "{candidates: 3, tokens: 200}\n",
            "s.yaml:6: budget.rungs: stages say that already; leave rungs out",
        ),
        (
            "budget:\n  hours: 3\n  seeds: 2\n" + STAGES + "{candidates: 3, tokens: 200}\n",
            "s.yaml:7: budget.seeds: stages say that already; leave seeds out",
        ),
        (
            STAGES + "{candidates: 10, tokens: 200}\n",
            "s.yaml:7: stages.1.candidates: 10 is more than the 9 of the stage before; a funnel narrows",
        ),
        (
            STAGES + "{candidates: 3, tokens: 100}\n",
            "s.yaml:7: stages.1.tokens: 100 is not above the 100 of the stage before; a candidate trains on",
        ),
        (
            "stages:\n  - candidates: 9\n    tokens: 10\n    seeds: 2\n  - {candidates: 3, tokens: 200}\n",
            "s.yaml:8: stages.0.seeds: only the last stage repeats its candidates with other seeds; leave seeds out",
        ),
        (
            "baselines: [eagle3, eagle3.1]\nstages:\n  - {candidates: 1, tokens: 10}\n",
            "s.yaml:7: stages.0.candidates: 1 trials do not hold 2 baselines, which count as trials; use at least 2",
        ),
        (
            "baselines: [eagle3, eagle3.1]\nbudget:\n  trials: 1\n  rungs: [10]\n",
            "s.yaml:7: budget.trials: 1 trials do not hold 2 baselines, which count as trials; use at least 2",
        ),
        ("stages: [{candidates: 9}]\n", "s.yaml:5: stages.0.tokens: this key is required"),
        ("stages: [{candidates: 0, tokens: 9}]\n", "s.yaml:5: stages.0.candidates = 0: input should be greater than 0"),
        ("stages: [{candidate: 2, tokens: 9}]\n", "s.yaml:5: stages.0.candidate: unknown key; did you mean"),
    ],
)
def test_bad_plans(text: str, message: str) -> None:
    assert refused(text).startswith(message)


# What a resume must find as it was


def changed(text: str, other: str) -> set[str]:
    before, after = parse(text).must_not_change(), parse(other).must_not_change()
    return {key for key in before if before[key] != after[key]}


@pytest.mark.parametrize(
    ("other", "names"),
    [
        (FUNNEL.replace("candidates: 9", "candidates: 12").replace("seeds: 3", "seeds: 4"), set()),
        (FUNNEL + "budget: {hours: 3}\ndecode: {conversations: 2}\n" + SPEED, {"speed", "objective"}),
        (FUNNEL.replace("20e3", "10e3"), {"budget.rungs"}),
        ("budget: {trials: 9, rungs: [20e3, 60e3, 180e3]}\n", {"stages"}),
        (FUNNEL + "objective: {maximize: acceptance_rate}\n", {"objective"}),
        (FUNNEL + "constraints: {params: {max: 9}}\n", {"constraints"}),
    ],
)
def test_a_resume_may_widen_a_funnel_and_change_nothing_that_was_measured_by(other: str, names: set[str]) -> None:
    assert changed(FUNNEL, other) == names


def test_a_funnel_does_not_go_on_as_asynchronous_rungs() -> None:
    """All of a funnel's first stage are complete for the study, which asynchronous rungs would take for the end."""
    told: dict[str, Any] = parse(FUNNEL).must_not_change()
    assert told["stages"] is True
    assert parse("budget: {trials: 9, rungs: [10]}\n").must_not_change()["stages"] is False
