"""The search file: everything that a search is told, closed, with defaults, and what it must agree with on a resume."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from archspec.errors import ArchspecError
from archspec.presets import load_spec
from archspec.schema import Closed, ClosedFile, field_error
from runners.search.runner_settings import RunnerSettings
from runners.training.settings import EvalSettings, Fraction, TrainSettings
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


class Objective(EvalSettings):
    """The one scalar that the search follows, and how it is measured."""

    maximize: Literal["acceptance_length", "acceptance_rate"] = "acceptance_length"

    def value(self, acceptance: dict[str, Any]) -> float:
        """The objective's value in an acceptance record."""
        return float(acceptance["length" if self.maximize == "acceptance_length" else "rate"])


class Budget(Closed):
    """How much may be spent. ``trials`` counts architectures that are trained, baselines included.

    ``rungs`` are tokens per trial; after each the weaker ones stop, baselines never. The ``finalists`` best are trained
    with ``seeds`` seeds in all. No new trial begins after ``hours``; one rung may take ``rung_minutes``.
    """

    trials: PositiveInt
    rungs: tuple[PositiveInt, ...]
    reduction: Annotated[int, Field(ge=2)] = 3
    seeds: PositiveInt = 1
    finalists: PositiveInt = 1
    hours: PositiveFloat | None = None
    rung_minutes: PositiveFloat | None = None
    retries: NonNegativeInt = 1
    max_failures_in_a_row: PositiveInt = 5

    @model_validator(mode="after")
    def _rungs_rise(self) -> Self:
        if not self.rungs or list(self.rungs) != sorted(set(self.rungs)):
            raise ValueError(
                f"rungs must be rising token counts, for example [20e3, 60e3, 180e3], but are {list(self.rungs)}"
            )
        return self


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
    objective: Objective = Objective()
    constraints: Constraints = Constraints()
    budget: Budget
    sampler: SamplerSettings = SamplerSettings()
    runner: RunnerSettings = RunnerSettings()
    seed: NonNegativeInt = 0

    @model_validator(mode="after")
    def _baselines_within_budget(self) -> Self:
        if len(self.baselines) > self.budget.trials:
            rule = f"{self.budget.trials} trials do not hold {len(self.baselines)} baselines, which count as trials"
            raise field_error("budget.trials", f"{rule}; use at least {len(self.baselines)}")
        return self

    @model_validator(mode="after")
    def _device_is_the_runners_to_give(self) -> Self:
        if self.runner.kind == "ray" and self.train.device not in ("auto", "cpu", "cuda"):
            rule = "the Ray runner gives every trial its own GPU, which it sees as the only one; use auto, cuda or cpu"
            raise field_error("train.device", rule)
        return self

    def must_not_change(self) -> dict[str, Any]:
        """What a resume must find as it was: all but how long the search goes on and where it runs."""
        places = {"target": {"device"}, "train": {"device", "threads"}, "features": {"path", "workers"}}
        data = self.model_dump(mode="json", exclude={"runner": True, "budget": True, **places})
        return data | {"budget.rungs": list(self.budget.rungs), "budget.reduction": self.budget.reduction}
