"""Small trainings with labels: a backbone to begin with, and a stop in the middle."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from jcl.commands import finetune as finetune_command
from jcl.commands import probes
from jcl.console import STDERR
from jcl.core.encoder import build_backbone
from jcl.evaluate.folders import FinetuneFolder
from jcl.evaluate.supervised import ClassifierTask
from jcl.export import BackboneInfo, save_backbone
from jcl.runs.checkpoint import read_tensors
from jcl.settings.commands import FinetuneOptions, LinearOptions
from jcl.views import IMAGENET_MEAN, IMAGENET_STD


def untrained_weights(file: Path, *, seed: int = 0, image_size: int = 16) -> Path:
    """A tiny backbone at random weights, in a file."""
    torch.manual_seed(seed)
    info = BackboneInfo("tiny_cnn", "imagenet", image_size, 128, IMAGENET_MEAN, IMAGENET_STD)
    save_backbone(build_backbone("tiny_cnn")[0], info, file)
    return file


def finetune(weights: Path, data: str, *, console: Any = STDERR, **options: Any) -> FinetuneFolder:
    """Fine-tune with these options."""
    return finetune_command.finetune(FinetuneOptions(weights=weights, data=data, **options), console=console)


def measure_linear(weights: Path, data: str, *, console: Any = STDERR, **options: Any) -> probes.LinearReport:
    """Train a linear probe with these options."""
    return probes.measure_linear(LinearOptions(weights=weights, data=data, **options), console=console)


def stop_after(patch: pytest.MonkeyPatch, step: int, number: int) -> None:
    """A real signal, sent at the end of a step."""
    train = ClassifierTask.step

    def train_then_stop(self, batch, done, lr):
        figures = train(self, batch, done, lr)
        if done + 1 == step:
            os.kill(os.getpid(), number)
        return figures

    patch.setattr(ClassifierTask, "step", train_then_stop)


def same_tensors(one: Path, two: Path) -> bool:
    first, second = read_tensors(one)[0], read_tensors(two)[0]
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
