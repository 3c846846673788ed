"""Where the time of a step goes: of the first one, which is compiled, and of those that follow.

    python benchmarks/step_profile.py --case resnet18-32-b256 --keys 5 --json profile.json

The first step's parts are timed one by one; what any first compilation takes, whatever is compiled, comes before them.
The kernels of later steps, which are recorded, are counted by kind; the rest of a step is spent between kernels.
Empty the compiler's caches (TORCHINDUCTOR_CACHE_DIR, TRITON_CACHE_DIR) to see a machine's very first run.
"""

import argparse
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from machine import save
from pretrain import CASES, DEVICE, build_step, milliseconds, random_batch
from torch.profiler import ProfilerActivity, profile

from jcl.core.registry import METHODS
from jcl.train.step import STEPS_BEFORE_RECORDING, TrainingStep

KINDS = {  # by what kernels' names hold, the first that fits; "indexed" convolutions are convolutions
    "reductions": ("triton_red", "triton_per"),
    "element by element": ("triton_poi", "triton_for"),
    "optimiser and momentum": ("multi_tensor", "fused_sgd"),
    "convolutions and products": (
        "conv",
        "gemm",
        "xmma",
        "cudnn",
        "cutlass",
        "wgrad",
        "dgrad",
        "nvjet",
        "sm90",
    ),
    "copies and fills": ("Memcpy", "Memset", "copy_kernel", "FillFunctor"),
    "sorting and indexing": ("sort", "Sort", "index", "scan", "radix"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=list(CASES), default="resnet18-32-b256")
    parser.add_argument("--method", choices=list(METHODS), default="jcl")
    parser.add_argument("--keys", type=int, default=5)
    parser.add_argument("--queries", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if min(arguments.keys, arguments.queries, arguments.steps) < 1:
        parser.error("--keys, --queries and --steps are at least 1")
    if not torch.cuda.is_available():
        raise SystemExit("There is no GPU here, and on others there are no kernels to look at.")
    case = CASES[arguments.case]
    parts = {"any first compilation": timed(lambda: torch.compile(torch.square)(torch.ones(8, device=DEVICE)))}
    step = build_step(case, arguments.method, arguments.keys, arguments.queries)
    batch, number = random_batch(case), itertools.count()

    def work() -> None:
        step(batch, next(number), 0.01, 1.0)

    parts |= parts_of(step, work)
    for _ in range(STEPS_BEFORE_RECORDING + 2):
        work()
    taken = milliseconds(work, arguments.steps)
    kernels = kernels_of(work, arguments.steps)
    print_parts(parts)
    print_kernels(kernels, taken)
    figures = {"first_step_seconds": parts, "step_ms": taken, "kernels": kernels}
    save({"case": case.name, "keys": arguments.keys, "queries": arguments.queries, **figures}, arguments.json, DEVICE)


def timed(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def parts_of(step: TrainingStep, work: Callable[[], object]) -> dict[str, float]:
    """Seconds of the first step's parts; views are made while keys and queries ask for them, and counted apart."""
    seconds: dict[str, float] = defaultdict(float)
    learner = step.learner
    places = {
        "views": (step, "make_views"),
        "keys": (learner, "encode_keys"),
        "queries": (learner, "encode_queries"),
        "loss": (learner, "contrast"),
        "backward pass": (step, "backward"),
    }
    inside: list[str] = []

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*values: Any) -> Any:
            results = []
            inside.append(name)
            taken = timed(lambda: results.append(function(*values)))
            inside.pop()
            seconds[name] += taken
            if inside:
                seconds[inside[-1]] -= taken
            return results[0]

        return call

    plain = {name: getattr(*place) for name, place in places.items()}
    for name, (owner, attribute) in places.items():
        setattr(owner, attribute, watched(name, plain[name]))
    whole = timed(work)
    for name, (owner, attribute) in places.items():
        setattr(owner, attribute, plain[name])
    return {**seconds, "the rest": whole - sum(seconds.values())}


def kernels_of(work: Callable[[], object], steps: int) -> list[dict[str, Any]]:
    """Name, kind, times a step and milliseconds a step of every kernel, the longest first."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            work()
        torch.cuda.synchronize()
    kernels = [
        {
            "name": event.key,
            "kind": kind_of(event.key),
            "times": event.count / steps,
            "ms": event.self_device_time_total / 1000 / steps,
        }
        for event in found.key_averages()
        if event.self_device_time_total
    ]
    return sorted(kernels, key=lambda kernel: -kernel["ms"])


def kind_of(name: str) -> str:
    return next((kind for kind, marks in KINDS.items() if any(mark in name for mark in marks)), "others")


def print_parts(parts: dict[str, float]) -> None:
    print("first step, seconds: " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items()))


def print_kernels(kernels: Sequence[dict[str, Any]], taken: float) -> None:
    kinds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for kernel in kernels:
        kinds[kernel["kind"]][0] += kernel["times"]
        kinds[kernel["kind"]][1] += kernel["ms"]
    kinds["between kernels"] = [0.0, taken - sum(kernel["ms"] for kernel in kernels)]
    print(f"a step takes {taken:.2f} ms\n{'kind':28}{'kernels':>9}{'ms':>9}{'share':>8}")
    for kind, (times, spent) in sorted(kinds.items(), key=lambda item: -item[1][1]):
        print(f"{kind:28}{times:9.0f}{spent:9.3f}{spent / taken:8.0%}")
    for kernel in kernels[:30]:
        print(f"{kernel['times']:6.0f} x{kernel['ms']:9.3f} ms  {kernel['name'][:90]}")


if __name__ == "__main__":
    main()
