"""What an accuracy is compared with: chance, the untrained network, and its own uncertainty.

Accuracies are in percent, with Wilson's 95 % binomial interval. An accuracy beats another if Newcombe's 95 % interval
of their difference (1998, method 10) is above zero. That is conservative, because both are measured on the same images.
Chance is the share of the most frequent class among the test images, which is the accuracy of always predicting it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

from jcl.console import join_words, pluralize
from jcl.runs.json_object import is_number

Z_95 = 1.959964  # standard deviations of a normal distribution on each side of its mean


class Estimate(NamedTuple):
    """A value, its 95 % interval, and the number of images if it is an accuracy."""

    value: float
    low: float
    high: float
    images: float = 0

    @property
    def interval(self) -> str:
        """As text, empty for an exact value."""
        return f"{self.low:.1f} to {self.high:.1f} %" if self.low < self.high else ""

    def beats(self, other: Self) -> bool:
        return self.value - other.value > math.hypot(self.value - self.low, other.high - other.value)


def estimate(accuracy: float, images: float | None = None) -> Estimate:
    """An accuracy measured on a number of images, or an exact value."""
    if images is None or images <= 0:
        return Estimate(accuracy, accuracy, accuracy)
    share, square = min(max(accuracy / 100, 0.0), 1.0), Z_95**2 / images
    center = (share + square / 2) / (1 + square)
    half = math.sqrt(square * (share * (1 - share) + square / 4)) / (1 + square)
    return Estimate(accuracy, 100 * max(0.0, center - half), 100 * min(1.0, center + half), images)


def clearly_best(estimates: Sequence[Estimate | None]) -> int | None:
    """The index of the estimate that beats all others, if there are others and one does."""
    known = {index: one for index, one in enumerate(estimates) if one is not None}
    best = max(known, key=lambda index: known[index].value, default=None)
    others = [one for index, one in known.items() if index != best]
    return best if best is not None and others and all(map(known[best].beats, others)) else None


def baseline_figures(
    name: str, accuracy: float, images: int, chance: float, untrained: float | None = None, start: float | None = None
) -> dict[str, Any]:
    """The interval of the accuracy `name`, its baselines, and whether it beats them, with plain names for JSON."""
    own = estimate(accuracy, images)
    found = {f"{name}_interval_low": own.low, f"{name}_interval_high": own.high}
    found |= {"chance_top1": chance, "beats_chance": own.beats(estimate(chance))}
    for kind, other in {"untrained": untrained, "start": start}.items():
        if other is not None:
            found |= {f"{kind}_{name}": other, f"beats_{kind}": own.beats(estimate(other, images))}
    return found


def compare_online(first: Mapping[str, Any], newest: Mapping[str, Any], *, initialized: bool) -> dict[str, Any]:
    """`baseline_figures` of the newest kNN of a run, from the first and the newest line of kNN in its metrics."""
    figures: list[Any] = [newest.get(name) for name in ("knn_top1", "test_images", "chance_top1")]
    if not newest.get("step") or not all(map(is_number, figures)):  # untrained, or edited by hand
        return {}
    before = first.get("knn_top1") if first.get("step") == 0 and is_number(first.get("knn_top1")) else None
    return baseline_figures("knn_top1", *figures, *((None, before) if initialized else (before, None)))


def baseline_warning(name: str, figures: Mapping[str, Any], advice: str = "") -> str | None:
    """A sentence about the baselines that the accuracy `name` does not beat, by `baseline_figures`, and advice."""
    start = f"start_{name}"
    titles = {"chance_top1": "chance", f"untrained_{name}": "the untrained network", start: "the weights at the start"}
    lost = [key for key in titles if figures.get(f"beats_{key.partition('_')[0]}") is False]
    if not lost:
        return None
    kind = "held-out image" if figures.get("test_held_out") else "test image"
    own, images = estimate(figures[name], figures["test_images"]), pluralize(figures["test_images"], kind)
    if start in lost and own.value < figures[start]:
        advice = "Use a lower --lr or fewer --epochs, or keep the weights as they were."
    title = {"knn_top1": "kNN", "linear_top1": "Linear"}.get(name, "Fine-tuned")
    others = join_words([f"{titles[key]} ({figures[key]:.1f} %)" for key in lost])
    text = f"{title} top-1 is {own.value:.1f} %, not clearly better than {others}"
    return f"{text}: the 95 % interval is {own.interval} on {images}. {advice}".strip()
