"""Settings of a COCO detector, with the paper's values as defaults."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from jcl.settings.schema import Auto, NotNegative, Positive, PositiveInt, Section, Triple, validated

Task = Literal["box", "mask", "keypoint"]
Heads = Literal["standard", "small"]

ITERATIONS = {"1x": 90_000, "2x": 180_000}
RANK_TIMEOUT = 600.0  # seconds
_PAPER_BATCH = 16
_PAPER_LR = 0.02  # for a batch of _PAPER_BATCH
_MAX_WARMUP = 1000
_MILESTONES = (2 / 3, 8 / 9)  # of the iterations: 60k and 80k of 90k
_SHORT_SIDE_STEP = 32


class CocoSettings(Section):
    """Where images and annotations are: a folder in COCO's layout, or each part by itself."""

    folder: str | None = None
    train_json: str | None = None
    val_json: str | None = None
    images: str | None = None
    val_images: str | None = None


class DetectionSettings(Section):
    """Task, data, initial backbone, sizes and schedule of a detector."""

    task: Task
    label: str
    init: str
    backbone: str
    mean: Triple = (0.485, 0.456, 0.406)
    std: tuple[Positive, Positive, Positive] = (0.229, 0.224, 0.225)
    coco: CocoSettings
    overfit: PositiveInt | None = None  # number of images to both train and test on
    heads: Heads = "standard"
    short_side: tuple[PositiveInt, PositiveInt] = (640, 800)
    test_short_side: PositiveInt = 800
    max_side: PositiveInt = 1333
    rois_per_image: Annotated[int, Field(ge=4)] = 512
    iterations: PositiveInt = ITERATIONS["1x"]
    batch_size: PositiveInt = _PAPER_BATCH
    accumulate: PositiveInt = 1
    lr: Positive = _PAPER_LR
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    weight_decay: NotNegative = 1e-4
    warmup: Annotated[int, Field(ge=0)] = _MAX_WARMUP
    checkpoint_every: PositiveInt = 1000
    precision: Literal["float32", "bfloat16"] | Auto = "auto"
    device: str = "auto"
    rank_timeout: Positive = RANK_TIMEOUT
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.short_side[0] > self.short_side[1]:
            raise ValueError("short_side must be in ascending order")
        if self.batch_size % self.accumulate:
            raise ValueError(f"batch_size {self.batch_size} is not divisible by accumulate {self.accumulate}")
        return self

    @property
    def short_sides(self) -> tuple[int, ...]:
        """The short sides that training chooses from: 640, 672, ..., 800."""
        least, most = self.short_side
        return (*range(least, most, _SHORT_SIDE_STEP), most)

    @property
    def milestones(self) -> tuple[int, int]:
        """The iterations at which the learning rate is multiplied by 0.1."""
        first, second = (round(share * self.iterations) for share in _MILESTONES)
        return first, second


def detection_settings(values: dict[str, Any], origin: str) -> DetectionSettings:
    """Validate nested values; errors mention `origin` and the name of the setting."""
    return validated(DetectionSettings, values, origin)


def scaled_lr(batch_size: int) -> float:
    """0.02 for a batch of 16, in proportion to the batch."""
    return _PAPER_LR * batch_size / _PAPER_BATCH


def default_warmup(iterations: int) -> int:
    """1,000 iterations, or a tenth of a short schedule."""
    return min(_MAX_WARMUP, max(1, iterations // 10))


def learning_rate(settings: DetectionSettings, iteration: int) -> float:
    """Linear warm-up from a thousandth, then x0.1 at each milestone."""
    warming = min(1.0, iteration / settings.warmup) if settings.warmup else 1.0
    factor = warming + 0.001 * (1 - warming)
    passed = sum(iteration >= milestone for milestone in settings.milestones)
    return float(settings.lr * factor * 0.1**passed)
