"""The time of a training step by part (data, views, query, keys, loss, ...), and options that make a run faster."""

import contextlib
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch

from jcl.console import ProgressCallback
from jcl.core.encoder import Stem, build_backbone
from jcl.core.registry import METHODS
from jcl.data import BatchLoader
from jcl.errors import SettingsError
from jcl.settings.resolved import ResolvedSettings
from jcl.settings.schema import with_values
from jcl.train.step import TrainingStep

Result = TypeVar("Result")
_WARMUP, _STEPS = 5, 20  # steps that are not timed, and that are


@dataclass(frozen=True)
class StepProfile:
    """Mean milliseconds of a step's parts; `rest` is everything else (momentum update, queue, launches)."""

    parts: dict[str, float]
    step: float
    images_per_second: float

    @property
    def rest(self) -> float:
        return max(0.0, self.step - sum(self.parts.values()))


def profile_steps(step: TrainingStep, loader: BatchLoader, progress: ProgressCallback) -> StepProfile:
    """Time the parts of some training steps; the learner should not be used afterwards.

    The step must not be recorded: a recorded step takes a little less than the sum shown here. On a GPU the parts are
    timed with CUDA events, without synchronization.
    """
    clock = _PartClock(step.options.device)
    methods = (
        ("views", step, "make_views"),
        *([("views", step, "make_local_views")] if step.make_local_views else []),
        ("keys", step.learner, "encode_keys"),
        ("query", step.learner, "encode_queries"),
        ("loss", step.learner, "contrast"),
        ("backward", step, "backward"),
        ("optimizer", step.optimizer, "step"),
    )
    for name, owner, method in methods:
        setattr(owner, method, clock.timed(name, getattr(owner, method)))
    batches = itertools.chain.from_iterable(loader.epoch(epoch) for epoch in itertools.count())
    on_gpu = step.options.device.type == "cuda"
    synchronize: Callable[[], None] = torch.cuda.synchronize if on_gpu else lambda: None
    waited = started = 0.0
    for number in range(_WARMUP + _STEPS):
        if number == _WARMUP:
            synchronize()
            clock.calls.clear()
            waited, started = 0.0, time.perf_counter()
        asked = time.perf_counter()
        batch = next(batches)
        waited += time.perf_counter() - asked
        step(batch, number, 1e-3, 1.0)
        progress(number + 1, _WARMUP + _STEPS)
    synchronize()
    seconds = time.perf_counter() - started
    parts = {"waiting for data": 1000 * waited / _STEPS}
    parts |= {name: clock.milliseconds(name) / _STEPS for name, *_ in methods}
    return StepProfile(parts, 1000 * seconds / _STEPS, _STEPS * loader.batch_size / seconds)


class _PartClock:
    """Adds up the time of named parts; a nested part is subtracted from the outer one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.calls: list[tuple[str, str, Any, Any]] = []  # name, outer part, start, end
        self.around: list[str] = []

    def timed(self, name: str, function: Callable[..., Result]) -> Callable[..., Result]:
        def call(*arguments: Any, **options: Any) -> Result:
            outer = self.around[-1] if self.around else ""
            self.around.append(name)
            start = self._now()
            result = function(*arguments, **options)
            self.calls.append((name, outer, start, self._now()))
            self.around.pop()
            return result

        return call

    def milliseconds(self, name: str) -> float:
        total = 0.0
        for own, outer, start, end in self.calls:
            taken = start.elapsed_time(end) if self.device.type == "cuda" else 1000 * (end - start)
            total += taken * ((own == name) - (outer == name))
        return total

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


_MIN_SPEEDUP = 1.5


def faster_options(settings: ResolvedSettings, device: torch.device) -> str:
    """`--image-size 96 (about 5x), --epochs 50 (about 4x)`: options that make this run faster, judged by its FLOPs."""
    # For views of 33 to 64 px, "auto" chooses a slower stem than for 96 px.
    stem = "imagenet" if 32 < settings.views.image_size <= 64 else settings.model.stem
    changes: dict[str, dict[str, Any]] = {
        "--image-size 96": {"views.image_size": 96, "views.local_size": 48, "model.stem": stem},
        "--epochs 50": {"train.epochs": 50},
        "--backbone resnet18": {"model.backbone": "resnet18"},
        "--method moco-v2": {"method.name": "moco-v2", "method.num_keys": 1, "method.num_queries": 1},
    }
    if device.type == "cpu":
        changes["--backbone tiny_cnn"] = {"model.backbone": "tiny_cnn", "model.stem": "imagenet"}
    found = []
    for flag, values in changes.items():
        # Some networks do not take 96 px, or their FLOPs cannot be counted.
        with contextlib.suppress(SettingsError, RuntimeError):
            speedup = _run_flops(settings) / _run_flops(with_values(settings, values))
            if speedup >= _MIN_SPEEDUP:
                found.append(f"{flag} ({f'about {speedup:.0f}' if speedup < 10 else 'over 10'}x)")
    return ", ".join(found)


def _run_flops(settings: ResolvedSettings) -> float:
    """The FLOPs of a run per training image; a backward pass takes twice as many as a forward pass."""
    model, method = settings.model, settings.method
    per_key = 3 if METHODS[method.name].gradient_through_keys else 1
    passes = 3 * method.num_queries + per_key * method.num_keys
    flops = passes * _forward_flops(model.backbone, model.stem, settings.views.image_size)
    if method.num_local_queries:
        flops += 3 * method.num_local_queries * _forward_flops(model.backbone, model.stem, settings.views.local_size)
    return settings.train.epochs * flops


@cache
def _forward_flops(backbone: str, stem: Stem, size: int) -> int:
    from torch.utils.flop_counter import FlopCounterMode  # imports Triton

    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        network = build_backbone(backbone, stem=stem, image_size=size)[0].eval()
        with FlopCounterMode(display=False) as counter:
            network(torch.empty(1, 3, size, size))
    return int(counter.get_total_flops())
