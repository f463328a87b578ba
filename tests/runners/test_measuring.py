"""What a search measures with its target: a profile that is not there before it, its finalists' speed after it."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from archspec.builder import adopt_target, build_draft
from archspec.profile import Profile, ProfileTimes
from archspec.weights import save_draft
from runners.features.store import FeatureStore
from runners.search import measuring, prediction
from runners.search.driver import Search
from runners.search.front import recommended
from runners.search.measuring import decode_finalists, measure_search_profile
from runners.search.prediction import incomparable
from runners.search.record import Record
from runners.training.trial import WEIGHTS_FOLDER
from tests.runners.drafts import single_thread
from tests.runners.interrupted import Runs
from tests.runners.replay import K, ToyTimes, search_file
from tests.runners.tiny import save_tiny

Finished = tuple[Search, list[Record]]


@pytest.fixture
def finished(tiny_store: FeatureStore, tmp_path: Path) -> Finished:
    """A search with two finalists, whose drafts are untrained."""
    file = search_file(
        tiny_store,
        {"trials": 4, "rungs": [100], "seeds": 2, "finalists": 2},
        target={"model": str(save_tiny(tmp_path / "target"))},
        objective={"draft_length": K, "maximize": "speedup"},
        speed={"accelerator": "H100-SXM", "draft_lengths": [1, K]},
        decode={"conversations": 2, "max_new_tokens": 10, "tree": {"branches": [2, 1]}},
    )
    search = Runs(tmp_path, tiny_store, file, ToyTimes()).search()
    ranked = search.execute()
    for record in ranked:
        torch.manual_seed(0)
        draft = build_draft(record.spec)
        adopt_target(draft, tiny_store.weights(), None)
        save_draft(draft, search.folder.trial(record.number) / WEIGHTS_FOLDER)
    return search, ranked


def test_finalists_and_the_pick_are_decoded_as_a_chain_and_as_a_tree(finished: Finished) -> None:
    search, ranked = finished
    told: list[str] = []
    decoded = decode_finalists(search, ranked, told.append)
    repeated = [record for record in ranked if record.repeats]
    assert recommended(search, ranked).trial in {record.number for record in repeated}
    assert told == [f"decoding 2 held-out conversations with {len(repeated)} drafts on this machine"]
    assert [one.hash for one in decoded] == [record.hash for record in repeated for _ in range(2)]
    for record, chain, tree in zip(repeated, decoded[::2], decoded[1::2], strict=True):
        measurement = record.measurements[-1]
        predicted = search.study.scorer.speedup(record, measurement)
        assert predicted is not None
        assert (chain.draft, tree.draft) == (f"chain of {predicted.k}", "tree 2x1")
        assert (chain.predicted, tree.predicted) == (predicted.value, None)
        assert (chain.expected_length, tree.expected_length) == (
            measurement.acceptance["length_by_k"][predicted.k - 1],
            None,
        )
        assert chain.same_text == tree.same_text == chain.responses == tree.responses == 2
        assert 0 < chain.low <= chain.measured <= chain.high
        assert chain.incomparable.startswith("predicted from the toy times, but measured on ")
        assert chain.plain_ms == tree.plain_ms > 0
        assert chain.profiled_ms == ToyTimes().target_ms(1)


def test_a_finalist_that_cannot_be_decoded_is_told_and_left_out(finished: Finished) -> None:
    search, ranked = finished
    first, *others = [record for record in ranked if record.repeats]
    (search.folder.trial(first.number) / WEIGHTS_FOLDER / "draft.safetensors").unlink()
    told: list[Any] = []
    decoded = decode_finalists(search, ranked, told.append)
    assert {one.hash for one in decoded} == {record.hash for record in others}
    assert len(told) == 2
    assert told[1].startswith(f"decoding {first.name}: ")
    assert "draft.safetensors" in told[1]


def test_a_profile_that_is_not_there_is_measured_at_the_searchs_own_use(
    tiny_store: FeatureStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    single_thread()
    monkeypatch.setattr(measuring, "ROUNDS", 2)
    monkeypatch.setattr(measuring, "PROFILED_DRAFTS", 3)
    path, told = tmp_path / "new" / "profile.json", list[str]()
    use = {"batch": 2, "context": 8, "draft_lengths": [1, 2], "threads": 1}
    file = search_file(
        tiny_store, target={"model": str(save_tiny(tmp_path / "target"))}, speed={"profile": str(path), **use}
    )
    measure_search_profile(file, tiny_store, told.append)
    profile = Profile.load(path)
    assert (profile.batches, profile.contexts, profile.rows, profile.threads) == ([1, 2], [8], [1, 2, 3], 1)
    assert [draft.name for draft in profile.drafts][:2] == list(file.baselines)
    assert len(profile.drafts) == 3
    measured = "the target and 3 drafts are measured on this machine, which should do nothing else"
    assert told[0] == f"profile: {path} is not there, so {measured}"
    fitted = r"drafts beside the measured ones are fitted with a mean error of \d+\.\d%"
    assert re.fullmatch(rf"profile: {path}: {fitted}; the quartiles of T\(1\) lie \d+% of it apart", told[1])


FAST = {"processor": "a CPU", "gpus": ["a GPU"]}


def profile_times(store: FeatureStore, hardware: str, batch: int = 1) -> ProfileTimes:
    profile = Profile.model_validate(
        {
            "hardware": hardware,
            "dtype": "float32",
            "target": {"model": "tiny", "facts": store.facts.model_dump()},
            "target_times": [{"batch": batch, "context": 64, "rows": rows, "ms": 10.0 + rows} for rows in (1, 9)],
            "drafts": [
                {"hash": "0" * 12, "times": [{"batch": batch, "context": 64, "step_ms": 1.0}]},
            ],
        }
    )
    return ProfileTimes(profile, store.facts, None, batch=batch, context=64)


def test_what_sets_predicted_and_measured_apart(tiny_store: FeatureStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "hardware", lambda: FAST)
    here = profile_times(tiny_store, "a CPU")
    assert incomparable(here, "cpu", "float32") == ""
    assert incomparable(here, "cpu", "bfloat16") == "predicted for float32, but measured in bfloat16"
    two = incomparable(profile_times(tiny_store, "another", 2), "cpu", "float32")
    assert two == (
        "predicted for another, but measured on a CPU; "
        "predicted for a batch of 2, but measured with one sequence at a time"
    )
    assert incomparable(ToyTimes(), "cpu", "float32") == "predicted from the toy times, but measured on a CPU"


def test_on_cuda_nothing_is_comparable(tiny_store: FeatureStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even on the GPU that was profiled, in the same float type."""
    monkeypatch.setattr(prediction, "hardware", lambda: FAST)
    assert incomparable(profile_times(tiny_store, "a GPU"), "cuda:0", "float32") == (
        "predicted for CUDA graphs with drafts in float32, but measured in a loop in Python with drafts in float32"
    )
