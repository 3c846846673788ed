"""The first steps of each method on several ranks: `python rank_steps.py RANKS ARRAYS FOLDER OUT`.

Run, it forks the ranks and writes what rank 0 ends with; imported, it gives the same steps of one process.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from jcl.core.encoder import Encoder
from jcl.core.method import ContrastiveLearner
from jcl.core.registry import METHODS as ALL_METHODS
from jcl.data import BatchLoader, open_data
from jcl.distributed.group import Ranks
from jcl.train.build import without_compiler
from jcl.train.step import StepOptions, TrainingStep
from jcl.views import view_recipe

STEPS = 3  # the last one overwrites the oldest keys
CPU = torch.device("cpu")
METHODS = {name: method for name, method in ALL_METHODS.items() if name != "moco-v1"}  # differs in its settings only


def smooth_encoder() -> Encoder:
    """A small network without ReLU: a difference in the last bit that turns one over changes a gradient by a jump."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.BatchNorm2d(outputs), nn.GELU()]
    return Encoder(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()), 32, head="linear", embedding_dim=16)


def first_steps(
    method: str, location: str, ranks: Ranks, bn_groups: int, micro_batches: int | None = None
) -> dict[str, Tensor]:
    """Figures of each step, and all weights, statistics, queue, gradients and optimizer state after the last one.

    With `micro_batches` by AdamW, whose epsilon keeps it from making steps of gradients that are rounding only.
    """
    learner = ContrastiveLearner(
        smooth_encoder(),
        METHODS[method],
        num_keys=3,
        num_queries=2 if method == "multi-key" else 1,  # which is no method's matter either
        temperature=0.2,
        queue_size=64,
        embedding_dim=16,
        key_momentum=0.9,
        bn_groups=bn_groups,
        micro_batches=micro_batches or 1,
        ranks=ranks,
    )
    trained = list(learner.query_encoder.parameters())
    if micro_batches:
        optimiser = without_compiler(torch.optim.AdamW)(trained, eps=0.01)
    else:
        optimiser = without_compiler(torch.optim.SGD)(trained, lr=0.05, momentum=0.9, weight_decay=1e-4)
    options = StepOptions(CPU, torch.float32, compiled=False, recorded=False, clip_grad=0.5 if micro_batches else 0.0)
    step = TrainingStep(learner, optimiser, view_recipe("small", 16), 0, options)
    loader = BatchLoader(
        open_data(location).train,
        batch_size=32,
        canvas=16,
        seed=0,
        ranks=ranks,
        num_keys=learner.num_keys,
        cache_bytes=0,
    )
    figures = []
    batches = (batch for epoch in range(STEPS) for batch in loader.epoch(epoch))
    for number, batch in zip(range(STEPS), batches, strict=False):
        figures.append(step(batch, number, 0.005 if micro_batches else 0.05, 1.0).clone())
    kept = "exp_avg" if micro_batches else "momentum_buffer"
    momenta = {f"momentum.{index}": state[kept] for index, state in optimiser.state_dict()["state"].items()}
    gradients = {
        f"gradient.{name}": parameter.grad.clone()
        for name, parameter in learner.query_encoder.named_parameters()
        if parameter.grad is not None
    }
    return {"figures": torch.stack(figures), **learner.state_dict(), **momenta, **gradients}


def be_rank(ranks: Ranks, arrays: str, folder: str, out: Path) -> None:
    meeting = out.with_suffix(".meeting")
    patience = timedelta(seconds=60)  # with a rank that broke
    dist.init_process_group("gloo", f"file://{meeting}", patience, rank=ranks.rank, world_size=ranks.count)
    results = {f"{method} arrays": first_steps(method, arrays, ranks, ranks.count) for method in METHODS}
    results["jcl files"] = first_steps("jcl", folder, ranks, ranks.count)  # how images are dealt is no method's matter
    results["jcl micro-batches"] = first_steps("jcl", arrays, ranks, 2 * ranks.count, 2)
    # Every rank must hold the same, though nothing but keys and gradients was ever exchanged.
    for result in results.values():
        for name, value in result.items():
            if not name.startswith("momentum"):
                every = ranks.gather(value.flatten().double()).view(ranks.count, -1)
                assert torch.equal(every, every[:1].expand_as(every)), name
    if ranks.first:
        torch.save(results, out)
    dist.destroy_process_group()


def main() -> None:
    count, arrays, folder, out = int(sys.argv[1]), *sys.argv[2:4], Path(sys.argv[4])
    children = []
    for rank in range(count):
        child = os.fork()
        if child == 0:
            try:
                be_rank(Ranks(rank, count), arrays, folder, out)
            except BaseException as error:
                print(f"rank {rank}: {error!r}", file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    sys.exit(any(statuses))


if __name__ == "__main__":
    main()
