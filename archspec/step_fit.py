"""A draft step's time for drafts that were not measured, fitted to those that were. No torch.

The model is a sum of costs that cannot be negative, in milliseconds a step at one batch size and context length::

    step = constant + per kernel * kernels + per element * layer elements + per head element * head elements

Elements are the single numbers that a step reads and writes (``archspec.work``): weights, keys and values of the
context, activations. The head counts apart because it is one large matrix, read at another rate than many small ones.
Coefficients are found by non-negative least squares (Lawson and Hanson 1974, chapter 23) on relative errors, since the
steps of a space differ by several times.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from archspec.resolve import ResolvedSpec
from archspec.work import Forward, aux_work, draft_work

Array = NDArray[np.float64]
_KERNELS_APART = 4  # less than half a layer


@dataclass(frozen=True)
class StepCounts:
    """What a draft step does, counted from its spec.

    ``cycle_elements`` are those of the norms and the projection of the aux states, which run once a cycle.
    """

    kernels: int
    layer_elements: float
    head_elements: float
    cycle_elements: float

    @classmethod
    def of(cls, spec: ResolvedSpec, batch: int, context: int) -> "StepCounts":
        """Count a step of ``batch`` sequences whose cache holds ``context`` rows each."""
        forward = Forward(rows=1, batch=batch, context=context, weights="float8", activations="float8")  # a byte each
        work = draft_work(spec, forward)
        head = sum(part.bytes for part in work if part.part in ("head", "choice"))
        return cls(
            kernels=sum(part.kernels for part in work),
            layer_elements=sum(part.bytes for part in work) - head,
            head_elements=head,
            cycle_elements=sum(part.bytes for part in aux_work(spec, forward)),
        )

    def columns(self, terms: Sequence[str]) -> list[float]:
        """The counts that the coefficients of ``terms`` multiply."""
        known = {
            "kernels": float(self.kernels),
            "layer elements": self.layer_elements,
            "head elements": self.head_elements,
            "elements": self.layer_elements + self.head_elements,
            "cycle elements": self.cycle_elements,
            "constant": 1.0,
        }
        return [known[term] for term in terms]


def step_terms(counts: Sequence[StepCounts]) -> tuple[str, ...]:
    """The terms that so many and such drafts can tell apart: fewer than drafts, so that an error is left to measure.

    Where all heads are of about one size, their elements cost what all others do; where all drafts start about as many
    kernels, these are the constant.
    """
    heads, kernels = [count.head_elements for count in counts], [count.kernels for count in counts]
    elements = ("elements",) if max(heads) < 1.25 * min(heads) else ("layer elements", "head elements")
    constant = ("constant",) if max(kernels) - min(kernels) >= _KERNELS_APART else ()
    for terms in (("kernels", *elements, *constant), ("kernels", *elements), ("kernels", "elements")):
        if len(terms) < len(counts):
            return terms
    return ("elements",)


@dataclass(frozen=True)
class Fit:
    """Coefficients by term in milliseconds a count, and each calibrating draft's error when it is left out.

    ``errors`` are relative and signed, (predicted - measured) / measured, in the order of the drafts; empty where one
    draft alone was there.
    """

    coefficients: dict[str, float]
    errors: tuple[float, ...] = ()

    @property
    def error(self) -> float | None:
        """Mean size of the leave-one-out errors, relative; None where nothing can be left out."""
        return float(np.abs(self.errors).mean()) if self.errors else None

    def predict(self, counts: StepCounts) -> float:
        """Milliseconds for a draft of these counts."""
        terms = tuple(self.coefficients)
        return float(np.dot(counts.columns(terms), list(self.coefficients.values())))


def fit(counts: Sequence[StepCounts], ms: Sequence[float], terms: Sequence[str], *, relative: bool = True) -> Fit:
    """Fit ``terms`` to measured ``ms``; with ``relative`` by relative errors, else by errors in milliseconds.

    Errors of left-out drafts are found with ``relative`` alone.
    """
    matrix, target = np.array([count.columns(terms) for count in counts]), np.array(ms)
    weights = 1 / target if relative else np.ones_like(target)
    everyone = np.arange(len(target))
    errors: list[float] = []
    if len(target) > 1 and relative:
        for left_out in everyone:
            others = everyone != left_out
            guess = float(matrix[left_out] @ _solved(matrix[others], target[others], weights[others]))
            errors.append(guess / float(target[left_out]) - 1)
    coefficients = _solved(matrix, target, weights)
    return Fit({term: float(value) for term, value in zip(terms, coefficients, strict=True)}, tuple(errors))


def _solved(matrix: Array, target: Array, weights: Array) -> Array:
    """Non-negative least squares, columns brought to equal size first: elements are millions, the constant is 1."""
    from scipy.optimize import nnls  # half a second to import, and needed by few

    scale = np.abs(matrix).max(axis=0)
    scale[scale == 0] = 1.0
    solution, _ = nnls(matrix / scale * weights[:, None], target * weights)
    found: Array = solution / scale
    return found
