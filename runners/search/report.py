"""What a search found, written down: the leaderboard, the winner's config and weights, and how sure they are."""

import csv
import io
import math
import os
import platform
import shutil
import statistics
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

from archspec.cost import draft_params, flops_per_token, trainable_params
from archspec.files import replacing, write_json, write_text
from archspec.formats import configs, unheld
from archspec.servable import verdicts
from runners.search.driver import Search
from runners.search.result import BestConfig, Metrics, Standing, Verdict
from runners.search.run_folder import RunFolder
from runners.search.study import Record
from runners.training.trial import WEIGHTS_FOLDER

_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)  # two-sided, by degrees of freedom from 1


def write_results(search: Search, ranked: Sequence[Record]) -> BestConfig:
    """Write leaderboard, best config and the winner's weights into the run folder."""
    winner = ranked[0]
    write_leaderboard(search)
    best = best_config(search, ranked)
    search.folder.best_config.unlink(missing_ok=True)  # never a config beside another draft's weights
    for file in sorted((search.folder.trial(winner.number) / WEIGHTS_FOLDER).iterdir()):
        with replacing(search.folder.best / file.name) as temporary:
            shutil.copyfile(file, temporary)
    write_json(search.folder.best_config, best.model_dump(mode="json"))
    return best


def best_config(search: Search, ranked: Sequence[Record]) -> BestConfig:
    """The winner with everything that is needed to judge and to repeat it."""
    winner, file, manifest = ranked[0], search.file, search.store.manifest
    train, heldout = search.store.split(file.data.holdout)
    return BestConfig(
        name=winner.name,
        hash=winner.candidate.hash,
        spec=winner.spec.model_dump(mode="json"),
        spec_as_written=winner.candidate.written.model_dump(mode="json"),
        train=file.train.model_copy(update=winner.candidate.train).model_dump(mode="json"),
        metrics=metrics_of(winner),
        verdict=judge(ranked),
        baselines=[standing(record) for record in ranked if record.baseline],
        runners_up=[standing(record) for record in ranked[1:6]],
        seeds=[m.seed for m in (winner.measurements[-1], *winner.repeats)],
        budget=file.budget.model_dump(mode="json"),
        target={"model": file.target.model, "fingerprint": manifest.key.target, "facts": manifest.facts.model_dump()},
        data={
            "features": search.store.fingerprint,
            "conversations": manifest.key.conversations,
            "text_origin": manifest.text_origin,
            "temperature": manifest.temperature,
            "train_conversations": len(train),
            "heldout_conversations": len(heldout),
        },
        code_version=code_version(),
        hardware=hardware(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        servable={verdict.engine: verdict.as_dict() for verdict in verdicts(winner.spec)},
        draft_model_configs=configs(winner.spec),
        not_held_by=unheld(winner.spec),
    )


def judge(ranked: Sequence[Record]) -> Verdict:
    """Compare the winner with the runner-up: is the difference of their seed means beyond its 95 % interval?

    With one seed each there is no seed noise to compare with, and only the bootstrap intervals can be looked at.
    """
    winner = ranked[0]
    if len(ranked) == 1:
        text = f"{winner.name} is the only architecture that finished"
        return Verdict(sureness="no rival", margin=None, noise=None, text=text)
    rival = ranked[1]
    ours, theirs = seed_lengths(winner), seed_lengths(rival)
    margin = statistics.fmean(ours) - statistics.fmean(theirs)
    failed = f"; {len(winner.failed_repeats)} of its seeds failed" if winner.failed_repeats else ""
    if min(len(ours), len(theirs)) < 2:
        text = _without_noise(winner, rival, margin) + failed
        return Verdict(sureness="one seed only", margin=margin, noise=None, text=text)
    noise = seed_noise(ours, theirs)
    text = (
        f"{winner.name} leads {rival.name} by {margin:.4f}; seed noise of the difference is {noise:.4f} "
        f"(95 %, {len(ours)} and {len(theirs)} seeds)"
    )
    if margin > noise:
        return Verdict(sureness="outside seed noise", margin=margin, noise=noise, text=text + failed)
    cheaper = min((winner, rival), key=lambda record: draft_params(record.spec))
    size = f"{cheaper.name} is the cheaper of the two ({draft_params(cheaper.spec):,} parameters)"
    text = f"{text}: not a real difference, and {size}{failed}"
    return Verdict(sureness="inside seed noise", margin=margin, noise=noise, text=text)


def _without_noise(winner: Record, rival: Record, margin: float) -> str:
    """What a single seed of the rival lets one say; repeated records rank first, so the margin may be negative."""
    if len(winner.repeats) > len(rival.repeats):
        beside = "above" if margin >= 0 else "below"
        means = f"{winner.name}'s mean of {1 + len(winner.repeats)} seeds is {abs(margin):.4f} {beside}"
        return f"{means} {rival.name}'s single seed; only the former was repeated"
    overlap = winner.measurements[-1].acceptance["low"] <= rival.measurements[-1].acceptance["high"]
    intervals = f"their intervals {'overlap' if overlap else 'do not overlap'}"
    return f"{winner.name} leads {rival.name} by {margin:.4f} on one seed; {intervals}"


def seed_noise(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Half the 95 % interval of a difference of two means under Student's t with the two groups' pooled variance."""
    freedom = len(ours) + len(theirs) - 2
    squares = sum((x - statistics.fmean(group)) ** 2 for group in (ours, theirs) for x in group)
    return _T95[min(freedom, len(_T95)) - 1] * math.sqrt(squares / freedom * (1 / len(ours) + 1 / len(theirs)))


def seed_lengths(record: Record) -> list[float]:
    """Acceptance length of every seed at the full budget, the search's own seed first."""
    return [m.length for m in (record.measurements[-1], *record.repeats)]


def standing(record: Record) -> Standing:
    """A record as it stands beside the winner."""
    return Standing(name=record.name, hash=record.candidate.hash, metrics=metrics_of(record))


def metrics_of(record: Record) -> Metrics:
    """The figures of a record at the last rung that it reached."""
    last = record.measurements[-1]
    lengths = seed_lengths(record)
    return Metrics(
        length=statistics.fmean(lengths),
        low=last.acceptance["low"],
        high=last.acceptance["high"],
        seed_lengths=lengths,
        acceptance=last.acceptance,
        loss=last.loss,
        train_tokens=last.tokens,
        train_seconds=sum(m.seconds for m in record.measurements),
        params=draft_params(record.spec),
        trainable_params=trainable_params(record.spec),
        flops_per_token=flops_per_token(record.spec),
    )


def leaderboard_rows(search: Search) -> list[dict[str, Any]]:
    """One row per architecture: completed ones by rank, then the stopped ones by rung and value, then failures."""
    ranked = search.ranking()
    rest = [record for record in search.study.records.values() if record.state != "complete"]
    rest.sort(key=lambda record: (len(record.measurements), _last_length(record)), reverse=True)
    rows = [_row(search, record, rank) for rank, record in enumerate(ranked, 1)]
    return rows + [_row(search, record, None) for record in rest]


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


def _row(search: Search, record: Record, rank: int | None) -> dict[str, Any]:
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
        "acceptance_length": _rounded(statistics.fmean(seed_lengths(record)) if last else None),
        "low": _rounded(acceptance.get("low")),
        "high": _rounded(acceptance.get("high")),
        "seeds": len(record.repeats) + bool(last),
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
        "learning_rate": record.candidate.train.get("learning_rate", search.file.train.learning_rate),
        "failure_kind": record.failure.kind if record.failure else "",
        "failure": record.failure.reason if record.failure else "",
        "hash": record.hash,
    }


def _rounded(value: Any) -> Any:
    return "" if value is None or value == "" else round(float(value), 5)


def _last_length(record: Record) -> float:
    return record.measurements[-1].length if record.measurements else 0.0


def write_provenance(folder: RunFolder, search: Search) -> None:
    """Write who made this run's numbers: target, data, code, hardware."""
    manifest = search.store.manifest
    write_json(
        folder.provenance,
        {
            "target": {"model": search.file.target.model, "fingerprint": manifest.key.target},
            "features": {
                "path": str(search.store.path),
                "fingerprint": search.store.fingerprint,
                "origin": manifest.text_origin,
            },
            "space": {"hash": search.file.space.hash},
            "code_version": code_version(),
            "hardware": hardware(),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
        },
    )


def code_version() -> str:
    """The package's version, with the commit when it runs from a checkout."""
    package = version("draft-archspec")
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return package
    git = shutil.which("git")
    if git is None:
        return package
    command = [git, "-C", str(root), "describe", "--always", "--dirty"]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"{package}+{told.stdout.strip()}" if told.returncode == 0 else package


def hardware() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
