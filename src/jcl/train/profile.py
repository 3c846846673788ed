"""The time of a training step by part: data, views, query, keys, loss, ..."""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from jcl.console import ProgressCallback
from jcl.data import BatchLoader
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
