"""The leaderboard: one row for each architecture, as ``leaderboard.csv`` and as tables show it."""

import csv
import io
import statistics
from typing import Any

from archspec.files import write_text
from runners.search.driver import Search
from runners.search.front import front_of
from runners.search.record import Record
from runners.training.proxy import proxy_of


def seed_lengths(record: Record) -> list[float]:
    """Acceptance length of every seed at the last rung, the search's own seed first."""
    return [m.length for m in record.final]


def leaderboard_rows(search: Search) -> list[dict[str, Any]]:
    """One row per architecture: completed ones by rank, then the stopped ones by rung and value, then failures."""
    ranked = search.ranking()
    rest = [record for record in search.study.records.values() if record.state != "complete"]
    rest.sort(key=lambda record: (len(record.measurements), _last_gain(search, record)), reverse=True)
    front = {record.number for record in front_of(search)}
    rows = [_row(search, record, rank, record.number in front) for rank, record in enumerate(ranked, 1)]
    return rows + [_row(search, record, None, record.number in front) for record in rest]


def write_leaderboard(search: Search) -> None:
    """Write ``leaderboard.csv``; also called while the search runs."""
    rows = leaderboard_rows(search)
    if not rows:
        return
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(search.folder.leaderboard, buffer.getvalue())


def _row(search: Search, record: Record, rank: int | None, on_front: bool) -> dict[str, Any]:
    last = record.measurements[-1] if record.measurements else None
    acceptance = last.acceptance if last else {}
    k = search.file.objective.draft_length
    conditional = acceptance.get("conditional", ("",) * k)
    return {
        "rank": rank or "",
        "trial": record.number,
        "name": record.name,
        "baseline": bool(record.baseline),
        "state": record.state,
        "rungs": len(record.measurements),
        "train_tokens": last.tokens if last else 0,
        "value": _rounded(statistics.fmean(search.study.scorer.followed_values(record)) if last else None),
        **_speed(search, record),
        "pareto": on_front if last else "",
        "meets": search.study.scorer.meets(record) if last else "",
        "acceptance_length": _rounded(statistics.fmean(seed_lengths(record)) if last else None),
        "low": _rounded(acceptance.get("low")),
        "high": _rounded(acceptance.get("high")),
        "seeds": len(record.final),
        "failed_seeds": len(record.failed_repeats),
        "seed_std": _rounded(statistics.stdev(seed_lengths(record)) if record.repeats else None),
        "acceptance_rate": _rounded(acceptance.get("rate")),
        **{f"alpha_{step}": _rounded(conditional[step]) for step in range(k)},
        **record.columns,
        "loss": _rounded(last.loss if last else None),
        "tokens_per_second": last.tokens_per_second if last else "",
        "train_seconds": round(sum(m.seconds for m in record.measurements), 1),
        "dtype": last.dtype if last else "",
        "seed": search.file.seed,
        "data": search.store.fingerprint,
        "own_text": search.store.manifest.text_origin == "own",
        "proxy": proxy_of(acceptance) if last else "",
        "learning_rate": record.candidate.train.get("learning_rate", search.file.train.learning_rate),
        "failure_kind": record.failure.kind if record.failure else "",
        "failure": record.failure.reason if record.failure else "",
        "hash": record.hash,
    }


def _speed(search: Search, record: Record) -> dict[str, Any]:
    """Mean speed-up over seeds, best k of the first, and the draft's time; empty where the search has no times."""
    scorer = search.study.scorer
    predicted = [scorer.speedup(record, m) for m in record.final]
    known = [one for one in predicted if one is not None]
    if not known:
        return dict.fromkeys(("speedup", "best_k", "draft_ms", "draft_ms_source"), "")
    return {
        "speedup": _rounded(statistics.fmean(one.value for one in known)),
        "best_k": known[0].k,
        "draft_ms": _rounded(known[0].draft_ms),
        "draft_ms_source": known[0].draft_source,
    }


def _rounded(value: Any) -> Any:
    return "" if value is None or value == "" else round(float(value), 5)


def _last_gain(search: Search, record: Record) -> float:
    return search.study.scorer.gain(record, record.measurements[-1]) if record.measurements else 0.0
