"""How sure a search is of its best architecture: its lead beside what the seed alone moves."""

from collections.abc import Sequence
from statistics import fmean

from runners.search.agreement import SeedSpread, seed_spread
from runners.search.record import Record
from runners.search.result import Rival, Sureness, Verdict
from runners.search.scores import Scorer


def judge(ranked: Sequence[Record], scorer: Scorer) -> Verdict:
    """Compare the first of ``ranked`` with every other: is its lead beyond the 95 % interval that seeds explain?

    The spread of seeds is pooled over all that were repeated and held to be the same for the others, so that a single
    run can be compared too. The figures of the verdict are those of the runner-up. A winner that keeps the bounds on
    what was measured has no rival among those that break one.
    """
    winner = ranked[0]
    rivals = [record for record in ranked[1:] if scorer.meets(record) or not scorer.meets(winner)]
    means = {record.number: fmean(scorer.gains(record)) for record in ranked}
    spread = seed_spread([scorer.gains(record) for record in ranked])
    failed = f"; {len(winner.failed_repeats)} of its seeds failed" if winner.failed_repeats else ""

    def verdict(
        sureness: Sureness,
        text: str,
        noise: float | None = None,
        inside: Sequence[Rival] = (),
        cheaper: str | None = None,
    ) -> Verdict:
        margin = means[winner.number] - means[rivals[0].number] if rivals else None
        return Verdict(
            winner=winner.name,
            objective=scorer.followed,
            sureness=sureness,
            margin=margin,
            noise=noise,
            inside=list(inside),
            cheaper=cheaper,
            text=text + failed,
        )

    if not rivals:
        others = " and keeps the constraints" if ranked[1:] else ""
        return verdict("no rival", f"{winner.name} is the only architecture that finished{others}")
    if spread is None:
        return verdict("one seed only", _on_one_seed(winner, rivals[0], scorer))
    noises = {record.number: spread.noise(len(winner.final), len(record.final)) for record in rivals}
    inside = [
        Rival(name=record.name, hash=record.hash, margin=margin, noise=noises[record.number])
        for record in rivals
        if (margin := means[winner.number] - means[record.number]) <= noises[record.number]
    ]
    text = _lead(winner, rivals[0], scorer, spread)
    if not inside:
        return verdict("outside seed noise", text, noises[rivals[0].number])
    names = {rival.hash for rival in inside}
    alike = [winner, *(record for record in rivals if record.hash in names)]
    text = f"{text}: {_not_told_apart(alike, rivals[0], scorer, spread)}"
    return verdict("inside seed noise", text, noises[rivals[0].number], inside, _cheapest(alike, scorer).name)


def _lead(winner: Record, rival: Record, scorer: Scorer, spread: SeedSpread) -> str:
    """The winner's lead and the noise of it, in words; a single run may stand above a mean of several."""
    margin = fmean(scorer.gains(winner)) - fmean(scorer.gains(rival))
    lead = f"leads {rival.name} by {margin:.4f}" if margin >= 0 else f"is {-margin:.4f} below {rival.name}'s single run"
    seeds = f"{len(winner.final)} and {len(rival.final)} seeds"
    noise = f"{spread.noise(len(winner.final), len(rival.final)):.4f} (95 %, {seeds})"
    return f"{winner.name} {lead} in {scorer.followed}; seed noise of the difference is {noise}"


def _not_told_apart(alike: Sequence[Record], rival: Record, scorer: Scorer, spread: SeedSpread) -> str:
    """Which the winner, the first of ``alike``, cannot be told from, and which of all of them is the cheapest."""
    others = [record.name for record in alike[1:] if record is not rival]
    more = f" and {len(others) - 3} more" if others[3:] else ""
    listed = ", ".join(others[:3]) + more
    margin = fmean(scorer.gains(alike[0])) - fmean(scorer.gains(rival))
    if rival not in alike:
        apart = f"a real difference, but none to {listed}"
    elif -margin > spread.noise(len(alike[0].final), len(rival.final)):
        apart = f"{rival.name} is really better, but no seed repeats it"
    else:
        apart = "not a real difference" + (f", nor to {listed}" if others else "")
    cheapest = _cheapest(alike, scorer)
    which = "cheaper of the two" if len(alike) == 2 else "cheapest of them"
    return f"{apart}, and {cheapest.name} is the {which} ({_costs(cheapest, scorer)})"


def _on_one_seed(winner: Record, rival: Record, scorer: Scorer) -> str:
    """Without any repeat only the intervals over conversations can be looked at."""
    margin = fmean(scorer.gains(winner)) - fmean(scorer.gains(rival))
    ours, theirs = winner.measurements[-1].acceptance, rival.measurements[-1].acceptance
    overlap = ours["low"] <= theirs["high"] and theirs["low"] <= ours["high"]
    intervals = f"their intervals of acceptance length {'overlap' if overlap else 'do not overlap'}"
    return f"{winner.name} leads {rival.name} by {margin:.4f} in {scorer.followed} on one seed; {intervals}"


def _cheapest(records: Sequence[Record], scorer: Scorer) -> Record:
    """The one whose step takes least time where that is known, and of those the one with the fewest parameters."""

    def cost(record: Record) -> tuple[float, float]:
        values = scorer.values(record, record.measurements[-1])
        return values.get("draft_ms", 0.0), values["params"]

    return min(records, key=cost)


def _costs(record: Record, scorer: Scorer) -> str:
    values = scorer.values(record, record.measurements[-1])
    step = f"{values['draft_ms']:.3f} ms a draft step, " if "draft_ms" in values else ""
    return f"{step}{values['params']:,.0f} parameters"
