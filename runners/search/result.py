"""The schema of ``best-config.json``. Importing it loads neither torch nor optuna."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Sureness = Literal["outside seed noise", "inside seed noise", "one seed only", "no rival"]


class _Result(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Metrics(_Result):
    """One architecture's figures. ``seed_lengths`` are acceptance lengths by seed; ``length`` is their mean.

    ``low`` and ``high`` bound the first seed's length by a bootstrap over held-out conversations.
    """

    length: float
    low: float
    high: float
    seed_lengths: list[float]
    acceptance: dict[str, Any]
    loss: float
    train_tokens: int
    train_seconds: float
    params: int
    trainable_params: int
    flops_per_token: int


class Standing(_Result):
    """An architecture beside the winner."""

    name: str
    hash: str
    metrics: Metrics


class Verdict(_Result):
    """Whether the winner may be called better than the runner-up, and why."""

    sureness: Sureness
    margin: float | None
    noise: float | None
    text: str


class BestConfig(_Result):
    """The file ``best-config.json``.

    ``servable`` is the verdict of every engine, ``draft_model_configs`` the ``config.json`` of every format that holds
    the draft, and ``not_held_by`` what each of the others lacks.
    """

    version: Literal[2] = 2
    name: str
    hash: str
    spec: dict[str, Any]
    spec_as_written: dict[str, Any]
    train: dict[str, Any]
    metrics: Metrics
    verdict: Verdict
    baselines: list[Standing]
    runners_up: list[Standing]
    seeds: list[int]
    budget: dict[str, Any]
    target: dict[str, Any]
    data: dict[str, Any]
    code_version: str
    hardware: dict[str, Any]
    created: str
    servable: dict[str, dict[str, Any]]
    draft_model_configs: dict[str, dict[str, Any]]
    not_held_by: dict[str, list[str]]
