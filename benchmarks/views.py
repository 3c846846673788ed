"""How many views a second one device makes: `python benchmarks/views.py [--device cuda] [--json FILE]`.

Each case draws fresh parameters for every view and makes complete, normalized views from a batch already on the device,
and is compared with the least we promise: on a GPU what keeps an H200 training, on a CPU, for one core, four times
(at 32 pixels) and once (at 224 pixels) the views that lightly makes on such a core.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from machine import save
from torch import Tensor

from jcl.train.step import StepOptions, view_function
from jcl.views import view_recipe

VIEWS_PER_IMAGE = 6


@dataclass(frozen=True)
class Case:
    recipe: str
    size: int
    canvas: int
    images: dict[str, int]  # in a batch, by device
    limit: dict[str, int]  # views a second at least, by device where something is promised


CASES = (
    Case("small", 32, 32, {"cuda": 4096, "cpu": 128}, {"cuda": 3_000_000}),
    Case("moco-v2", 32, 32, {"cuda": 4096, "cpu": 128}, {"cpu": 6_450}),
    Case("moco-v1", 224, 500, {"cuda": 256, "cpu": 8}, {}),
    Case("moco-v2", 224, 320, {"cuda": 256, "cpu": 8}, {"cuda": 60_000, "cpu": 170}),
    Case("moco-v2", 224, 500, {"cuda": 256, "cpu": 8}, {"cuda": 60_000, "cpu": 170}),  # as the recipes decode
)


def view_making(case: Case, device: torch.device) -> Callable[[], Tensor]:
    """A function that makes all views of one batch, of another step each time."""
    images = case.images[device.type]
    pixels = torch.randint(0, 256, (images, 3, case.canvas, case.canvas), dtype=torch.uint8, device=device)
    sizes = torch.full((images, 2), case.canvas, device=device)
    rows = torch.arange(images, device=device).repeat_interleave(VIEWS_PER_IMAGE)
    numbers = torch.arange(VIEWS_PER_IMAGE, device=device).repeat(images)
    step = torch.zeros((), dtype=torch.int64, device=device)
    recipe = view_recipe(case.recipe, case.size)
    on_gpu = device.type == "cuda"
    options = StepOptions(device, torch.bfloat16 if on_gpu else torch.float32, compiled=on_gpu, recorded=False)
    make, samples = view_function(recipe, 0, options), torch.arange(images, device=device)
    return lambda: make(step.add_(1), pixels, sizes, samples, rows, numbers)


def seconds_per_batch(make: Callable[[], Tensor], device: torch.device, seconds: float) -> float:
    """The fastest of five rounds, the one that other work on the machine slowed least."""
    make(), make()
    rounds = []
    for _ in range(5):
        done, start = 0, now(device)
        while now(device) - start < seconds / 5:
            for _ in range(10 if device.type == "cuda" else 1):
                make()
                done += 1
        rounds.append((now(device) - start) / done)
    return min(rounds)


def now(device: torch.device) -> float:
    """Seconds: of the clock once a GPU has finished its work, of work on a CPU, where one thread works."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--seconds", type=float, default=5.0, help="to spend on each case")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.set_num_threads(1)

    figures: dict[str, float] = {}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "one CPU core"
    print(f"{name}, {VIEWS_PER_IMAGE} views per image")
    print(f"{'recipe':10}{'size':>6}{'canvas':>8}{'batch':>7}{'views/s':>12}{'at least':>12}{'ratio':>8}")
    for case in CASES:
        images, limit = case.images[device.type], case.limit.get(device.type)
        duration = seconds_per_batch(view_making(case, device), device, arguments.seconds)
        rate = images * VIEWS_PER_IMAGE / duration
        figures[f"{case.recipe}_{case.size}px_of_{case.canvas}px_views_per_second".replace("-", "_")] = rate
        promise = f"{limit:12,}{rate / limit:8.2f}" if limit else f"{'-':>12}{'-':>8}"
        print(f"{case.recipe:10}{case.size:6}{case.canvas:8}{images:7}{rate:12,.0f}{promise}", flush=True)
    save(figures, arguments.json, device)


if __name__ == "__main__":
    main()
