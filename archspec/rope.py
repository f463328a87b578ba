"""How rotary positions are scaled, in the words of a spec and in those of transformers' configs. No torch.

``archspec.attention`` has the formulas. A *kind* is what a config calls its scaling; drafts have ``linear``, ``llama3``
and ``yarn``. The longest context of a config (``max_position_embeddings``) enters none of them: it only stands in for
the original one where a config leaves that out, as in transformers.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from archspec.errors import nearest
from archspec.schema import Closed, field_error


def _number(value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
        return float(value)
    raise ValueError("must be a positive number")


def _factor(value: Any) -> Any:
    if _number(value) < 1:
        raise ValueError("must be 1 or more: so many times the original context")
    return float(value)


Number = Annotated[float, BeforeValidator(_number)]
Factor = Annotated[float, BeforeValidator(_factor)]
Positions = Annotated[int, Field(gt=0, strict=True)]


class LinearRope(Closed):
    """Every position divided by ``factor`` (position interpolation, arXiv 2306.15595)."""

    type: Literal["linear"]
    factor: Factor

    @property
    def attention_scale(self) -> float:
        """What cosine and sine are multiplied by."""
        return 1.0


class Llama3Rope(Closed):
    """Llama 3.1's rule: slow pairs are divided by ``factor``, quick ones are left alone, those between are blended.

    A pair is slow or quick by how often it turns in ``original_max_positions``: below ``low_freq_factor``, above
    ``high_freq_factor``.
    """

    type: Literal["llama3"]
    factor: Factor
    low_freq_factor: Number
    high_freq_factor: Number
    original_max_positions: Positions

    @model_validator(mode="after")
    def _bounds_rise(self) -> Self:
        if self.low_freq_factor >= self.high_freq_factor:
            rule = f"must be above low_freq_factor, which is {self.low_freq_factor}"
            raise field_error("high_freq_factor", f"{rule}, but is {self.high_freq_factor}")
        return self

    @property
    def attention_scale(self) -> float:
        """What cosine and sine are multiplied by."""
        return 1.0


class YarnRope(Closed):
    """YaRN (arXiv 2309.00071): as ``llama3``, but blended along the index of the pair, and attention is sharpened.

    Pairs that turn more than ``beta_fast`` times in ``original_max_positions`` are left alone, those below
    ``beta_slow`` divided by ``factor``; ``truncate`` rounds the bounds outwards to whole pairs. ``attention_factor``
    multiplies cosine and sine; null stands for 0.1 ln(factor) + 1, equation 22 of the paper.
    """

    type: Literal["yarn"]
    factor: Factor
    original_max_positions: Positions
    beta_fast: Number = 32.0
    beta_slow: Number = 1.0
    truncate: Annotated[bool, Field(strict=True)] = True
    attention_factor: Number | None = None

    @model_validator(mode="after")
    def _bounds_fall(self) -> Self:
        if self.beta_fast <= self.beta_slow:
            rule = f"must be above beta_slow, which is {self.beta_slow}"
            raise field_error("beta_fast", f"{rule}, but is {self.beta_fast}")
        return self

    @property
    def usual_scale(self) -> float:
        """The attention factor of the paper."""
        return yarn_scale(self.factor)

    @property
    def attention_scale(self) -> float:
        """What cosine and sine are multiplied by."""
        return self.usual_scale if self.attention_factor is None else self.attention_factor


Rope = LinearRope | Llama3Rope | YarnRope

KINDS: dict[str, type[Rope]] = {
    "linear": LinearRope,
    "llama3": Llama3Rope,
    "yarn": YarnRope,
}

AnyRope = Annotated[Rope, Field(discriminator="type")]


def yarn_scale(factor: float, weight: float = 1.0) -> float:
    """0.1 ``weight`` ln(``factor``) + 1: YaRN's attention factor, with the weight (mscale) that configs may give it."""
    return 0.1 * weight * math.log(factor) + 1.0


def _by_kind(value: Any) -> Any:
    """The model that ``type`` names, so that messages are about its fields alone."""
    if not isinstance(value, Mapping):
        return value
    kind = value.get("type")
    if kind is None:
        raise field_error("type", f"this key is required; choose from {', '.join(KINDS)}")
    if not isinstance(kind, str) or kind not in KINDS:
        raise field_error("type", f"{kind!r}: {nearest(str(kind), KINDS)}")
    return KINDS[kind].model_validate(dict(value))


def _as_written(value: Any) -> Any:
    if value is None:
        return "none"
    if value in ("none", "target") or isinstance(value, Mapping | Rope):
        return _by_kind(value)
    raise ValueError(f"must be 'none', 'target' or a mapping whose type is {', '.join(KINDS)}")


def _resolved(value: Any) -> Any:
    if value == "target":
        raise ValueError("must be 'none' or a mapping: the target's has been put in by now")
    return _as_written(value)


def with_numbers(rope: Any) -> Any:
    """``rope`` with YaRN's attention factor as a number; words stay as they are."""
    if isinstance(rope, YarnRope) and rope.attention_factor is None:
        return rope.model_copy(update={"attention_factor": rope.attention_scale})
    return rope


WrittenRope = Annotated[AnyRope | Literal["none", "target"], BeforeValidator(_as_written)]
"""As a spec has it."""

ResolvedRope = Annotated[AnyRope | Literal["none"], BeforeValidator(_resolved), AfterValidator(with_numbers)]
"""With numbers only."""

TargetRope = Annotated[AnyRope | str, BeforeValidator(_by_kind), AfterValidator(with_numbers)]
"""As a target has it: ``none``, a scaling, or the word for a kind that drafts do not have."""


# As transformers writes it (modeling_rope_utils.py of 5.24): rope_parameters, or the older rope_scaling

ORIGINAL = "original_max_position_embeddings"


def kind_of(keys: Mapping[str, Any]) -> str:
    """What a config calls its scaling, by ``rope_type`` or the older ``type``; ``none`` for plain positions.

    Raises:
        ValueError: both keys stand there and differ, or there is a factor without a kind.
    """
    new, old = keys.get("rope_type"), keys.get("type")
    if new is not None and old is not None and new != old:
        raise field_error("rope_type", f"rope_type and type must agree, but are {new} and {old}")
    kind = new if new is not None else old
    if kind is None and keys.get("factor") is not None:
        raise field_error("rope_type", f"this key is required beside factor; choose from {', '.join(KINDS)}")
    return "none" if kind in (None, "default") else str(kind)


def rope_of(keys: Mapping[str, Any], max_positions: int | None) -> Rope | str:
    """The scaling that a config's rotary keys describe, ``none``, or the word for a kind that drafts do not have.

    ``max_positions`` stands in for an original context that is not written. Keys that are null count as left out.
    YaRN's ``mscale`` and ``mscale_all_dim``, where both are there and no ``attention_factor`` is, become that factor.

    Raises:
        ValueError: a key is missing or breaks a rule; a pydantic error that names it.
    """
    kind, known = kind_of(keys), {key: value for key, value in keys.items() if value is not None}
    if kind not in KINDS:
        return kind
    model = KINDS[kind]
    data = {name: known[name] for name in model.model_fields if name in known} | {"type": kind}
    if "original_max_positions" in model.model_fields:
        original = known.get(ORIGINAL, max_positions)
        if type(original) is not int or original < 1:
            raise field_error(ORIGINAL, f"must be a positive whole number for {kind}, but is {original}")
        data["original_max_positions"] = original
    rope = model.model_validate(data)
    weights = known.get("mscale"), known.get("mscale_all_dim")
    if isinstance(rope, YarnRope) and rope.attention_factor is None and all(weights):
        over, under = (yarn_scale(rope.factor, _number(weight)) for weight in weights)
        return rope.model_copy(update={"attention_factor": over / under})
    resolved: Rope = with_numbers(rope)
    return resolved


def target_rope(keys: Mapping[str, Any], max_positions: int | None) -> Rope | str:
    """As ``rope_of``, for a target, which loads whatever its scaling is: one that breaks a rule is told by a word."""
    try:
        return rope_of(keys, max_positions)
    except ValueError:
        return f"unusual {keys.get('rope_type') or keys.get('type')}"


def rope_keys(rope: Rope | str) -> dict[str, Any]:
    """The keys of ``rope_parameters`` and ``rope_scaling``, without the base.

    Numbers are floats, since vLLM and SGLang fail on a linear factor that is an int. YaRN's attention factor and
    ``truncate`` stand there only where they are not the usual ones.
    """
    if isinstance(rope, str):
        return {"rope_type": "default"}
    renamed = {"type": "rope_type", "original_max_positions": ORIGINAL}
    keys = {renamed.get(name, name): value for name, value in rope.model_dump().items()}
    if isinstance(rope, YarnRope):
        if rope.attention_scale == rope.usual_scale:
            del keys["attention_factor"]
        if rope.truncate:
            del keys["truncate"]
    return keys
