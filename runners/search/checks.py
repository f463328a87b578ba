"""What is wrong with a search file beyond its schema. No torch: ``archspec validate`` uses it too."""

from archspec.errors import ArchspecError, nearest
from archspec.facts import TargetFacts
from archspec.presets import load_spec
from archspec.resolve import resolve
from archspec.schema import Document
from archspec.speedup import Times
from runners.features.manifest import MANIFEST
from runners.search.search_file import SearchFile
from runners.search.times import missing_profile, open_times
from runners.training.settings import TrainSettings
from search_spaces import apply_overrides, require_feasible


def check_alone(file: SearchFile) -> None:
    """Check what needs no target: text files, ``fixed`` values, and what the space draws for training.

    Raises:
        ArchspecError: a file is missing, a path is no field of a spec, or a value breaks a rule.
    """
    if not file.data.conversations and not (file.features.path / MANIFEST).is_file():
        rule = f"{file.features.path} holds no feature store yet; name JSONL files to capture, or adopt a dump into it"
        raise ArchspecError(f"data.conversations: names no file, and {rule}")
    missing = missing_profile(file)
    if missing is not None and file.runner.kind != "local":
        rule = "no such profile; measure one with archspec profile on the machine that will serve"
        raise ArchspecError(f"speed.profile: {missing}: {rule}")
    for path in file.data.conversations:
        if not path.is_file():
            raise ArchspecError(f"data.conversations: {path}: no such conversations file")
    apply_overrides(file.space.base, {"depth": file.space.greatest_depth} | file.fixed, "fixed")
    require_train_choices(file)


def check_fit(file: SearchFile, facts: TargetFacts) -> None:
    """Check what the target's dimensions decide; bounds on time only where the times are known already.

    Raises:
        ArchspecError: a baseline does not fit or stands twice, the times do not cover the search, or no draft of the
            space can be used.
    """
    require_baselines(file, facts)
    require_some_draft(file, facts, open_times(file, facts))


def require_some_draft(file: SearchFile, facts: TargetFacts, times: Times | None) -> None:
    """Make sure that some draft of the space may keep the constraints, as far as can be told before training.

    Raises:
        ArchspecError: none keeps those that are told from the spec, or a bound on what is measured is beyond what any
            draft can reach: one that costs nothing and is always right.
    """
    require_feasible(file.space, facts, file.fixed, file.constraints, times)
    k = file.objective.draft_length
    greatest = {"acceptance_length": (k + 1.0, f"with {k} drafted tokens"), "acceptance_rate": (1.0, "at all")}
    if times is not None and file.speed is not None:
        alone = times.target_ms(1)
        most = max((k + 1) * alone / times.target_ms(k + 1) for k in file.speed.range)
        greatest["speedup"] = (most, f"by the {times.source}")
    for name, (most, where) in greatest.items():
        bound = getattr(file.constraints, name)
        if bound is not None and bound.min is not None and bound.min > most:
            ideal = f"one that costs nothing and is always right has {most:.4g} {where}"
            raise ArchspecError(f"constraints.{name}.min: no draft can reach {bound.min:g}: {ideal}")


def require_baselines(file: SearchFile, facts: TargetFacts) -> None:
    """Check every baseline before anything is trained.

    Raises:
        ArchspecError: a baseline does not fit the target under ``fixed``, or is the same architecture as another.
    """
    names: dict[str, str] = {}
    for name in file.baselines:
        written = apply_overrides(load_spec(name), file.fixed, f"baseline {name} with fixed")
        hash_ = resolve(written, facts, f"baseline {name} with fixed").hash
        if hash_ in names:
            raise ArchspecError(f"baselines: {names[hash_]} and {name} are the same architecture; leave one out")
        names[hash_] = name


def require_train_choices(file: SearchFile) -> None:
    """Check that every ``train.NAME`` of the space is a training setting and takes every value drawn for it.

    Raises:
        ArchspecError: it does not; the message names the choice, the value and the rule.
    """
    for parameter in file.space.parameters(file.space.greatest_depth):
        if parameter.path.kind != "train":
            continue
        (name, *below), domain = parameter.path.field, parameter.domain
        if name not in TrainSettings.model_fields or below:
            known = [f"train.{field}" for field in TrainSettings.model_fields]
            raise ArchspecError(f"space: choices.{parameter.name}: no such setting; {nearest(parameter.name, known)}")
        labels = domain.labels() if domain.size is not None else (domain.low, domain.high)
        for label in labels:
            settings = file.train.model_dump() | {name: domain.value(label)}
            Document(settings, f"space: choices.{parameter.name}").validate(TrainSettings)
