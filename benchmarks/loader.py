"""Images per second from files on disk to batches on the device, for several numbers of workers.

    python benchmarks/loader.py [FOLDER] [--workers 0 1 2] [--canvas 320] [--batch-size 64] [--seconds 10]
    python benchmarks/loader.py [FOLDER] --workers 2 --steps 50000 --batch-size 8 --canvas 32

Without a folder, photographs of COCO's size are drawn first. Each row is compared with what a worker must deliver so
that 16 of them feed a ResNet-50 trained with JCL on one H200 (2,400 images a second in all), and shows how much the
memory of this process, of its workers and the memory they share grew between the first and the last third of the
time. With `--steps` it loads that many batches instead, to see a slow growth.
"""

import argparse
import itertools
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from machine import save
from PIL import Image

from jcl.data import BatchLoader, ImageSource, open_data

LIMIT_PER_WORKER = 2400 / 16


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or draw_photographs(Path(scratch), 300)
        source = open_data(str(folder)).train
        print(f"{source.description}; canvas {arguments.canvas}, batch {arguments.batch_size}, {os.cpu_count()} cores")
        print(f"{'workers':>7}{'images/s':>10}{'per worker':>12}{'of limit':>10}{'first batch':>13}{'growth':>11}")
        figures: dict[str, float] = {"limit_per_worker": LIMIT_PER_WORKER}
        for workers in arguments.workers:
            figures |= measure(source, workers, arguments)
    save(figures, arguments.json, arguments.device)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--canvas", type=int, default=320)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0, help="for each number of workers")
    parser.add_argument("--steps", type=int, help="load this many batches, instead of --seconds")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    return parser.parse_args()


def draw_photographs(folder: Path, count: int) -> Path:
    """Colored noise at several scales: about as many bytes as a photograph of 640 x 480 pixels."""
    draw = np.random.default_rng(0)
    for number in range(count):
        picture = np.zeros((480, 640, 3))
        for size in (4, 16, 64, 256):
            noise = Image.fromarray(draw.integers(0, 256, (size, size, 3), dtype=np.uint8))
            picture += np.asarray(noise.resize((640, 480), Image.Resampling.BICUBIC)) / 4
        Image.fromarray(picture.astype(np.uint8)).save(folder / f"{number:04}.jpg", quality=90)
    return folder


def measure(source: ImageSource, workers: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Load for the given time, after a first batch that also starts the workers, and print one row."""
    started = time.perf_counter()
    options = {"batch_size": min(arguments.batch_size, len(source)), "canvas": arguments.canvas, "seed": 0}
    # Nothing is kept, so that every batch is decoded, as it is for a set too large for the memory.
    with BatchLoader(source, **options, workers=workers, device=arguments.device, cache_bytes=0) as loader:
        batches = (batch for epoch in range(10**9) for batch in loader.epoch(epoch))
        next(batches)
        first, memory, images = time.perf_counter(), [], 0
        for step in itertools.count():
            if step == arguments.steps or (not arguments.steps and time.perf_counter() - first >= arguments.seconds):
                break
            images += len(next(batches))
            if step % max(20, (arguments.steps or 0) // 500) == 0:
                memory.append(own_mebibytes())
        rate = images / (time.perf_counter() - first)
    third = max(1, len(memory) // 3)
    growth = max(memory[-third:]) - max(memory[:third])
    per_worker = rate / max(1, workers)
    print(
        f"{workers:>7}{rate:>10.0f}{per_worker:>12.0f}{per_worker / LIMIT_PER_WORKER:>10.2f}"
        f"{first - started:>11.1f} s{growth:>7.1f} MiB"
    )
    return {
        f"images_per_second_{workers}": rate,
        f"growth_mebibytes_{workers}": growth,
        f"peak_mebibytes_{workers}": max(memory),
        f"batches_{workers}": images // loader.batch_size,
    }


def own_mebibytes() -> float:
    """Memory of this process and all below it, shared pages counted once; zero where the system does not say."""
    total = 0
    for process in [os.getpid(), *descendants(os.getpid())]:
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def descendants(process: int) -> list[int]:
    try:
        children = [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []
    return children + [below for child in children for below in descendants(child)]


if __name__ == "__main__":
    main()
