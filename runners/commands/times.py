"""Times that ``eval`` and ``show`` are given on the command line."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from archspec.errors import ArchspecError
from archspec.schema import Document

if TYPE_CHECKING:
    from archspec.resolve import ResolvedSpec
    from runners.search.objective import SpeedSettings
    from runners.search.times import StepTimes

PLACE = "--"  # before the names of settings, in messages
SHOWN_LENGTHS = (1, 2, 3, 4, 6, 8)


def speed_settings(
    profile: Path | None,
    accelerator: str | None,
    *,
    dtype: str | None,
    batch: int | None,
    context: int | None,
    draft_lengths: str | None = None,
    longest: int = 1,
) -> "SpeedSettings | None":
    """The settings that these options make; None where no times are asked for.

    What is left out is 1 sequence with 512 tokens and 1 to ``longest`` drafted ones, or the nearest that the profile
    has.

    Raises:
        ArchspecError: an option stands without times or beside one that it does not fit, or has a wrong value.
    """
    from archspec.profile import Profile
    from runners.search.objective import SpeedSettings

    if profile is None and accelerator is None:
        use = {"dtype": dtype, "batch": batch, "context": context, "draft-lengths": draft_lengths}
        given = next((name for name, value in use.items() if value is not None), None)
        if given is not None:
            raise ArchspecError(f"--{given} {use[given]}: needs times; add --profile FILE or --accelerator NAME")
        return None
    if profile is not None and accelerator is not None:
        raise ArchspecError("times come from one place: give --profile or --accelerator")
    known: dict[str, list[int]] = {}
    if profile is not None:
        measured = Profile.load(profile)
        if dtype is not None:
            raise ArchspecError(f"--dtype {dtype}: is the roofline's; {profile} was measured in {measured.dtype}")
        known = {"batch": measured.batches, "context": measured.contexts, "rows": measured.rows}
    most = max(1, _within(longest + 1, known.get("rows")) - 1)
    settings: dict[str, Any] = {
        "profile": profile,
        "accelerator": accelerator,
        "batch": batch or _within(1, known.get("batch")),
        "context": context or _within(512, known.get("context")),
        "draft_lengths": _lengths(draft_lengths or f"1-{most}"),
    }
    if dtype is not None:
        settings["dtype"] = dtype
    return Document(settings, f"--accelerator {accelerator}").validate(SpeedSettings)


def step_times(spec: "ResolvedSpec | None", speed: "SpeedSettings") -> "StepTimes":
    """What a cycle of ``spec`` costs, for some numbers of drafted tokens; None is a spec that no target is known for.

    Raises:
        ArchspecError: no target is known, the times are not for it, or the draft cannot be told from them.
    """
    from runners.search.times import StepTimes, times_for

    if spec is None:
        given = "profile" if speed.profile is not None else "accelerator"
        rule = "what a draft step takes depends on the target; name it by --target"
        raise ArchspecError(f"--{given} {getattr(speed, given)}: {rule}")
    rows = [1, *(k + 1 for k in SHOWN_LENGTHS)]
    return StepTimes.of(spec, times_for(speed, spec.target, place=PLACE), rows)


def _within(usual: int, known: list[int] | None) -> int:
    return usual if not known else min(max(usual, known[0]), known[-1])


def _lengths(text: str) -> tuple[int, int]:
    """``1-8`` or ``3`` as the least and the greatest."""
    low, dash, high = text.partition("-")
    ends = (low, high if dash else low)
    if not all(end.isdecimal() and int(end) for end in ends):
        raise ArchspecError(f"--draft-lengths {text}: write a least and a greatest k, such as 1-8, or one k")
    least, greatest = map(int, ends)
    if least > greatest:
        raise ArchspecError(f"--draft-lengths {text}: the range is empty; use {greatest}-{least}")
    return least, greatest
