"""A cost profile of this machine: what is measured, how often, and what is made of it.

On a CPU every sample is taken right after one of T(1), the target's forward of one token, and kept as a multiple of it;
in the end all are multiplied by the median of T(1). What slows the machine for a while, such as a neighbour, then
changes little, and a speed-up is a matter of such ratios alone.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version

import torch

from archspec.errors import ArchspecError
from archspec.modules import Draft
from archspec.profile import DraftEntry, DraftTime, Profile, ProfiledTarget, Spread, TargetTime
from archspec.resolve import ResolvedSpec
from runners.features.onednn import packed_linears
from runners.features.target import Target
from runners.provenance import code_version, hardware
from runners.speed.clock import clock_for
from runners.speed.loop import CYCLES, fixed_cost
from runners.speed.work import DraftSteps, Prefix, Projection, TargetForward, Work, random_ids, untrained

Key = tuple[object, ...]
Progress = Callable[[int, int], None]
LOOP_EVERY = 3  # rounds; a loop gives several cycles and takes long, since it begins with a prefill


@dataclass(frozen=True)
class MeasureSettings:
    """At which batch sizes and context lengths (tokens in the cache), and for how many drafted tokens a cycle at most.

    ``rounds`` is how many samples are taken of everything, one after the other and round after round.
    """

    batches: tuple[int, ...] = (1,)
    contexts: tuple[int, ...] = (512,)
    draft_length: int = 8
    rounds: int = 12
    threads: int | None = None

    def check(self, max_positions: int) -> None:
        """Refuse what a target of so many positions cannot do, before anything is loaded or measured.

        Raises:
            ArchspecError: nothing to measure, or a context beyond the target's positions.
        """
        for name, values in (("batch", self.batches), ("context", self.contexts)):
            if not values or min(values) < 1:
                raise ArchspecError(f"{name}: give whole numbers from 1, for example --{name} 1,8")
        for name, value in (("draft length", self.draft_length), ("rounds", self.rounds)):
            if value < 1:
                raise ArchspecError(f"{name}: must be at least 1, but is {value}")
        beyond = (CYCLES + 1) * (self.loop_length + 1)
        if max(self.contexts) + beyond > max_positions:
            rule = f"with {self.draft_length} drafted tokens a cycle the target's {max_positions} positions allow"
            raise ArchspecError(f"context {max(self.contexts)}: {rule} at most {max_positions - beyond}")

    @property
    def loop_length(self) -> int:
        """Drafted tokens of a cycle in the decoding loop, whose first step is held against the others."""
        return max(2, self.draft_length)


def check_device(device: str) -> None:
    """Refuse devices that have no clock here.

    Raises:
        ArchspecError: it is neither a CPU nor CUDA.
    """
    if torch.device(device).type not in ("cpu", "cuda"):
        raise ArchspecError(f"device {device}: profiles are measured on cpu and cuda; use one of them")


@dataclass(frozen=True)
class Part:
    """What is timed under which key; taken in every ``every``-th round. ``sample`` gives milliseconds."""

    key: Key
    sample: Callable[[], Sequence[float]]
    every: int = 1


def measure_profile(
    target: Target,
    model: str,
    specs: Sequence[ResolvedSpec],
    settings: MeasureSettings,
    progress: Progress = lambda _, __: None,
) -> Profile:
    """Measure ``target`` and untrained drafts of ``specs`` on the target's device; ``model`` is its name for the file.

    On a CPU a batch of 1 is measured in any case, since the decoding loop that T_0 is measured in knows no other.

    Raises:
        ArchspecError: there is no draft, one was resolved for another target, the settings do not fit the target, or
            the device has no clock here.
    """
    settings.check(target.facts.max_positions)
    check_device(str(target.device))
    specs = list({spec.hash: spec for spec in specs}.values())
    if not specs:
        raise ArchspecError("a profile needs at least one draft: name one by --draft, or a search file by --search")
    for spec in specs:
        if spec.target != target.facts:
            raise ArchspecError(f"draft {spec.name} was resolved for a target of other dimensions than {model}")
    cpu = target.device.type == "cpu"
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    batches = sorted({1, *settings.batches} if cpu else set(settings.batches))
    drafts = {spec.hash: untrained(spec, target) for spec in specs}
    notes: set[str] = set()
    target_times: list[TargetTime] = []
    draft_times: dict[str, list[DraftTime]] = defaultdict(list)
    for number, context in enumerate(settings.contexts):
        parts = list(_parts(target, drafts, batches, context, settings, notes))
        done, total = number * settings.rounds, len(settings.contexts) * settings.rounds
        with packed_linears(target.model, *drafts.values()):
            samples = _take(parts, settings.rounds, partial(_onwards, progress, done, total), relative=cpu)
        target_times += _target_times(samples, batches, context, settings.draft_length)
        for key in drafts:
            draft_times[key] += _draft_times(samples, key, batches, context, settings.draft_length)
    how = [f"measured by archspec profile in {settings.rounds} rounds, {_HOW[target.device.type == 'cuda']}"]
    return Profile(
        hardware=_name_of(target.device),
        dtype=str(target.dtype).removeprefix("torch."),
        device=str(target.device),
        threads=torch.get_num_threads() if cpu else None,
        machine=hardware(),
        software=_software(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        how="; ".join([*how, *sorted(notes)]),
        target=ProfiledTarget(model=model, fingerprint=target.fingerprint, facts=target.facts),
        target_times=tuple(target_times),
        drafts=tuple(DraftEntry.of(spec, draft_times[spec.hash]) for spec in specs),
    )


_HOW = ("everything relative to T(1), T_0 from the decoding loop", "CUDA graphs between events, no decoding loop")


def _onwards(progress: Progress, before: int, total: int, done: int) -> None:
    progress(before + done, total)


def _parts(
    target: Target,
    drafts: Mapping[str, Draft],
    batches: Sequence[int],
    context: int,
    settings: MeasureSettings,
    notes: set[str],
) -> Iterator[Part]:
    """Everything that is timed at one context length, T(1) first."""
    aux = next(iter(drafts.values())).spec.inputs.aux_layers

    def timed(key: Key, work: Work, warm: bool = False) -> Part:
        clock = clock_for(work, target.device, notes, warm=warm)
        return Part(key, lambda: [clock.sample()])

    for batch in batches:
        prefix = Prefix(target, batch, context)
        for rows in range(1, settings.draft_length + 2):
            yield timed(("target", batch, rows), TargetForward(target, prefix, rows, aux))
        for key, draft in drafts.items():
            yield timed(("step", key, batch), DraftSteps(draft, batch, context, settings.draft_length), warm=True)
            yield timed(("project", key, batch), Projection(draft, batch), warm=True)
    if target.device.type == "cuda":
        return
    prompt = random_ids(target, 1, context)[0].tolist()
    for key, draft in drafts.items():
        loop = partial(fixed_cost, target, draft, prompt, settings.loop_length)
        yield Part(("cycle", key), loop, LOOP_EVERY)


def _take(
    parts: Sequence[Part], rounds: int, progress: Callable[[int], None], *, relative: bool
) -> dict[Key, list[float]]:
    """Milliseconds of every part; one round to warm up is thrown away. ``relative`` is to the first part."""
    for part in parts:
        part.sample()
    taken: dict[Key, list[float]] = defaultdict(list)
    first = parts[0]
    for number in range(rounds):
        for part in parts:
            if number % part.every:
                continue
            unit = statistics.median(first.sample()) if relative else 1.0
            taken[first.key] += [unit] if relative else []
            taken[part.key] += [] if relative and part is first else [ms / unit for ms in part.sample()]
        progress(number + 1)
    if not relative:
        return taken
    typical = statistics.median(taken[first.key])
    return {key: ms if key == first.key else [typical * ratio for ratio in ms] for key, ms in taken.items()}


def _target_times(
    samples: Mapping[Key, Sequence[float]], batches: Sequence[int], context: int, draft_length: int
) -> Iterator[TargetTime]:
    for batch in batches:
        for rows in range(1, draft_length + 2):
            ms = samples["target", batch, rows]
            yield TargetTime(batch=batch, context=context, rows=rows, ms=_median(ms), spread=_quartiles(ms))


def _draft_times(
    samples: Mapping[Key, Sequence[float]], key: str, batches: Sequence[int], context: int, draft_length: int
) -> Iterator[DraftTime]:
    """A step is a chain's share. T_0 of a larger batch is the loop's at 1, and what the projection costs more there."""
    alone = statistics.median(samples["project", key, batches[0]])
    for batch in batches:
        steps = [ms / draft_length for ms in samples["step", key, batch]]
        project = samples["project", key, batch]
        loop = samples.get(("cycle", key))
        cycles = [max(0.0, ms + statistics.median(project) - alone) for ms in loop] if loop else project
        yield DraftTime(
            batch=batch,
            context=context,
            step_ms=_median(steps),
            step_spread=_quartiles(steps),
            cycle_ms=_median(cycles),
            cycle_spread=_quartiles(cycles),
        )


def _median(ms: Sequence[float]) -> float:
    return round(statistics.median(ms), 5)


def _quartiles(ms: Sequence[float]) -> Spread:
    low, _, high = statistics.quantiles(ms, n=4, method="inclusive") if len(ms) > 1 else (ms[0],) * 3
    return round(low, 5), round(high, 5)


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(hardware()["processor"] or "CPU")


def _software() -> dict[str, str]:
    known = {"draft-archspec": code_version(), "torch": torch.__version__, "transformers": version("transformers")}
    return known | ({"cuda": str(torch.version.cuda)} if torch.cuda.is_available() else {})
