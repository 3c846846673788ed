"""What the compiler makes of a step.

A kernel that reads back what it has written is not safe: Triton may give the load to another thread than the store,
without waiting in between (https://github.com/triton-lang/triton/issues/10924). Views of photographs were once spoilt
by it now and then, with values left over from other work.
"""

import re
from functools import partial

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from jcl.core.method import ContrastiveLearner, StepMetrics
from jcl.data import ImageBatch
from jcl.settings.recipes import build_settings
from jcl.settings.resolve import resolve
from jcl.settings.resolved import DataFacts
from jcl.train.build import build_learner, build_optimizer, run_view_recipe, step_options
from jcl.train.step import TrainingStep
from jcl.views import ViewMaker, view_recipe

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
KERNEL = re.compile(r"@triton\.jit\ndef (triton_\w+)\((.*?)\n'''", re.DOTALL)
ACCESS = re.compile(r"tl\.(load|store)\((\w+_ptr\d+) ")


def kernels(code: str) -> dict[str, list[tuple[str, str]]]:
    """For each Triton kernel in generated code what it loads and stores, in order."""
    return {name: ACCESS.findall(body) for name, body in KERNEL.findall(code)}


def read_back(accesses: list[tuple[str, str]]) -> set[str]:
    """What a kernel loads after having stored it."""
    stored: set[str] = set()
    found = set()
    for kind, pointer in accesses:
        if kind == "store":
            stored.add(pointer)
        elif pointer in stored:
            found.add(pointer)
    return found


def test_reading_back_is_noticed():
    code = "@triton.jit\ndef triton_red_0(in_ptr0, in_out_ptr0):\n    {}\n    {}\n'''"
    load, store = "a = tl.load(in_out_ptr0 + (x), None)", "tl.store(in_out_ptr0 + (x), a, None)"
    assert read_back(kernels(code.format(store, load))["triton_red_0"]) == {"in_out_ptr0"}
    assert read_back(kernels(code.format(load, store))["triton_red_0"]) == set()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("recipe", "backbone", "canvas", "more", "compiled"),
    [
        ("cifar10", "resnet18", 32, {}, False),  # has kernels of its own for everything
        ("cifar10", "resnet18", 32, {"model.bn_groups": 1, "method.num_local_queries": 0}, True),
        ("folder", "vit_tiny_patch16_224", 224, {}, True),
    ],
)
def test_no_kernel_of_a_step_reads_back_what_it_wrote(recipe, backbone, canvas, more, compiled):
    device, images = torch.device("cuda"), 64
    values = {"model.backbone": backbone, "train.batch_size": images, "train.cuda_graph": False, **more}
    settings, _ = resolve(build_settings(recipe, values=values), DataFacts(images, canvas, decoded=True))
    learner, _ = build_learner(settings, device)
    optimiser = build_optimizer(settings, learner, device)
    step = TrainingStep(learner, optimiser, run_view_recipe(settings), 0, step_options(settings, device))
    with torch._inductor.config.patch(force_disable_caches=True):
        _, code = run_and_get_code(step, noise(images, canvas), 0, 0.01, 1.0)
    found = {name: accesses for part in code for name, accesses in kernels(part).items()}
    assert bool(found) == compiled
    assert {name: read_back(accesses) for name, accesses in found.items() if read_back(accesses)} == {}


def noise(images: int, canvas: int) -> ImageBatch:
    pixels = torch.randint(0, 256, (images, 3, canvas, canvas), dtype=torch.uint8, device="cuda")
    return ImageBatch(pixels, torch.full((images, 2), canvas, device="cuda"), torch.arange(images, device="cuda"))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("size", [64, 128, 224])
def test_views_hold_nothing_that_lay_in_memory_before(size):
    from jcl.views.kernels import FusedViews

    batch, recipe = noise(64, 224), view_recipe("moco-v2", size)
    rows = torch.arange(64, device="cuda").repeat(3)
    numbers = torch.arange(3, device="cuda").repeat_interleave(64)
    fused = FusedViews(recipe, 0, torch.device("cuda"), torch.float32)
    for number in range(10):
        step = torch.tensor(number, device="cuda")
        wanted = ViewMaker(recipe, 0, step, batch.pixels, batch.sizes, batch.samples)(rows, numbers)
        left = [torch.full((2**26,), float("nan"), device="cuda") for _ in range(8)]
        del left
        found = fused(step, batch.pixels, batch.sizes, batch.samples, rows, numbers)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0.04)  # planes are kept in half precision


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("recorded", [False, True])
def test_encoding_side_by_side_does_not_change_a_step(recorded, monkeypatch):
    # The same kernels in both, which trials on a busy GPU would not choose: else rounding errors grow step by step.
    kernels = partial(torch.backends.cudnn.flags, enabled=True, deterministic=True, allow_tf32=False)
    monkeypatch.setattr("jcl.train.step.cudnn_benchmark", kernels)
    device, images, batch = torch.device("cuda"), 64, noise(64, 32)
    values = {"train.batch_size": images, "train.precision": "float32", "train.cuda_graph": recorded}
    settings, _ = resolve(build_settings("cifar10", values=values), DataFacts(images, 32, decoded=True))

    def train() -> torch.Tensor:
        learner, _ = build_learner(settings, device)
        optimizer = build_optimizer(settings, learner, device)
        step = TrainingStep(learner, optimizer, run_view_recipe(settings), 0, step_options(settings, device))
        return torch.stack([step(batch, number, 0.01, 1.0).clone() for number in range(20)])

    found = train()
    assert found.isfinite().all()
    monkeypatch.setattr(ContrastiveLearner, "_side_device", None)
    tolerance = torch.full_like(found[0], 1e-4)
    tolerance[StepMetrics._fields.index("contrastive_accuracy")] = 0.01  # a few queries
    assert ((found - train()).abs() <= tolerance * (1 + found.abs())).all()
