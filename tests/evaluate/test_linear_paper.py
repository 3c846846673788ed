"""The paper's linear probe: its schedule, its start, its frozen backbone, and a loop that does as torch's parts do."""

import copy
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.nn import functional as F

from jcl.commands.inputs import EvaluationTarget
from jcl.commands.probes import LinearProbe
from jcl.core.encoder import build_backbone
from jcl.data import ArrayImages, ImageData
from jcl.errors import RunError, SettingsError
from jcl.evaluate.classification import classification_task
from jcl.evaluate.features import FeatureSettings
from jcl.evaluate.linear import ProbeGrid
from jcl.evaluate.supervised import Classifier, ClassifierTask, crop_and_flip, paper_settings, probe_optimizer
from jcl.export import BackboneInfo
from jcl.settings.commands import LinearOptions
from jcl.train.display import Display
from jcl.train.schedule import learning_rate
from jcl.train.trainer import Trainer
from jcl.views import IMAGENET_MEAN, IMAGENET_STD, ViewMaker

QUIET = Console(quiet=True)
CPU = torch.device("cpu")
PREPROCESSING = FeatureSettings(16, IMAGENET_MEAN, IMAGENET_STD)


def colored(count: int, seed: int) -> ArrayImages:
    """Noise of 16 px, brighter in one color: red, green or blue, which is the class."""
    own = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    pixels = torch.randint(0, 160, (count, 3, 16, 16), generator=own, dtype=torch.uint8)
    pixels[torch.arange(count), labels] += 70
    return ArrayImages(pixels, labels, ("red", "green", "blue"))


@pytest.fixture
def task():
    return classification_task(ImageData("colors", colored(60, 0), colored(30, 1)))


@pytest.fixture
def backbone():
    torch.manual_seed(0)
    return build_backbone("tiny_cnn")[0]


def probe_task(task, network, train, device):
    return ClassifierTask(
        title="probe",
        network=network,
        optimizer=probe_optimizer(network, train),
        data=task,
        preprocessing=PREPROCESSING,
        recipe=crop_and_flip(PREPROCESSING),
        train=train,
        device=device,
        workers=0,
    )


def paper_probe(backbone, task, train, *, width=128, device=CPU):
    info = BackboneInfo("tiny_cnn", "imagenet", 16, width, IMAGENET_MEAN, IMAGENET_STD)
    target = EvaluationTarget(backbone, info, ImageData("colors", task.train, task.test), device)
    options = LinearOptions(weights=Path("w"), workers=0, no_untrained=True)
    return LinearProbe(options, train, ProbeGrid(), target, task, QUIET).report_paper()


@pytest.mark.parametrize(("epochs", "drops"), [(100, (60, 80)), (10, (6, 8)), (50, (30, 40))])
def test_the_learning_rate_drops_at_60_and_80_percent(epochs, drops):
    train = paper_settings(epochs=epochs)
    assert (train.batch_size, train.momentum, train.weight_decay, train.warmup_epochs) == (256, 0.9, 0.0, 0.0)
    for epoch in range(epochs):
        expected = 30 * 0.1 ** sum(epoch >= drop for drop in drops)
        for step in (epoch * 7, epoch * 7 + 6):
            assert learning_rate(train, step, 7) == pytest.approx(expected, rel=1e-12)
    assert learning_rate(paper_settings(lr=10.0), 0, 7) == 10


def test_settings_that_make_no_sense_are_a_sentence():
    with pytest.raises(SettingsError, match="lr"):
        paper_settings(lr=0.0)


def test_the_layer_starts_as_mocos_by_the_seed(backbone):
    layer = Classifier(backbone, 128, 1000, frozen=True, seed=0).fc
    assert layer.weight.std().item() == pytest.approx(0.01, rel=0.01)
    assert abs(layer.weight.mean().item()) < 1e-4 and layer.bias.abs().max() == 0
    assert torch.equal(layer.weight, Classifier(backbone, 128, 1000, frozen=True, seed=0).fc.weight)
    assert not torch.equal(layer.weight, Classifier(backbone, 128, 1000, frozen=True, seed=1).fc.weight)


def test_views_are_crops_and_flips_alone():
    recipe = crop_and_flip(PREPROCESSING)
    assert (recipe.min_scale, recipe.max_scale, recipe.ratio) == (0.08, 1.0, (3 / 4, 4 / 3))
    assert recipe.random_crop and recipe.flip_probability == 0.5
    assert recipe.jitter_probability == recipe.gray_probability == recipe.blur_probability == 0
    assert recipe.min_scale == 0.08 and crop_and_flip(PREPROCESSING, min_scale=0.5).min_scale == 0.5
    assert crop_and_flip(PREPROCESSING, jitter=True).jitter_probability == 0.8


def test_the_loop_is_what_torch_does_with_its_own_parts(task, backbone):
    """The same batches and views, the backbone in eval mode, nn.Linear and MultiStepLR: the same layer, bit for bit."""
    train = paper_settings(lr=3.0, epochs=5, batch_size=16, seed=4)
    network = Classifier(backbone, 128, 3, frozen=True, seed=4)
    layer = nn.Linear(128, 3)
    layer.load_state_dict(network.fc.state_dict())
    optimizer = torch.optim.SGD(layer.parameters(), lr=3.0, momentum=0.9)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 4], 0.1)
    probe = probe_task(task, network, train, CPU)
    with probe.loader as loader:
        for epoch in range(5):
            for number, batch in enumerate(loader.epoch(epoch)):
                make = ViewMaker(
                    crop_and_flip(PREPROCESSING), 4, epoch * 3 + number, batch.pixels, batch.sizes, batch.samples
                )
                with torch.no_grad():
                    features = backbone.eval()(make(torch.arange(16), torch.zeros(16, dtype=torch.int64)))
                optimizer.zero_grad()
                F.cross_entropy(layer(features), task.train.labels[batch.samples]).backward()
                optimizer.step()
            schedule.step()
        Trainer(probe, Display(QUIET, "probe")).run()
    torch.testing.assert_close(network.fc.weight, layer.weight, rtol=0, atol=1e-6)
    torch.testing.assert_close(network.fc.bias, layer.bias, rtol=0, atol=1e-6)


def test_it_learns_and_the_seed_fixes_the_figures(task, backbone):
    train = paper_settings(lr=1.0, epochs=10, batch_size=16)
    before = copy.deepcopy(backbone.state_dict())
    first, again = (paper_probe(backbone, task, train).figures | {"seconds": 0} for _ in range(2))
    assert first == again and first["linear_top1"] > 80 and first["linear_top5"] == 100 and first["test_images"] == 30
    assert all(torch.equal(value, before[name]) for name, value in backbone.state_dict().items())


def test_a_batch_larger_than_the_data_takes_all_of_it(task, backbone):
    assert paper_probe(backbone, task, paper_settings(lr=1.0, epochs=2)).figures["test_images"] == 30


def test_a_loss_that_is_not_finite_stops_training(task, backbone):
    with torch.no_grad():
        next(backbone.parameters()).fill_(torch.inf)
    with pytest.raises(RunError, match="not finite after step"):
        paper_probe(backbone, task, paper_settings(epochs=2, batch_size=16))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_gpu_learns_too_and_never_waits_within_an_epoch(task, backbone, compiled):
    train = paper_settings(lr=1.0, epochs=10, batch_size=16, compiled=compiled)
    device = torch.device("cuda")
    assert paper_probe(backbone, task, train, device=device).figures["linear_top1"] > 80
    network = Classifier(backbone, 128, 3, frozen=True, seed=0).to(device)
    probe = probe_task(task, network, train, device)
    with probe.loader as loader:
        batches = list(loader.epoch(0))
        probe.step(batches[0], 0, 1.0)
        torch.cuda.set_sync_debug_mode("error")
        try:
            probe.step(batches[1], 1, 1.0)
        finally:
            torch.cuda.set_sync_debug_mode("default")
