"""Checkpoints written beside training: what is in them, who waits for whom, and what a failure does."""

import threading
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from jcl.commands.pretrain import pretrain
from jcl.errors import RunError
from jcl.runs import checkpoint
from jcl.runs import saver as saver_module
from jcl.runs.checkpoint import (
    Progress,
    list_checkpoints,
    load_checkpoint,
    newest_checkpoint,
    read_tensors,
    take_snapshot,
)
from jcl.runs.saver import CheckpointSaver
from small_runs import tiny_settings

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=ON_GPU)]


class Trainee:
    """A model whose weights all equal the number of steps it was trained for."""

    def __init__(self, device: str = "cpu") -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(4, 4)).to(device)
        self.model.to(memory_format=torch.channels_last)
        self.optimiser = torch.optim.SGD(self.model.parameters(), lr=1.0, momentum=0.5)
        for parameter in self.model.parameters():
            self.optimiser.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        self.progress = Progress(window=torch.zeros(3, device=device))

    def tensors(self) -> list[torch.Tensor]:
        momentum = [state["momentum_buffer"] for state in self.optimiser.state.values()]
        return [*self.model.state_dict().values(), *momentum, self.progress.window]

    @torch.no_grad()
    def step(self) -> None:
        self.progress.step += 1
        for tensor in self.tensors():
            tensor.fill_(self.progress.step)

    def save(self, saver: CheckpointSaver) -> None:
        saver.start(self.model, self.optimiser, self.progress)


def values_in(path: Path) -> set[float]:
    return {value for tensor in read_tensors(path)[0].values() for value in tensor.flatten().tolist()}


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def saver(tmp_path: Path, said: list[str]) -> CheckpointSaver:
    return CheckpointSaver(tmp_path / "checkpoints", keep=2, warn=said.append)


class Gate:
    """Holds every write back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        original = saver_module.write_snapshot

        def held_back(*arguments):
            assert self.open.wait(20)
            return original(*arguments)

        monkeypatch.setattr(saver_module, "write_snapshot", held_back)


@pytest.mark.parametrize("device", DEVICES)
def test_a_checkpoint_holds_the_state_of_the_moment_it_was_asked_for(saver, tmp_path, monkeypatch, device):
    gate, trainee = Gate(monkeypatch), Trainee(device)
    for step in range(1, 4):
        gate.open.clear()
        trainee.step()
        trainee.save(saver)
        assert saver.busy
        for _ in range(3):  # training goes on meanwhile, and changes everything in place
            trainee.step()
        trainee.progress.step = step
        gate.open.set()
        saver.wait()
        assert not saver.busy
        newest = newest_checkpoint(tmp_path / "checkpoints")
        assert newest == tmp_path / "checkpoints" / f"step-{step:09d}.safetensors"
        assert values_in(newest) == {float(step)}
    assert len(list_checkpoints(tmp_path / "checkpoints")) == 2


def test_there_is_one_write_at_a_time_and_leaving_waits_for_it(saver, said, tmp_path, monkeypatch):
    gate, trainee = Gate(monkeypatch), Trainee()
    opener = threading.Timer(0.3, gate.open.set)
    with pytest.raises(ZeroDivisionError), saver:
        trainee.step()
        trainee.save(saver)
        opener.start()
        trainee.step()
        trainee.save(saver)  # waits
        assert gate.open.is_set()
        assert list_checkpoints(tmp_path / "checkpoints")[0].name == "step-000000001.safetensors"
        raise ZeroDivisionError
    assert not saver.busy
    assert [values_in(path) for path in list_checkpoints(tmp_path / "checkpoints")] == [{1.0}, {2.0}]
    assert said == []


def test_a_failed_write_is_said_once_and_the_next_one_tried(saver, said, tmp_path):
    trainee = Trainee()
    (tmp_path / "checkpoints").write_bytes(b"in the way")
    for _ in range(3):
        trainee.step()
        trainee.save(saver)
        saver.wait()
    assert len(said) == 1
    assert "checkpoints could not be written" in said[0]
    (tmp_path / "checkpoints").unlink()
    trainee.step()
    trainee.save(saver)
    saver.wait()
    assert len(said) == 2 and "again" in said[1] and "step-000000004.safetensors" in said[1]
    trainee.save(saver)
    saver.wait()
    assert len(said) == 2


def test_finishing_insists(saver, said, tmp_path):
    trainee = Trainee()
    trainee.step()
    (tmp_path / "checkpoints").write_bytes(b"in the way")
    with pytest.raises(RunError, match="could not be written"):
        saver.finish(trainee.model, trainee.optimiser, trainee.progress)
    (tmp_path / "checkpoints").unlink()
    saver.finish(trainee.model, trainee.optimiser, trainee.progress)
    assert not saver.busy and values_in(newest_checkpoint(tmp_path / "checkpoints")) == {1.0}
    assert said == []


def test_a_defect_of_ours_is_not_taken_for_a_full_disk(saver, monkeypatch):
    trainee = Trainee()

    def broken(*arguments):
        raise ZeroDivisionError

    monkeypatch.setattr(saver_module, "write_snapshot", broken)
    trainee.save(saver)
    with pytest.raises(ZeroDivisionError):
        saver.wait()


def test_the_old_checkpoint_stays_until_the_new_one_has_been_written(tmp_path, monkeypatch):
    saver, trainee, there = CheckpointSaver(tmp_path, keep=1, warn=print), Trainee(), []
    original = checkpoint.save_with_checksum

    def looking(*arguments: object) -> None:
        original(*arguments)
        there.append([entry.name for entry in list_checkpoints(tmp_path)])

    monkeypatch.setattr(checkpoint, "save_with_checksum", looking)
    for _ in range(3):
        trainee.step()
        trainee.save(saver)
        saver.wait()
    names = [f"step-{step:09}.safetensors" for step in (1, 2, 3)]
    assert there == [names[:1], names[:2], names[1:]]
    assert [entry.name for entry in tmp_path.iterdir()] == names[2:]


def test_what_killed_writers_left_is_cleared_away(tmp_path):
    (tmp_path / ".step-000000007.safetensors.0123abcd.partial").write_bytes(b"half")
    (tmp_path / "step-000000005.safetensors").write_bytes(b"kept")
    CheckpointSaver(tmp_path, keep=1, warn=print)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000000005.safetensors"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnGpu:
    def test_between_replays_of_a_graph(self, saver, tmp_path):
        """Replays are launched far faster than they run; each snapshot falls between the two it was asked between."""
        trainee, slow = Trainee("cuda"), torch.randn(4096, 4096, device="cuda")
        state = [tensor for tensor in trainee.tensors() if tensor.is_floating_point()]

        @torch.no_grad()
        def work() -> None:
            for _ in range(4):
                slow @ slow
            torch._foreach_add_(state, 1.0)

        work()  # libraries are set up outside of the recording
        for tensor in trainee.tensors():
            tensor.detach().zero_()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        for step in range(1, 31):
            graph.replay()
            trainee.progress.step = step
            if step % 10 == 0:
                trainee.save(saver)
        saver.wait()
        for step in (20, 30):
            assert values_in(tmp_path / "checkpoints" / f"step-{step:09d}.safetensors") == {0.0, float(step)}

    def test_a_rate_on_the_device_is_left_to_the_next_step(self, saver, tmp_path):
        trainee = Trainee("cuda")
        trainee.optimiser.param_groups[0]["lr"] = torch.tensor(0.25, device="cuda")
        saver.finish(trainee.model, trainee.optimiser, trainee.progress)
        other = Trainee()
        load_checkpoint(newest_checkpoint(tmp_path / "checkpoints"), other.model, other.optimiser, torch.device("cpu"))
        assert other.optimiser.param_groups[0]["lr"] == 1.0

    def test_pinned_memory_is_used_again(self):
        trainee = Trainee("cuda")
        first = take_snapshot(trainee.model, trainee.optimiser, trainee.progress)
        places = {name: tensor.data_ptr() for name, tensor in first.tensors.items()}
        assert all(tensor.is_pinned() for tensor in first.tensors.values())
        second = take_snapshot(trainee.model, trainee.optimiser, trainee.progress, first)
        assert {name: tensor.data_ptr() for name, tensor in second.tensors.items()} == places

    def test_a_write_in_flight_does_not_disturb_the_recording_of_a_step(self, npz, tmp_path):
        """Checkpoints are asked for after each of the first steps, so one is under way when the graph is recorded."""
        values = {"train__device": "cuda", "train__compile": False, "record__checkpoint_minutes": 1e-9}
        run = pretrain(tiny_settings(npz, **values), tmp_path / "run", console=Console(quiet=True))
        assert run.summary["steps"] == 12
        for path in list_checkpoints(run.path / "checkpoints"):
            assert all(torch.isfinite(tensor).all() for tensor in read_tensors(path)[0].values())
