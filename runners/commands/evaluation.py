"""What ``eval`` does: acceptance, with times the predicted speed-up, and both beside real decoding."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import RenderableType

from archspec.errors import ArchspecError
from archspec.profile import ProfileTimes
from archspec.resolve import ResolvedSpec
from archspec.speedup import Times, speedup
from runners.commands.times import PLACE
from runners.display import tables
from runners.display.speed import comparison_table, prediction_tables
from runners.features.store import FeatureStore
from runners.search.objective import SpeedSettings
from runners.search.prediction import Comparison, Prediction
from runners.search.times import times_for
from runners.training import single
from runners.training.acceptance import measure_acceptance
from runners.training.decoding_check import DecodingCheck, check_decoding
from runners.training.device import pick_device
from runners.training.proxy import proxy_of
from runners.training.settings import EvalSettings, TreeSettings

DECODED_IN = "float32"  # by check_decoding


@dataclass(frozen=True)
class Evaluated:
    """What was found; ``comparison`` needs times and decoding."""

    acceptance: dict[str, Any]
    prediction: Prediction | None
    decoding: DecodingCheck | None
    comparison: Comparison | None

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON; None for what was not asked."""
        parts = {name: getattr(self, name) for name in ("decoding", "prediction", "comparison")}
        return {"acceptance": self.acceptance} | {name: part and part.as_dict() for name, part in parts.items()}

    def shown(self) -> Iterator[RenderableType]:
        """The same for people."""
        yield from (tables.acceptance_table(self.acceptance), "", tables.categories_table(self.acceptance))
        if self.prediction is not None:
            yield from ("", *prediction_tables(self.prediction.as_dict(), bool(proxy_of(self.acceptance))))
        if self.decoding is not None:
            yield from ("", tables.decoding_table(self.decoding.as_dict()))
        if self.comparison is not None:
            yield from ("", comparison_table(self.comparison.as_dict()))


@dataclass(frozen=True)
class Evaluation:
    """What is asked for: acceptance under ``settings``, with ``speed`` a prediction, ``decode`` conversations for real.

    ``chain`` is the k to decode with; None takes the fastest where times are known, and else that of ``settings``.
    """

    draft: Path
    features: Path
    settings: EvalSettings
    holdout: float | None
    device: str
    speed: SpeedSettings | None
    decode: int
    target: str | None
    chain: int | None
    tree: TreeSettings | None

    def run(self) -> Evaluated:
        """Everything that is cheap to check comes first.

        Raises:
            ArchspecError: the draft, the store, the times or the target are wrong, or do not fit together.
        """
        store, device = FeatureStore.open(self.features), pick_device(self.device)
        draft, heldout = single.open_draft(self.draft, store), single.heldout(self.draft, store, self.holdout)
        times = None if self.speed is None else self._times(self.speed, draft.spec, store)
        record = measure_acceptance(draft, store, heldout, self.settings, device).as_dict()
        prediction = None
        if self.speed is not None and times is not None:
            prediction = Prediction.of(record["length_by_k"], draft.spec, times, self.speed.range)
        if not self.decode:
            return Evaluated(record, prediction, None, None)
        k = self.chain or (prediction.found.k if prediction else self.settings.draft_length)
        if isinstance(times, ProfileTimes) and times.profile.threads and device == "cpu":
            torch.set_num_threads(times.profile.threads)
        check = check_decoding(
            draft,
            self.target,
            store,
            heldout[: self.decode],
            k,
            device,
            temperature=self.settings.temperature,
            top_p=self.settings.top_p,
            tree=self.tree,
            sample_draft=self.settings.draft == "sampled",
        )
        if times is None:
            return Evaluated(record, None, check, None)
        predicted = speedup(record["length_by_k"], draft.spec, times, range(k, k + 1)).value
        compared = Comparison.of(check, k, predicted, draft.spec, times, device, DECODED_IN)
        return Evaluated(record, prediction, check, compared)

    def _times(self, speed: SpeedSettings, spec: ResolvedSpec, store: FeatureStore) -> Times:
        """The times, which must know the draft and every k that may come up."""
        last, longest = speed.range[-1], self.settings.longest
        if last > longest:
            given = f"--draft-lengths {speed.range[0]}-{last}"
            raise ArchspecError(f"{given}: acceptance is measured up to {longest}; raise --draft-length to {last}")
        times = times_for(speed, store.facts, store.manifest.key.target, PLACE)
        times.draft_ms(spec)
        if self.chain is not None and self.decode:
            times.target_ms(self.chain + 1)
        return times
