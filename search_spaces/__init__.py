"""Which drafts are candidates: spaces, sampling, cheap constraints. Importing it loads neither torch nor optuna."""

from search_spaces.constraints import Constraints
from search_spaces.sampling import Candidate, Infeasible, apply_overrides, locate, require_feasible, sample
from search_spaces.space import Space, SpaceReference, ready_space_names

__all__ = [
    "Candidate",
    "Constraints",
    "Infeasible",
    "Space",
    "SpaceReference",
    "apply_overrides",
    "locate",
    "ready_space_names",
    "require_feasible",
    "sample",
]
