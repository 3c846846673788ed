"""A model of throughput on many GPUs, from figures measured on one: `python benchmarks/scale.py [--local-batch 64]`.

Nothing here is measured on several GPUs. Computation and decoding rates are those of one H200 and its 16 cores
(benchmarks/results); the bytes that ranks exchange are counted from the plan; the network's speed is assumed and
stated. Exchanges are added to the computation, none of them hidden behind it, so this is a lower bound.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from jcl.core.encoder import Encoder, build_backbone
from jcl.data.loader import ImageExchange
from jcl.distributed.group import Ranks

RESULTS = Path(__file__).with_name("results")
CANVAS, EMBEDDING, NUM_KEYS, QUEUE = 500, 128, 5, 65_536
JPEG_BYTES = 110_000  # an average ImageNet file
GPUS_PER_MACHINE = 8


@dataclass(frozen=True)
class Network:
    name: str
    inside: float  # bytes a second that one GPU sends to the others of its machine
    between: float  # bytes a second of a machine to the others


NETWORKS = (
    Network("NVLink, 8 x 400 Gb/s between machines", 300e9, 8 * 40e9),
    Network("NVLink, 100 Gb/s between machines", 300e9, 10e9),
)


def parameters() -> int:
    backbone, width = build_backbone("resnet50")
    return sum(parameter.numel() for parameter in Encoder(backbone, width).parameters())


def seconds_to_average(own_bytes: float, gpus: int, network: Network) -> float:
    """A ring through all GPUs: what each sends crosses the line between two machines once, not once for each GPU."""
    line = own_bytes / network.between if gpus > GPUS_PER_MACHINE else 0.0
    return own_bytes / network.inside + line


def seconds_to_exchange(own_bytes: float, gpus: int, network: Network) -> float:
    """Each GPU receives `own_bytes`, evenly from all others; those of other machines share their machine's line."""
    machines = -(-gpus // GPUS_PER_MACHINE)
    inside = min(gpus, GPUS_PER_MACHINE)
    share_between = 1 - (inside - 1) / max(1, gpus - 1) if machines > 1 else 0.0
    return own_bytes * (1 - share_between) / network.inside + own_bytes * share_between * inside / network.between


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local-batch", type=int, default=64, help="images per GPU")
    arguments = parser.parse_args()
    measured = json.loads((RESULTS / "pretrain-resnet50.json").read_text())
    loading = json.loads((RESULTS / "loader.json").read_text())
    per_image = measured["resnet50-224-b256_jcl_M=5_ms"] / 256 / 1000
    decoded_by_core = loading["images_per_second_16"] / 16
    local, weights = arguments.local_batch, 4 * parameters()
    checkpoint = 3 * weights + 4 * QUEUE * EMBEDDING
    print(f"ResNet-50, 224 px, M'={NUM_KEYS}, {local} images per GPU, {1000 * local * per_image:.1f} ms of computation")
    print(f"gradients {weights / 2**20:.0f} MiB, checkpoint {checkpoint / 2**20:.0f} MiB, whatever the number of GPUs")
    print(f"decoding: {1 / per_image / decoded_by_core:.1f} cores for each GPU")
    for network in NETWORKS:
        print(f"\n{network.name}")
        print(f"{'GPUs':>6}{'batch':>8}{'gradients':>11}{'images':>9}{'keys':>8}{'ms/step':>9}{'images/s':>11}", end="")
        print(f"{'efficiency':>12}{'GB/s read':>11}{'ImageNet epoch':>16}{'100 M epoch':>13}")
        for gpus in (1, 8, 16, 64, 256, 1024):
            batch = local * gpus
            gradients = 2 * weights * (gpus - 1) / gpus
            images = received_images(gpus, batch) * 3 * CANVAS**2 if gpus > 1 else 0
            keys = (batch - local) * NUM_KEYS * EMBEDDING * 4
            seconds = local * per_image + seconds_to_average(gradients, gpus, network)
            seconds += seconds_to_exchange(images + keys, gpus, network)
            rate = batch / seconds
            print(
                f"{gpus:>6}{batch:>8,}{gradients / 2**20:>7.0f} MiB{images / 2**20:>5.0f} MiB{keys / 2**20:>4.0f} MiB"
                f"{1000 * seconds:>9.1f}{rate:>11,.0f}{local * per_image / seconds:>12.0%}"
                f"{rate * JPEG_BYTES / 1e9:>11.2f}{1_281_167 / rate:>14.0f} s{100e6 / rate / 3600:>11.2f} h"
            )


def received_images(gpus: int, batch: int) -> int:
    """How many images the first rank gets from others in a step, counted."""
    return sum(ImageExchange(Ranks(0, gpus), 0, batch, NUM_KEYS).plan(0).received)


if __name__ == "__main__":
    main()
