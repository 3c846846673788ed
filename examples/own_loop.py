"""Joint Contrastive Learning in your own PyTorch loop.

    python examples/own_loop.py --epochs 12

The images are synthetic; replace them with your own uint8 tensor (N, 3, H, W).
"""

import argparse
import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import jcl
from jcl.core.encoder import TinyCNN
from jcl.data import ImageData, open_demo
from jcl.evaluate import extract_features, knn_accuracy
from jcl.views import ViewMaker, view_recipe

KEYS, BATCH, MOMENTUM = 4, 100, 0.99  # KEYS is the paper's M': key views of each image


class Encoder(nn.Module):
    """A backbone with pooled features, a two-layer head, and L2 normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = TinyCNN()
        self.head = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, images: Tensor) -> Tensor:
        return F.normalize(self.head(self.backbone(images)), dim=1)


def train(images: Tensor, encoder: Encoder, epochs: int) -> None:
    key_encoder = copy.deepcopy(encoder).requires_grad_(False)
    queue = jcl.KeyQueue(size=256, dim=64)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.06, momentum=0.9, weight_decay=1e-4)
    recipe = view_recipe("small", size=images.shape[-1], min_scale=0.8)
    for epoch in range(1, epochs + 1):
        losses = []
        for step, batch in enumerate(torch.randperm(len(images)).split(BATCH)):
            rows, sizes = torch.arange(len(batch)), torch.tensor(images.shape[2:]).expand(len(batch), 2)
            # Views depend only on seed, step, sample and view number; there is no random state.
            views = ViewMaker(recipe, seed=epoch, step=step, pixels=images[batch], sizes=sizes, samples=batch)
            query = encoder(views(rows, torch.zeros_like(rows)))
            with torch.no_grad():
                for key_param, param in zip(key_encoder.parameters(), encoder.parameters(), strict=True):
                    key_param.lerp_(param, 1 - MOMENTUM)
                numbers = 1 + torch.arange(KEYS).repeat(len(batch))  # view 0 is the query
                keys = key_encoder(views(rows.repeat_interleave(KEYS), numbers)).view(len(batch), KEYS, -1)
            loss = jcl.joint_contrastive_loss(query, keys, queue.rows.clone(), temperature=0.1, covariance_scale=1.0)
            queue.enqueue(keys.mean(dim=1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(f"epoch {epoch} loss {sum(losses) / len(losses):.3f}", flush=True)


def knn_top1(encoder: Encoder, data: ImageData) -> float:
    features = (extract_features(encoder.backbone, split, image_size=32) for split in (data.train, data.test))
    bank, test = ((found.values, found.labels) for found in features)
    return knn_accuracy(*bank, *test, k=[20])[0].top1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    epochs = parser.parse_args().epochs
    torch.manual_seed(0)
    data, encoder = open_demo(train_count=1000, test_count=500), Encoder()
    print(f"kNN before training {knn_top1(encoder, data):.1f} %", flush=True)
    train(data.train.pixels, encoder, epochs)
    print(f"kNN after training {knn_top1(encoder, data):.1f} %")


if __name__ == "__main__":
    main()
