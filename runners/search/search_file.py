"""The search file: everything that a search is told, closed, with defaults, and what it must agree with on a resume."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeInt, PositiveInt, model_validator

from archspec.errors import ArchspecError
from archspec.presets import load_spec
from archspec.schema import Closed, ClosedFile, field_error
from runners.search.objective import NEED_TIMES, DecodeSettings, Objective, SpeedSettings, default_objective
from runners.search.plan import Budget, Plan, Stage, check_plan
from runners.search.runner_settings import RunnerSettings
from runners.training.settings import Fraction, TrainSettings
from search_spaces import Constraints, SpaceReference


class TargetSettings(Closed):
    """Which target: a folder, a ``.gguf`` file, ``package:NAME`` or a hub name, and how it is loaded for capture."""

    model: str
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "auto"
    trust_remote_code: bool = False


class DataSettings(Closed):
    """Conversations as JSONL files. ``holdout`` is the share of conversations that measures and never trains.

    A store that is there already needs no conversations where it was adopted from another project.
    """

    conversations: tuple[Path, ...] = ()
    max_length: PositiveInt = 1024
    holdout: Fraction = 0.1

    @model_validator(mode="after")
    def _some_held_out(self) -> Self:
        if self.holdout == 0:
            raise field_error("holdout", "must be above 0: acceptance is measured on held-out conversations")
        return self


class FeatureSettings(Closed):
    """The feature store: made if missing, reused if it fits. ``dtype`` is that of the stored states.

    ``workers`` is how many capture it together on the cluster of a Ray runner; one is this process, which captures
    alone where trials run locally.
    """

    path: Path
    dtype: Literal["float32", "bfloat16"] = "float32"
    batch_tokens: PositiveInt = 4096
    shard_tokens: PositiveInt = 65536
    workers: PositiveInt = 1


class SamplerSettings(Closed):
    """How candidates are drawn: Optuna's TPE (multivariate, grouped) or uniformly at random."""

    kind: Literal["tpe", "random"] = "tpe"
    startup_trials: PositiveInt = 8


def _path_or_settings(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


def _known_spec(name: str) -> str:
    try:
        load_spec(name)
    except ArchspecError as error:
        raise ValueError(str(error)) from None
    return name


class SearchFile(ClosedFile):
    """One search. ``fixed`` are spec values (dotted path: value) that every candidate and baseline has."""

    target: TargetSettings
    data: DataSettings
    features: Annotated[
        FeatureSettings, BeforeValidator(_path_or_settings, json_schema_input_type=FeatureSettings | str)
    ]
    space: SpaceReference
    fixed: dict[str, Any] = Field(default_factory=dict)
    baselines: tuple[Annotated[str, AfterValidator(_known_spec)], ...] = ("eagle3",)
    train: TrainSettings = TrainSettings()
    objective: Objective = Objective(maximize=("acceptance_length",))
    speed: SpeedSettings | None = None
    constraints: Constraints = Constraints()
    budget: Budget = Budget()
    stages: tuple[Stage, ...] = ()
    decode: DecodeSettings | None = None
    sampler: SamplerSettings = SamplerSettings()
    runner: RunnerSettings = RunnerSettings()
    seed: NonNegativeInt = 0

    @model_validator(mode="before")
    @classmethod
    def _name_an_objective(cls, data: Any) -> Any:
        return default_objective(data)

    @property
    def plan(self) -> Plan:
        """How many candidates train for how long."""
        return Plan.of(self.budget, self.stages)

    @model_validator(mode="after")
    def _one_plan(self) -> Self:
        check_plan(self.budget, self.stages)
        trials, place = self.plan.trials, "stages.0.candidates" if self.stages else "budget.trials"
        if len(self.baselines) > trials:
            rule = f"{trials} trials do not hold {len(self.baselines)} baselines, which count as trials"
            raise field_error(place, f"{rule}; use at least {len(self.baselines)}")
        if self.objective.mode == "multi" and self.stages:
            raise field_error("objective.mode", "multi has rungs of its own; use budget.trials and rungs, not stages")
        return self

    @model_validator(mode="after")
    def _times_where_needed(self) -> Self:
        needed: list[tuple[str, str]] = [
            ("objective", name) for name in self.objective.directions if name in NEED_TIMES
        ]
        bound = [name for name in sorted(NEED_TIMES) if getattr(self.constraints, name) is not None]
        needed += [(f"constraints.{name}", name) for name in bound]
        if self.speed is None:
            if needed:
                place, name = needed[0]
                rule = "needs times; add speed: {profile: FILE} or speed: {accelerator: NAME}"
                raise field_error(place, f"{name} {rule}")
            if self.decode is not None:
                rule = "needs the k to decode with and the prediction to compare; add speed: {profile: FILE}"
                raise field_error("decode", rule)
            return self
        known = self.objective.longest
        if self.speed.draft_lengths[1] > known:
            rule = (
                f"acceptance is measured up to {known}; raise objective.draft_length to {self.speed.draft_lengths[1]}"
            )
            raise field_error("speed.draft_lengths", rule)
        return self

    @model_validator(mode="after")
    def _device_is_the_runners_to_give(self) -> Self:
        if self.runner.kind == "ray" and self.train.device not in ("auto", "cpu", "cuda"):
            rule = "the Ray runner gives every trial its own GPU, which it sees as the only one; use auto, cuda or cpu"
            raise field_error("train.device", rule)
        return self

    def must_not_change(self) -> dict[str, Any]:
        """What a resume must find as it was: all but how long the search goes on and where it runs.

        Whether a profile's times are the same is told by what it holds, not by its path.
        """
        places = {"target": {"device"}, "train": {"device", "threads"}, "features": {"path", "workers"}}
        places |= {"speed": {"profile", "threads"}}
        later = {"runner": True, "budget": True, "stages": True, "decode": True}
        data = self.model_dump(mode="json", exclude={**later, **places})
        told = {"budget.rungs": list(self.plan.rungs), "budget.reduction": self.budget.reduction}
        return data | told | {"stages": bool(self.stages)}
