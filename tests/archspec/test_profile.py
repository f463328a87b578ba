"""The profile: what its file may hold, what lies between its points, and what its fit says of other drafts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel

from archspec.errors import ArchspecError
from archspec.presets import load_preset
from archspec.profile import DraftEntry, DraftTime, Profile, ProfileTimes, between
from archspec.resolve import ResolvedSpec, resolve
from archspec.schema import Document
from archspec.speedup import speedup
from archspec.step_fit import StepCounts, fit, step_terms
from search_spaces import apply_overrides
from tests.smollm2 import SMOLLM2
from tests.test_docs import blocks, keys, model_in, page, section

SHAPES = [(1, 4096), (1, 16384), (2, 4096), (2, 30000), (3, 8192), (3, 49152), (4, 4096), (5, 16384)]


def spec(depth: int = 1, vocabulary: int = 4096, changes: dict[str, Any] | None = None) -> ResolvedSpec:
    values = {"depth": depth, "head.vocab_size": vocabulary if vocabulary != 49152 else "full", **(changes or {})}
    return resolve(apply_overrides(load_preset("eagle3"), values), SMOLLM2)


def plain(**changes: Any) -> dict[str, Any]:
    """A profile as data: batch 1 and 4, contexts 100 and 300, rows 1, 2 and 4, one draft."""
    points = [(batch, context) for batch in (1, 4) for context in (100, 300)]
    data: dict[str, Any] = {
        "hardware": "a machine",
        "dtype": "float32",
        "target": {"model": "smollm2", "facts": SMOLLM2.model_dump(mode="json")},
        "target_times": [
            {"batch": batch, "context": context, "rows": rows, "ms": 10.0 * batch + context / 100 + rows}
            for batch, context in points
            for rows in (1, 2, 4)
        ],
        "drafts": [
            {
                "spec": {"name": "mine", "layers": [{"fusion": "concat"}], "head": {"vocab_size": 4096}},
                "times": [
                    {"batch": batch, "context": context, "step_ms": 1.0 * batch + context / 1000, "cycle_ms": 0.5}
                    for batch, context in points
                ],
            }
        ],
    }
    return {**data, **changes}


def profile(**changes: Any) -> Profile:
    return Document(plain(**changes), "p.json").validate(Profile)


def times(loaded: Profile | None = None, batch: int = 1, context: int = 100, **more: Any) -> ProfileTimes:
    return ProfileTimes(loaded or profile(), SMOLLM2, None, batch=batch, context=context, **more)


def measured(specs: list[ResolvedSpec], ms: list[float], cycles: list[float] | None = None) -> Profile:
    entries = [
        DraftEntry.of(one, [DraftTime(batch=1, context=100, step_ms=step, cycle_ms=cycle)]).model_dump(mode="json")
        for one, step, cycle in zip(specs, ms, cycles or [0.0] * len(ms), strict=True)
    ]
    return profile(drafts=entries)


# The file


def test_a_saved_profile_is_loaded_as_it_was(tmp_path: Path) -> None:
    before = measured([spec(1), spec(2, 30000, {"inputs.aux_layers": [3, 9]})], [1.25, 2.0])
    before.save(tmp_path / "new" / "p.json")
    after = Profile.load(tmp_path / "new" / "p.json")
    assert after == before
    assert [entry.hash for entry in after.drafts] == [
        spec(1).hash,
        spec(2, 30000, {"inputs.aux_layers": [3, 9]}).hash,
    ]


def test_the_example_in_the_docs_is_all_that_is_needed() -> None:
    text = next(text for info, text in blocks(page("profile.md")) if info == "json profile")
    loaded = Document.parse(text, "docs").validate(Profile)
    facts = loaded.target.facts
    found = ProfileTimes(loaded, facts, None, batch=1, context=1024)
    eagle3 = resolve(load_preset("eagle3"), facts)
    assert found.draft_source(eagle3) == "measured"
    assert (found.target_ms(1), found.draft_ms(eagle3), found.cycle_ms(eagle3)) == (7.0, 0.9, 0.6)
    predicted = speedup([1 + 0.5 * k for k in range(1, 9)], eagle3, found, range(1, 9))
    assert predicted.by_k[3] == pytest.approx(2.5 * 7.0 / (7.2 + 3 * 0.9 + 0.6))
    deep = resolve(load_preset("eagle3-deep-fused-once"), facts)
    assert found.draft_source(deep) == "scaled"
    assert 0.9 < found.draft_ms(deep) < 2.7


def test_every_field_is_documented() -> None:
    def names(model: type[BaseModel], above: str = "") -> set[str]:
        found = set()
        for name, field in model.model_fields.items():
            inner = model_in(field.annotation)
            listed = "tuple[" in str(field.annotation)
            if inner is None or listed or inner.__module__ != "archspec.profile":
                found.add(f"{above}{name}")
            if inner is not None and inner.__module__ == "archspec.profile":
                found |= names(inner, f"{above}{name}.N." if listed else f"{above}{name}.")
        return found

    assert keys(section(page("profile.md"), "## Fields")) == names(Profile)


def test_a_preset_or_a_spec_names_the_draft() -> None:
    time = [{"batch": 1, "context": 100, "step_ms": 1.0}]
    loaded = profile(drafts=[{"spec": "eagle3", "times": time}, {"spec": "eagle1", "times": time}])
    assert [entry.label for entry in loaded.drafts] == ["eagle3", "eagle1"]
    assert times(loaded).draft_source(resolve(load_preset("eagle1"), SMOLLM2)) == "measured"
    resolved = spec(2).model_dump(mode="json")
    assert times(profile(drafts=[{"spec": resolved, "times": time}])).draft_source(spec(2)) == "measured"


TIME = {"batch": 1, "context": 100, "step_ms": 1.0}
ONE = {"batch": 1, "context": 100, "rows": 1, "ms": 1.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hardwear": "x"}, "hardwear: unknown key; did you mean 'hardware'"),
        ({"target_times": [{**ONE, "ms": 0}]}, r"target_times\.0\.ms = 0: input should be greater than 0"),
        (
            {"target_times": [{**ONE, "ms": float("inf")}]},
            r"target_times\.0\.ms = inf: input should be a finite number",
        ),
        (
            {"target_times": [{**ONE, "spread": [1.5, 2.0]}]},
            r"target_times\.0\.spread: low <= 1 <= high must hold, but it is \[1\.5, 2\]; give the quartiles",
        ),
        ({"target_times": [{**ONE, "rows": 2}]}, "target_times: must hold a time for 1 row, which plain decoding"),
        (
            {"target_times": [ONE, {**ONE, "ms": 2.0}]},
            r"target_times\.1: batch 1, context 100, rows 1 is there twice, first as target_times\.0",
        ),
        ({"drafts": []}, "drafts: must hold at least one measured draft"),
        ({"drafts": [{"times": [TIME]}]}, r"drafts\.0\.spec: give the draft's spec, a preset's name, or its hash"),
        ({"drafts": [{"spec": "eagle3", "times": []}]}, r"drafts\.0\.times: must hold at least one time"),
        (
            {"drafts": [{"spec": "eagle3", "times": [TIME, TIME]}]},
            r"drafts\.0\.times\.1: batch 1, context 100 is there twice, first as times\.0",
        ),
        (
            {"drafts": [{"spec": "eagle33", "times": [TIME]}]},
            r"drafts\.0\.spec = 'eagle33': 'eagle33' is no preset: did",
        ),
        (
            {"drafts": [{"spec": {"layers": [{"fusoin": "concat"}]}, "times": [TIME]}]},
            r"drafts\.0\.spec\.layers\.0\.fusoin: unknown key; did you mean 'fusion'",
        ),
        (
            {"drafts": [{"spec": {**spec().model_dump(), "head": {"vocab_size": 60000}}, "times": [TIME]}]},
            r"drafts\.0\.spec: .*60000 is larger than the target's vocabulary of 49152",
        ),
        (
            {"drafts": [{"spec": "eagle3", "hash": "0123456789ab", "times": [TIME]}]},
            r"drafts\.0\.hash: 0123456789ab is not the hash of the spec beside it, [0-9a-f]{12}; leave one",
        ),
        (
            {"drafts": [{"spec": "eagle3", "times": [TIME]}, {"name": "b", "spec": "eagle3", "times": [TIME]}]},
            r"drafts\.1: the same draft as drafts\.0; put its times together",
        ),
        (
            {"drafts": [{"spec": "eagle3", "times": [{**TIME, "step_spread": [0, 0.5]}]}]},
            r"drafts\.0\.times\.0\.step_spread: low <= 1 <= high must hold",
        ),
        (
            {"drafts": [{"spec": "eagle3", "times": [{**TIME, "cycle_ms": 1, "cycle_spread": [2, 3]}]}]},
            r"drafts\.0\.times\.0\.cycle_spread: low <= 1 <= high must hold",
        ),
    ],
)
def test_a_broken_file_says_where_and_why(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArchspecError, match=message):
        profile(**changes)


def test_a_broken_file_names_its_line(tmp_path: Path) -> None:
    text = json.dumps(plain(), indent=1).replace('"rows": 2', '"rows": -2', 1)
    (tmp_path / "p.json").write_text(text)
    line = text[: text.index('"rows": -2')].count("\n") + 1
    with pytest.raises(ArchspecError, match=rf"p\.json:{line}: target_times\.1\.rows = -2: input should be greater"):
        Profile.load(tmp_path / "p.json")


# Which target, batch and context


def test_a_profile_of_another_target_is_refused() -> None:
    other = SMOLLM2.model_copy(update={"num_layers": 32, "hidden_size": 960})
    message = (
        "p.json: measured for another target .smollm2: hidden_size 576, num_layers 30. "
        "than this one .hidden_size 960, num_layers 32.; measure it with archspec profile"
    )
    with pytest.raises(ArchspecError, match=message):
        ProfileTimes(profile(), other, "ab", batch=1, context=100, name="p.json")
    known = profile(target={**plain()["target"], "fingerprint": "ab"})
    with pytest.raises(ArchspecError, match=r"p: measured for target ab \(smollm2\), not for target cd; measure it"):
        ProfileTimes(known, SMOLLM2, "cd", batch=1, context=100, name="p")
    stretched = SMOLLM2.model_copy(update={"max_positions": 9})
    assert ProfileTimes(known, stretched, "ab", batch=1, context=100).target_ms(1) == 12
    assert ProfileTimes(known, stretched, None, batch=1, context=100).target_ms(1) == 12


@pytest.mark.parametrize(
    ("batch", "context", "message"),
    [
        (8, 100, "p: 8 sequences in a batch are outside what was measured, 1 to 4; the nearest is 4"),
        (1, 50, "p: 50 tokens of context are outside what was measured, 100 to 300; the nearest is 100"),
        (1, 301, "p: 301 tokens of context are outside what was measured, 100 to 300; the nearest is 300"),
    ],
)
def test_outside_the_profile_names_the_range_and_the_nearest(batch: int, context: int, message: str) -> None:
    with pytest.raises(ArchspecError, match=message):
        times(batch=batch, context=context, name="p")


def test_a_single_point_and_a_hole_are_told_as_such() -> None:
    alone = profile(target_times=[ONE])
    with pytest.raises(
        ArchspecError, match="200 tokens of context are outside what was measured, 100 alone; the nearest"
    ):
        times(alone, context=200)
    corners = profile(target_times=[ONE, {**ONE, "batch": 4, "context": 300}])
    with pytest.raises(
        ArchspecError, match=r"batch of 2 with a context of 200 is not between.* 1 with 100, 4 with 300"
    ):
        times(corners, batch=2, context=200)


def test_rows_beyond_the_profile() -> None:
    with pytest.raises(
        ArchspecError, match=r"p: 5 tokens a sequence are outside .* 1 to 4; the nearest is 4; k drafted"
    ):
        times(name="p").target_ms(5)


def test_values_between_points_are_linear() -> None:
    assert times(context=150).target_ms(3) == pytest.approx(10 + 1.5 + 3)
    assert times(batch=3, context=200).target_ms(1) == pytest.approx(30 + 2 + 1)
    assert times(batch=2, context=150).draft_ms(spec()) == pytest.approx(2 + 0.15)
    points: dict[tuple[int, ...], float] = {(1, 10): 1.0, (1, 20): 3.0, (5, 10): 9.0}
    assert between(points, (1, 15)) == 2.0
    assert between(points, (3, 10)) == 5.0
    assert between(points, (3, 15)) is None
    assert between(points, (6, 10)) is None


# Drafts


def test_a_measured_draft_has_its_own_times() -> None:
    found = times(measured([spec(1), spec(2)], [1.5, 7.0], [0.25, 0.5]))
    assert (found.draft_ms(spec(2)), found.cycle_ms(spec(2)), found.draft_source(spec(2))) == (7.0, 0.5, "measured")
    assert found.draft_source(spec(3)) == "fitted"
    assert found.source == "profile of a machine, float32; batch 1, context 100"


def test_a_draft_known_by_its_hash_alone() -> None:
    found = times(profile(drafts=[{"name": "x", "hash": spec(2).hash, "times": [TIME]}]), name="p")
    assert found.draft_ms(spec(2)) == 1.0
    for question in (found.draft_ms, found.cycle_ms):
        with pytest.raises(
            ArchspecError, match=r"p: draft eagle3 \(\w+\) was not measured, and of x none was at batch 1"
        ):
            question(spec(1))
    assert (found.fit_error, found.fit_errors, found.coefficients) == (None, {}, {})


def test_one_draft_is_scaled_by_what_it_reads() -> None:
    found = times(measured([spec(1)], [2.0], [0.5]))
    one, three = (StepCounts.of(spec(depth), 1, 100) for depth in (1, 3))
    ratio = (three.layer_elements + three.head_elements) / (one.layer_elements + one.head_elements)
    assert found.draft_ms(spec(3)) == pytest.approx(2.0 * ratio)
    assert found.cycle_ms(spec(3)) == pytest.approx(0.5)
    assert (found.draft_source(spec(3)), found.fit_error) == ("scaled", None)


def law(counts: StepCounts) -> float:
    return 0.2 + 0.01 * counts.kernels + 3e-7 * counts.layer_elements + 2e-7 * counts.head_elements


def test_the_fit_finds_the_constants_that_made_the_times() -> None:
    specs = [spec(*shape) for shape in SHAPES]
    found = times(measured(specs, [law(StepCounts.of(one, 1, 100)) for one in specs]))
    expected = {"kernels": 0.01, "layer elements": 3e-7, "head elements": 2e-7, "constant": 0.2}
    assert found.coefficients == pytest.approx(expected, rel=1e-6)
    assert found.fit_error == pytest.approx(0, abs=1e-3)
    other = spec(6, 20000, {"layers.0.fusion": "project"})
    assert found.draft_ms(other) == pytest.approx(law(StepCounts.of(other, 1, 100)))


def test_no_coefficient_is_negative() -> None:
    """Deeper drafts that are as fast would make a kernel's cost negative in plain least squares."""
    specs = [spec(*shape) for shape in SHAPES]
    found = times(measured(specs, [3.0 - 0.1 * depth for depth, _ in SHAPES]))
    assert min(found.coefficients.values()) >= 0


def test_the_error_is_that_of_drafts_left_out() -> None:
    """Done by hand: one term, relative least squares, so the coefficient is sum(r) / sum(r^2) with r = count / ms."""
    specs = [spec(1), spec(2)]
    ms = [2.0, 3.0]
    sizes = [counts.layer_elements + counts.head_elements for counts in (StepCounts.of(one, 1, 100) for one in specs)]
    found = times(measured(specs, ms))
    assert list(found.coefficients) == ["elements"]
    left = [sizes[0] * ms[1] / sizes[1] / ms[0] - 1, sizes[1] * ms[0] / sizes[0] / ms[1] - 1]
    assert list(found.fit_errors) == [one.hash for one in specs]
    assert list(found.fit_errors.values()) == pytest.approx(left)
    assert found.fit_error == pytest.approx(np.abs(left).mean())
    rates = np.array(sizes) / np.array(ms)
    assert found.coefficients["elements"] == pytest.approx(rates.sum() / (rates**2).sum())


@pytest.mark.parametrize(
    ("shapes", "terms"),
    [
        (SHAPES[:2], ("elements",)),
        (SHAPES[:3], ("kernels", "elements")),
        (SHAPES[:4], ("kernels", "layer elements", "head elements")),
        (SHAPES[:5], ("kernels", "layer elements", "head elements", "constant")),
        ([(1, 4096), (2, 4096), (3, 4096), (4, 4096)], ("kernels", "elements", "constant")),
        ([(1, 4096), (1, 8192), (1, 16384), (1, 30000), (1, 49152)], ("kernels", "layer elements", "head elements")),
    ],
)
def test_terms_are_those_that_the_drafts_tell_apart(shapes: list[tuple[int, int]], terms: tuple[str, ...]) -> None:
    assert step_terms([StepCounts.of(spec(*shape), 1, 100) for shape in shapes]) == terms


def test_the_cost_of_a_cycle_grows_with_the_aux_states() -> None:
    inputs: list[list[int]] = [[3], [3, 9], [3, 9, 15]]
    specs = [spec(1, changes={"inputs.aux_layers": ids}) for ids in inputs]
    found = times(measured(specs, [1.0, 1.0, 1.0], [1.0, 2.0, 3.0]))
    four = spec(1, changes={"inputs.aux_layers": [3, 9, 15, 21]})
    assert found.cycle_ms(four) == pytest.approx(4.0, rel=0.01)


def test_counts_know_batch_context_and_window() -> None:
    short, long = (StepCounts.of(spec(), 1, context) for context in (100, 1000))
    assert long.layer_elements - short.layer_elements == 900 * 2 * SMOLLM2.kv_heads * SMOLLM2.head_dim
    windowed = spec(changes={"layers.0.attention.window": 64})
    assert StepCounts.of(windowed, 1, 1000).layer_elements == StepCounts.of(windowed, 1, 100).layer_elements
    assert StepCounts.of(spec(), 8, 1000).layer_elements > long.layer_elements
    assert fit([short], [2.0], ["elements"]).errors == ()
