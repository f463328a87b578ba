"""What a search measures with its target loaded: a cost profile before it, real decoding of the finalists after it."""

from collections.abc import Callable, Sequence

import torch

from archspec.errors import ArchspecError
from archspec.presets import load_spec
from archspec.profile import ProfileTimes
from archspec.resolve import resolve
from runners.features.store import FeatureStore
from runners.features.target import Target, load_target
from runners.search.driver import Search
from runners.search.front import recommended
from runners.search.objective import DecodeSettings
from runners.search.prediction import incomparable
from runners.search.record import Record
from runners.search.result import Decoded
from runners.search.search_file import SearchFile
from runners.speed.choose import spread_drafts
from runners.speed.measure import MeasureSettings, measure_profile
from runners.training.decoding_check import Timed, check_decoding
from runners.training.device import pick_device
from runners.training.single import open_draft
from search_spaces import apply_overrides

Report = Callable[[str], None]

PROFILED_DRAFTS, ROUNDS = 10, 12


def measure_search_profile(file: SearchFile, store: FeatureStore, report: Report) -> None:
    """Measure the profile that the search names: its baselines and drafts from all over its space, at its own use."""
    speed = file.speed
    assert speed is not None
    assert speed.profile is not None
    settings = MeasureSettings((speed.batch,), (speed.context,), speed.range[-1], ROUNDS, speed.threads)
    settings.check(store.facts.max_positions)
    named = [resolve(apply_overrides(load_spec(name), file.fixed), store.facts) for name in file.baselines]
    specs = spread_drafts(file.space, store.facts, file.fixed, named, PROFILED_DRAFTS)
    what = f"the target and {len(specs)} drafts are measured on this machine, which should do nothing else"
    report(f"profile: {speed.profile} is not there, so {what}")
    profile = measure_profile(_target(file), file.target.model, specs, settings)
    profile.save(speed.profile)
    times = ProfileTimes(profile, store.facts, None, batch=speed.batch, context=speed.context)
    error = "an unknown error" if times.fit_error is None else f"a mean error of {times.fit_error:.1%}"
    rest = f"the quartiles of T(1) lie {profile.unrest:.0%} of it apart"
    report(f"profile: {speed.profile}: drafts beside the measured ones are fitted with {error}; {rest}")


def decode_finalists(search: Search, ranked: Sequence[Record], report: Report) -> list[Decoded]:
    """Decode held-out prompts with every architecture that was repeated and the recommended one, best first.

    One that cannot be decoded as asked is left out, and ``report`` told why: what was searched is not lost by it.
    """
    file, settings = search.file, search.file.decode
    assert settings is not None
    assert file.speed is not None
    pick = recommended(search, ranked)
    finalists = [record for record in ranked if record.repeats or record.number == pick.trial]
    report(f"decoding {settings.conversations} held-out conversations with {len(finalists)} drafts on this machine")
    target = _target(file)
    times = search.study.scorer.times
    threads = file.speed.threads or (times.profile.threads if isinstance(times, ProfileTimes) else None)
    if threads is not None:
        torch.set_num_threads(threads)
    found = list[Decoded]()
    for record in finalists:
        try:
            found += _decode(search, record, target, settings)
        except ArchspecError as error:
            report(f"decoding {record.name}: {error}")
    return found


def _target(file: SearchFile) -> Target:
    settings = file.target
    return load_target(settings.model, settings.dtype, pick_device(settings.device), settings.trust_remote_code)


def _decode(search: Search, record: Record, target: Target, settings: DecodeSettings) -> list[Decoded]:
    """The record at its best k, and with the tree; by the weights of the search's own seed."""
    measurement, objective = record.measurements[-1], search.file.objective
    predicted = search.study.scorer.speedup(record, measurement)
    assert predicted is not None
    _, heldout = search.store.split(search.file.data.holdout)
    check = check_decoding(
        open_draft(search.folder.trial(record.number), search.store),
        target,
        search.store,
        heldout[: settings.conversations],
        predicted.k,
        str(target.device),
        temperature=measurement.acceptance["temperature"],
        top_p=measurement.acceptance["top_p"],
        tree=settings.tree,
        sample_draft=objective.draft == "sampled",
        max_new_tokens=settings.max_new_tokens,
    )
    times = search.study.scorer.times
    assert times is not None
    why = incomparable(times, str(target.device), str(target.dtype).removeprefix("torch."))

    def decoded(timed: Timed, predicted_speedup: float | None, expected_length: float | None) -> Decoded:
        return Decoded(
            name=record.name,
            hash=record.hash,
            draft=timed.shape,
            predicted=predicted_speedup,
            measured=timed.speedup,
            low=timed.speedup_low,
            high=timed.speedup_high,
            length=timed.length,
            expected_length=expected_length,
            same_text=timed.same_text,
            responses=check.responses,
            incomparable=why,
            plain_ms=1e3 / check.plain_tokens_per_second,
            profiled_ms=times.target_ms(1),
        )

    expected = measurement.acceptance["length_by_k"][predicted.k - 1]
    chain = decoded(check.chain, predicted.value, expected)
    return [chain, *([decoded(check.tree, None, None)] if check.tree else [])]
