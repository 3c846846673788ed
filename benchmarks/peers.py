"""Our MoCo v2 views beside lightly's: `python benchmarks/peers.py [--images FOLDER] [--json FILE]`.

First on one CPU core: both make the same number of views of the same decoded images, with one thread, in turns; the
figure is the time of work on the CPU, so that other work on the machine does not count.

Then, with `--workers N` on a machine that has a GPU, from the files in FOLDER to views: lightly's in N processes of
PyTorch's DataLoader, ours decoded in N processes and made on the GPU. lightly is no requirement of ours; where it is
missing, this says how to install it.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from machine import save
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms.functional import pil_to_tensor, to_pil_image

from jcl.data import BatchLoader, ImageSource, open_data
from jcl.views import ViewMaker, view_recipe

# (size of the view, canvas, images, how many times lightly's views/s we promise at least)
CASES = ((32, 32, 100, 4.0), (224, 320, 20, 1.0))
ROUNDS = 5
FEED_LIMIT = 5.0  # how many times the images/s that lightly feeds from the same cores


def square_images(folder: Path | None, count: int, canvas: int) -> list[Image.Image]:
    """Photographs from a folder, or smooth random ones, all resized to the canvas."""
    if folder is None:
        generator = torch.Generator().manual_seed(0)
        noise = torch.randint(0, 256, (count, 3, canvas // 4, canvas // 4), dtype=torch.uint8, generator=generator)
        images = [to_pil_image(image) for image in noise]
    else:
        paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in {".jpg", ".jpeg", ".png"})
        if not paths:
            sys.exit(f"There is no JPEG or PNG image under {folder}; name a folder that holds some with --images.")
        images = [Image.open(paths[index % len(paths)]).convert("RGB") for index in range(count)]
    return [image.resize((canvas, canvas)) for image in images]


def our_views(images: list[Image.Image], size: int, views: int) -> Callable[[], object]:
    pixels = torch.stack([pil_to_tensor(image) for image in images])
    sizes = torch.tensor(pixels.shape[2:]).expand(len(images), 2)
    rows = torch.arange(len(images)).repeat_interleave(views)
    numbers = torch.arange(views).repeat(len(images))
    step = torch.zeros((), dtype=torch.int64)
    make = ViewMaker(view_recipe("moco-v2", size), 0, step, pixels, sizes, torch.arange(len(images)))

    def run() -> Tensor:
        step.add_(1)
        return make(rows, numbers)

    return run


def lightly_transform(size: int, views: int) -> Callable[[Image.Image], list[Tensor]]:
    try:
        from lightly.transforms import MoCoV2Transform
        from lightly.transforms.multi_view_transform import MultiViewTransform
    except ImportError as error:
        sys.exit(
            f"lightly cannot be imported ({error}). Install it with `pip install lightly`, or to leave this "
            "environment as it is, `pip install --no-deps --target DIR lightly lightly_utils pytorch_lightning "
            "lightning_utilities torchmetrics aenum` and run again with PYTHONPATH=DIR."
        )
    transform: Callable[[Image.Image], list[Tensor]]
    transform = MultiViewTransform(MoCoV2Transform(input_size=size).transforms[:1] * views)
    return transform


def lightly_views(images: list[Image.Image], size: int, views: int) -> Callable[[], object]:
    transform = lightly_transform(size, views)
    return lambda: [torch.stack(transform(image)) for image in images]


class LightlyFiles(Dataset[Tensor]):
    """The files of a source again and again, read and transformed as lightly's users do."""

    def __init__(self, paths: list[Path], views: int) -> None:
        self.paths, self.transform = paths, lightly_transform(224, views)

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> Tensor:
        with Image.open(self.paths[index % len(self.paths)]) as image:
            return torch.stack(self.transform(image.convert("RGB")))


def fed_by_lightly(paths: list[Path], workers: int, batch_size: int, views: int) -> Iterator[object]:
    files = LightlyFiles(paths, views)
    return iter(DataLoader(files, batch_size, num_workers=workers, pin_memory=True, prefetch_factor=2))


def fed_by_us(source: ImageSource, workers: int, batch_size: int, views: int) -> Iterator[object]:
    from jcl.views.kernels import FusedViews  # Triton is only there for GPUs

    device = torch.device("cuda")
    make = FusedViews(view_recipe("moco-v2", 224), 0, device, torch.bfloat16)
    rows = torch.arange(batch_size, device=device).repeat_interleave(views)
    numbers = torch.arange(views, device=device).repeat(batch_size)

    step = torch.zeros((), dtype=torch.int64, device=device)
    options: dict[str, Any] = {"batch_size": batch_size, "canvas": 320, "seed": 0, "workers": workers, "device": device}
    with BatchLoader(source, **options, cache_bytes=0) as loader:
        for epoch in itertools.count():
            for batch in loader.epoch(epoch):
                yield make(step.add_(1), batch.pixels, batch.sizes, batch.samples, rows, numbers)


def images_per_second(batches: Iterator[object], batch_size: int, workers: int, seconds: float) -> float:
    for _ in range(2 * workers):  # what was made ahead while starting is used up
        next(batches)
    torch.cuda.synchronize()
    start, done = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        next(batches)
        done += 1
    torch.cuda.synchronize()
    return done * batch_size / (time.perf_counter() - start)


def compare_feeds(folder: Path, workers: int, views: int, seconds: float) -> dict[str, float]:
    """Images a second, each with all its views, from files."""
    source = open_data(str(folder)).train
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in {".jpg", ".jpeg"})
    batch_size = 64
    rates = {
        "lightly": images_per_second(fed_by_lightly(paths, workers, batch_size, views), batch_size, workers, seconds),
        "jcl": images_per_second(fed_by_us(source, workers, batch_size, views), batch_size, workers, seconds),
    }
    ratio = rates["jcl"] / rates["lightly"]
    print(f"\n{views} views of 224 px of each of {source.description}, {workers} processes, images/s:")
    print(f"lightly {rates['lightly']:,.0f}, ours {rates['jcl']:,.0f}: ratio {ratio:.2f}, at least {FEED_LIMIT}")
    return {f"{name}_fed_images_per_second": rate for name, rate in rates.items()} | {"ratio_fed": ratio}


def best_seconds(makers: dict[str, Callable[[], object]]) -> dict[str, float]:
    """The best of some rounds for each, taken in turns."""
    best = dict.fromkeys(makers, float("inf"))
    for make in makers.values():
        make()
    for _ in range(ROUNDS):
        for name, make in makers.items():
            start = time.process_time()
            make()
            best[name] = min(best[name], time.process_time() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, metavar="FOLDER", help="photographs to use; drawn ones without it")
    parser.add_argument("--views", type=int, default=6, help="views of each image (a query and the keys)")
    parser.add_argument("--workers", type=int, default=0, help="processes to feed a GPU from files with")
    parser.add_argument("--seconds", type=float, default=20.0, help="to spend on each feed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    figures: dict[str, float] = {}
    print(f"MoCo v2 views on one CPU core, {arguments.views} of each image")
    print(f"{'size':>6}{'canvas':>8}{'lightly ms/view':>18}{'ours ms/view':>14}{'ratio':>8}{'at least':>10}")
    for size, canvas, count, limit in CASES:
        images = square_images(arguments.images, count, canvas)
        makers = {
            "lightly": lightly_views(images, size, arguments.views),
            "jcl": our_views(images, size, arguments.views),
        }
        milliseconds = {name: 1e3 * best / count / arguments.views for name, best in best_seconds(makers).items()}
        ratio = milliseconds["lightly"] / milliseconds["jcl"]
        for name, value in milliseconds.items():
            figures[f"{name}_{size}px_views_per_second"] = 1e3 / value
        figures[f"ratio_{size}px"] = ratio
        print(
            f"{size:6}{canvas:8}{milliseconds['lightly']:18.3f}{milliseconds['jcl']:14.3f}{ratio:8.2f}{limit:10.1f}",
            flush=True,
        )
    if arguments.workers and arguments.images:
        figures |= compare_feeds(arguments.images, arguments.workers, arguments.views, arguments.seconds)
    save(figures, arguments.json, "cuda" if arguments.workers else "cpu")


if __name__ == "__main__":
    main()
