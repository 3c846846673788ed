"""Bytes that a rank receives in a step, counted where they are handed over, against gathering every key view.

ShuffleBN as it is usually written has every rank receive every key view of the batch as float32 before it encodes its
share of them. Here a rank receives the decoded uint8 images of which it makes key views, each once. Views and canvas
keep the sides' ratio of 224 to 320 px, so that the ratio of bytes is that of ImageNet. Real processes train through
gloo; an all-reduce of n bytes on W ranks brings each 2 (W-1)/W n, a gather (W-1)/W of its result.

    python benchmarks/exchange.py --ranks 8 --json benchmarks/results/exchange.json
"""

import argparse
import json
import os
import socket
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from machine import save
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

from jcl.core.encoder import Encoder, build_backbone
from jcl.core.method import ContrastiveLearner
from jcl.core.registry import METHODS
from jcl.data import BatchLoader, open_data
from jcl.distributed.group import Ranks
from jcl.train.step import StepOptions, TrainingStep
from jcl.views import view_recipe

LEAST_RATIO = 8.0
STEPS = 4
VIEW, CANVAS = 28, 40
EMBEDDING = 128


def count_exchanges(ranks: int) -> Counter[str]:
    """Count the bytes that this rank receives from others in collectives: of images, keys and gradients."""
    received: Counter[str] = Counter()
    others = (ranks - 1) / ranks

    def counting(name: str, kind: str, share: float) -> None:
        """Count a share of the bytes of a collective's first argument."""
        original = getattr(dist, name)

        def counted(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
            received[kind] += round(share * tensor.nbytes)
            return original(tensor, *arguments, **options)

        setattr(dist, name, counted)

    counting("all_to_all_single", "images", 1.0)  # a rank sends nothing to itself
    counting("all_gather_into_tensor", "keys", others)
    counting("all_reduce", "gradients", 2 * others)  # with statistics and metrics
    return received


def train_as(rank: int, count: int, port: int, images: Path, batch_size: int, num_keys: int, out: Path) -> None:
    """Train JCL for a few steps as one of the ranks; the first one writes how many bytes it received per step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=count)
    ranks = Ranks(rank, count)
    torch.manual_seed(0)
    learner = ContrastiveLearner(
        Encoder(*build_backbone("tiny_cnn"), embedding_dim=EMBEDDING),
        METHODS["jcl"],
        num_keys=num_keys,
        temperature=0.2,
        queue_size=4 * batch_size,
        embedding_dim=EMBEDDING,
        key_momentum=0.999,
        bn_groups=count,
        ranks=ranks,
    )
    optimizer = torch.optim.SGD(learner.query_encoder.parameters(), lr=0.03)
    options = StepOptions(torch.device("cpu"), torch.float32, compiled=False, recorded=False)
    step = TrainingStep(learner, optimizer, view_recipe("moco-v2", VIEW), 0, options)
    source = open_data(str(images)).train
    # Without a cache: images that are kept in memory are exchanged in the first epoch only.
    loader = BatchLoader(
        source, batch_size=batch_size, canvas=CANVAS, seed=0, ranks=ranks, num_keys=num_keys, cache_bytes=0
    )
    received = count_exchanges(count)
    for number, batch in enumerate(loader.epoch(0)):
        step(batch, number, 0.03, 1.0)
    per_step = {kind: total / loader.steps_per_epoch for kind, total in sorted(received.items())}
    if ranks.first:
        out.write_text(json.dumps(per_step))
    dist.destroy_process_group()


def write_images(folder: Path, count: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (count, CANVAS, CANVAS, 3), dtype=np.uint8)
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(folder / f"{number:04}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--local-batch", type=int, default=16, help="images per rank")
    parser.add_argument("--num-keys", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    ranks, batch_size = arguments.ranks, arguments.ranks * arguments.local_batch
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        os.environ["XDG_CACHE_HOME"] = folder
        images, out = Path(folder) / "images", Path(folder) / "received.json"
        images.mkdir()
        write_images(images, STEPS * batch_size)
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        shared = (ranks, port, images, batch_size, arguments.num_keys, out)
        start_processes(train_as, args=shared, nprocs=ranks, start_method="fork")  # type: ignore[no-untyped-call]
        received = json.loads(out.read_text())
    gathered = (ranks - 1) / ranks * batch_size * arguments.num_keys * 3 * VIEW * VIEW * 4
    ratio = gathered / received["images"]
    table = Table("a rank receives, a step", "bytes", title=f"{ranks} ranks, {batch_size} images of {CANVAS} px")
    for kind, number in received.items():
        table.add_row(kind, f"{number:,.0f}")
    table.add_row("every key view as float32, instead of images", f"{gathered:,.0f}")
    Console().print(table)
    verdict = "at least" if ratio >= LEAST_RATIO else "NOT"
    print(f"Images: {ratio:.1f} times fewer bytes than gathering every key view ({verdict} {LEAST_RATIO:g}).")
    figures = {"ranks": ranks, "batch_size": batch_size, "num_keys": arguments.num_keys, "steps": STEPS}
    figures |= {f"{kind}_bytes": number for kind, number in received.items()}
    save(figures | {"gathered_views_bytes": gathered, "ratio": ratio}, arguments.json, "cpu")


if __name__ == "__main__":
    main()
