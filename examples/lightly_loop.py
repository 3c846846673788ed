"""Joint Contrastive Learning with lightly: its views, head and momentum update with jcl's loss and queue.

    python examples/lightly_loop.py --epochs 10

`jcl.joint_contrastive_loss` with a `jcl.KeyQueue` replaces NTXentLoss with a memory bank, and the transform makes
KEYS + 1 views of each image instead of two.
"""

import argparse
import copy

import torch
from lightly.models.modules import MoCoProjectionHead
from lightly.models.utils import batch_shuffle, batch_unshuffle, deactivate_requires_grad, update_momentum
from lightly.transforms import MoCoV2Transform
from lightly.transforms.multi_view_transform import MultiViewTransform
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import jcl
from jcl.core.encoder import TinyCNN
from jcl.data import drawn_objects

KEYS = 3  # the paper's M': key views of each image


class DrawnObjects(Dataset[list[Tensor]]):
    """KEYS + 1 views of each synthetic image; for your own folder use lightly's `LightlyDataset`."""

    def __init__(self, count: int) -> None:
        self.images = [Image.fromarray(image.numpy()) for image in drawn_objects(count, 0)[0].permute(0, 2, 3, 1)]
        view = MoCoV2Transform(input_size=32, cj_strength=0.5, gaussian_blur=0.0, min_scale=0.8).transforms[0]
        self.transform = MultiViewTransform([view] * (KEYS + 1))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> list[Tensor]:
        return self.transform(self.images[index])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    epochs = parser.parse_args().epochs
    torch.manual_seed(0)
    encoder = nn.Sequential(TinyCNN(), MoCoProjectionHead(input_dim=128, hidden_dim=128, output_dim=64))
    key_encoder = copy.deepcopy(encoder)
    deactivate_requires_grad(key_encoder)
    queue = jcl.KeyQueue(size=160, dim=64)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.06, momentum=0.9, weight_decay=1e-4)
    loader = DataLoader(DrawnObjects(320), batch_size=40, shuffle=True, drop_last=True)
    for epoch in range(1, epochs + 1):
        losses = []
        for views in loader:
            update_momentum(encoder, key_encoder, m=0.99)
            query = F.normalize(encoder(views[0]), dim=1)
            with torch.no_grad():
                shuffled, order = batch_shuffle(torch.cat(views[1:]))
                encoded = batch_unshuffle(F.normalize(key_encoder(shuffled), dim=1), order)
                keys = encoded.view(KEYS, len(query), -1).transpose(0, 1)  # (images, KEYS, 64)
            loss = jcl.joint_contrastive_loss(query, keys, queue.rows.clone(), temperature=0.1, covariance_scale=1.0)
            queue.enqueue(keys.mean(dim=1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(f"epoch {epoch} loss {sum(losses) / len(losses):.3f}", flush=True)


if __name__ == "__main__":
    main()
