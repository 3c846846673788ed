"""Memory and time of a training step over the number of keys: the comparison in the paper's supplement.

Memory is the peak that PyTorch held during a step, including weights, optimizer state and images: on a GPU as reported
by the caching allocator, on a CPU as recorded by the profiler.
"""

import contextlib
import gc
import itertools
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from jcl.console import ProgressCallback, no_progress, pluralize
from jcl.core.encoder import OWN_BACKBONES
from jcl.core.registry import METHODS
from jcl.data import ImageBatch
from jcl.distributed.device import choose_device
from jcl.settings.commands import CostOptions
from jcl.settings.recipes import build_settings
from jcl.settings.resolve import passes_for_constant_memory, resolve
from jcl.settings.resolved import DataFacts, ResolvedSettings
from jcl.settings.values import with_values
from jcl.train.build import build_learner, build_optimizer, run_view_recipe, step_options
from jcl.train.step import TrainingStep

Step = Callable[[], object]
BASELINE = "moco-v2"
COMPARED = ("jcl", "multi-key", "multi-key-backprop")
_DATASET_SIZE = 1_000_000  # assumed when "auto" is resolved; no images are read
OUT_OF_MEMORY, KILLED = "out of memory", "killed, probably out of memory"
_NOISY = 0.2  # interquartile range of the times of a step, relative to its time


@dataclass(frozen=True)
class StepCost:
    """The cost of one step."""

    bytes: int
    milliseconds: float
    spread: float = 0.0  # interquartile range of the timed steps, in milliseconds


@dataclass(frozen=True)
class CostCell:
    """A method with a number of keys; if it could not be measured, the cost is None and `failure` says why."""

    method: str
    keys: int
    cost: StepCost | None
    failure: str = OUT_OF_MEMORY


@dataclass(frozen=True)
class CostReport:
    """All measurements, with increasing numbers of keys of each method, and the settings and the device."""

    cells: Sequence[CostCell]
    settings: ResolvedSettings
    device: str

    def measured(self, method: str) -> list[tuple[int, StepCost]]:
        """The numbers of keys with which a method fits into memory, and their costs."""
        return [(cell.keys, cell.cost) for cell in self.cells if cell.method == method and cell.cost is not None]

    @property
    def baseline(self) -> StepCost | None:
        """The cost of MoCo v2, which everything is compared with."""
        return next((cost for _, cost in self.measured(BASELINE)), None)

    def growth(self, method: str) -> tuple[float, float] | None:
        """Slope, in bytes per key, and R² of a line fitted to a method's memory, if there are three measurements."""
        found = self.measured(method)
        if len(found) < 3:
            return None
        keys, memory = [count for count, _ in found], [cost.bytes for _, cost in found]
        fit = statistics.correlation(keys, memory) ** 2 if len(set(memory)) > 1 else 1.0
        return statistics.linear_regression(keys, memory).slope, fit

    def metrics(self) -> dict[str, Any]:
        """One flat object; null for what could not be measured."""
        found: dict[str, Any] = {
            "device": self.device,
            "torch": torch.__version__,
            "backbone": self.settings.model.backbone,
            "image_size": self.settings.views.image_size,
            "batch_size": self.settings.train.batch_size,
        }
        for cell in self.cells:
            name, cost = f"{cell.method.replace('-', '_')}_m{cell.keys}", cell.cost
            found[f"{name}_bytes"] = cost and cost.bytes
            found[f"{name}_ms"] = cost and cost.milliseconds
            found[f"{name}_ms_spread"] = cost and cost.spread
            if cost and (base := self.baseline):
                found[f"{name}_bytes_times_moco_v2"] = cost.bytes / base.bytes
                found[f"{name}_ms_times_moco_v2"] = cost.milliseconds / base.milliseconds
        for method in COMPARED:
            if line := self.growth(method):
                name = method.replace("-", "_")
                found[f"{name}_bytes_per_key"], found[f"{name}_line_fit"] = line
        return found

    def describe(self) -> str:
        model, size, batch = self.settings.model, self.settings.views.image_size, self.settings.train.batch_size
        return f"{model.backbone} at {size} px, batch of {batch}, {self.device}"

    def finding(self) -> str:
        """Memory of JCL and of backprop through the keys relative to MoCo v2, with the most keys that fit."""
        base, found = self.baseline, []
        if base is None:
            return f"MoCo v2 itself could not be measured: {self.cells[0].failure}"
        for method in ("jcl", "multi-key-backprop"):
            fitting = self.measured(method)[-1:]
            parts = [f"{cost.bytes / base.bytes:.2f} × with {pluralize(keys, 'key')}" for keys, cost in fitting]
            missing = [cell for cell in self.cells if cell.method == method and cell.cost is None]
            parts += [f"{cell.failure} with {pluralize(cell.keys, 'key')}" for cell in missing[:1]]
            found.append(f"{METHODS[method].title} {', '.join(parts)}")
        return f"Memory relative to MoCo v2: {'; '.join(found)}"

    def warning(self) -> str:
        """A warning if the times of a cell vary much, or nothing."""
        noise = max((cell.cost.spread / cell.cost.milliseconds for cell in self.cells if cell.cost), default=0.0)
        problem = f"repeated steps differ by up to {100 * noise:.0f} %"
        return f"The times are unreliable: {problem}. Use an idle machine or more --repeats." if noise > _NOISY else ""


def measure_cost(options: CostOptions, progress: ProgressCallback = no_progress) -> CostReport:
    """Measure MoCo v2 once and the others with each number of keys, each in its own process, until one fails."""
    keys = sorted(set(options.keys))
    device = choose_device(options.device)
    recipe, values = _recipe(options, device)
    cells: list[CostCell] = []
    for method, counts in ((BASELINE, [1]), *((method, keys) for method in COMPARED)):
        failure = ""
        for count in counts:
            task = (step_settings(recipe, values, method, count), device, options.repeats)
            answer = failure or run_in_subprocess(measure_training_step, *task)
            cost, failure = (None, answer) if isinstance(answer, str) else (answer, "")
            cells.append(CostCell(method, count, cost, failure))
            progress(len(cells), 1 + len(COMPARED) * len(keys))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return CostReport(cells, step_settings(recipe, values, BASELINE, 1), name)


def _recipe(options: CostOptions, device: torch.device) -> tuple[str, dict[str, Any]]:
    """The recipe and its changes: by default the paper's ResNet-50 on a GPU, and a small network on a CPU."""
    given = {
        "model.backbone": options.backbone,
        "views.image_size": options.image_size,
        "train.batch_size": options.batch_size,
    }
    values = {name: value for name, value in given.items() if value is not None}
    eager = {"train.compile": False, "train.cuda_graph": False}  # 19 compilations would take too long
    if options.recipe is not None:
        return options.recipe, eager | values
    if device.type == "cuda":
        return "imagenet-paper", eager | {"train.batch_size": 256} | values
    batch = options.batch_size or 64
    groups = max(groups for groups in range(1, 33) if batch % groups == 0 and batch // groups >= 2)
    small = {"views.image_size": 64, "train.batch_size": 64, "model.bn_groups": groups}
    return "demo", eager | small | values


def step_settings(recipe: str, values: Mapping[str, Any], method: str, keys: int) -> ResolvedSettings:
    """The settings of a measurement: a recipe with changes, a method and its number of keys."""
    one_query = {"method.num_queries": 1}  # as in the paper
    own = {"method.num_keys": keys} if METHODS[method].several_keys else {}
    settings = build_settings(recipe, method=method, values=one_query | dict(values) | own)
    size = settings.views.image_size
    side = 320 if size == "auto" else max(32, round(size * 10 / 7))
    resolved = resolve(settings, DataFacts(images=_DATASET_SIZE, short_side=side, decoded=True))[0]
    if settings.train.key_passes == "auto" and not METHODS[method].gradient_through_keys:
        # Training may encode small views in one pass, but here memory is compared. A small network stores little for
        # the backward pass, so it encodes one batch of keys at a time.
        batches = 1 if resolved.model.backbone in OWN_BACKBONES else 4
        passes = passes_for_constant_memory(resolved.method.num_keys, resolved.model.bn_groups, batches)
        resolved = with_values(resolved, {"train.key_passes": passes})
    return resolved


def measure_training_step(settings: ResolvedSettings, device: torch.device, repeats: int) -> StepCost:
    """Measure the step of a real run, on random images on the device, in this process."""

    def build() -> Step:
        learner, _ = build_learner(settings, device)
        optimizer = build_optimizer(settings, learner, device)
        step = TrainingStep(learner, optimizer, run_view_recipe(settings), 0, step_options(settings, device))
        count, side = settings.train.batch_size, settings.data.canvas
        pixels = torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, device=device)
        batch = ImageBatch(pixels, torch.full((count, 2), side, device=device), torch.arange(count, device=device))
        numbers = itertools.count()
        return lambda: step(batch, next(numbers), 0.01, float(settings.method.covariance_scale))

    return measure_step(build, device, repeats=repeats)


def measure_step(build: Callable[[], Step], device: torch.device, *, repeats: int) -> StepCost:
    """Time a step `repeats` times: the median on a GPU, the minimum on a CPU, which other processes disturb."""
    memory, times = (_measure_on_gpu if device.type == "cuda" else _measure_on_cpu)(build, device, repeats)
    lower, upper = np.quantile(times, [0.25, 0.75])
    typical = statistics.median(times) if device.type == "cuda" else min(times)
    return StepCost(memory, typical, float(upper - lower))


def _measure_on_gpu(build: Callable[[], Step], device: torch.device, repeats: int) -> tuple[int, list[float]]:
    step = build()
    for _ in range(3):  # selects kernels and creates the optimizer state, which may take more memory
        step()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        step()
        end.record()
        torch.cuda.synchronize(device)
        times.append(start.elapsed_time(end))
    return torch.cuda.max_memory_allocated(device), times


def _measure_on_cpu(build: Callable[[], Step], _device: torch.device, repeats: int) -> tuple[int, list[float]]:
    gc.collect()  # the profiler would subtract what an earlier measurement left
    # The profiler must see the weights allocated. The second step is the first with all of the optimizer state.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step = build()
        for _ in range(2):
            step()
    results: Any = profile.profiler.kineto_results if profile.profiler else None
    changes = [(event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]"]
    changes.sort(key=lambda change: change[0])  # stable: simultaneous events keep their order
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        step()
        times.append(1000 * (time.perf_counter() - started))
    return int(np.cumsum([size for _, size in changes]).max()), times


def run_in_subprocess(work: Callable[..., Any], *arguments: Any) -> Any:
    """Call `work(*arguments)` in a fresh process; OUT_OF_MEMORY or KILLED if that happened to it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    try:
        with ProcessPoolExecutor(1, context, initializer=_prepare_process) as pool:
            return pool.submit(work, *arguments).result()
    except BrokenProcessPool:
        return KILLED
    except (RuntimeError, MemoryError) as error:
        # The CPU allocator raises a plain RuntimeError.
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error):
            return OUT_OF_MEMORY
        raise


def _prepare_process() -> None:
    with contextlib.suppress(OSError):  # if memory runs out, the system should kill this process first
        Path("/proc/self/oom_score_adj").write_text("1000")
    os.environ["KINETO_LOG_LEVEL"] = "99"
