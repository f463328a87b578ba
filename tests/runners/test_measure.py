"""Measuring: everything that a profile needs is there, larger drafts cost more, and nothing is left changed."""

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from archspec.attention import ChainCache
from archspec.errors import ArchspecError
from archspec.profile import Profile, ProfileTimes
from archspec.resolve import ResolvedSpec
from archspec.speedup import speedup
from archspec.step_fit import StepCounts
from archspec.weights import SPEC_FILE, WEIGHTS_FILE
from runners.commands.speed import _settings, app
from runners.display.console import Commands, make_console
from runners.display.speed import profile_tables
from runners.features.target import Target
from runners.search.objective import SpeedSettings
from runners.search.search_file import SearchFile
from runners.speed.choose import spread_drafts
from runners.speed.clock import CpuClock
from runners.speed.loop import Mark, WatchedTarget, _beside, fixed_cost
from runners.speed.measure import MeasureSettings, Part, _take, check_device, measure_profile
from runners.speed.work import DraftSteps, Prefix, Projection, TargetForward, random_ids, untrained
from search_spaces import Space
from tests.runners.drafts import single_thread, tiny_spec
from tests.runners.tiny import save_tiny, tiny_target

QUICK = MeasureSettings(batches=(1, 2), contexts=(8, 16), draft_length=3, rounds=2, threads=1)


@pytest.fixture
def target() -> Target:
    single_thread()
    return tiny_target()


def small(target: Target, **changes: Any) -> ResolvedSpec:
    return tiny_spec(target.facts, changes=changes)


def wide_and_deep(target: Target) -> ResolvedSpec:
    """Far more work than ``small``: six layers with MLPs of 4096."""
    return small(target, **{"depth": 6, "layers.*.mlp.intermediate_size": 4096})


# The whole


def test_a_profile_is_complete(target: Target) -> None:
    specs = [small(target), small(target, depth=2)]
    seen: list[tuple[int, int]] = []
    profile = measure_profile(target, "tiny", specs, QUICK, lambda done, total: seen.append((done, total)))
    points = [(batch, context) for batch in (1, 2) for context in (8, 16)]
    assert {(t.batch, t.context, t.rows) for t in profile.target_times} == {
        (*p, m) for p in points for m in (1, 2, 3, 4)
    }
    assert [draft.hash for draft in profile.drafts] == [spec.hash for spec in specs]
    assert all({(t.batch, t.context) for t in draft.times} == set(points) for draft in profile.drafts)
    assert all(time.spread for time in profile.target_times)
    assert all(time.step_spread and time.cycle_spread for draft in profile.drafts for time in draft.times)
    assert (profile.target.fingerprint, profile.dtype, profile.threads) == (target.fingerprint, "float32", 1)
    assert (profile.device, profile.hardware == "") == ("cpu", False)
    assert {"draft-archspec", "torch", "transformers"} <= set(profile.software)
    assert "2 rounds" in (profile.how or "")
    assert seen == [(done, 4) for done in range(1, 5)]
    found = ProfileTimes(profile, target.facts, target.fingerprint, batch=2, context=12)
    assert speedup([1.2, 1.3, 1.35], specs[1], found, range(1, 4)).draft_source == "measured"
    assert found.draft_ms(small(target, depth=3)) > 0


def test_a_larger_draft_takes_longer(target: Target) -> None:
    specs = [small(target), wide_and_deep(target)]
    profile = measure_profile(target, "tiny", specs, MeasureSettings(contexts=(8,), draft_length=2, rounds=3))
    few, many = (draft.times[0].step_ms for draft in profile.drafts)
    assert many > 3 * few


def test_a_larger_batch_is_measured_beside_one(target: Target) -> None:
    profile = measure_profile(target, "tiny", [small(target)], MeasureSettings((4,), (8,), 1, 2))
    assert profile.batches == [1, 4]


def test_tables_show_every_time(target: Target) -> None:
    profile = measure_profile(
        target, "tiny", [small(target), small(target, depth=2)], MeasureSettings((1,), (8,), 2, 2)
    )
    found = ProfileTimes(profile, target.facts, None, batch=1, context=8)
    console = make_console()
    with console.capture() as capture:
        for part in profile_tables(profile, [found]):
            console.print(part)
    text = capture.get()
    assert "tiny on " in text
    assert "batch 1, 8 tokens of context" in text
    assert f"{found.draft_ms(small(target, depth=2)):.3f}" in text
    assert f"mean error of {found.fit_error:.1%}" in text
    noisy = [time.model_copy(update={"spread": (0.0, 2 * time.ms)}) for time in profile.target_times]
    alone = profile.model_copy(update={"drafts": profile.drafts[:1], "target_times": tuple(noisy)})
    with console.capture() as capture:
        for part in profile_tables(alone, [ProfileTimes(alone, target.facts, None, batch=1, context=8)]):
            console.print(part)
    text = capture.get()
    assert "with an error that is not known; measure more drafts" in text
    assert "not quiet: the quartiles of T(1) lie 200% of it apart; measure again when nothing else runs" in text


# Its parts


def test_the_forward_is_the_models_own_and_leaves_the_cache_as_it_was(target: Target) -> None:
    prefix = Prefix(target, batch=2, context=10)
    work = TargetForward(target, prefix, 3, [1, 2])
    first = work()
    assert prefix.cache.get_seq_length() == 13
    work.reset()
    assert prefix.cache.get_seq_length() == 10
    assert torch.equal(work(), first)
    work.reset()
    ids = torch.cat((random_ids(target, 1, 10).expand(2, 10), random_ids(target, 2, 3)), dim=1)
    own = target.model(input_ids=ids, use_cache=False).logits[:, -3:].argmax(-1)
    assert torch.equal(own, first)


def test_draft_steps_are_the_drafts_own(target: Target) -> None:
    """The last of a chain's tokens, and the same at every call, for nothing is kept between them."""
    draft = untrained(small(target, depth=2), target)
    work = DraftSteps(draft, 2, 5, 3)
    first = work()
    work.reset()
    assert torch.equal(work(), first)
    memory, h = ChainCache(), draft.spec.hidden_size
    ids = torch.arange(10).view(2, 5)
    with torch.no_grad():
        draft(ids, torch.ones(2, 5, h), torch.arange(5)[None], memory)
        token, u = ids[:, :1], torch.ones(2, 1, h)
        for step in range(3):
            state = draft(token, u, torch.tensor([[5 + step]]), memory)
            token, u = draft.logits(state).argmax(-1), draft.feed_back(state)
    assert torch.equal(first, token)
    assert Projection(draft, 2)().shape == (2, 1, h)


def test_an_untrained_draft_shares_the_embedding_and_leaves_the_seed_alone(target: Target) -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    draft = untrained(small(target, **{"head.vocab_size": 64}), target)
    assert torch.equal(torch.rand(1), expected)
    assert draft.embed_tokens.weight.data_ptr() == target.weights.embed_tokens.data_ptr()
    assert draft.vocab_ids.tolist() == list(range(64))
    assert not draft.trainable_parameters()
    narrow = untrained(small(target, **{"hidden_size": 16, "embedding": "trained", "head.weights": "own"}), target)
    assert narrow.embed_tokens.weight.shape == (target.facts.vocab_size, 16)


def test_the_loop_is_watched_and_left_as_it_was(target: Target) -> None:
    draft = untrained(small(target), target)
    costs = fixed_cost(target, draft, random_ids(target, 1, 8)[0].tolist(), 3)
    assert len(costs) >= 2
    assert -50 < statistics.median(costs) < 100
    assert not draft._forward_pre_hooks
    assert not draft.lm_head._forward_hooks
    assert target.eos_token_ids
    assert WatchedTarget(target, []).eos_token_ids == frozenset()


def test_what_a_cycle_costs_beside_by_hand() -> None:
    """Verified after 50 ms; steps of 5, 2 and 2 ms; 3 + 1 ms of other things; the first step is 3 ms dearer."""
    times = [("verify", 0), ("verified", 50), ("step", 53), ("stepped", 58), ("step", 58), ("stepped", 60)]
    times += [("step", 60), ("stepped", 62), ("verify", 63)]
    assert _beside([Mark(what, ms / 1e3) for what, ms in times]) == pytest.approx(3 + 1 + 3)


def test_a_slow_while_cancels() -> None:
    """The machine is twice as slow in the second of three rounds; what is kept is the usual."""
    slowness = iter([1.0, 1.0, *[1.0] * 3, *[2.0] * 3, *[1.0] * 3])
    one, other = Part(("one",), lambda: [10 * next(slowness)]), Part(("other",), lambda: [30 * next(slowness)])
    taken = _take([one, other], 3, lambda _: None, relative=True)
    assert taken["other",] == [30, 30, 30]
    assert sorted(taken["one",]) == [10, 10, 10, 10, 20, 20]


def test_parts_are_taken_as_often_as_they_say() -> None:
    calls: list[str] = []

    def sample(name: str) -> list[float]:
        calls.append(name)
        return [1.0]

    parts = [Part(("a",), lambda: sample("a")), Part(("b",), lambda: sample("b"), every=3)]
    taken = _take(parts, 4, lambda _: None, relative=False)
    assert (len(taken["a",]), len(taken["b",])) == (4, 2)
    assert calls[:2] == ["a", "b"]


def test_a_warm_clock_runs_once_more(target: Target) -> None:
    class Counted:
        runs = resets = 0

        def __call__(self) -> None:
            self.runs += 1

        def reset(self) -> None:
            self.resets += 1

    cold, warm = Counted(), Counted()
    assert CpuClock(cold).sample() >= 0
    assert CpuClock(warm, warm=True).sample() >= 0
    assert (cold.runs, cold.resets, warm.runs, warm.resets) == (1, 1, 2, 2)


# Which drafts


def test_drafts_of_a_space_lie_far_apart(target: Target) -> None:
    space = Space.load("depth-and-fusion")
    fixed = {"head.vocab_size": 100, "inputs.aux_layers": [1, 2, 3]}
    named = [small(target, **{"head.vocab_size": 100})]
    chosen = spread_drafts(space, target.facts, fixed, [*named, *named], 6)
    assert len({spec.hash for spec in chosen}) == len(chosen) == 6
    assert chosen[0].hash == named[0].hash
    assert {len(spec.layers) for spec in chosen[:2]} == {1, 3}
    kernels = [StepCounts.of(spec, 1, 64).kernels for spec in chosen]
    assert max(kernels) > 2 * min(kernels)
    assert spread_drafts(space, target.facts, fixed, named, 100)[:6] == chosen


def test_no_draft_of_the_space_fits(target: Target) -> None:
    fixed = {"head.vocab_size": 99999}
    with pytest.raises(ArchspecError, match="no draft of the space fits the target; archspec validate says why"):
        spread_drafts(Space.load("depth-and-fusion"), target.facts, fixed, [], 3)


# Errors


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (MeasureSettings(batches=()), "batch: give whole numbers from 1, for example --batch 1,8"),
        (MeasureSettings(contexts=(0,)), "context: give whole numbers from 1, for example --context 1,8"),
        (MeasureSettings(draft_length=0), "draft length: must be at least 1, but is 0"),
        (MeasureSettings(rounds=0), "rounds: must be at least 1, but is 0"),
        (
            MeasureSettings(contexts=(8, 600)),
            "context 600: with 8 drafted tokens a cycle the target's 512 positions allow at most 449",
        ),
    ],
)
def test_settings_are_checked(target: Target, settings: MeasureSettings, message: str) -> None:
    with pytest.raises(ArchspecError, match=message):
        measure_profile(target, "tiny", [small(target)], settings)


def test_only_devices_with_a_clock_are_measured() -> None:
    check_device("cpu")
    check_device("cuda:1")
    with pytest.raises(ArchspecError, match="device mps: profiles are measured on cpu and cuda; use one of them"):
        check_device("mps")


def test_drafts_are_checked(target: Target) -> None:
    with pytest.raises(ArchspecError, match="at least one draft: name one by --draft, or a search file by --search"):
        measure_profile(target, "tiny", [], QUICK)
    other = target.facts.model_copy(update={"vocab_size": 300})
    with pytest.raises(ArchspecError, match="draft eagle3 was resolved for a target of other dimensions than tiny"):
        measure_profile(target, "tiny", [tiny_spec(other)], QUICK)


# The command


def run(*words: str) -> Any:
    whole = typer.Typer(cls=Commands)
    whole.add_typer(app)
    whole.command("other")(lambda: None)
    return CliRunner().invoke(whole, ["profile", *words])


ONE = ("--context", "8", "--draft-length", "2", "--rounds", "2", "--threads", "1")


def test_the_command_writes_a_profile(tmp_path: Path, target: Target) -> None:
    model, out = str(save_tiny(tmp_path / "model")), tmp_path / "p.json"
    fixed = ("--set", "head.vocab_size=100", "--set", "inputs.aux_layers=[1, 2, 3]")
    done = run("--target", model, "--draft", "eagle3", *fixed, *ONE, "--out", str(out))
    assert done.exit_code == 0, done.output
    profile = Profile.load(out)
    assert profile.drafts[0].hash == small(target, **{"head.vocab_size": 100}).hash
    assert profile.target.fingerprint == target.fingerprint
    assert "other drafts: scaled by what they read" in done.output
    assert f"profile: {out}" in done.output
    again = run("--target", model, "--draft", "eagle3", *fixed, *ONE, "--out", str(out), "--json")
    assert '"target_times"' in again.stdout


def test_the_command_reads_a_search_file_and_a_drafts_folder(tmp_path: Path, target: Target) -> None:
    model, out = str(save_tiny(tmp_path / "model")), tmp_path / "p.json"
    (tmp_path / "search.yaml").write_text(
        f"""target: {{model: "{model}"}}
data: {{conversations: [none.jsonl]}}
features: none
space: depth-and-fusion
fixed: {{head.vocab_size: 100, inputs.aux_layers: [1, 2, 3]}}
baselines: [eagle3]
budget: {{trials: 3, rungs: [100]}}
"""
    )
    draft = tmp_path / "draft"
    draft.mkdir()
    own = small(target, **{"head.vocab_size": 64})
    (draft / SPEC_FILE).write_text(own.dump())
    (draft / WEIGHTS_FILE).write_bytes(b"")
    words = ("--search", str(tmp_path / "search.yaml"), "--draft", str(draft), "--drafts", "4")
    done = run(*words, *ONE, "--out", str(out))
    assert done.exit_code == 0, done.output
    drafts = Profile.load(out).drafts
    assert [entry.hash for entry in drafts[:2]] == [own.hash, small(target, **{"head.vocab_size": 100}).hash]
    assert len(drafts) == 4
    assert "fitted, with a mean error of" in done.output


def test_the_command_measures_a_searchs_own_use(tmp_path: Path) -> None:
    """What options say goes before what the file says, and that before what is usual."""
    speed = "speed: {profile: p.json, batch: 2, context: 16, draft_lengths: [2, 3], threads: 1}\n"
    (tmp_path / "search.yaml").write_text(
        "target: {model: m}\ndata: {conversations: [none.jsonl]}\nfeatures: none\nspace: depth-and-fusion\n"
        f"budget: {{trials: 3, rungs: [100]}}\n{speed}"
    )
    file = SearchFile.load(tmp_path / "search.yaml")
    assert _settings(file, None, None, None, 5, None) == MeasureSettings((2,), (16,), 3, 5, 1)
    assert _settings(file, "1,4", "8", 6, 5, 2) == MeasureSettings((1, 4), (8,), 6, 5, 2)
    usual = MeasureSettings((SpeedSettings.model_fields["batch"].default,), (512,), 8, 5, None)
    assert SpeedSettings.model_fields["context"].default == 512
    without = file.model_copy(update={"speed": None})
    assert _settings(None, None, None, None, 5, None) == _settings(without, None, None, None, 5, None) == usual


def test_the_command_says_what_it_lacks(tmp_path: Path) -> None:
    out = str(tmp_path / "p.json")
    model = str(save_tiny(tmp_path / "model"))
    assert "which target? name it by --target, or a search file by --search" in run("--out", out).output
    nothing = run("--target", model, "--context", "8", "--out", out)
    assert (nothing.exit_code, "nothing to measure beside the target" in nothing.output) == (2, True)
    far = run("--target", model, "--draft", "eagle3", "--context", "9e3", "--out", out)
    assert "context 9000: with 8 drafted tokens a cycle" in far.output
    assert not Path(out).exists()
