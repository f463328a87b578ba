"""A search for speed as a user meets it: the one message for whatever is wrong with its times, range and bounds."""

import re
from pathlib import Path
from typing import Any

import pytest

from archspec.accelerators import ACCELERATORS
from runners.features.store import FeatureStore
from runners.features.target import target_facts
from tests.commands import World, answered, refused

HEAD = (  # five lines
    "target: {model: MODEL}\ndata: {conversations: [TEXT]}\nfeatures: FEATURES\n"
    "space: {base: eagle3, choices: {depth: [1, 2]}}\nfixed: {head.vocab_size: 128}\n"
)
BUDGET = "budget: {trials: 2, rungs: [300]}\n"


class Refusing:
    """Searches that are refused before anything is captured, trained or begun; ``message`` is what they say."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world, self.folder, self.file = world, folder, folder / "s.yaml"
        self.profile = world.profile(folder / "p.json")

    def message(self, text: str, budget: str = BUDGET) -> str:
        """Of a search with this text, in which P.json stands for the profile, from its sixth line on."""
        names = {"MODEL": self.world.target, "TEXT": self.world.text, "FEATURES": self.folder / "features"}
        head = HEAD
        for word, path in names.items():
            head = head.replace(word, str(path))
        self.file.write_text(head + text.replace("P.json", str(self.profile)) + budget, encoding="utf-8")
        told = refused("search", self.file, "--out", self.folder / "run")
        assert not (self.folder / "features").exists()
        assert not (self.folder / "run").exists()
        return told


@pytest.fixture
def search(world: World, tmp_path: Path) -> Refusing:
    return Refusing(world, tmp_path)


# The profile


def test_a_profile_for_another_target(search: Refusing) -> None:
    facts = target_facts(str(search.world.target)).model_dump(mode="json") | {"hidden_size": 64}
    search.world.profile(search.profile, target={"model": "another", "facts": facts})
    assert search.message("speed: {profile: P.json, context: 100}\n") == (
        f"error: speed.profile: {search.profile}: measured for another target (another: hidden_size 64) than this one "
        "(hidden_size 32); measure it with archspec profile\n"
    )


def test_a_profile_for_another_target_of_the_same_sizes(world: World, tmp_path: Path) -> None:
    """Which is told by the store's fingerprint."""
    facts = target_facts(str(world.target)).model_dump(mode="json")
    other = {"model": "another", "fingerprint": "0123456789abcdef", "facts": facts}
    profile = world.profile(tmp_path / "p.json", target=other)
    file = world.search_file(tmp_path / "s.yaml", speed={"profile": str(profile), "context": 100})
    own = FeatureStore.open(world.features).manifest.key.target
    assert refused("search", file, "--out", tmp_path / "run") == (
        f"error: speed.profile: {profile}: measured for target 0123456789abcdef (another), not for target {own}; "
        "measure it with archspec profile\n"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("use", "message"),
    [
        ("batch: 16", "16 sequences in a batch are outside what was measured, 1 to 4; the nearest is 4"),
        ("context: 1000", "1000 tokens of context are outside what was measured, 64 to 256; the nearest is 256"),
        ("context: 20", "20 tokens of context are outside what was measured, 64 to 256; the nearest is 64"),
    ],
)
def test_a_use_that_the_profile_does_not_cover(use: str, message: str, search: Refusing) -> None:
    usual = "" if "context" in use else ", context: 100"
    told = search.message(f"speed: {{profile: P.json, {use}{usual}}}\n")
    assert told == f"error: speed.profile: {search.profile}: {message}\n"


def test_more_draft_tokens_than_the_profile_covers(search: Refusing) -> None:
    text = "speed: {profile: P.json, context: 100, draft_lengths: [1, 9]}\nobjective: {draft_length: 9}\n"
    assert search.message(text) == (
        f"error: speed.profile: {search.profile}: 10 tokens a sequence are outside what was measured, 1 to 9; the "
        "nearest is 9; k drafted tokens need k + 1, so measure with a larger k\n"
    )


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('"ms": 10.1', '"ms": -1', "target_times.0.ms = -1: input should be greater than 0"),
        (
            '"rows": 1,',
            '"row": 1,',
            "target_times.0.row: unknown key; did you mean 'rows'? choose from batch, context, rows, ms, spread",
        ),
        ('"ms": 10.1', '"ms" 10.1', "not valid JSON: expected ',' or '}', but got '<scalar>'"),
    ],
)
def test_a_broken_profile(before: str, after: str, message: str, search: Refusing) -> None:
    text = search.profile.read_text(encoding="utf-8")
    line = 1 + text[: text.index(before)].count("\n")
    search.profile.write_text(text.replace(before, after, 1), encoding="utf-8")
    assert search.message("speed: {profile: P.json, context: 100}\n") == f"error: {search.profile}:{line}: {message}\n"


def test_a_profile_that_ends_too_early(search: Refusing) -> None:
    text = search.profile.read_text(encoding="utf-8")
    search.profile.write_text(text[:700], encoding="utf-8")
    line = 1 + text[:700].count("\n")
    assert search.message("speed: {profile: P.json}\n") == (
        f"error: {search.profile}:{line}: not valid JSON: found unexpected end of stream\n"
    )


# Other times, and what is asked of them


def test_an_unknown_accelerator(search: Refusing) -> None:
    names = ", ".join(one.name for one in ACCELERATORS)
    rule = "accelerator 'H100-SMX' is unknown: did you mean 'H100-SXM'? choose from"
    assert search.message("speed: {accelerator: H100-SMX}\n") == f"error: speed.accelerator: {rule} {names}\n"
    assert search.message("speed: {accelerator: H100}\n") == (
        "error: speed.accelerator: accelerator 'H100' is several: choose from H100-SXM, H100-PCIe\n"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "speed:\n  accelerator: H100-SXM\n  draft_lengths: [4, 2]\n",
            "8: speed.draft_lengths: the range is empty: 4 is above 2; use [2, 4]",
        ),
        (
            "objective: {maximize: speedup}\n",
            "6: objective: speedup needs times; add speed: {profile: FILE} or speed: {accelerator: NAME}",
        ),
        (
            "constraints:\n  draft_ms: {max: 2}\n",
            "7: constraints.draft_ms: draft_ms needs times; add speed: {profile: FILE} or speed: {accelerator: NAME}",
        ),
    ],
)
def test_a_range_an_objective_and_a_bound_that_cannot_be(text: str, message: str, search: Refusing) -> None:
    assert search.message(text) == f"error: {search.file}:{message}\n"


@pytest.mark.parametrize(("setting", "name"), [("trials: 9", "trials"), ("rungs: [9]", "rungs"), ("seeds: 2", "seeds")])
def test_stages_beside_what_they_say_already(setting: str, name: str, search: Refusing) -> None:
    text = "stages: [{candidates: 3, tokens: 300}, {candidates: 1, tokens: 600}]\n"
    assert search.message(text, f"budget: {{{setting}}}\n") == (
        f"error: {search.file}:7: budget.{name}: stages say that already; leave {name} out\n"
    )


@pytest.mark.parametrize(
    ("bounds", "nearest"),
    [
        ("draft_ms: {max: 0.01}", "draft_ms: 2 is above the greatest allowed, 0.01"),
        ("params: {max: 1000}", "params: 18,560 is above the greatest allowed, 1,000"),
        (
            "params: {max: 1000}, draft_ms: {max: 0.01}",
            "params: 18,560 is above the greatest allowed, 1,000; draft_ms: 2 is above the greatest allowed, 0.01",
        ),
    ],
)
def test_a_bound_that_nothing_can_meet(bounds: str, nearest: str, search: Refusing) -> None:
    """The nearest draft is the cheapest of the space, which the profile has measured."""
    text = f"speed: {{profile: P.json, context: 100}}\nconstraints: {{{bounds}}}\n"
    rule = "no draft of the space can be used: of 2 drawn, 2 break the constraints, the nearest one as"
    assert search.message(text) == f"error: {rule} {nearest}\n"


# Going on


@pytest.mark.parametrize(
    ("bound", "rule"),
    [
        (
            "acceptance_length: {min: 9}",
            "acceptance_length.min: no draft can reach 9: {free} has 5 with 4 drafted tokens",
        ),
        ("acceptance_rate: {min: 1.5}", "acceptance_rate.min: no draft can reach 1.5: {free} has 1 at all"),
    ],
)
def test_a_bound_on_what_is_measured_that_no_draft_can_reach(bound: str, rule: str, search: Refusing) -> None:
    free = "one that costs nothing and is always right"
    told = search.message(f"speed: {{profile: P.json, context: 100}}\nconstraints: {{{bound}}}\n")
    assert told == f"error: constraints.{rule.format(free=free)}\n"


def test_a_speedup_that_no_draft_can_reach(search: Refusing) -> None:
    told = search.message(
        "speed: {profile: P.json, context: 100, draft_lengths: [1, 2]}\nconstraints: {speedup: {min: 50}}\n"
    )
    free = "one that costs nothing and is always right has"
    assert f"constraints.speedup.min: no draft can reach 50: {free} 2.942 by the profile of" in told


def test_a_run_goes_on_with_the_times_that_it_began_with_alone(world: World, tmp_path: Path) -> None:
    profile, run = world.profile(tmp_path / "p.json"), tmp_path / "run"
    changes: dict[str, Any] = {"budget": {"trials": 1, "rungs": [300]}}
    file = world.search_file(tmp_path / "s.yaml", speed={"profile": str(profile), "context": 100}, **changes)
    assert "speed-up predicted from the profile of a quiet machine" in answered("search", file, "--out", run)
    resume = ("search", "--resume", "--out", run)
    before = profile.read_text(encoding="utf-8")
    world.profile(profile, hardware="another machine")
    use = r"float32, 1 thread; batch 1, context 100; [0-9a-f]{12}"
    rule = (
        rf"error: {run}: the run began with other times \(profile of a quiet machine, {use}\) than now \(profile of "
        rf"another machine, {use}\); put the profile back, or begin a new run with --out\n"
    )
    assert re.fullmatch(rule, refused(*resume))
    other = world.search_file(tmp_path / "other.yaml", speed={"profile": str(profile), "context": 200}, **changes)
    assert refused("search", other, "--resume", "--out", run) == (
        f"error: {run}: the run was made with other values of speed (see {run}/search.yaml); a changed search is a new "
        "run: choose another folder with --out\n"
    )
    profile.unlink()
    assert refused(*resume) == (
        f"error: speed.profile: {profile}: no such file, but {run} began with its times; put it back, or begin a new "
        "run with --out\n"
    )
    assert not profile.exists()  # it is not measured anew
    profile.write_text(before, encoding="utf-8")
    answered(*resume)
