"""Small trainings with labels: a backbone to begin with, and a stop in the middle."""

import os
from pathlib import Path

import pytest
import torch

from jcl.core.encoder import build_backbone
from jcl.evaluate.supervised import SupervisedTraining
from jcl.export import BackboneInfo, save_backbone
from jcl.runs.checkpoint import read_tensors
from jcl.views import IMAGENET_MEAN, IMAGENET_STD


def untrained_weights(file: Path, *, seed: int = 0, image_size: int = 16) -> Path:
    """A tiny backbone at random weights, in a file."""
    torch.manual_seed(seed)
    info = BackboneInfo("tiny_cnn", "imagenet", image_size, 128, IMAGENET_MEAN, IMAGENET_STD)
    save_backbone(build_backbone("tiny_cnn")[0], info, file)
    return file


def stop_after(patch: pytest.MonkeyPatch, step: int, number: int) -> None:
    """A real signal, sent at the end of a step."""
    learn = SupervisedTraining.learn

    def learn_then_stop(self, batch):
        figures = learn(self, batch)
        if self.progress.step + 1 == step:
            os.kill(os.getpid(), number)
        return figures

    patch.setattr(SupervisedTraining, "learn", learn_then_stop)


def same_tensors(one: Path, two: Path) -> bool:
    first, second = read_tensors(one)[0], read_tensors(two)[0]
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
