"""Micro-batches and activation checkpointing train as the whole batch does, in less memory."""

import pytest
import torch

import jcl
from jcl.data import ImageBatch
from jcl.errors import SettingsError
from jcl.settings.recipes import build_settings
from jcl.settings.resolve import fit_to_ranks, resolve
from jcl.settings.resolved import DataFacts, ResolvedSettings
from jcl.studies.cost import measure_training_step, run_in_subprocess
from jcl.train.build import build_learner, build_optimizer, run_view_recipe, step_options
from jcl.train.step import TrainingStep
from run_tools import QUIET
from small_runs import TINY_VALUES, tiny_settings

CPU = torch.device("cpu")
AUTO = {"model.bn_groups": "auto", "train.key_passes": "auto"}


def resolved(backbone: str, batch: int, **changes: object) -> ResolvedSettings:
    own = {"model.backbone": backbone, "train.batch_size": batch, "method.queue_size": 2 * batch, "train.lr": "auto"}
    values = TINY_VALUES | own | {name.replace("__", "."): value for name, value in changes.items()}
    return resolve(build_settings("folder", values=values), DataFacts(images=1000, short_side=32, decoded=True))[0]


def random_batch(count: int, side: int = 16, device: torch.device = CPU) -> ImageBatch:
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, generator=draw)
    return ImageBatch(
        pixels.to(device), torch.full((count, 2), side, device=device), torch.arange(count, device=device)
    )


def train(settings: ResolvedSettings, steps: int = 2, device: torch.device = CPU) -> dict[str, torch.Tensor]:
    """Figures of each step, and weights, statistics and queue after the last one."""
    learner, _ = build_learner(settings, device)
    optimizer = build_optimizer(settings, learner, device)
    step = TrainingStep(learner, optimizer, run_view_recipe(settings), 0, step_options(settings, device))
    batch = random_batch(settings.train.batch_size, device=device)
    # AdamW steps as far for small gradients as for large ones, so it carries rounding into the weights.
    lr = 0.05 if settings.train.optimizer == "sgd" else 1e-4
    figures = [step(batch, number, lr, 1.0).clone() for number in range(steps)]
    return {"figures": torch.stack(figures), **learner.state_dict()}


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("backbone", "batch", "changes"),
    [
        pytest.param("tiny_cnn", 64, {"model__bn_groups": 8, "method__num_local_queries": 1}, id="4 x 16"),
        pytest.param(
            "tiny_cnn", 16, {"model__bn_groups": 8, "method__num_queries": 2, "train__key_passes": 4}, id="queries"
        ),
        pytest.param(
            "test_vit",
            16,
            {"model__bn_groups": "auto", "model__drop_path": 0.3, "views__image_size": 32},
            id="transformer",
        ),
    ],
)
def test_micro_batches_equal_the_whole_batch(backbone, batch, changes):
    whole = train(resolved(backbone, batch, **changes))
    assert_equal(train(resolved(backbone, batch, train__accumulate=4, **changes)), whole)


@pytest.mark.parametrize(
    ("backbone", "changes"),
    [
        ("test_resnet", {"model__bn_groups": 1, "method__num_local_queries": 1}),
        ("test_resnet", {"model__bn_groups": 4, "train__accumulate": 2}),
        ("test_vit", {"model__drop_path": 0.3, "method__num_local_queries": 2}),
    ],
)
def test_activation_checkpointing_changes_no_bit(backbone, changes):
    """Running statistics too: a block that is computed twice counts once."""
    changes = {"views__image_size": 32, "model__bn_groups": 1} | changes
    plain, repeated = (
        train(resolved(backbone, 8, train__checkpoint_activations=again, **changes)) for again in (False, True)
    )
    assert_equal(repeated, plain, 1e-6)
    layers = [value for name, value in repeated.items() if name.startswith("query") and "num_batches" in name]
    assert all(int(count) == 2 for count in layers) and bool(layers) == (backbone == "test_resnet")


def test_checkpointing_is_refused_without_blocks():
    with pytest.raises(SettingsError, match=r"train\.checkpoint_activations=false"):
        build_learner(resolved("tiny_cnn", 8, train__checkpoint_activations=True), CPU)


@pytest.mark.parametrize(
    ("backbone", "changes", "words"),
    [
        ("tiny_cnn", {"train__accumulate": 3}, r"train\.accumulate=3 does not divide train\.batch_size=16"),
        ("tiny_cnn", {"train__accumulate": 4}, r"train\.accumulate=4 does not divide model\.bn_groups=2"),
        (
            "tiny_cnn",
            {"train__accumulate": 2, "model__bn_groups": 1},
            r"train\.accumulate=2 does not divide model\.bn_groups=1",
        ),
        (
            "tiny_cnn",
            {"train__key_passes": 2, "model__bn_groups": 1},
            r"train\.key_passes=2 does not divide model\.bn_groups=1",
        ),
        ("tiny_cnn", {"train__accumulate": 16, "model__bn_groups": 1}, r"train\.accumulate=16 does not divide"),
        ("tiny_cnn", {"train__accumulate": 2, "method__name": "multi-key-backprop"}, r"set train\.accumulate=1"),
    ],
)
def test_parts_that_are_not_whole_groups_are_refused(backbone, changes, words):
    with pytest.raises(SettingsError, match=words):
        build_learner(resolved(backbone, 16, **changes), CPU)


@pytest.mark.parametrize(
    ("backbone", "batch", "accumulate", "groups"),
    [("resnet18", 256, 4, 8), ("resnet18", 256, 16, 16), ("resnet18", 64, 4, 4), ("test_vit", 64, 4, 1)],
)
def test_automatic_groups_fit_the_micro_batches(backbone, batch, accumulate, groups):
    changes = AUTO | {"train.accumulate": accumulate, "method.num_keys": 5, "views.image_size": 32}
    settings = resolved(backbone, batch, **{name.replace(".", "__"): value for name, value in changes.items()})
    assert settings.model.bn_groups == groups
    assert settings.train.key_passes >= accumulate  # keys take no more memory than a micro-batch
    fitted, _ = fit_to_ranks(settings, 2)
    learner, _ = build_learner(fitted, CPU)
    assert learner.micro_batches == accumulate


def test_micro_batches_need_less_memory():
    """Measured on the CPU, where a network must be deep for its activations to outweigh views and weights."""
    changes = {"views__image_size": 64, "model__bn_groups": 4, "train__key_passes": 4, "data__canvas": 64}
    memory = [
        measure_training_step(resolved("test_resnet", 16, **changes, **parts), CPU, 1).bytes
        for parts in ({}, {"train__accumulate": 4})
    ]
    assert memory[1] < 0.65 * memory[0]


def test_too_little_memory_leaves_no_folder(npz, tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 8.00 GiB. Of")

    monkeypatch.setattr(TrainingStep, "__call__", fail)
    with pytest.raises(torch.OutOfMemoryError):
        jcl.pretrain(tiny_settings(npz), tmp_path / "run", console=QUIET)
    assert not (tmp_path / "run").exists()


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("backbone", "changes"),
    [
        ("resnet18", {"model__bn_groups": 8, "method__num_local_queries": 1}),
        ("resnet18", {"model__bn_groups": 8, "train__checkpoint_activations": True}),
        ("vit_tiny_patch16_224", {"model__drop_path": 0.2, "method__num_local_queries": 1}),
        ("timm/convnext_atto", {"model__drop_path": 0.2, "train__checkpoint_activations": True}),
    ],
)
def test_recorded_micro_batches_equal_plain_steps_on_a_gpu(backbone, changes, monkeypatch):
    """Three steps are launched and three are replayed; AdamW counts and steps on the device."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    device = torch.device("cuda")
    changes = {"views__image_size": 64, "model__bn_groups": "auto", "train__precision": "float32"} | changes
    plain = {name: value for name, value in changes.items() if name != "train__checkpoint_activations"}
    plain |= {"train__cuda_graph": False}  # compiled, because compiled views keep images in half precision
    whole = train(resolved(backbone, 64, **plain), steps=6, device=device)
    parts = train(resolved(backbone, 64, train__accumulate=4, **changes), steps=6, device=device)
    torch.testing.assert_close(parts["figures"], whole["figures"], rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(parts["queue.rows"], whole["queue.rows"], rtol=0, atol=5e-3)
    assert not torch.equal(whole["figures"][4], whole["figures"][5])


@pytest.mark.gpu
@needs_gpu
def test_four_micro_batches_need_two_fifths_of_the_memory_on_a_gpu():
    """ResNet-50 with 256 photographs, as one batch and as 4 x 64, each in a process of its own."""
    device, memory = torch.device("cuda"), []
    for accumulate in (1, 4):
        values = {"train.batch_size": 256, "data.canvas": 320, "train.accumulate": accumulate}
        settings = build_settings("imagenet-paper", values=values)
        settings, _ = resolve(settings, DataFacts(images=1_000_000, short_side=320, decoded=True))
        memory.append(run_in_subprocess(measure_training_step, settings, device, 3).bytes)
    print(f"peak memory {memory[1] / 2**30:.2f} of {memory[0] / 2**30:.2f} GiB: ratio {memory[1] / memory[0]:.2f}")
    assert memory[1] <= 0.4 * memory[0]
