"""Images a second of the whole training step, against the encoder alone.

    python benchmarks/pretrain.py [--case NAME] [--keys 5 32] [--queries 2] [--local-queries 6] [--json FILE]
    python benchmarks/pretrain.py --case resnet50-224-b256 --images FOLDER --workers 16
    python benchmarks/pretrain.py --case resnet50-224-b256 --accumulate 4 [--checkpoint-activations]

The ceiling is what the encoder allows: one forward and backward pass of the query and a forward pass of each key,
compiled, in bfloat16 and channels-last, nothing else. The step does all the rest too: views of uint8 images on the
device, ShuffleBN, momentum update, loss, queue, optimizer. The time until it is ready is printed too, with an empty
cache mostly compilation. With `--images` MoCo v2 and five keys are then fed from the image files in that folder
too, every image decoded anew each time, as in training on a set too large for memory. `--accumulate` adds a row with
micro-batches, and its peak memory against the whole batch.
"""

import argparse
import gc
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
from machine import save

from jcl.core.encoder import Encoder, build_backbone, patch_embedding
from jcl.data import BatchLoader, ImageBatch, open_data
from jcl.settings.recipes import build_settings
from jcl.settings.resolve import resolve
from jcl.settings.resolved import DataFacts, ResolvedSettings
from jcl.train.build import build_learner, build_optimizer, run_view_recipe, step_options
from jcl.train.step import TrainingStep

DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Case:
    name: str
    recipe: str
    canvas: int
    batch_size: int
    height: int | None = None  # of the images, which are as wide as the canvas; default: square
    limit: float | None = None  # images a second
    ceiling_share: float | None = None  # of the encoder alone
    backbone: str | None = None  # default: the recipe's


CASES = {
    case.name: case
    for case in (
        Case("resnet18-32-b512", "cifar10", 32, 512, limit=30_000),
        Case("resnet18-32-b256", "cifar10", 32, 256),  # as the recipe has it
        Case("resnet18-32-b192", "cifar10", 32, 192),
        Case("resnet18-32-b128", "cifar10", 32, 128, limit=20_000),
        # As the recipe decodes files of 500 × 375 px, ImageNet's typical size.
        Case("resnet50-224-b256", "imagenet-paper", 500, 256, height=375, ceiling_share=0.95),
        Case("vit-s16-224-b256", "imagenet-paper", 320, 256, ceiling_share=0.9, backbone="vit_small_patch16_224"),
        Case("convnext-t-224-b256", "imagenet-paper", 320, 256, ceiling_share=0.9, backbone="timm/convnext_tiny"),
    )
}


AUTO = {"train.lr": "auto", "train.weight_decay": "auto", "train.warmup_epochs": "auto", "model.bn_groups": "auto"}
Values = dict[str, Any]  # settings by their dotted names


def case_settings(
    case: Case, method: str, num_keys: int, num_queries: int, changes: Values | None = None
) -> ResolvedSettings:
    values: Values = {"train.batch_size": case.batch_size, "data.canvas": case.canvas, "method.num_local_queries": 0}
    values |= changes or {}
    if case.backbone:
        values |= AUTO | {"model.backbone": case.backbone}
    if method == "jcl":
        values |= {"method.num_keys": num_keys, "method.num_queries": num_queries}
    settings = build_settings(case.recipe, method=method, values=values)
    return resolve(settings, DataFacts(images=1_000_000, short_side=case.canvas, decoded=True))[0]


def build_step(case: Case, method: str, num_keys: int, num_queries: int, changes: Values | None = None) -> TrainingStep:
    settings = case_settings(case, method, num_keys, num_queries, changes)
    learner, _ = build_learner(settings, DEVICE)
    optimizer = build_optimizer(settings, learner, DEVICE)
    return TrainingStep(learner, optimizer, run_view_recipe(settings), 0, step_options(settings, DEVICE))


def random_batch(case: Case) -> ImageBatch:
    shape = (case.batch_size, 3, case.canvas, case.canvas)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE)
    sizes = torch.tensor([case.height or case.canvas, case.canvas], device=DEVICE).repeat(case.batch_size, 1)
    return ImageBatch(pixels, sizes, torch.arange(case.batch_size, device=DEVICE))


def seconds_until_ready(work: Callable[[], object]) -> float:
    """How long the first calls take, which compile, choose kernels and record."""
    start = time.perf_counter()
    for _ in range(6):
        work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def milliseconds(work: Callable[[], object], repeats: int) -> float:
    """The median of single timed calls."""
    times: list[float] = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


@dataclass(frozen=True)
class Measured:
    milliseconds: float
    peak_bytes: int
    seconds_until_ready: float


def measure_step(
    case: Case, method: str, num_keys: int, num_queries: int, repeats: int, changes: Values | None = None
) -> tuple[Measured, TrainingStep]:
    """What a step takes on images that lie on the device, and the step itself."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step = build_step(case, method, num_keys, num_queries, changes)
    batch, number = random_batch(case), itertools.count()

    def work() -> None:
        step(batch, next(number), 0.01, 1.0)

    ready = seconds_until_ready(work)
    return Measured(milliseconds(work, repeats), torch.cuda.max_memory_allocated(), ready), step


def measure_fed_step(case: Case, step: TrainingStep, folder: Path, workers: int, seconds: float) -> float:
    """Milliseconds of a step when its images are decoded from files all the while."""
    source = open_data(str(folder)).train
    options: dict[str, Any] = {"batch_size": case.batch_size, "canvas": case.canvas, "seed": 0, "workers": workers}
    with BatchLoader(source, **options, device=DEVICE, cache_bytes=0) as loader:
        batches = (batch for epoch in itertools.count() for batch in loader.epoch(epoch))
        numbers = itertools.count()
        for batch in itertools.islice(batches, 4 * workers):  # batches that were decoded ahead
            step(batch, next(numbers), 0.01, 1.0)
        torch.cuda.synchronize()
        start, done = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            for batch in itertools.islice(batches, 10):
                step(batch, next(numbers), 0.01, 1.0)
                done += 1
            torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - start) / done


def measure_ceiling(case: Case, repeats: int) -> tuple[float, float]:
    """Milliseconds of forward and backward, and of forward alone in training mode, for one batch."""
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    settings = case_settings(case, "jcl", 5, 1)
    size = settings.views.image_size
    model = settings.model
    backbone, width = build_backbone(model.backbone, stem=model.stem, image_size=size, drop_path=0.0)
    if model.freeze_patch_embed and (patches := patch_embedding(backbone)):
        patches.requires_grad_(False)
    encoder = Encoder(backbone, width).to(DEVICE).to(memory_format=torch.channels_last)
    encoder.compile(dynamic=False)
    images = torch.randn(case.batch_size, 3, size, size, device=DEVICE, dtype=torch.bfloat16)
    images = images.contiguous(memory_format=torch.channels_last)

    def both() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = encoder(images).sum()
        torch.autograd.backward(loss)

    def forward() -> None:
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
            encoder(images)

    for work in (both, forward):
        seconds_until_ready(work)
    return milliseconds(both, repeats), milliseconds(forward, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=list(CASES), help="default: all")
    parser.add_argument("--keys", type=int, nargs="+", default=[5], help="numbers of keys M'")
    parser.add_argument("--queries", type=int, default=1, help="queries per image of JCL")
    parser.add_argument("--local-queries", type=int, default=0, help="small crops of half the size, as queries of JCL")
    parser.add_argument("--inductor", action="append", default=[], metavar="NAME", help="switch on in the compiler")
    parser.add_argument("--accumulate", type=int, default=1, help="also measure a step of this many micro-batches")
    parser.add_argument("--checkpoint-activations", action="store_true", help="and with activation checkpointing")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--skip-ceiling", action="store_true")
    parser.add_argument("--skip-moco", action="store_true", help="leave out the baseline that ratios are taken of")
    parser.add_argument("--images", type=Path, metavar="FOLDER", help="feed the step from these files too")
    parser.add_argument("--workers", type=int, default=16, help="processes that decode them")
    parser.add_argument("--seconds", type=float, default=40.0, help="for the step fed from files")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.queries < 1:
        parser.error(f"--queries is {arguments.queries}; at least one is needed")
    for option in arguments.inductor:  # such as combo_kernels, to see what it is worth
        if not isinstance(getattr(torch._inductor.config, option, None), bool):
            parser.error(f"--inductor {option}: the compiler has nothing of that name to switch on")
        setattr(torch._inductor.config, option, True)
    figures: dict[str, float] = {}
    print(torch.cuda.get_device_name(DEVICE), "torch", torch.__version__)
    for name in arguments.case or CASES:
        figures |= measure_case(CASES[name], arguments)
        save(figures, arguments.json, DEVICE)


def measure_case(case: Case, arguments: argparse.Namespace) -> dict[str, float]:
    repeats = arguments.repeats
    both, forward = (0.0, 0.0) if arguments.skip_ceiling else measure_ceiling(case, repeats)
    print(f"\n{case.name}: encoder alone {both:.2f} ms forward and backward, {forward:.2f} ms forward")
    print(
        f"{'method':24}{'ms':>9}{'images/s':>11}{'of ceiling':>12}{'x moco-v2':>11}{'GiB':>8}{'x moco-v2':>11}"
        f"{'ready, s':>10}"
    )
    figures = {f"{case.name}_forward_backward_ms": both, f"{case.name}_forward_ms": forward}
    moco, moco_step = (None, None) if arguments.skip_moco else measure_step(case, "moco-v2", 1, 1, repeats)

    def add_row(method: str, queries: float, keys: int, found: Measured) -> tuple[float, float]:
        taken, memory = found.milliseconds, found.peak_bytes
        rate, share = case.batch_size / taken * 1000, (queries * both + keys * forward) / taken
        slower, larger = (taken / moco.milliseconds, memory / moco.peak_bytes) if moco else (math.nan, math.nan)
        print(
            f"{method:24}{taken:9.2f}{rate:11,.0f}{share:12.2f}{slower:11.2f}{memory / 2**30:8.2f}{larger:11.2f}"
            f"{found.seconds_until_ready:10.1f}",
            flush=True,
        )
        name = f"{case.name}_{method}".replace(" ", "_").replace("'", "")
        row = {
            f"{name}_ms": taken,
            f"{name}_images_per_second": rate,
            f"{name}_share_of_ceiling": share,
            f"{name}_times_moco_v2": slower,
            f"{name}_bytes": float(memory),
            f"{name}_bytes_times_moco_v2": larger,
            f"{name}_seconds_until_ready": found.seconds_until_ready,
        }
        figures.update({key: value for key, value in row.items() if not math.isnan(value)})
        return rate, share

    def add_fed_row(method: str, queries: float, keys: int, step: TrainingStep, found: Measured) -> tuple[float, float]:
        fed = measure_fed_step(case, step, arguments.images, arguments.workers, arguments.seconds)
        now = Measured(fed, torch.cuda.max_memory_allocated(), found.seconds_until_ready)
        return add_row(f"{method} from files", queries, keys, now)

    if moco is not None and moco_step is not None:
        add_row("moco-v2", 1, 1, moco)
        if arguments.images:
            add_fed_row("moco-v2", 1, 1, moco_step, moco)
    del moco_step  # and with it its memory, which would count for the next one
    queries, local = arguments.queries, arguments.local_queries
    equivalent = queries + local / 4  # a local query has a quarter of the pixels
    for count in arguments.keys:
        found, step = measure_step(case, "jcl", count, queries, repeats, {"method.num_local_queries": local})
        method = f"jcl M'={count}" if queries == 1 else f"jcl Q={queries} M'={count}"
        method += f" L={local}" if local else ""
        promised = add_row(method, equivalent, count, found)
        if count == 5 and arguments.images:
            promised = add_fed_row(method, equivalent, count, step, found)
        if count == 5 and equivalent == 1:
            print_promise(case, *promised)
        del step
        changes: Values = {"train.accumulate": arguments.accumulate, "method.num_local_queries": local}
        changes |= {"train.checkpoint_activations": True} if arguments.checkpoint_activations else {}
        if arguments.accumulate > 1 or arguments.checkpoint_activations:
            parts = measure_step(case, "jcl", count, queries, repeats, changes)[0]
            add_row(f"{method} in {arguments.accumulate}", equivalent, count, parts)
            ratio = parts.peak_bytes / found.peak_bytes
            figures[f"{case.name}_keys_{count}_memory_ratio"] = ratio
            print(f"  peak memory against the whole batch: ratio {ratio:.2f}")
    return figures


def print_promise(case: Case, rate: float, share: float) -> None:
    if case.limit:
        print(f"  at least {case.limit:,.0f} images/s: ratio {rate / case.limit:.2f}")
    if case.ceiling_share:
        print(f"  at least {case.ceiling_share:.2f} of the encoder alone: ratio {share / case.ceiling_share:.2f}")


if __name__ == "__main__":
    main()
