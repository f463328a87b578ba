"""What a search found, written down: the best config and its weights, the Pareto set, and where figures come from."""

import shutil
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime

from archspec.cost import draft_params, flops_per_token, trainable_params
from archspec.files import replacing, write_json
from archspec.formats import configs, unheld
from archspec.servable import verdicts
from runners.provenance import code_version, hardware
from runners.search.agreement import Agreement, agreements, seed_spread
from runners.search.driver import Search
from runners.search.front import front_of, recommended, write_front
from runners.search.leaderboard import seed_lengths, write_leaderboard
from runners.search.record import Record
from runners.search.result import BestConfig, Decoded, Metrics, Predicted, Standing
from runners.search.run_folder import RunFolder
from runners.search.scores import Scorer
from runners.search.times import times_identity
from runners.search.verdict import judge
from runners.training.trial import WEIGHTS_FOLDER


def write_results(search: Search, ranked: Sequence[Record], decoded: Sequence[Decoded] = ()) -> BestConfig:
    """Write leaderboard, Pareto set, best config and the recommended draft's weights into the run folder."""
    write_leaderboard(search)
    write_front(search, ranked)
    best = best_config(search, ranked, decoded)
    search.folder.best_config.unlink(missing_ok=True)  # never a config beside another draft's weights
    for file in sorted((search.folder.trial(best.recommended.trial) / WEIGHTS_FOLDER).iterdir()):
        with replacing(search.folder.best / file.name) as temporary:
            shutil.copyfile(file, temporary)
    write_json(search.folder.best_config, best.model_dump(mode="json"))
    return best


def best_config(search: Search, ranked: Sequence[Record], decoded: Sequence[Decoded] = ()) -> BestConfig:
    """The recommended draft with everything that is needed to judge and to repeat it."""
    pick, scorer, file, manifest = recommended(search, ranked), search.study.scorer, search.file, search.store.manifest
    record = search.study.records[pick.trial]
    train, heldout = search.store.split(file.data.holdout)
    spread = seed_spread([scorer.gains(one) for one in ranked])
    return BestConfig(
        name=record.name,
        hash=record.candidate.hash,
        spec=record.spec.model_dump(mode="json"),
        spec_as_written=record.candidate.written.model_dump(mode="json"),
        train=file.train.model_copy(update=record.candidate.train).model_dump(mode="json"),
        metrics=metrics_of(record, scorer),
        verdict=judge(ranked, scorer),
        recommended=pick,
        objectives=dict(file.objective.directions),
        times=scorer.times.source if scorer.times else None,
        pareto=[standing(one, scorer) for one in front_of(search)],
        agreement=[one.as_dict() for one in stage_agreement(search)],
        seed_spread=spread.as_dict() if spread else None,
        turned_away=dict(search.study.turned_away),
        decoded=list(decoded),
        baselines=[standing(one, scorer) for one in ranked if one.baseline],
        runners_up=[standing(one, scorer) for one in [one for one in ranked if one is not record][:5]],
        seeds=[m.seed for m in record.final],
        budget=file.budget.model_dump(mode="json") | {"stages": [stage.model_dump() for stage in file.stages]},
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
        servable={verdict.engine: verdict.as_dict() for verdict in verdicts(record.spec)},
        draft_model_configs=configs(record.spec),
        not_held_by=unheld(record.spec),
    )


def stage_agreement(search: Search) -> list[Agreement]:
    """How candidates rank at every two rungs or stages, by the followed objective and the search's own seed."""
    scorer, records = search.study.scorer, search.study.records.values()
    rungs = search.file.plan.rungs
    stages = [
        {r.number: scorer.gain(r, r.measurements[i]) for r in records if len(r.measurements) > i}
        for i in range(len(rungs))
    ]
    return agreements(stages, rungs)


def standing(record: Record, scorer: Scorer) -> Standing:
    """A record as it stands beside the winner."""
    return Standing(name=record.name, hash=record.candidate.hash, metrics=metrics_of(record, scorer))


def metrics_of(record: Record, scorer: Scorer) -> Metrics:
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
        predicted=predicted_of(record, scorer),
    )


def predicted_of(record: Record, scorer: Scorer) -> Predicted | None:
    """The predicted speed-up of a record; None where the search has no times."""
    found = [one for m in record.final if (one := scorer.speedup(record, m)) is not None]
    if not found:
        return None
    return Predicted(
        speedup=statistics.fmean(one.value for one in found),
        k=found[0].k,
        by_k=found[0].by_k,
        draft_ms=found[0].draft_ms,
        draft_source=found[0].draft_source,
    )


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
            "times": times_identity(search.study.scorer.times),
            "code_version": code_version(),
            "hardware": hardware(),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
        },
    )
