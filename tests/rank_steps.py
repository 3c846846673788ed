"""The first steps of each method on however many ranks this is started as: `python rank_steps.py DATA FOLDER OUT`.

Run by a launcher it writes what rank 0 ends with; imported, it gives the same steps of one process.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from jcl.core.encoder import Encoder
from jcl.core.method import METHODS, ContrastiveLearner
from jcl.data import BatchLoader, open_data
from jcl.ranks import Ranks
from jcl.train.step import StepOptions, TrainingStep
from jcl.views import view_recipe

STEPS = 20
CPU = torch.device("cpu")


def smooth_encoder() -> Encoder:
    """A small network without ReLU: a difference in the last bit that turns one over changes a gradient by a jump."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.BatchNorm2d(outputs), nn.GELU()]
    return Encoder(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()), 32, head="linear", embedding_dim=16)


def first_steps(method: str, location: str, ranks: Ranks, bn_groups: int) -> dict[str, Tensor]:
    """The losses, and all weights, statistics, queue, gradients and optimiser state after the last step."""
    learner = ContrastiveLearner(
        smooth_encoder(),
        METHODS[method],
        num_keys=3,
        temperature=0.2,
        queue_size=128,
        embedding_dim=16,
        key_momentum=0.9,
        bn_groups=bn_groups,
        ranks=ranks,
    )
    optimiser = torch.optim.SGD(learner.query_encoder.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    options = StepOptions(CPU, torch.float32, compiled=False, recorded=False)
    step = TrainingStep(learner, optimiser, view_recipe("small", 16), 0, options)
    loader = BatchLoader(
        open_data(location).train,
        batch_size=32,
        canvas=16,
        seed=0,
        ranks=ranks,
        num_keys=learner.num_keys,
        kept_bytes=0,
    )
    losses = []
    batches = (batch for epoch in range(STEPS) for batch in loader.epoch(epoch))
    for number, batch in zip(range(STEPS), batches, strict=False):
        losses.append(step(batch, number, 0.05, 1.0)[0].clone())
    momenta = {
        f"momentum.{index}": state["momentum_buffer"] for index, state in optimiser.state_dict()["state"].items()
    }
    gradients = {
        f"gradient.{name}": parameter.grad.clone()
        for name, parameter in learner.query_encoder.named_parameters()
        if parameter.grad is not None
    }
    return {"losses": torch.stack(losses), **learner.state_dict(), **momenta, **gradients}


def main() -> None:
    arrays, folder, out = sys.argv[1:]
    dist.init_process_group("gloo")
    ranks = Ranks(dist.get_rank(), dist.get_world_size())
    results = {
        f"{method} {kind}": first_steps(method, location, ranks, ranks.count)
        for method in METHODS
        for kind, location in (("arrays", arrays), ("files", folder))
    }
    # Every rank must hold the same, though nothing but keys and gradients was ever exchanged.
    for result in results.values():
        for name, value in result.items():
            if not name.startswith("momentum"):
                every = ranks.gather(value.flatten().double()).view(ranks.count, -1)
                assert torch.equal(every, every[:1].expand_as(every)), name
    if ranks.first:
        torch.save(results, Path(out))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
