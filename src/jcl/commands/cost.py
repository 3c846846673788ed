"""Memory and time of a training step of each method over the number of keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from jcl.console import pluralize, readable_size
from jcl.core.registry import METHODS
from jcl.data import ImageBatch
from jcl.distributed.device import choose_device
from jcl.errors import SettingsError
from jcl.settings.recipes import build_settings
from jcl.settings.resolve import DataFacts, ResolvedSettings, passes_of_flat_memory, resolve
from jcl.settings.schema import with_values
from jcl.settings.studies import CostOptions, parse_integers
from jcl.studies.cost import (
    BASELINE,
    Cell,
    Step,
    StepCost,
    baseline,
    growth,
    measure_step,
    most_keys,
    reliable_increases,
    run_in_subprocess,
)
from jcl.train.build import build_learner, build_optimizer, run_view_recipe, step_options
from jcl.train.step import TrainingStep

COMPARED = ("jcl", "multi-key", "multi-key-backprop")
_DATASET_SIZE = 1_000_000  # assumed when "auto" is resolved; no images are read
_FLAT_GROWTH = 0.001  # of the baseline's memory per key: 3 % with 32 keys


@dataclass(frozen=True)
class CostReport:
    """All measurements, with the settings and the device."""

    cells: tuple[Cell, ...]
    settings: ResolvedSettings
    device: str

    def metrics(self) -> dict[str, Any]:
        """One flat object; null for what ran out of memory."""
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

    def describe(self) -> str:
        model, size, batch = self.settings.model, self.settings.views.image_size, self.settings.train.batch_size
        return f"{model.backbone} at {size} px, batch of {batch}, {self.device}"

    def finding(self) -> str:
        """Memory of JCL and of backprop through the keys relative to MoCo v2, with the most keys that fit."""
        base = baseline(self.cells)
        if base is None:
            return "MoCo v2 itself ran out of memory"
        found = []
        for method in ("jcl", "multi-key-backprop"):
            cell, parts = most_keys(self.cells, method), []
            if cell is not None and cell.cost is not None:
                parts.append(f"{cell.cost.bytes / base.bytes:.2f} × with {pluralize(cell.keys, 'key')}")
            missing = [each.keys for each in self.cells if each.method == method and each.cost is None]
            if missing:
                parts.append(f"out of memory with {pluralize(min(missing), 'key')}")
            found.append(f"{METHODS[method].title} {', '.join(parts)}")
        return f"Memory relative to MoCo v2: {'; '.join(found)}"

    def growth_lines(self) -> list[str]:
        """How each method's memory grows with the keys."""
        base, lines = baseline(self.cells), []
        for method in COMPARED:
            line = growth(self.cells, method)
            if line is None:
                continue
            if base is not None and abs(line.bytes_per_key) < _FLAT_GROWTH * base.bytes:
                text = "constant memory"
            else:
                text = f"{readable_size(line.bytes_per_key)} per key (R² of a linear fit: {line.fit:.3f})"
            lines.append(f"{METHODS[method].title}: {text}.")
        return lines

    def warning(self) -> str:
        """A warning if the times are too noisy to compare, or nothing."""
        increases = reliable_increases(self.cells)
        unreliable = increases.count(False)
        if not unreliable:
            return ""
        noise = max(cell.cost.spread / cell.cost.milliseconds for cell in self.cells if cell.cost is not None)
        return (
            f"The times are unreliable: in {unreliable} of {len(increases)} comparisons, more keys cost less time than "
            f"the noise (up to {100 * noise:.0f} %). Use an idle machine or more --repeats."
        )


def measure_cost(options: CostOptions, progress: Callable[[int, int], None] = lambda done, total: None) -> CostReport:
    """Measure MoCo v2 once and the other methods with each number of keys, each in its own process.

    If a measurement runs out of memory, the method is not measured with more keys.
    """
    keys = sorted(parse_integers(options.keys, "--keys"))
    if keys[0] < 1:
        raise SettingsError(f"--keys must be at least 1, but got {options.keys}.")
    device = choose_device(options.device)
    given = {
        "model.backbone": options.backbone,
        "views.image_size": options.image_size,
        "train.batch_size": options.batch_size,
    }
    values = {name: value for name, value in given.items() if value is not None}
    plan = CostPlan(*_recipe(device, options.recipe, values), str(device), options.repeats)
    settings = plan.settings(BASELINE, 1)
    cells: list[Cell] = []
    for method, counts in ((BASELINE, [1]), *((method, keys) for method in COMPARED)):
        fits = True
        for count in counts:
            cost = run_in_subprocess(measure_cell, (plan, method, count)) if fits else None
            fits = cost is not None
            cells.append(Cell(method, count, cost))
            progress(len(cells), 1 + len(COMPARED) * len(keys))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return CostReport(tuple(cells), settings, name)


def _recipe(device: torch.device, recipe: str | None, values: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The recipe and its changes: by default the paper's ResNet-50 on a GPU, and a small network on a CPU."""
    eager = {"train.compile": False, "train.cuda_graph": False}  # 19 compilations would take too long
    if recipe is not None:
        return recipe, eager | values
    if device.type == "cuda":
        return "imagenet-paper", eager | {"train.batch_size": 256} | values
    values = {"views.image_size": 64, "train.batch_size": 64} | values
    # A small network stores little for the backward pass, so keys must be encoded in small parts to fit as well.
    batch = values["train.batch_size"]
    parts = max(parts for parts in range(1, 33) if batch % parts == 0 and batch // parts >= 2)
    return "demo", eager | {"model.bn_groups": parts, "train.key_passes": parts} | values


@dataclass(frozen=True)
class CostPlan:
    """What all measurements share: a recipe with changes, the device, and the number of timed steps."""

    recipe: str
    values: dict[str, Any]
    device: str
    repeats: int

    def settings(self, method: str, keys: int) -> ResolvedSettings:
        one_query = {"method.num_queries": 1}  # as in the paper
        values = one_query | self.values | ({"method.num_keys": keys} if METHODS[method].several_keys else {})
        settings = build_settings(self.recipe, method=method, values=values)
        size = settings.views.image_size
        side = 320 if size == "auto" else max(32, round(size * 10 / 7))
        chosen = resolve(settings, DataFacts(images=_DATASET_SIZE, short_side=side, decoded=True))[0]
        if settings.train.key_passes == "auto" and not METHODS[method].gradient_through_keys:
            # Training may encode small views in one pass, but here memory is compared.
            passes = passes_of_flat_memory(chosen.method.num_keys, chosen.model.bn_groups)
            chosen = with_values(chosen, {"train.key_passes": passes})
        return chosen


def measure_cell(task: tuple[CostPlan, str, int]) -> StepCost:
    """Measure one method with one number of keys in this process."""
    plan, method, keys = task
    device = torch.device(plan.device)
    return measure_step(lambda: _training_step(plan.settings(method, keys), device), device, repeats=plan.repeats)


def _training_step(settings: ResolvedSettings, device: torch.device) -> Step:
    """The step of a real run, on random images on the device."""
    learner, _ = build_learner(settings, device)
    optimizer = build_optimizer(settings, learner, device)
    step = TrainingStep(learner, optimizer, run_view_recipe(settings), 0, step_options(settings, device))
    count, side = settings.train.batch_size, settings.data.canvas
    pixels = torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, device=device)
    sizes = torch.full((count, 2), side, device=device)
    batch = ImageBatch(pixels, sizes, torch.arange(count, device=device))
    numbers = iter(range(1_000_000))
    return lambda: step(batch, next(numbers), 0.01, float(settings.method.covariance_scale))
