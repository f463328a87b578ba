"""The times that a search reckons with: a measured profile, or the roofline of a named accelerator. No torch."""

import hashlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from archspec.accelerators import accelerator_named
from archspec.errors import ArchspecError
from archspec.facts import TargetFacts
from archspec.presets import load_spec
from archspec.profile import Profile, ProfileTimes
from archspec.resolve import ResolvedSpec, resolve
from archspec.roofline import Roofline
from archspec.speedup import Times
from runners.search.objective import SpeedSettings
from runners.search.search_file import SearchFile
from search_spaces import apply_overrides


def open_times(file: SearchFile, facts: TargetFacts, fingerprint: str | None = None) -> Times | None:
    """The search's times, checked to cover its batch size, context, draft lengths and baselines.

    None where the search asks for none, and where its profile is still to be measured (see ``missing_profile``).
    ``fingerprint`` is the target's, as far as it is known.

    Raises:
        ArchspecError: the profile is broken or for another target, does not cover what is asked, or the accelerator is
            unknown or too small.
    """
    if file.speed is None or missing_profile(file) is not None:
        return None
    times = times_for(file.speed, facts, fingerprint)
    if isinstance(times, ProfileTimes) and not times.coefficients:
        rule = "holds no draft with its spec at this batch and context, from which others could be told"
        raise ArchspecError(f"speed.profile: {file.speed.profile}: {rule}; measure more with archspec profile")
    for baseline in file.baselines:
        times.draft_ms(resolve(apply_overrides(load_spec(baseline), file.fixed), facts, f"baseline {baseline}"))
    return times


def times_for(speed: SpeedSettings, facts: TargetFacts, fingerprint: str | None = None, place: str = "speed.") -> Times:
    """The times that ``speed`` names, for a target; ``place`` is where messages say that they were named.

    Raises:
        ArchspecError: as ``open_times``, or the profile is missing.
    """
    times: Times
    if speed.profile is not None:
        profile = Profile.load(speed.profile)
        name = f"{place}profile: {speed.profile}"
        times = ProfileTimes(profile, facts, fingerprint, batch=speed.batch, context=speed.context, name=name)
    else:
        try:
            accelerator = accelerator_named(speed.accelerator or "")
        except ArchspecError as error:
            raise ArchspecError(f"{place}accelerator: {error}") from None
        times = Roofline(accelerator, facts, dtype=speed.dtype, batch=speed.batch, context=speed.context)
    for rows in (1, speed.range[0] + 1, speed.range[-1] + 1):
        times.target_ms(rows)
    return times


@dataclass(frozen=True)
class StepTimes:
    """What a draft's cycles are made of, in milliseconds for all sequences of the batch.

    ``parts`` are those of a draft step, told by a roofline alone; ``target_ms`` is T(m) by m, 1 and others.
    """

    source: str
    draft_ms: float
    draft_source: str
    parts: dict[str, float]
    cycle_ms: float
    target_ms: dict[int, float]

    @classmethod
    def of(cls, spec: ResolvedSpec, times: Times, rows: Iterable[int]) -> "StepTimes":
        """Those of ``spec``, with T(m) at ``rows``, of which the ones that a profile does not cover are left out.

        Raises:
            ArchspecError: the draft was not measured, and nothing was that it can be told from.
        """
        target_ms: dict[int, float] = {}
        for m in rows:
            with suppress(ArchspecError):
                target_ms[m] = times.target_ms(m)
        parts = times.draft_parts(spec) if isinstance(times, Roofline) else {}
        return cls(times.source, times.draft_ms(spec), times.draft_source(spec), parts, times.cycle_ms(spec), target_ms)

    def cycle(self, k: int) -> float:
        """A whole cycle with ``k`` drafted tokens: T(k + 1), k draft steps, and T_0."""
        return self.target_ms[k + 1] + k * self.draft_ms + self.cycle_ms

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON; ``parts`` is None where nothing is known of them."""
        return asdict(self) | {"parts": self.parts or None}


def times_identity(times: Times | None) -> str | None:
    """What tells these times from others: their source, and for a profile the digest of all that it holds."""
    if not isinstance(times, ProfileTimes):
        return None if times is None else times.source
    digest = hashlib.sha256(times.profile.model_dump_json().encode()).hexdigest()[:12]
    return f"{times.source}; {digest}"


def missing_profile(file: SearchFile) -> Path | None:
    """The profile that the search names, if it is not there yet."""
    profile = None if file.speed is None else file.speed.profile
    return None if profile is None or profile.exists() else profile
