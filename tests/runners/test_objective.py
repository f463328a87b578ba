"""What a search is for: defaults, what is followed, and every message about objectives, times and decoding."""

import pytest

from archspec.errors import ArchspecError
from archspec.schema import Document
from runners.search.objective import Objective, SpeedSettings
from runners.search.search_file import SearchFile

HEAD = (  # five lines
    "target: {model: m}\ndata: {conversations: [t.jsonl]}\nfeatures: f\nspace: norms\n"
    "budget: {trials: 3, rungs: [100, 200]}\n"
)
SPEED = "speed: {accelerator: H100-SXM}\n"


def parse(text: str) -> SearchFile:
    return Document.parse(HEAD + text, "s.yaml").validate(SearchFile)


@pytest.mark.parametrize(
    ("text", "directions"),
    [
        ("", {"acceptance_length": "maximize"}),
        (SPEED, {"speedup": "maximize"}),
        ("objective: {draft_length: 3}\n", {"acceptance_length": "maximize"}),
        ("objective: {maximize: [], minimize: []}\n", {"acceptance_length": "maximize"}),
        (SPEED + "objective: {draft_length: 3}\n", {"speedup": "maximize"}),
        (SPEED + "objective: {maximize: acceptance_rate}\n", {"acceptance_rate": "maximize"}),
        ("objective: {minimize: params}\n", {"params": "minimize"}),
        (
            SPEED + "objective: {minimize: [params, draft_ms], maximize: [acceptance_length, speedup]}\n",
            {"acceptance_length": "maximize", "speedup": "maximize", "params": "minimize", "draft_ms": "minimize"},
        ),
    ],
)
def test_speed_up_is_the_objective_where_there_are_times(text: str, directions: dict[str, str]) -> None:
    file = parse(text)
    assert dict(file.objective.directions) == directions
    assert list(file.objective.directions) == list(directions)
    again = Document.parse(file.dump(), "again.yaml").validate(SearchFile)
    assert again == file


@pytest.mark.parametrize(
    ("text", "followed"),
    [
        ("", "acceptance_length"),
        ("maximize: [acceptance_length, speedup], minimize: params", "speedup"),
        ("maximize: [acceptance_length, acceptance_rate], minimize: params", "acceptance_length"),
        ("minimize: [params, draft_ms]", "params"),
        ("minimize: [params, draft_ms], follow: draft_ms", "draft_ms"),
        ("maximize: speedup, minimize: params, mode: multi", "speedup"),
    ],
)
def test_one_scalar_is_followed(text: str, followed: str) -> None:
    objective = f"objective: {{{text}}}\n"
    assert parse((SPEED if text else "") + objective).objective.followed == followed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "objective:\n  maximize: params\n  minimize: params\n",
            "s.yaml:8: objective.minimize: params stands twice; keep one",
        ),
        (
            "objective: {maximize: [speedup, speedup]}\n",
            "s.yaml:6: objective.maximize: speedup stands twice; keep one",
        ),
        ("objective: {maximize: speed}\n", "s.yaml:6: objective.maximize.0 = 'speed': did you mean 'speedup'? choose"),
        (
            "objective:\n  maximize: acceptance_length\n  follow: params\n",
            "s.yaml:8: objective.follow: params is no objective of this search; choose from acceptance_length",
        ),
        (
            "objective:\n  maximize: acceptance_length\n  within:\n    params: 3e6\n",
            "s.yaml:9: objective.within.params: params is no objective of this search; choose from acceptance_length",
        ),
        (
            "objective:\n  follow: speedup\n",
            "s.yaml:7: objective.follow: speedup is no objective of this search; choose from acceptance_length",
        ),
        (
            "objective:\n  minimize: params\n  within: {params: -1}\n",
            "s.yaml:8: objective.within.params = -1: input should be greater than 0",
        ),
        (
            "objective:\n  mode: multi\n",
            "s.yaml:7: objective.mode: multi needs two objectives or more, as in maximize: speedup, minimize: params",
        ),
        (
            "objective:\n  maximize: acceptance_length\n  minimize: params\n  mode: multi\n  follow: params\n",
            "s.yaml:10: objective.follow: multi follows all objectives; leave follow out or use mode: scalar",
        ),
        (
            "objective: {mode: both}\n",
            "s.yaml:6: objective.mode = 'both': choose from scalar, multi",
        ),
        (
            "objective:\n  maximize: speedup\n",
            "s.yaml:6: objective: speedup needs times; add speed: {profile: FILE} or speed: {accelerator: NAME}",
        ),
        (
            "constraints:\n  params: {max: 9}\n  draft_ms: {max: 2}\n",
            "s.yaml:8: constraints.draft_ms: draft_ms needs times; add speed: {profile: FILE} or",
        ),
        (
            "constraints: {speedup: {min: 2}}\n",
            "s.yaml:6: constraints.speedup: speedup needs times; add speed: {profile: FILE} or",
        ),
        (
            "decode: {conversations: 3}\n",
            "s.yaml:6: decode: needs the k to decode with and the prediction to compare; add speed: {profile: FILE}",
        ),
        (
            "speed: {batch: 4}\n",
            "s.yaml:6: speed: times come from one place: give profile (a file of archspec profile) or accelerator (a",
        ),
        (
            "speed: {profile: p.json, accelerator: H100-SXM}\n",
            "s.yaml:6: speed: times come from one place: give profile (a file of archspec profile) or accelerator (a",
        ),
        (
            "speed:\n  profile: p.json\n  dtype: float16\n",
            "s.yaml:8: speed.dtype: float16 is for an accelerator; a profile has its own, so leave dtype out",
        ),
        (
            "speed:\n  accelerator: H100-SXM\n  draft_lengths: [8, 2]\n",
            "s.yaml:8: speed.draft_lengths: the range is empty: 8 is above 2; use [2, 8]",
        ),
        (
            "speed:\n  accelerator: H100-SXM\n  draft_lengths: [1, 12]\n",
            "s.yaml:8: speed.draft_lengths: acceptance is measured up to 8; raise objective.draft_length to 12",
        ),
        (
            "speed: {accelerator: H100-SXM, draft_lengths: [0, 2]}\n",
            "s.yaml:6: speed.draft_lengths.0 = 0: input should",
        ),
        ("objective:\n", "s.yaml:6: objective = None: must be a mapping with keys from"),
    ],
)
def test_bad_objectives(text: str, message: str) -> None:
    with pytest.raises(ArchspecError) as caught:
        parse(text)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("speed", ["", SPEED])
def test_several_objectives_at_once_have_rungs_of_their_own(speed: str) -> None:
    text = HEAD.replace("budget: {trials: 3, rungs: [100, 200]}\n", "stages: [{candidates: 3, tokens: 9}]\n") + speed
    text += "objective:\n  maximize: acceptance_length\n  minimize: params\n  mode: multi\n"
    with pytest.raises(ArchspecError) as caught:
        Document.parse(text, "s.yaml").validate(SearchFile)
    line = 9 + bool(speed)
    rule = "multi has rungs of its own; use budget.trials and rungs, not stages"
    assert str(caught.value) == f"s.yaml:{line}: objective.mode: {rule}"


def test_the_range_of_draft_lengths_has_both_its_ends() -> None:
    assert list(SpeedSettings(accelerator="H100-SXM", draft_lengths=(2, 4)).range) == [2, 3, 4]


def test_a_longer_chain_than_usual_may_be_served_where_it_is_measured() -> None:
    file = parse("speed: {accelerator: H100-SXM, draft_lengths: [1, 12]}\nobjective: {draft_length: 12}\n")
    assert (file.objective.longest, file.speed and file.speed.range[-1]) == (12, 12)


def test_one_name_stands_for_a_list_of_one() -> None:
    assert Objective(maximize="speedup") == Objective(maximize=("speedup",))
