"""A draft's predicted speed-up, and whether what decoding measures here may be held against it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from archspec.profile import ProfileTimes
from archspec.resolve import ResolvedSpec
from archspec.speedup import Speedup, Times, speedup
from runners.provenance import hardware
from runners.search.times import StepTimes
from runners.training.decoding_check import DecodingCheck

LOOP_BATCH = 1  # sequences that the decoding loop decodes at once


@dataclass(frozen=True)
class Prediction:
    """The speed-up at every k of a range, from the acceptance lengths ``length_by_k`` (entry k - 1 for k tokens)."""

    found: Speedup
    steps: StepTimes
    length_by_k: Sequence[float]

    @classmethod
    def of(cls, length_by_k: Sequence[float], spec: ResolvedSpec, times: Times, draft_lengths: range) -> "Prediction":
        """Predict; raises as ``archspec.speedup.speedup`` and ``times`` do."""
        steps = StepTimes.of(spec, times, [1, *(k + 1 for k in draft_lengths)])
        return cls(speedup(length_by_k, spec, times, draft_lengths), steps, length_by_k)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        by_k = {
            k: {"length": self.length_by_k[k - 1], "cycle_ms": self.steps.cycle(k), "speedup": value}
            for k, value in self.found.by_k.items()
        }
        return {"speedup": self.found.value, "k": self.found.k, "by_k": by_k} | self.steps.as_dict()


@dataclass(frozen=True)
class Comparison:
    """A chain of ``k`` tokens: its measured speed-up beside the predicted one, and what sets the two apart.

    ``predicted`` rests on all held-out conversations, ``predicted_for_decoded`` on those that were decoded alone, so
    that of its error the times are the only cause. ``incomparable`` says why the two are of different things; empty if
    they are not.
    """

    k: int
    predicted: float
    predicted_for_decoded: float
    measured: float
    low: float
    high: float
    incomparable: str

    @classmethod
    def of(
        cls, check: DecodingCheck, k: int, predicted: float, spec: ResolvedSpec, times: Times, device: str, dtype: str
    ) -> "Comparison":
        """Beside the chain of ``check``, which was decoded with ``k`` tokens on ``device`` in ``dtype``."""
        own = speedup(check.evaluator.length_by_k, spec, times, range(k, k + 1)).value
        chain, why = check.chain, incomparable(times, device, dtype)
        return cls(k, predicted, own, chain.speedup, chain.speedup_low, chain.speedup_high, why)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON; errors are (measured - predicted) / predicted."""
        off = {
            "off_by": self.measured / self.predicted - 1,
            "off_by_for_decoded": self.measured / self.predicted_for_decoded - 1,
        }
        return vars(self) | off


def incomparable(times: Times, device: str, dtype: str) -> str:
    """Why a speed-up that the decoding loop measures on ``device`` is not the one that ``times`` predict; else empty.

    ``dtype`` is what target and draft are decoded in, with torch's present number of threads. On CUDA there is always a
    reason: profiles are taken from CUDA graphs there, with drafts in the target's float type, and the loop is neither.
    """
    here, on_cpu = hardware(), not device.startswith("cuda")
    machines = [here["processor"] or "CPU"] if on_cpu else here["gpus"]
    name = ", ".join(dict.fromkeys(machines))
    if not isinstance(times, ProfileTimes):
        return f"predicted from the {times.source}, but measured on {name}"
    profile, threads = times.profile, torch.get_num_threads()
    pairs = (
        (profile.hardware in machines, profile.hardware, f"on {name}"),
        (profile.dtype == dtype, profile.dtype, f"in {dtype}"),
        (not on_cpu or profile.threads in (None, threads), f"{profile.threads} CPU threads", f"with {threads}"),
        (on_cpu, f"CUDA graphs with drafts in {profile.dtype}", "in a loop in Python with drafts in float32"),
        (times.batch == LOOP_BATCH, f"a batch of {times.batch}", "with one sequence at a time"),
    )
    return "; ".join(f"predicted for {theirs}, but measured {ours}" for same, theirs, ours in pairs if not same)
