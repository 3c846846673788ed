"""Images a second of the whole training step, against the encoder alone: `python benchmarks/pretrain.py [--json FILE]`.

The ceiling is what the encoder allows: one forward and backward pass of the query and a forward pass of each key,
compiled, in bfloat16 and channels-last, nothing else. The step does all the rest too: views of uint8 images on the
device, ShuffleBN, momentum update, loss, queue, optimiser.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from jcl.automatic import DataFacts, choose
from jcl.building import build_learner, build_optimiser, run_view_recipe, step_options
from jcl.core.encoder import Encoder, build_backbone
from jcl.data import ImageBatch
from jcl.recipes import build_settings
from jcl.settings import Settings
from jcl.train.step import TrainingStep

DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Case:
    name: str
    recipe: str
    canvas: int
    batch_size: int
    limit: float | None = None  # images a second
    ceiling_share: float | None = None  # of the encoder alone


CASES = {
    case.name: case
    for case in (
        Case("resnet18-32-b512", "cifar10", 32, 512, limit=30_000),
        Case("resnet18-32-b128", "cifar10", 32, 128, limit=20_000),
        Case("resnet50-224-b256", "imagenet-paper", 320, 256, ceiling_share=0.9),
    )
}


def case_settings(case: Case, method: str, num_keys: int) -> Settings:
    values: dict[str, Any] = {"train.batch_size": case.batch_size, "data.canvas": case.canvas}
    if method == "jcl":
        values["method.num_keys"] = num_keys
    settings = build_settings(case.recipe, method=method, values=values)
    return choose(settings, DataFacts(images=1_000_000, short_side=case.canvas, decoded=True))[0]


def random_batch(case: Case) -> ImageBatch:
    shape = (case.batch_size, 3, case.canvas, case.canvas)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE)
    sizes = torch.full((case.batch_size, 2), case.canvas, device=DEVICE)
    return ImageBatch(pixels, sizes, torch.arange(case.batch_size, device=DEVICE))


def milliseconds(work: Callable[[], object], repeats: int) -> float:
    """The median of single timed calls, after some that are not counted."""
    for _ in range(6):
        work()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def measure_step(case: Case, method: str, num_keys: int, repeats: int) -> tuple[float, int]:
    """Milliseconds and peak bytes of a step."""
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    settings = case_settings(case, method, num_keys)
    learner, _ = build_learner(settings, DEVICE)
    optimiser = build_optimiser(settings, learner, DEVICE)
    step = TrainingStep(learner, optimiser, run_view_recipe(settings), 0, step_options(settings, DEVICE))
    batch, number = random_batch(case), iter(range(10**9))
    taken = milliseconds(lambda: step(batch, next(number), 0.01, 1.0), repeats)
    return taken, torch.cuda.max_memory_allocated()


def measure_ceiling(case: Case, repeats: int) -> tuple[float, float]:
    """Milliseconds of forward and backward, and of forward alone in training mode, for one batch."""
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    settings = case_settings(case, "jcl", 5)
    assert settings.model.stem != "auto" and isinstance(settings.views.image_size, int)
    size = settings.views.image_size
    backbone, width = build_backbone(settings.model.backbone, stem=settings.model.stem)
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

    return milliseconds(both, repeats), milliseconds(forward, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=list(CASES), help="default: all")
    parser.add_argument("--keys", type=int, nargs="+", default=[5], help="numbers of keys M'")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--skip-ceiling", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    figures: dict[str, float] = {}
    print(torch.cuda.get_device_name(DEVICE), "torch", torch.__version__)
    for name in arguments.case or CASES:
        figures |= measure_case(CASES[name], arguments.keys, arguments.repeats, arguments.skip_ceiling)
        if arguments.json:
            arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


def measure_case(case: Case, keys: list[int], repeats: int, skip_ceiling: bool) -> dict[str, float]:
    moco, moco_memory = measure_step(case, "moco-v2", 1, repeats)
    figures = {f"{case.name}_moco_v2_ms": moco, f"{case.name}_moco_v2_bytes": float(moco_memory)}
    both, forward = (0.0, 0.0) if skip_ceiling else measure_ceiling(case, repeats)
    print(f"\n{case.name}: encoder alone {both:.2f} ms forward and backward, {forward:.2f} ms forward")
    print(f"{'method':12}{'ms':>9}{'images/s':>11}{'of ceiling':>12}{'x moco-v2':>11}{'GiB':>8}{'x moco-v2':>11}")
    rows = [("moco-v2", 1, moco, moco_memory)]
    rows += [(f"jcl M'={count}", count, *measure_step(case, "jcl", count, repeats)) for count in keys]
    for method, count, taken, memory in rows:
        rate = case.batch_size / taken * 1000
        share = (both + count * forward) / taken
        print(
            f"{method:12}{taken:9.2f}{rate:11,.0f}{share:12.2f}{taken / moco:11.2f}{memory / 2**30:8.2f}"
            f"{memory / moco_memory:11.2f}",
            flush=True,
        )
        figures |= {
            f"{case.name}_{method}_ms": taken,
            f"{case.name}_{method}_images_per_second": rate,
            f"{case.name}_{method}_share_of_ceiling": share,
            f"{case.name}_{method}_bytes": float(memory),
        }
        if method == "jcl M'=5":
            print_promise(case, rate, share)
    return figures


def print_promise(case: Case, rate: float, share: float) -> None:
    if case.limit:
        print(f"  at least {case.limit:,.0f} images/s: ratio {rate / case.limit:.2f}")
    if case.ceiling_share:
        print(f"  at least {case.ceiling_share:.2f} of the encoder alone: ratio {share / case.ceiling_share:.2f}")


if __name__ == "__main__":
    main()
