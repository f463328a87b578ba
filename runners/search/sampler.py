"""Which of Optuna's samplers draws a search's next candidate."""

import warnings

import numpy as np
import optuna

from runners.search.search_file import SamplerSettings


def make_sampler(
    settings: SamplerSettings, seed: int, draws: int, at_random: bool = False
) -> optuna.samplers.BaseSampler:
    """A sampler for one draw, seeded by the number of ``draws`` before it: a resumed search draws what another would.

    Several objectives take the same sampler, which then splits by non-domination (Optuna 5, ``TPESampler``).
    """
    seed = int(np.random.SeedSequence([seed, draws]).generate_state(1)[0])
    if at_random or settings.kind == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # of group
        return optuna.samplers.TPESampler(
            multivariate=True, group=True, seed=seed, n_startup_trials=settings.startup_trials
        )
