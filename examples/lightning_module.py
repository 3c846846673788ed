"""Joint Contrastive Learning as a PyTorch Lightning module.

    python examples/lightning_module.py --epochs 12

Views are made inside the module, on the training device, from one uint8 copy of each image.
"""

import argparse
import copy
import logging

import pytorch_lightning as lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import jcl
from jcl.core.encoder import Encoder, build_backbone
from jcl.data import open_demo
from jcl.evaluate import extract_features, knn_accuracy
from jcl.views import ViewMaker, view_recipe

KEYS, MOMENTUM = 4, 0.99  # KEYS is the paper's M': key views of each image


class JointContrastiveModule(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder(*build_backbone("tiny_cnn"), embedding_dim=64)
        self.key_encoder = copy.deepcopy(self.encoder).requires_grad_(False)
        self.queue = jcl.KeyQueue(size=256, dim=64)  # a module: moves with the device and is saved
        self.recipe = view_recipe("small", size=32, min_scale=0.8)
        self.loss = jcl.JointContrastiveLoss(temperature=0.1, covariance_scale=1.0)
        self.losses: list[Tensor] = []

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        pixels, samples = batch
        rows = torch.arange(len(pixels), device=self.device)
        sizes = torch.tensor(pixels.shape[2:], device=self.device).expand(len(pixels), 2)
        views = ViewMaker(self.recipe, 0, self.global_step, pixels, sizes, samples)
        query = self.encoder(views(rows, torch.zeros_like(rows)))
        with torch.no_grad():
            keys = self.encode_keys(views, len(pixels))
        loss = self.loss(query, keys, self.queue.rows.clone())
        self.queue.enqueue(keys.mean(dim=1))
        self.losses.append(loss.detach())
        self.log("train_loss", loss)
        return loss

    def encode_keys(self, views: ViewMaker, images: int) -> Tensor:
        """Update the key encoder, then encode views 1, 2, ... of each image: (images, KEYS, 64)."""
        for key_param, param in zip(self.key_encoder.parameters(), self.encoder.parameters(), strict=True):
            key_param.lerp_(param, 1 - MOMENTUM)
        index = torch.arange(images * KEYS, device=self.device)
        return self.key_encoder(views(index // KEYS, 1 + index % KEYS)).view(images, KEYS, -1)

    def on_train_epoch_end(self) -> None:
        print(f"epoch {self.current_epoch + 1} loss {torch.stack(self.losses).mean():.3f}", flush=True)
        self.losses.clear()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.encoder.parameters(), lr=0.06, momentum=0.9, weight_decay=1e-4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    epochs = parser.parse_args().epochs
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    lightning.seed_everything(0, verbose=False)
    data = open_demo(train_count=1000, test_count=500)
    images = TensorDataset(data.train.pixels, torch.arange(len(data.train)))
    module = JointContrastiveModule()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_epochs=epochs, accelerator="cpu", enable_model_summary=False, **quiet)
    trainer.fit(module, DataLoader(images, batch_size=100, shuffle=True, drop_last=True))
    features = (extract_features(module.encoder.backbone, split, image_size=32) for split in (data.train, data.test))
    bank, test = ((found.values, found.labels) for found in features)
    print(f"kNN after training {knn_accuracy(*bank, *test, k=[20])[0].top1:.1f} %")


if __name__ == "__main__":
    main()
