"""What a step of each method costs over the number of keys: what `jcl cost` calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from jcl.console import pluralize
from jcl.core.method import METHODS
from jcl.data import ImageBatch
from jcl.distributed.device import choose_device
from jcl.errors import SettingsError
from jcl.settings.recipes import build_settings
from jcl.settings.resolve import DataFacts, ResolvedSettings, passes_of_flat_memory, resolve
from jcl.settings.schema import with_values
from jcl.studies.apart import OutOfMemory, run_in_subprocess
from jcl.studies.cost import BASELINE, Cell, Step, StepCost, baseline, growth, measure_step, more_keys, most_keys
from jcl.train.build import build_learner, build_optimizer, run_view_recipe, step_options
from jcl.train.step import TrainingStep

COMPARED = ("jcl", "multi-key", "multi-key-backprop")
TITLES = {name: method.title for name, method in METHODS.items()}
"""What the methods are called in tables and figures."""

_CPU = "CPU"
_IMAGES = 1_000_000  # of the data set that automatic settings are chosen for; none is read


@dataclass(frozen=True)
class CostReport:
    """All cells, and what they were measured on."""

    cells: tuple[Cell, ...]
    settings: ResolvedSettings
    device: str

    def figures(self) -> dict[str, Any]:
        """One flat object of plain names; what did not fit into the memory is null."""
        found: dict[str, Any] = {
            "device": self.device,
            "torch": torch.__version__,
            "backbone": self.settings.model.backbone,
            "image_size": self.settings.views.image_size,
            "batch_size": self.settings.train.batch_size,
        }
        base = baseline(self.cells)
        for cell in self.cells:
            name = f"{cell.method.replace('-', '_')}_m{cell.keys}"
            found[f"{name}_bytes"] = None if cell.cost is None else cell.cost.bytes
            found[f"{name}_ms"] = None if cell.cost is None else cell.cost.milliseconds
            found[f"{name}_ms_spread"] = None if cell.cost is None else cell.cost.spread
            if cell.cost is not None and base is not None:
                found[f"{name}_bytes_times_moco_v2"] = cell.cost.bytes / base.bytes
                found[f"{name}_ms_times_moco_v2"] = cell.cost.milliseconds / base.milliseconds
        for method in COMPARED:
            line = growth(self.cells, method)
            if line is not None:
                found[f"{method.replace('-', '_')}_bytes_per_key"] = line.bytes_per_key
                found[f"{method.replace('-', '_')}_line_fit"] = line.fit
        return found

    @property
    def on_gpu(self) -> bool:
        return self.device != _CPU

    def described(self) -> str:
        """What was measured, in a few words."""
        settings = self.settings
        return (
            f"{settings.model.backbone} at {settings.views.image_size} px, batch of {settings.train.batch_size}, "
            f"{self.device}"
        )

    def finding(self) -> str:
        """What the numbers say, in one line."""
        base = baseline(self.cells)
        if base is None:
            return "MoCo v2 itself did not fit into the memory"
        found = (f"{TITLES[method]} {_times(self.cells, method, base)}" for method in ("jcl", "multi-key-backprop"))
        return f"Memory over MoCo v2's: {'; '.join(found)}"

    def doubt(self) -> str:
        """A sentence where the times were disturbed so much that they tell little; nothing where they were not."""
        compared = more_keys(self.cells)
        doubtful = sum(each.in_doubt for each in compared)
        if not doubtful:
            return ""
        costs = [cell.cost for cell in self.cells if cell.cost is not None]
        most = max(cost.spread / cost.milliseconds for cost in costs)
        spread = f"less than equal steps differ (up to {100 * most:.0f} %)" if most else "nothing"
        return (
            f"The times are in doubt: from one number of keys to the next, {doubtful} of {len(compared)} times "
            f"more keys seem to cost {spread}; measure again on an idle machine, or with more --repeats."
        )


def _times(cells: Sequence[Cell], method: str, base: StepCost) -> str:
    """A method's memory with the most keys that fit, over MoCo v2's, and with how many keys it does not fit."""
    cell = most_keys(cells, method)
    missing = min((each.keys for each in cells if each.method == method and each.cost is None), default=None)
    parts = []
    if cell is not None and cell.cost is not None:
        parts.append(f"{cell.cost.bytes / base.bytes:.2f} × with {pluralize(cell.keys, 'key')}")
    if missing is not None:
        parts.append(f"does not fit with {pluralize(missing, 'key')}")
    return ", ".join(parts)


def measure_cost(
    keys: Sequence[int],
    *,
    recipe: str | None = None,
    values: Mapping[str, Any] | None = None,
    repeats: int = 5,
    device: str = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> CostReport:
    """Measure MoCo v2 once and each other method with each number of keys, every cell in a process of its own.

    Without a `recipe` it is the paper's ResNet-50 on a GPU, with a batch of 256, and a small network on 64 px with a
    batch of 64 on a CPU. A cell that does not fit ends its method: more keys would fit even less.
    """
    if not keys or min(keys) < 1:
        raise SettingsError(f"--keys takes numbers of keys, each at least 1, such as 1,2,4; got {list(keys)}.")
    target = choose_device(device)
    plan = CostPlan(*_usual(target, recipe, dict(values or {})), str(target), repeats)
    settings = plan.settings(BASELINE, 1)
    cells: list[Cell] = []
    for method, counts in ((BASELINE, [1]), *((method, sorted(set(keys))) for method in COMPARED)):
        full = False
        for count in counts:
            cost = None if full else run_in_subprocess(measure_cell, (plan, method, count))
            full = cost is None or isinstance(cost, OutOfMemory)
            cells.append(Cell(method, count, None if isinstance(cost, OutOfMemory) else cost))
            if progress is not None:
                progress(len(cells), 1 + len(COMPARED) * len(set(keys)))
    return CostReport(tuple(cells), settings, _device_name(target))


def _usual(device: torch.device, recipe: str | None, values: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    eager = {"train.compile": False, "train.cuda_graph": False}  # nobody waits for 19 compilations
    if recipe is not None:
        return recipe, eager | values
    if device.type == "cuda":
        return "imagenet-paper", eager | {"train.batch_size": 256} | values
    values = {"views.image_size": 64, "train.batch_size": 64} | values
    # A small network keeps little of a query for its backward pass, so its keys must come in small parts too.
    parts = _parts_of(values["train.batch_size"])
    return "demo", eager | {"model.bn_groups": parts, "train.key_passes": parts} | values


def _parts_of(batch: int) -> int:
    """The most equal parts, 32 at most, with two images or more in each."""
    return max(parts for parts in range(1, 33) if batch % parts == 0 and batch // parts >= 2)


@dataclass(frozen=True)
class CostPlan:
    """What all cells have in common: a recipe with changes, the device, and how many steps are timed."""

    recipe: str
    values: dict[str, Any]
    device: str
    repeats: int

    def settings(self, method: str, keys: int) -> ResolvedSettings:
        one_query = {"method.num_queries": 1}  # as in the paper, whose comparison this is
        values = one_query | self.values | ({"method.num_keys": keys} if METHODS[method].several_keys else {})
        settings = build_settings(self.recipe, method=method, values=values)
        size = settings.views.image_size
        side = 320 if size == "auto" else max(32, round(size * 10 / 7))
        chosen = resolve(settings, DataFacts(images=_IMAGES, short_side=side, decoded=True))[0]
        if settings.train.key_passes == "auto" and not METHODS[method].gradient_through_keys:
            # Memory is what is compared; training may take small views at once, because they are small.
            passes = passes_of_flat_memory(chosen.method.num_keys, chosen.model.bn_groups)
            chosen = with_values(chosen, {"train.key_passes": passes})
        return chosen


def measure_cell(task: tuple[CostPlan, str, int]) -> StepCost:
    """Measure one method with one number of keys in this process."""
    plan, method, keys = task
    device = torch.device(plan.device)
    return measure_step(lambda: _training_step(plan.settings(method, keys), device), device, repeats=plan.repeats)


def _training_step(settings: ResolvedSettings, device: torch.device) -> Step:
    """The step of a real run, on random images that lie on the device."""
    learner, _ = build_learner(settings, device)
    optimiser = build_optimizer(settings, learner, device)
    step = TrainingStep(learner, optimiser, run_view_recipe(settings), 0, step_options(settings, device))
    count, side = settings.train.batch_size, settings.data.canvas
    pixels = torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, device=device)
    sizes = torch.full((count, 2), side, device=device)
    batch = ImageBatch(pixels, sizes, torch.arange(count, device=device))
    numbers = iter(range(1_000_000))
    return lambda: step(batch, next(numbers), 0.01, float(settings.method.covariance_scale))


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _CPU
