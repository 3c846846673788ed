"""Training speed of a detector at the paper's size, compared with torchvision's reference loop on the same model.

    python benchmarks/detection.py COCO_FOLDER [--task box mask keypoint] [--batch-size 16] [--iterations 60]

Both loops train the same R50-FPN detector from the same files with as many workers, on images of 640 to 800 px. The
reference loop follows torchvision's detection references with `--amp`: workers rasterize masks at the original size,
the model resizes on the device, and the loss is read at every iteration. Limit: at least as fast.
"""

import argparse
import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from machine import save
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from jcl.commands.detect import build_body
from jcl.distributed.device import PeakMemory
from jcl.evaluate.detection.batches import Hardware, PackedImages, batch_keys, make_target, read_image, training_batches
from jcl.evaluate.detection.data import CocoDataset, CocoImage, coco_files, load_coco, training_subset
from jcl.evaluate.detection.model import DetectionTask, build_detector, build_optimizer, prepare_for_training
from jcl.settings.detection import ITERATIONS, CocoSettings, DetectionSettings

WARMUP = 20  # iterations that are not timed: workers start and kernels are chosen
Loop = Callable[[nn.Module, CocoDataset, DetectionSettings, int, torch.device], Iterator[None]]


def main() -> None:
    arguments = parse_arguments()
    device = torch.device(arguments.device)
    figures: dict[str, float] = {}
    print(f"batch {arguments.batch_size}, {arguments.workers} workers, {arguments.iterations} iterations of each loop")
    print(f"{'task':<10}{'jcl images/s':>14}{'hours for 90k':>15}{'GiB':>6}{'torchvision':>13}{'GiB':>6}{'ratio':>7}")
    for task in arguments.task:
        ours, our_memory = measure(jcl_loop, task, arguments, device)
        theirs, their_memory = measure(reference_loop, task, arguments, device)
        hours = ITERATIONS["1x"] * arguments.batch_size / ours / 3600
        ratio = ours / theirs
        print(
            f"{task:<10}{ours:>14.1f}{hours:>15.1f}{our_memory:>6.1f}{theirs:>13.1f}{their_memory:>6.1f}{ratio:>7.2f}"
            + ("" if ratio >= 1 else "  MISSED")
        )
        figures |= {
            f"{task}_images_per_second": ours,
            f"{task}_hours_for_1x": hours,
            f"{task}_peak_memory_gib": our_memory,
            f"{task}_torchvision_images_per_second": theirs,
            f"{task}_torchvision_peak_memory_gib": their_memory,
            f"{task}_ratio": ratio,
        }
    save(figures, arguments.json, device)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("coco", type=Path)
    parser.add_argument("--task", nargs="+", default=["box", "mask", "keypoint"])
    parser.add_argument("--backbone", default="resnet50")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--short-side", type=int, nargs=2, default=(640, 800))
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    return parser.parse_args()


def measure(loop: Loop, task: str, arguments: argparse.Namespace, device: torch.device) -> tuple[float, float]:
    """Images per second and peak memory in GiB of a loop on a new detector."""
    values = {
        "task": task,
        "label": "random",
        "init": "random",
        "backbone": arguments.backbone,
        "coco": CocoSettings(folder=arguments.coco),
        "batch_size": arguments.batch_size,
        "short_side": arguments.short_side,
        "iterations": WARMUP + arguments.iterations + 1000,  # workers keep reading ahead
    }
    settings = DetectionSettings(**values)
    dataset, _ = load_coco(coco_files(settings.coco, settings.task), settings.task)
    dataset, _ = training_subset(dataset, settings.task)
    keypoints = len(dataset.keypoints) if task == "keypoint" else 0
    detector = build_detector(
        build_body(settings.backbone), settings, classes=len(dataset.categories), keypoints=keypoints
    )
    memory = PeakMemory(device)
    steps = loop(detector, dataset, settings, arguments.workers, device)
    run(steps, WARMUP, device)
    begun = time.perf_counter()
    run(steps, arguments.iterations, device)
    speed = arguments.iterations * settings.batch_size / (time.perf_counter() - begun)
    return speed, memory.read() / 2**30


def run(steps: Iterator[None], count: int, device: torch.device) -> None:
    for _ in itertools.islice(steps, count):
        pass
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def jcl_loop(
    detector: nn.Module, dataset: CocoDataset, settings: DetectionSettings, workers: int, device: torch.device
) -> Iterator[None]:
    """`jcl detect` without checkpoints."""
    detector = prepare_for_training(detector, device, 1)
    hardware = Hardware(device, torch.bfloat16 if device.type == "cuda" else torch.float32, workers)
    batches = training_batches(dataset, settings, 0, hardware)
    task = DetectionTask(detector, build_optimizer(detector, settings), batches, settings, hardware)
    for step, batch in enumerate(task.batches(0, 0)):
        task.step(batch, step, task.learning_rate(step))
        yield


class OriginalSample:
    """Makes a decoded image with its target at the original size."""

    def __init__(self, dataset: CocoDataset, settings: DetectionSettings) -> None:
        self.class_of, self.task = dataset.class_of, settings.task

    def __call__(self, image: CocoImage, _iteration: int) -> tuple[Tensor, dict[str, Tensor]]:
        target = make_target(image, self.class_of, image.height, image.width, self.task)
        return read_image(image).float() / 255, target


def reference_loop(
    detector: nn.Module, dataset: CocoDataset, settings: DetectionSettings, workers: int, device: torch.device
) -> Iterator[None]:
    """The loop of torchvision's detection references with `--amp`."""
    least, most = settings.short_side
    sides = tuple(range(least, most + 1, 32))
    detector.transform = GeneralizedRCNNTransform(sides, settings.max_side, list(settings.mean), list(settings.std))
    detector.to(device).train()
    optimizer = torch.optim.SGD(detector.parameters(), lr=settings.lr, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler(device.type, enabled=device.type == "cuda")
    loader: DataLoader[Any] = DataLoader(
        PackedImages(dataset.images, OriginalSample(dataset, settings)),
        batch_sampler=batch_keys(dataset, settings, 0),
        num_workers=workers,
        collate_fn=_collate,
    )
    for pixels, targets in loader:
        on_device = [image.to(device) for image in pixels]
        moved = [{name: value.to(device) for name, value in target.items()} for target in targets]
        with torch.autocast(device.type, dtype=torch.float16, enabled=device.type == "cuda"):
            losses = sum(detector(on_device, moved).values())
        losses.item()
        optimizer.zero_grad()
        scaler.scale(losses).backward()
        scaler.step(optimizer)
        scaler.update()
        yield


def _collate(samples: list[tuple[Tensor, dict[str, Tensor]]]) -> tuple[Any, ...]:
    return tuple(zip(*samples, strict=True))


if __name__ == "__main__":
    main()
