"""What a measured candidate is worth under a search's objectives."""

import math
import statistics
from functools import cached_property

from archspec.speedup import Speedup, Times, speedup
from runners.search.objective import Direction, ObjectiveName
from runners.search.record import Record
from runners.search.search_file import SearchFile
from runners.training.trial import Measurement

SIZES: frozenset[ObjectiveName] = frozenset({"params", "draft_ms"})  # of which equal ratios are equal distances


class Scorer:
    """Turns a record and one of its measurements into the values of every objective that can be told.

    ``times`` are the search's; None where it has none, and speed-up and draft time are left out.
    """

    def __init__(self, file: SearchFile, times: Times | None) -> None:
        self.times = times
        self._file = file
        self._values: dict[tuple[str, int, int], dict[str, float]] = {}
        self._speedups: dict[tuple[str, int, int], Speedup] = {}

    @property
    def followed(self) -> ObjectiveName:
        """The objective that ranks candidates."""
        return self._file.objective.followed

    @cached_property
    def names(self) -> tuple[ObjectiveName, ...]:
        """The objectives, in the order of ``vector``."""
        return tuple(self._file.objective.directions)

    @cached_property
    def directions(self) -> list[Direction]:
        """The directions of ``vector``."""
        return list(self._file.objective.directions.values())

    @cached_property
    def judged_directions(self) -> list[Direction]:
        """The directions of ``judged``."""
        if self._file.objective.mode == "multi":
            return self.directions
        return [self._file.objective.directions[self.followed]]

    def speedup(self, record: Record, measurement: Measurement) -> Speedup | None:
        """Predicted speed-up at the best k of the range; None without times."""
        if self.times is None or self._file.speed is None:
            return None
        key = _key(record, measurement)
        if key not in self._speedups:
            lengths = measurement.acceptance["length_by_k"]
            self._speedups[key] = speedup(lengths, record.spec, self.times, self._file.speed.range)
        return self._speedups[key]

    def values(self, record: Record, measurement: Measurement) -> dict[str, float]:
        """Every objective that can be told, asked for or not, by its name."""
        key = _key(record, measurement)
        if key not in self._values:
            found = {
                "acceptance_length": measurement.length,
                "acceptance_rate": float(measurement.acceptance["rate"]),
                "params": float(record.columns["params"]),
            }
            predicted = self.speedup(record, measurement)
            if predicted is not None:
                found |= {"speedup": predicted.value, "draft_ms": predicted.draft_ms}
            self._values[key] = found
        return self._values[key]

    def vector(self, record: Record, measurement: Measurement) -> list[float]:
        """The values of the search's objectives, as they are."""
        values = self.values(record, measurement)
        return [values[name] for name in self.names]

    def means(self, record: Record) -> list[float]:
        """``vector`` as the mean over the record's seeds at the last rung that it reached."""
        return [
            statistics.fmean(values) for values in zip(*(self.vector(record, m) for m in record.final), strict=True)
        ]

    def judged(self, record: Record, measurement: Measurement) -> list[float]:
        """What candidates are drawn and stopped by: the followed objective, or in ``multi`` mode all of them.

        There volumes decide, so that sizes are taken by their base-10 logarithm.
        """
        if self._file.objective.mode == "multi":
            values = zip(self.names, self.vector(record, measurement), strict=True)
            return [math.log10(value) if name in SIZES else value for name, value in values]
        return [self.values(record, measurement)[self.followed]]

    def gain(self, record: Record, measurement: Measurement) -> float:
        """The followed objective turned so that more is better."""
        value = self.values(record, measurement)[self.followed]
        return value if self._file.objective.directions[self.followed] == "maximize" else -value

    def followed_values(self, record: Record) -> list[float]:
        """The followed objective of every seed, as it is."""
        return [self.values(record, m)[self.followed] for m in record.final]

    def gains(self, record: Record) -> list[float]:
        """``gain`` of every seed at the last rung that the record reached, the search's own seed first."""
        return [self.gain(record, m) for m in record.final]

    def beyond(self, record: Record, measurement: Measurement) -> dict[str, float]:
        """How far a measurement is beyond each bound on what was measured; 0 or less is feasible."""
        return self._file.constraints.measured_margins(self.values(record, measurement))

    def keeps(self, record: Record, measurement: Measurement) -> bool:
        """Whether a measurement keeps them all."""
        return all(margin <= 0 for margin in self.beyond(record, measurement).values())

    def merit(self, record: Record, measurement: Measurement) -> tuple[bool, float]:
        """What ranks candidates at a rung: those that keep the bounds first, then by gain."""
        return self.keeps(record, measurement), self.gain(record, measurement)

    def meets(self, record: Record) -> bool:
        """Whether a measured record keeps those bounds at its last rung, by the search's own seed."""
        return self.keeps(record, record.measurements[-1])


def _key(record: Record, measurement: Measurement) -> tuple[str, int, int]:
    return record.hash, measurement.seed, measurement.rung
