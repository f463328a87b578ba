"""The schema of ``best-config.json``. Importing it loads neither torch nor optuna."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Sureness = Literal["outside seed noise", "inside seed noise", "one seed only", "no rival"]


class _Result(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Predicted(_Result):
    """Predicted speed-up: the mean over seeds, and for the first seed the best k and the speed-up at every k.

    ``draft_ms`` is one draft step in milliseconds, found as ``draft_source`` says.
    """

    speedup: float
    k: int
    by_k: dict[int, float]
    draft_ms: float
    draft_source: str


class Metrics(_Result):
    """One architecture's figures. ``seed_lengths`` are acceptance lengths by seed; ``length`` is their mean.

    ``low`` and ``high`` bound the first seed's length by a bootstrap over held-out conversations. ``predicted`` is None
    where the search has no times.
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
    predicted: Predicted | None = None


class Standing(_Result):
    """An architecture beside the winner."""

    name: str
    hash: str
    metrics: Metrics


class Rival(_Result):
    """An architecture whose difference to the winner is no larger than seed noise."""

    name: str
    hash: str
    margin: float
    noise: float


class Verdict(_Result):
    """Whether the best by the followed objective may be called better than the others, and why.

    ``inside`` are those that it cannot be told from, ``cheaper`` the cheapest of them and it; None if it is alone.
    """

    winner: str
    objective: str
    sureness: Sureness
    margin: float | None
    noise: float | None
    inside: list[Rival]
    cheaper: str | None
    text: str


class Pick(_Result):
    """The architecture that is recommended, which ``best`` holds, and why."""

    trial: int
    name: str
    hash: str
    why: str


class Decoded(_Result):
    """One finalist decoded for real beside what was predicted for it.

    ``draft`` says how: a chain's k, or a tree. The speed-up that was ``measured`` has an interval by bootstrap over
    answers. ``incomparable`` says why predicted and measured are of different things; empty if they are not.
    ``plain_ms`` is what plain decoding of the same prompts took a token, ``profiled_ms`` what the search reckoned with
    for it, T(1); both in milliseconds.
    """

    name: str
    hash: str
    draft: str
    predicted: float | None
    measured: float
    low: float
    high: float
    length: float
    expected_length: float | None
    same_text: int | None
    responses: int
    incomparable: str
    plain_ms: float
    profiled_ms: float


class BestConfig(_Result):
    """The file ``best-config.json``.

    ``servable`` is the verdict of every engine, ``draft_model_configs`` the ``config.json`` of every format that holds
    the draft, and ``not_held_by`` what each of the others lacks.
    """

    version: Literal[3] = 3
    name: str
    hash: str
    spec: dict[str, Any]
    spec_as_written: dict[str, Any]
    train: dict[str, Any]
    metrics: Metrics
    verdict: Verdict
    recommended: Pick
    objectives: dict[str, str]
    times: str | None
    pareto: list[Standing]
    agreement: list[dict[str, Any]]
    seed_spread: dict[str, Any] | None
    turned_away: dict[str, int]
    decoded: list[Decoded]
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
