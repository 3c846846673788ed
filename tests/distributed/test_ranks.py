"""Several ranks train as one process does. Real processes, real exchanges (gloo)."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from jcl.data.loader import ImageExchange
from jcl.distributed.group import ALONE, LostContact, Ranks, catch_lost_contact
from rank_steps import METHODS, first_steps
from small_runs import drawn_pixels


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same 50 images as an array file and as a folder."""
    root = tmp_path_factory.mktemp("images")
    pixels = drawn_pixels(50)
    np.savez(root / "arrays.npz", x_train=pixels)
    (root / "files").mkdir()
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(root / "files" / f"{number:02}.png")
    return root / "arrays.npz", root / "files"


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.faults)])
def test_ranks_train_as_one_process_with_as_many_batch_norm_groups(images, tmp_path: Path, count: int):
    script, out = Path(__file__).parents[1] / "rank_steps.py", tmp_path / "together.pt"
    command = [sys.executable, str(script), str(count), *map(str, images), str(out)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        alone = {f"{method} arrays": first_steps(method, str(images[0]), ALONE, count) for method in METHODS}
        alone["jcl micro-batches"] = first_steps("jcl", str(images[0]), ALONE, 2 * count, 1)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    together = torch.load(out, weights_only=True)
    for kind, steps in (alone | {"jcl files": alone["jcl arrays"]}).items():
        for name, expected in steps.items():
            difference = float((together[kind][name] - expected).abs().max()) / max(1.0, float(expected.abs().max()))
            assert difference <= 1e-6, (kind, name, difference)


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("num_keys", [1, 5])
def test_a_plan_holds_what_the_rank_encodes_and_what_is_sent_is_what_is_received(count: int, num_keys: int):
    batch = 64
    for step in range(5):
        plans = [ImageExchange(Ranks(rank, count), 3, batch, num_keys).plan(step) for rank in range(count)]
        for rank, plan in enumerate(plans):
            own = torch.arange(batch).view(count, -1)[rank]
            assert torch.equal(plan.rows[: len(own)], own)
            held = plan.local_rows >= 0
            assert torch.equal(plan.rows[plan.local_rows[held]], held.nonzero().flatten())
            foreign = held.clone()
            foreign[own] = False
            assert plan.received == foreign.view(count, -1).sum(1).tolist()
            for other in range(count):
                assert plan.received[other] == len(plans[other].sent[rank])
                sent = other * len(own) + plans[other].sent[rank]
                assert foreign[sent].all()


def test_at_eight_ranks_an_eighth_of_the_bytes_move():
    """Against gathering every key view of 224 px as float32, with images on a canvas of 320 px; counted exactly."""
    count, batch, num_keys = 8, 256, 5
    moved = []
    for step in range(5):
        plan = ImageExchange(Ranks(3, count), 0, batch, num_keys).plan(step)
        moved.append(sum(plan.received) * (3 * 320 * 320 + 3 * 8))
    gathered = (count - 1) / count * batch * num_keys * 3 * 224 * 224 * 4
    assert gathered / max(moved) > 8


def test_too_little_memory_is_no_lost_contact():
    with pytest.raises(torch.OutOfMemoryError), catch_lost_contact():
        raise torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(LostContact), catch_lost_contact():
        raise RuntimeError("connection reset")
