"""From a space to candidates: drawing with Optuna, drawing to prove that something can be drawn, and the way back."""

import copy
import hashlib
import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from pydantic import ValidationError

from archspec.errors import ArchspecError
from archspec.facts import TargetFacts
from archspec.resolve import ResolvedSpec, resolve
from archspec.schema import Document, dotted
from archspec.spec import DraftSpec
from archspec.speedup import Times
from search_spaces.constraints import Constraints
from search_spaces.domains import Domain, Label, Range
from search_spaces.naming import candidate_name
from search_spaces.paths import get_in, merge, merge_in, parse_path, put_in, spec_data
from search_spaces.space import Parameter, Space

if TYPE_CHECKING:
    import optuna

Chooser = Callable[[str, Domain], Label]
FEASIBILITY_DRAWS = 500


class Infeasible(Exception):
    """A draw whose values are valid one by one but not together, or not for this target."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Candidate:
    """One draft to try: resolved, as written, and the training settings that were drawn with it."""

    spec: ResolvedSpec
    written: DraftSpec
    train: dict[str, float | int | str]

    @property
    def hash(self) -> str:
        """The architecture's hash, followed by one of the training settings if any were drawn."""
        if not self.train:
            return self.spec.hash
        return f"{self.spec.hash}-{hashlib.sha256(json.dumps(self.train, sort_keys=True).encode()).hexdigest()[:6]}"


def sample(
    space: Space, trial: "optuna.trial.BaseTrial", facts: TargetFacts, fixed: Mapping[str, Any] | None = None
) -> Candidate:
    """Draw one candidate for the target described by ``facts``.

    ``fixed`` are values for paths, put into the base before the choices; a choice of the same path wins. Parameters of
    layers that the draft does not have are not suggested.

    Raises:
        Infeasible: the values drawn do not make a draft, or not one for this target.
        ArchspecError: ``fixed`` names a path that does not exist.
    """
    return _draw(space, partial(_suggest, trial), facts, fixed or {})


def apply_overrides(spec: DraftSpec, overrides: Mapping[str, Any], source: str = "overrides") -> DraftSpec:
    """``spec`` with a value for each path; ``depth`` first, so that the others may name the layers it adds.

    ``source`` is what messages name.

    Raises:
        ArchspecError: a path does not exist, or the outcome breaks a rule.
    """
    if not overrides:
        return spec
    data = spec_data(spec, _fixed_depth(overrides, source))
    _override(data, overrides, len(data["layers"]), source)
    return Document(data, source).validate(DraftSpec)


def locate(
    space: Space,
    spec: DraftSpec,
    facts: TargetFacts,
    fixed: Mapping[str, Any] | None = None,
    train: Mapping[str, Any] | None = None,
) -> dict[str, Label] | None:
    """The Optuna parameters under which ``space`` yields the architecture of ``spec``, or None if it does not.

    ``train`` are the settings that ``spec`` is trained with; a space that draws one of them yields ``spec`` only if it
    can draw that value.

    Raises:
        ArchspecError: ``spec`` does not fit the target, or ``fixed`` names a path that does not exist.
    """
    fixed = fixed or {}
    wanted = resolve(spec, facts)
    depth = len(wanted.layers)
    found: dict[str, Label] = {"depth": depth} if "depth" in space.choices else {}
    start = _start(space, depth if found else None, fixed)
    if len(start["layers"]) != depth or (found and depth not in space.depths()):
        return None
    for parameter in space.parameters(depth):
        if parameter.path.kind == "train":
            label = parameter.domain.find((train or {}).get(dotted(parameter.path.field)))
        else:
            label = _agreeing(parameter, start, spec_data(spec), wanted)
        if label is None:
            return None
        found[parameter.name] = label
    try:
        candidate = _draw(space, partial(_recorded_label, found), facts, fixed)
    except Infeasible:
        return None
    return found if candidate.spec.hash == wanted.hash else None


def require_feasible(
    space: Space,
    facts: TargetFacts,
    fixed: Mapping[str, Any] | None = None,
    constraints: Constraints | None = None,
    times: Times | None = None,
) -> None:
    """Make sure that the space can yield a draft for this target, by trying all of a small space or many draws.

    Where many draws break the constraints, a draft that keeps them is looked for from the least of every choice and
    from the nearest draw, one choice at a time. ``times`` are what bounds on time are held against; without them such
    bounds are not checked.

    Raises:
        ArchspecError: it cannot; the message gives the most frequent reason, or of drafts that break constraints the
            one that comes nearest. Or ``fixed`` is wrong by itself.
    """
    fixed = fixed or {}
    reasons: Counter[str] = Counter()
    beyond: list[tuple[float, str, dict[str, Label]]] = []
    for choose in _choosers(space, fixed):
        chosen: dict[str, Label] = {}
        try:
            spec = _draw(space, partial(_remembered, chosen, choose), facts, fixed).spec
        except Infeasible as error:
            reasons[error.reason] += 1
            continue
        reason = constraints.reason(spec, times) if constraints else None
        if constraints is None or reason is None:
            return
        beyond.append((sum(constraints.violations(spec, times).values()), reason, chosen))
    nearest: tuple[float, str] = (math.inf, "")
    if constraints is not None and beyond:
        drawn = min(beyond, key=lambda draw: draw[0])
        nearest = min(_nearest(space, facts, fixed, constraints, times, start) for start in ({}, drawn[2]))
        if not nearest[0]:
            return
    deepest = {"depth": space.greatest_depth} if "depth" in space.choices else {}
    apply_overrides(space.base, dict(fixed) | deepest, "fixed")
    tried = f"no draft of the space can be used: of {reasons.total() + len(beyond)} drawn,"
    if beyond:
        raise ArchspecError(f"{tried} {len(beyond)} break the constraints, the nearest one as {nearest[1]}")
    reason, count = reasons.most_common(1)[0]
    raise ArchspecError(f"{tried} {count} failed because {reason}")


def _nearest(
    space: Space,
    facts: TargetFacts,
    fixed: Mapping[str, Any],
    constraints: Constraints,
    times: Times | None,
    start: Mapping[str, Label],
) -> tuple[float, str]:
    """How far beyond the constraints the draft is that descent finds, and in words; it changes one choice at a time.

    It begins with the choices of ``start``, and where every other number is least. What bounds count falls with most
    choices whatever the others are, so that the end is nearly always the draft that comes nearest; a second start is
    for choices that help only together, such as a hidden size of its own and a trained embedding.
    """
    chosen = dict(start)
    domains: dict[str, Domain] = {}

    def choose(name: str, domain: Domain) -> Label:
        domains[name] = domain
        return chosen.setdefault(name, domain.low if isinstance(domain, Range) else domain.labels()[0])

    def beyond() -> tuple[float, str]:
        try:
            spec = _draw(space, choose, facts, fixed).spec
        except Infeasible as error:
            return math.inf, error.reason
        return sum(constraints.violations(spec, times).values()), constraints.reason(spec, times) or ""

    best, better = beyond(), True
    while better and best[0] > 0:
        better = False
        for name, domain in list(domains.items()):
            for label in _tried(domain):
                before, chosen[name] = chosen[name], label
                found = beyond()
                if found[0] < best[0]:
                    best, better = found, True
                else:
                    chosen[name] = before
    return best


def _tried(domain: Domain) -> Sequence[Label]:
    """Every label of a set, or some 30 of a range, both ends among them."""
    if not isinstance(domain, Range):
        return domain.labels()
    if domain.size is None:
        return domain.low, domain.high
    labels = domain.labels()
    return *labels[:: max(1, len(labels) // 30)], labels[-1]


def _remembered(chosen: dict[str, Label], choose: Chooser, name: str, domain: Domain) -> Label:
    return chosen.setdefault(name, choose(name, domain))


def _suggest(trial: "optuna.trial.BaseTrial", name: str, domain: Domain) -> Label:
    if not isinstance(domain, Range):
        return cast("Label", trial.suggest_categorical(name, list(domain.labels())))
    if domain.whole:
        return trial.suggest_int(name, int(domain.low), int(domain.high), step=int(domain.step or 1), log=domain.log)
    return trial.suggest_float(name, domain.low, domain.high, step=domain.step, log=domain.log)


def _choosers(space: Space, fixed: Mapping[str, Any]) -> Iterator[Chooser]:
    """Every setting of a small space, otherwise random ones from a fixed seed."""
    size = space.grid_size()
    if size is None or size > FEASIBILITY_DRAWS:
        generator = random.Random(0)
        for _ in range(FEASIBILITY_DRAWS):
            yield partial(_random_label, generator)
        return
    depths = space.depths() if "depth" in space.choices else [len(_start(space, None, fixed)["layers"])]
    for depth in depths:
        parameters = space.parameters(depth)
        names = ["depth", *(parameter.name for parameter in parameters)]
        for labels in itertools.product(*(parameter.domain.labels() for parameter in parameters)):
            yield partial(_recorded_label, dict(zip(names, (depth, *labels), strict=True)))


def _recorded_label(setting: Mapping[str, Label], name: str, _: Domain) -> Label:
    return setting[name]


def _random_label(generator: random.Random, _: str, domain: Domain) -> Label:
    if domain.size is not None:
        return domain.labels()[generator.randrange(domain.size)]
    assert isinstance(domain, Range)
    return generator.uniform(domain.low, domain.high)


def _draw(space: Space, choose: Chooser, facts: TargetFacts, fixed: Mapping[str, Any]) -> Candidate:
    chosen = {"depth": choose("depth", space.choices["depth"])} if "depth" in space.choices else {}
    data = _start(space, chosen.get("depth"), fixed)
    parameters = space.parameters(len(data["layers"]))
    chosen |= {parameter.name: choose(parameter.name, parameter.domain) for parameter in parameters}
    values = {parameter.name: parameter.domain.value(chosen[parameter.name]) for parameter in parameters}
    trained = [parameter for parameter in parameters if parameter.path.kind == "train"]
    train = {dotted(parameter.path.field): values[parameter.name] for parameter in trained}
    try:
        changes = [parameter.name for parameter in parameters if _put(data, parameter, values[parameter.name])]
        data["name"] = candidate_name(chosen, ["depth", *changes, *(f"train.{name}" for name in train)])
        written = Document(data, "draw").validate(DraftSpec)
        return Candidate(resolve(written, facts, "draw"), written, train)
    except (ValueError, ArchspecError) as error:
        raise Infeasible("; ".join(line.removeprefix("draw: ") for line in str(error).splitlines())) from None


def _put(data: dict[str, Any], parameter: Parameter, value: Any) -> bool:
    """Put a parameter's value into ``data``; whether that changed anything."""
    before = [get_in(data, place) for place in parameter.places]
    for place in parameter.places:
        merge_in(data, place, value)
    return before != [get_in(data, place) for place in parameter.places]


def _start(space: Space, depth: Label | None, fixed: Mapping[str, Any]) -> dict[str, Any]:
    """The base with ``depth`` layers (None: as many as it or ``fixed`` has) and the ``fixed`` values, as plain data."""
    data = spec_data(space.base, _fixed_depth(fixed, "fixed") if depth is None else int(depth))
    _override(data, fixed, max(space.greatest_depth, len(data["layers"])), "fixed")
    return data


def _fixed_depth(overrides: Mapping[str, Any], source: str) -> int | None:
    depth = overrides.get("depth")
    if "depth" in overrides and (not isinstance(depth, int) or isinstance(depth, bool) or depth < 1):
        raise ArchspecError(f"{source}: depth = {depth!r}: must be a whole number of layers, 1 or more")
    return depth


def _override(data: dict[str, Any], overrides: Mapping[str, Any], greatest_depth: int, source: str) -> None:
    for text, value in overrides.items():
        try:
            path = parse_path(text, greatest_depth)
            if path.kind == "train":
                raise ValueError("a training setting is no part of a spec; set it under train")
            for _, places in path.groups(len(data["layers"])):
                for place in places:
                    merge_in(data, place, value)
        except ValueError as error:
            raise ArchspecError(f"{source}: {text}: {error}") from None


def _agreeing(parameter: Parameter, start: dict[str, Any], data: dict[str, Any], wanted: ResolvedSpec) -> Label | None:
    """The first label whose value can stand in ``data`` without changing the architecture ``wanted``."""
    try:
        standing = get_in(wanted.model_dump(mode="json"), parameter.places[0])
        for label in _likely(parameter.domain, standing):
            changed = copy.deepcopy(data)
            for place in parameter.places:
                put_in(changed, place, merge(get_in(start, place), parameter.domain.value(label)))
            try:
                if resolve(DraftSpec.model_validate(changed), wanted.target).hash == wanted.hash:
                    return label
            except (ArchspecError, ValidationError):
                continue
    except ValueError:
        pass  # the parameter belongs to a part that one of the two specs does not have
    return None


def _likely(domain: Domain, standing: Any) -> Sequence[Label]:
    """Every label of a set; of a range, the number that stands there, then any other, for a value of no effect."""
    if not isinstance(domain, Range):
        return domain.labels()
    label = domain.find(standing)
    return [domain.low] if label is None else [label, domain.low]
