"""The bound on the keys of a trained run, checkpoint by checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jcl.studies.bound import BoundRow
from jcl.studies.normality import Normality


@dataclass(frozen=True, eq=False)
class StepBound:
    """The losses of real keys after some steps of training, and how Gaussian q·k is over the views of an image."""

    step: int
    row: BoundRow
    normality: Normality
    queue_filled: float  # 0..1, the share of the negatives that are real keys


@dataclass(frozen=True, eq=False)
class RunBounds:
    """A run's checkpoints, oldest first, with what Gaussian draws of the same size give."""

    steps: tuple[StepBound, ...]
    reference: Normality
    temperature: float
    own_scale: float
    images: int
    keys: int

    def figures(self) -> dict[str, Any]:
        """One flat object: the last checkpoint under plain names, every checkpoint under names with its step."""
        found: dict[str, Any] = {
            "images": self.images,
            "keys_per_image": self.keys,
            "temperature": self.temperature,
            "covariance_scale": self.own_scale,
            "gaussian_reference_rejected_percent": self.reference.rejected(),
            **_step_figures(self.steps[-1]),
        }
        for each in self.steps:
            found |= {f"{name}_step{each.step}": value for name, value in _step_figures(each).items()}
        return found


def _step_figures(bound: StepBound) -> dict[str, float]:
    return bound.row.figures() | {
        "skewness_median": float(bound.normality.skewness.quantile(0.5)),
        "excess_kurtosis_median": float(bound.normality.excess_kurtosis.quantile(0.5)),
        "rejected_percent": bound.normality.rejected(),
        "queue_filled": bound.queue_filled,
    }
