"""A cost profile: how long a target's forwards and draft steps take on one machine, and what follows for other drafts.

The file is written by ``archspec profile``, or by hand from an engine's own measurements. docs/profile.md has its
fields and an example. No torch.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt, model_validator

from archspec.errors import ArchspecError
from archspec.facts import TargetFacts
from archspec.files import write_json
from archspec.presets import load_spec
from archspec.resolve import ResolvedSpec, resolve
from archspec.schema import Closed, ClosedFile, field_error
from archspec.spec import DraftSpec
from archspec.step_fit import Fit, StepCounts, fit, step_terms

Milliseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
MillisecondsOrNone = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Spread = tuple[MillisecondsOrNone, MillisecondsOrNone]


def _spread_around(spread: Spread | None, ms: float, name: str) -> None:
    if spread is not None and not spread[0] <= ms <= spread[1]:
        rule = f"low <= {ms:g} <= high must hold, but it is [{spread[0]:g}, {spread[1]:g}]"
        raise field_error(name, f"{rule}; give the quartiles, or leave it out")


class TargetTime(Closed):
    """T(m): the target's forward and head for ``rows`` = m new tokens of each of ``batch`` sequences.

    ``context`` tokens of every sequence are in the cache before. ``spread`` is the first and the third quartile in ms.
    """

    batch: PositiveInt
    context: NonNegativeInt
    rows: PositiveInt
    ms: Milliseconds
    spread: Spread | None = None

    @model_validator(mode="after")
    def _spread_fits(self) -> Self:
        _spread_around(self.spread, self.ms, "spread")
        return self


class DraftTime(Closed):
    """One draft at one batch size and context length, in milliseconds for all sequences together.

    ``step_ms`` is a draft step with head and choice of a token; ``cycle_ms`` is T_0, what a cycle costs beside the
    target's forward and its draft steps. Spreads are first and third quartile.
    """

    batch: PositiveInt
    context: NonNegativeInt
    step_ms: Milliseconds
    step_spread: Spread | None = None
    cycle_ms: MillisecondsOrNone = 0.0
    cycle_spread: Spread | None = None

    @model_validator(mode="after")
    def _spreads_fit(self) -> Self:
        _spread_around(self.step_spread, self.step_ms, "step_spread")
        _spread_around(self.cycle_spread, self.cycle_ms, "cycle_spread")
        return self


def _as_written(value: Any) -> Any:
    """A preset's name as its spec; of a resolved spec the target is left out, which the profile has."""
    if isinstance(value, str):
        try:
            return load_spec(value)
        except ArchspecError as error:
            raise ValueError(str(error)) from None
    return {key: part for key, part in value.items() if key != "target"} if isinstance(value, dict) else value


class DraftEntry(Closed):
    """A draft that was measured. ``spec`` is as in a spec file, resolved or not, or a preset's name.

    A draft known by its ``hash`` alone is found when a search comes to it, but teaches nothing about others.
    """

    name: str = ""
    hash: str | None = None
    spec: Annotated[DraftSpec, BeforeValidator(_as_written, json_schema_input_type=DraftSpec | str)] | None = None
    times: tuple[DraftTime, ...]

    @model_validator(mode="after")
    def _says_which_draft(self) -> Self:
        if self.spec is None and self.hash is None:
            raise field_error("spec", "give the draft's spec, a preset's name, or its hash as a leaderboard shows it")
        if not self.times:
            raise field_error("times", "must hold at least one time")
        _once((("times", i, (time.batch, time.context)) for i, time in enumerate(self.times)), ("batch", "context"))
        return self

    @classmethod
    def of(cls, spec: ResolvedSpec, times: Iterable[DraftTime]) -> Self:
        """The entry of a resolved spec."""
        written = DraftSpec.model_validate(spec.model_dump(mode="json", exclude={"target"}))
        return cls(name=spec.name, hash=spec.hash, spec=written, times=tuple(times))

    @property
    def label(self) -> str:
        """What tables call it."""
        return self.name or (self.spec.name if self.spec is not None else f"draft {self.hash}")


class ProfiledTarget(Closed):
    """The target that was measured; ``fingerprint`` as in a feature store's manifest, if it is known."""

    model: str
    fingerprint: str | None = None
    facts: TargetFacts


class Profile(ClosedFile):
    """Times of one target and of some drafts on one machine.

    ``hardware`` and ``dtype`` are told in every table that rests on the profile; ``how`` says how it was measured.
    """

    version: Literal[1] = 1
    hardware: str
    dtype: str
    device: str | None = None
    threads: PositiveInt | None = None
    machine: dict[str, Any] = Field(default_factory=dict)
    software: dict[str, str] = Field(default_factory=dict)
    created: str | None = None
    how: str | None = None
    target: ProfiledTarget
    target_times: tuple[TargetTime, ...]
    drafts: tuple[DraftEntry, ...]

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if not any(time.rows == 1 for time in self.target_times):
            raise field_error("target_times", "must hold a time for 1 row, which plain decoding is measured by")
        if not self.drafts:
            raise field_error("drafts", "must hold at least one measured draft")
        points = ((time.batch, time.context, time.rows) for time in self.target_times)
        _once((("target_times", i, point) for i, point in enumerate(points)), ("batch", "context", "rows"))
        return self

    @model_validator(mode="after")
    def _drafts_fit_the_target(self) -> Self:
        hashes: dict[str, int] = {}
        for i, draft in enumerate(self.drafts):
            known = draft.hash
            if draft.spec is not None:
                try:
                    known = resolve(draft.spec, self.target.facts).hash
                except ArchspecError as error:
                    raise field_error(f"drafts.{i}.spec", str(error)) from None
            if draft.hash not in (None, known):
                rule = f"{draft.hash} is not the hash of the spec beside it, {known}"
                raise field_error(f"drafts.{i}.hash", f"{rule}; leave one of the two out")
            if known is not None and hashes.setdefault(known, i) != i:
                raise field_error(f"drafts.{i}", f"the same draft as drafts.{hashes[known]}; put its times together")
        return self

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        write_json(path, self.model_dump(mode="json"))

    @property
    def unrest(self) -> float:
        """How far the quartiles of T(1) lie apart, as a share of it, at the point where that is most; 0 if unknown."""
        alone = [time for time in self.target_times if time.rows == 1 and time.spread is not None]
        return max(((time.spread[1] - time.spread[0]) / time.ms for time in alone if time.spread), default=0.0)

    @property
    def batches(self) -> list[int]:
        """Batch sizes measured, rising."""
        return sorted({time.batch for time in self.target_times})

    @property
    def contexts(self) -> list[int]:
        """Context lengths measured, rising."""
        return sorted({time.context for time in self.target_times})

    @property
    def rows(self) -> list[int]:
        """Tokens a sequence measured, rising."""
        return sorted({time.rows for time in self.target_times})


def _once(places: Iterable[tuple[str, int, tuple[int, ...]]], axes: Sequence[str]) -> None:
    seen: dict[tuple[int, ...], int] = {}
    for name, index, point in places:
        if seen.setdefault(point, index) != index:
            told = ", ".join(f"{axis} {value}" for axis, value in zip(axes, point, strict=True))
            raise field_error(f"{name}.{index}", f"{told} is there twice, first as {name}.{seen[point]}")


class ProfileTimes:
    """Times (see ``archspec.speedup.Times``) from a profile, at one batch size and context length.

    Between measured batch sizes, context lengths and rows, times are interpolated linearly. A draft that was measured
    has its own times; for any other they are fitted to those that were (``archspec.step_fit``).

    Args:
        profile: the profile.
        facts: the target at hand.
        fingerprint: the target's, or None if it is not known.
        batch: sequences decoded together.
        context: tokens of each sequence that are in the cache.
        name: what messages call the profile, such as its path.

    Raises:
        ArchspecError: the profile is for another target, or does not cover this batch size or context length.
    """

    def __init__(
        self,
        profile: Profile,
        facts: TargetFacts,
        fingerprint: str | None,
        *,
        batch: int,
        context: int,
        name: str = "profile",
    ) -> None:
        self.profile, self.batch, self.context, self._name = profile, batch, context, name
        _require_target(profile, facts, fingerprint, name)
        self._rows: dict[tuple[int, ...], float] = {(t.batch, t.context, t.rows): t.ms for t in profile.target_times}
        self._require_point()
        self._drafts: dict[str, tuple[float, float]] = {}
        self._calibrating: list[tuple[str, StepCounts, float, float]] = []
        for draft in profile.drafts:
            spec = None if draft.spec is None else resolve(draft.spec, profile.target.facts)
            step = between({(t.batch, t.context): t.step_ms for t in draft.times}, (batch, context))
            cycle = between({(t.batch, t.context): t.cycle_ms for t in draft.times}, (batch, context))
            if step is None or cycle is None:
                continue
            self._drafts[str(draft.hash) if spec is None else spec.hash] = (step, cycle)
            if spec is not None:
                self._calibrating.append((spec.hash, StepCounts.of(spec, batch, context), step, cycle))
        self._step_fit, self._cycle_fit = self._fit()

    @property
    def source(self) -> str:
        """See ``Times``."""
        profile = self.profile
        threads = "" if profile.threads is None else f", {profile.threads} thread{'s' * (profile.threads > 1)}"
        where = f"{profile.hardware}, {profile.dtype}{threads}"
        return f"profile of {where}; batch {self.batch}, context {self.context}"

    def target_ms(self, rows: int) -> float:
        """See ``Times``.

        Raises:
            ArchspecError: so many rows were not measured.
        """
        found = between(self._rows, (self.batch, self.context, rows))
        if found is None:
            told = _outside("tokens a sequence", rows, self.profile.rows)
            raise ArchspecError(f"{self._name}: {told}; k drafted tokens need k + 1, so measure with a larger k")
        return found

    def draft_ms(self, spec: ResolvedSpec) -> float:
        """See ``Times``.

        Raises:
            ArchspecError: the draft was not measured, and nothing was that others can be told from.
        """
        measured = self._drafts.get(spec.hash)
        return measured[0] if measured is not None else self._required(self._step_fit, spec)

    def cycle_ms(self, spec: ResolvedSpec) -> float:
        """See ``Times``; raises as ``draft_ms``."""
        measured = self._drafts.get(spec.hash)
        return measured[1] if measured is not None else self._required(self._cycle_fit, spec)

    def draft_source(self, spec: ResolvedSpec) -> str:
        """``measured``, ``fitted``, or ``scaled`` where a single draft was measured, whose cost per weight is taken."""
        if spec.hash in self._drafts:
            return "measured"
        return "fitted" if len(self._calibrating) > 1 else "scaled"

    @property
    def fit_error(self) -> float | None:
        """Mean size of the fit's relative errors on drafts that it was not fitted to; None if that is not known."""
        return None if self._step_fit is None else self._step_fit.error

    @property
    def fit_errors(self) -> dict[str, float]:
        """By hash: a measured draft's relative error, (predicted - measured) / measured, when the fit leaves it out."""
        if self._step_fit is None or not self._step_fit.errors:
            return {}
        return dict(zip((key for key, *_ in self._calibrating), self._step_fit.errors, strict=True))

    @property
    def coefficients(self) -> dict[str, float]:
        """Milliseconds that each count of ``archspec.step_fit`` costs."""
        return {} if self._step_fit is None else dict(self._step_fit.coefficients)

    def _fit(self) -> tuple[Fit | None, Fit | None]:
        if not self._calibrating:
            return None, None
        _, counts, steps, cycles = zip(*self._calibrating, strict=True)
        terms = ("constant", "cycle elements") if len(counts) > 2 else ("constant",)
        return fit(counts, steps, step_terms(counts)), fit(counts, cycles, terms, relative=False)

    def _required(self, found: Fit | None, spec: ResolvedSpec) -> float:
        if found is not None:
            return found.predict(StepCounts.of(spec, self.batch, self.context))
        names = ", ".join(draft.label for draft in self.profile.drafts)
        where = f"batch {self.batch}, context {self.context}"
        raise ArchspecError(
            f"{self._name}: draft {spec.name} ({spec.hash}) was not measured, and of {names} none was at {where} with "
            "its spec, from which it could be fitted; measure more with archspec profile --draft"
        )

    def _require_point(self) -> None:
        if between(self._rows, (self.batch, self.context, 1)) is not None:
            return
        profile = self.profile
        for what, value, known in (
            ("sequences in a batch", self.batch, profile.batches),
            ("tokens of context", self.context, profile.contexts),
        ):
            if not known[0] <= value <= known[-1]:
                raise ArchspecError(f"{self._name}: {_outside(what, value, known)}")
        points = sorted({(time.batch, time.context) for time in profile.target_times if time.rows == 1})
        told = ", ".join(f"{batch} with {context}" for batch, context in points)
        raise ArchspecError(
            f"{self._name}: a batch of {self.batch} with a context of {self.context} is not between measured ones; "
            f"measured were {told}"
        )


def between(points: Mapping[tuple[int, ...], float], at: tuple[int, ...]) -> float | None:
    """The value at ``at``, linear between the nearest points along each axis, the first outermost; None outside."""
    if not at:
        return points[()]
    first, *rest = at
    slices: dict[int, dict[tuple[int, ...], float]] = {}
    for place, value in points.items():
        slices.setdefault(place[0], {})[place[1:]] = value
    found = {place: between(inner, tuple(rest)) for place, inner in slices.items()}
    known = {place: value for place, value in found.items() if value is not None}
    if first in known:
        return known[first]
    below, above = [place for place in known if place < first], [place for place in known if place > first]
    if not below or not above:
        return None
    low, high = max(below), min(above)
    share = (first - low) / (high - low)
    return (1 - share) * known[low] + share * known[high]


def _outside(what: str, value: int, known: Sequence[int]) -> str:
    """``16 sequences in a batch are outside what was measured, 1 to 8; the nearest is 8``."""
    reach = f"{known[0]} to {known[-1]}" if len(known) > 1 else f"{known[0]} alone"
    nearest = min(known, key=lambda one: abs(one - value))
    return f"{value} {what} are outside what was measured, {reach}; the nearest is {nearest}"


_DIMENSIONS = ("hidden_size", "num_layers", "vocab_size", "heads", "kv_heads", "head_dim", "intermediate_size")


def _require_target(profile: Profile, facts: TargetFacts, fingerprint: str | None, name: str) -> None:
    target = profile.target
    if target.fingerprint is not None and fingerprint is not None:
        if target.fingerprint != fingerprint:
            rule = f"measured for target {target.fingerprint} ({target.model}), not for target {fingerprint}"
            raise ArchspecError(f"{name}: {rule}; measure it with archspec profile")
        return
    pairs = [(one, getattr(target.facts, one), getattr(facts, one)) for one in _DIMENSIONS]
    if other := [(one, theirs, ours) for one, theirs, ours in pairs if theirs != ours]:
        theirs, ours = (", ".join(f"{pair[0]} {pair[i]}" for pair in other) for i in (1, 2))
        rule = f"measured for another target ({target.model}: {theirs}) than this one ({ours})"
        raise ArchspecError(f"{name}: {rule}; measure it with archspec profile")
