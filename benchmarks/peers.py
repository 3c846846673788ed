"""Our MoCo v2 views beside lightly's, on one CPU core: `python benchmarks/peers.py [--images FOLDER] [--json FILE]`.

Both make the same number of views of the same decoded images, with one thread, in turns; the figure is the time of
work on the CPU, so that other work on the machine does not count. lightly is no requirement of ours; where it is
missing, this says how to install it.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor, to_pil_image

from jcl.views import ViewMaker, view_recipe

# (size of the view, canvas, images, how many times lightly's views/s we promise at least)
CASES = ((32, 32, 100, 4.0), (224, 320, 20, 1.0))
ROUNDS = 5


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


def lightly_views(images: list[Image.Image], size: int, views: int) -> Callable[[], object]:
    try:
        from lightly.transforms import MoCoV2Transform
        from lightly.transforms.multi_view_transform import MultiViewTransform
    except ImportError as error:
        sys.exit(
            f"lightly cannot be imported ({error}). Install it with `pip install lightly`, or to leave this "
            "environment as it is, `pip install --no-deps --target DIR lightly lightly_utils pytorch_lightning "
            "lightning_utilities torchmetrics aenum` and run again with PYTHONPATH=DIR."
        )
    transform = MultiViewTransform(MoCoV2Transform(input_size=size).transforms[:1] * views)
    return lambda: [torch.stack(transform(image)) for image in images]


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
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
