"""Time and memory of kNN at CIFAR-10 size: 10,000 queries against a bank of 50,000 rows of 512 numbers.

    python benchmarks/knn.py [--device cuda] [--json FILE]

Prints one table, with each time as a ratio to the limit of 2 seconds (stated for one H200). The second row is the
worst case for the rule on ties: a bank in which every row stands twenty times.
"""

import argparse
import time
from pathlib import Path

import torch
from machine import device_name, save
from torch import Tensor

from jcl.distributed.device import PeakMemory
from jcl.evaluate.knn import knn_accuracy
from jcl.evaluate.neighbours import DEFAULT_CHUNK

LIMIT_SECONDS = 2.0
BANK, QUERIES, WIDTH, CLASSES = 50_000, 10_000, 512, 10
K, TEMPERATURES = (1, 20, 200), (0.05, 0.1, 0.2)


def main() -> None:
    arguments = parse_arguments()
    device = torch.device(arguments.device)
    name = device_name(device)
    print(f"kNN of {QUERIES:,} x {BANK:,} x {WIDTH}, k {K}, temperatures {TEMPERATURES}, chunk {arguments.chunk}")
    print(f"on {name}")
    print(f"{'features':<14}{'seconds':>9}{'of limit':>10}{'peak memory':>13}")
    figures: dict[str, object] = {"device": name, "limit_seconds": LIMIT_SECONDS, "chunk": arguments.chunk}
    for kind, bank in (("distinct", BANK), ("tied", BANK // 20)):
        problem = make_problem(bank, device)
        seconds, peak = measure(problem, arguments.chunk, arguments.repeats)
        print(f"{kind:<14}{seconds:>9.3f}{seconds / LIMIT_SECONDS:>10.2f}{peak / 2**20:>9.0f} MiB")
        figures |= {f"{kind}_float64_seconds": seconds, f"{kind}_float64_peak_bytes": peak}
        figures |= {f"{kind}_float64_ratio": seconds / LIMIT_SECONDS}
    save(figures, arguments.json, device)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--chunk", type=int, default=DEFAULT_CHUNK, help="rows compared at a time")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls after one warm-up; the median counts")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    return parser.parse_args()


def make_problem(distinct: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Noisy class centers; a bank of `distinct` different rows repeated to the full size."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, (BANK + QUERIES,), generator=generator)
    centers = torch.randn(CLASSES, WIDTH, generator=generator)
    features = centers[labels] + 4 * torch.randn(BANK + QUERIES, WIDTH, generator=generator)
    bank = features[:distinct].repeat(BANK // distinct, 1)
    tables = (bank, labels[:distinct].repeat(BANK // distinct), features[BANK:], labels[BANK:])
    return tuple(table.to(device) for table in tables)  # type: ignore[return-value]


def measure(problem: tuple[Tensor, ...], chunk: int, repeats: int) -> tuple[float, int]:
    """Median seconds of `repeats` calls, and peak memory: on a GPU without the features, on a CPU of the process."""
    device = problem[0].device
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    memory, times = PeakMemory(device), []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        knn_accuracy(*problem, k=K, temperature=TEMPERATURES, chunk=chunk)
        times.append(time.perf_counter() - start)  # the accuracies are numbers on the host, so the GPU is done
    return sorted(times[1:])[repeats // 2], memory.read() - before


if __name__ == "__main__":
    main()
