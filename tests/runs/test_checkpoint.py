import base64
import os
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fault_tools import be_killed_writing
from jcl.errors import RunError
from jcl.runs.atomic import remove_partial_files, write_atomically
from jcl.runs.checkpoint import (
    Progress,
    list_checkpoints,
    load_checkpoint,
    newest_checkpoint,
    read_tensors,
    save_with_checksum,
    search_checkpoints,
    take_snapshot,
    write_snapshot,
)
from jcl.settings.recipes import build_settings
from jcl.train.build import build_learner
from small_runs import TINY_VALUES

CPU = torch.device("cpu")
WINDOW = torch.tensor([0.1, 1 / 3, 3e-20])


def model_and_optimiser(seed: int = 0, steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1 + 0.2, momentum=0.9, weight_decay=1e-4)
    for _ in range(steps):
        optimiser.zero_grad()
        model(torch.randn(5, 3)).square().sum().backward()
        optimiser.step()
    return model, optimiser


def save_checkpoint(
    folder: Path, model: nn.Module, optimiser: torch.optim.Optimizer, progress: Progress, keep: int
) -> Path:
    return write_snapshot(folder, take_snapshot(model, optimiser, progress), keep)


def saved(folder: Path, step: int, keep: int = 10) -> Path:
    return save_checkpoint(folder, *model_and_optimiser(step), Progress(step, 1.5, WINDOW, 2), keep)


def test_everything_comes_back_bit_for_bit(tmp_path):
    model, optimiser = model_and_optimiser()
    path = save_checkpoint(tmp_path, model, optimiser, Progress(7, 0.1 + 0.2, WINDOW, 3), keep=2)
    other, other_optimiser = model_and_optimiser(seed=9, steps=0)
    progress = load_checkpoint(path, other, other_optimiser, CPU)
    assert (progress.step, progress.seconds, progress.window_steps) == (7, 0.1 + 0.2, 3)
    assert torch.equal(progress.window, WINDOW)
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)
    mine, theirs = optimiser.state_dict(), other_optimiser.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    assert mine["state"].keys() == theirs["state"].keys()
    for index, values in mine["state"].items():
        assert torch.equal(values["momentum_buffer"], theirs["state"][index]["momentum_buffer"])
    batch = torch.randn(5, 3)
    for network, its_optimiser in ((model, optimiser), (other, other_optimiser)):
        its_optimiser.zero_grad()
        network(batch).square().sum().backward()
        its_optimiser.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.RMSprop])
def test_other_optimisers_too(tmp_path, make):
    model, _ = model_and_optimiser()
    optimiser = make(model.parameters(), lr=0.01)
    model(torch.randn(5, 3)).sum().backward()
    optimiser.step()
    path = save_checkpoint(tmp_path, model, optimiser, Progress(1, 0.0, WINDOW, 1), keep=2)
    other = make(model.parameters(), lr=0.5, foreach=True)
    load_checkpoint(path, model, other, CPU)
    assert other.param_groups[0]["lr"] == 0.01
    assert other.param_groups[0]["foreach"]  # how it is computed depends on the machine, not on the checkpoint
    for index, values in optimiser.state_dict()["state"].items():
        for name, value in values.items():
            assert torch.equal(other.state_dict()["state"][index][name], value)


def test_a_state_before_the_first_step_can_be_saved(tmp_path):
    model, optimiser = model_and_optimiser(steps=0)
    path = save_checkpoint(tmp_path, model, optimiser, Progress(), keep=1)
    assert load_checkpoint(path, model, optimiser, CPU).step == 0


def test_only_the_newest_are_kept(tmp_path):
    for step in (5, 10, 200, 1000):
        saved(tmp_path, step, keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == [
        "step-000000200.safetensors",
        "step-000001000.safetensors",
    ]


def test_a_damaged_file_of_a_later_step_never_pushes_out_a_good_one(tmp_path):
    saved(tmp_path, 10, keep=1)
    saved(tmp_path, 20, keep=2).write_bytes(b"torn")
    good = saved(tmp_path, 15, keep=1)
    assert newest_checkpoint(tmp_path) == good


@pytest.mark.parametrize("damage", ["empty", "half", "header", "text", "folder", "pipe", "link", "zeros for ever"])
def test_torn_or_damaged_newest_file_is_passed_over(tmp_path, damage):
    old, new = saved(tmp_path, 10), saved(tmp_path, 20)
    content = new.read_bytes()
    new.unlink()
    if damage == "folder":
        new.mkdir()
    elif damage == "pipe":
        os.mkfifo(new)
    elif damage == "link":
        new.symlink_to("/nowhere")
    elif damage == "zeros for ever":
        new.symlink_to("/dev/zero")
    else:
        new.write_bytes(
            {
                "empty": b"",
                "half": content[: len(content) // 2],
                "header": os.urandom(64) + content[64:],
                "text": b"not a checkpoint",
            }[damage]
        )
    newest, damaged = search_checkpoints(tmp_path)
    assert newest == old and len(damaged) == 1 and str(new) in damaged[0]
    with pytest.raises(RunError, match="cannot be read"):
        read_tensors(new)


@pytest.fixture(scope="module")
def sealed(tmp_path_factory) -> bytes:
    return saved(tmp_path_factory.mktemp("sealed"), 20).read_bytes()


def damaged_files(content: bytes, stride: int) -> Iterator[tuple[str, bytes]]:
    """Bytes of the header and some of the tensors' with one bit flipped, and the file cut off at many lengths."""
    header_end = 8 + int.from_bytes(content[:8], "little")
    places = [*range(0, header_end, stride), *range(header_end, len(content), 97), len(content) - 1]
    for number, place in enumerate(places):
        changed = bytearray(content)
        changed[place] ^= 1 << number % 8
        yield f"bit {number % 8} of byte {place}", bytes(changed)
    for length in range(0, len(content), 101):
        yield f"cut after {length}", content[:length]
    yield "something behind it", content + b"\x00"


@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_one_flipped_bit_anywhere_is_found(tmp_path, sealed, stride):
    old, new = saved(tmp_path, 10), tmp_path / "step-000000020.safetensors"
    new.write_bytes(sealed)
    assert newest_checkpoint(tmp_path) == new
    missed, parts = [], model_and_optimiser()
    for what, content in damaged_files(sealed, stride):
        new.write_bytes(content)
        newest, damaged = search_checkpoints(tmp_path)
        if newest != old or str(new) not in damaged[0]:
            missed.append(what)
        with pytest.raises(RunError):
            load_checkpoint(new, *parts, CPU)
    assert missed == []


def test_a_checkpoint_without_its_checksum_is_refused(tmp_path):
    path = saved(tmp_path, 3)
    tensors, metadata = read_tensors(path)
    save_file(tensors, path, {name: value for name, value in metadata.items() if name != "sha256"})
    assert newest_checkpoint(tmp_path) is None
    with pytest.raises(RunError, match="no checksum"):
        load_checkpoint(path, *model_and_optimiser(), CPU)


def test_text_that_looks_like_a_checksum_is_none(tmp_path):
    text = '"sha256":"' + "1" * 64 + '"'
    save_with_checksum(tmp_path / "file", {text: torch.arange(3.0)}, {"a": text, "z": text})
    tensors, metadata = read_tensors(tmp_path / "file")
    assert metadata["a"] == metadata["z"] == text and torch.equal(tensors[text], torch.arange(3.0))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_state_that_is_not_finite_is_no_checkpoint(tmp_path, value):
    good = saved(tmp_path, 1)
    model, optimiser = model_and_optimiser()
    with torch.no_grad():
        model[0].weight[0, 0] = value
    with pytest.raises(RunError, match=r"model.0.weight is not finite"):
        save_checkpoint(tmp_path, model, optimiser, Progress(2, 1.5, WINDOW, 2), keep=1)
    assert list(tmp_path.iterdir()) == [good]


def test_no_checkpoint_at_all(tmp_path):
    assert newest_checkpoint(tmp_path) is None
    assert newest_checkpoint(tmp_path / "missing") is None
    (tmp_path / "step-x.safetensors").write_bytes(b"")
    (tmp_path / ".step-000000001.safetensors.0123abcd.partial").write_bytes(b"")
    assert list_checkpoints(tmp_path) == []


@pytest.mark.parametrize("save", [save_file, lambda tensors, path, text: save_with_checksum(path, tensors, text)])
@pytest.mark.parametrize("metadata", [{}, {"format": "jcl-backbone-1"}])
def test_other_safetensors_files_are_refused(tmp_path, metadata, save):
    save({"weight": torch.zeros(2)}, tmp_path / "other.safetensors", metadata)
    with pytest.raises(RunError, match="not a checkpoint of this tool"):
        load_checkpoint(tmp_path / "other.safetensors", *model_and_optimiser(), CPU)


@pytest.mark.parametrize("change", [{"step": "many"}, {"optimiser": "{"}, {"optimiser": "[]"}, {"seconds": None}])
def test_metadata_that_makes_no_sense_is_a_sentence(tmp_path, change):
    tensors, metadata = read_tensors(saved(tmp_path, 3))
    metadata = {name: value for name, value in (metadata | change).items() if value is not None}
    save_with_checksum(tmp_path / "changed.safetensors", tensors, metadata)
    with pytest.raises(RunError, match="does not fit"):
        load_checkpoint(tmp_path / "changed.safetensors", *model_and_optimiser(), CPU)


def test_a_checkpoint_of_another_network_is_a_sentence(tmp_path):
    other = nn.Linear(3, 3)
    with pytest.raises(RunError, match="weight is missing"):
        load_checkpoint(saved(tmp_path, 3), other, torch.optim.SGD(other.parameters()), CPU)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model.head_width": 7}, "query_encoder.head.0.weight is [128, 128] in the checkpoint and [7, 128]"),
        ({"method.queue_size": 64}, "queue.rows is [32, 16] in the checkpoint and [64, 16]"),
        ({"model.backbone": "resnet18"}, "query_encoder.backbone."),
    ],
)
def test_the_tensor_that_does_not_fit_changed_settings_is_named(tmp_path, change, said):
    """Without the list of tensors, which for a large network fills the screen."""

    def parts(changes):
        learner, _ = build_learner(build_settings("folder", values=TINY_VALUES | {"data.channels": 3} | changes), CPU)
        return learner, torch.optim.SGD(learner.parameters(), lr=0.1)

    path = save_checkpoint(tmp_path, *parts({}), Progress(3, 1.5, WINDOW, 2), keep=1)
    load_checkpoint(path, *parts({}), CPU)
    with pytest.raises(RunError, match=re.escape(said)) as error:
        load_checkpoint(path, *parts(change), CPU)
    assert len(str(error.value)) < 450


def test_a_writer_killed_before_the_rename_leaves_the_old_file(tmp_path):
    """The process dies at the moment between writing and renaming, as a power cut would have it."""
    path = tmp_path / "step-000000010.safetensors"
    path.write_bytes(b"old")
    be_killed_writing(path)
    assert path.read_bytes() == b"old"
    assert list_checkpoints(tmp_path) == [path]
    assert len(list(tmp_path.iterdir())) == 2
    remove_partial_files(tmp_path)
    assert list(tmp_path.iterdir()) == [path]
    write_atomically(path, b"newer")
    assert path.read_bytes() == b"newer"


@pytest.mark.parametrize("where", ["parent is a file", "target is a folder", "partial is a folder"])
def test_a_place_that_cannot_be_written_is_a_sentence_and_keeps_what_was_there(tmp_path, where, monkeypatch):
    monkeypatch.setattr("jcl.runs.atomic.secrets.token_hex", lambda _: "1")
    path = tmp_path / "checkpoints" / "step-000000001.safetensors"
    if where == "parent is a file":
        path.parent.write_bytes(b"kept")
    elif where == "target is a folder":
        path.mkdir(parents=True)
        (path / "kept").write_bytes(b"kept")
    else:
        path.parent.mkdir()
        path.write_bytes(b"kept")
        path.with_name(f".{path.name}.1.partial").mkdir()
    before = {entry: entry.is_file() and entry.read_bytes() for entry in tmp_path.rglob("*")}
    with pytest.raises(RunError, match="could not be written"):
        saved(tmp_path / "checkpoints", 1)
    assert {entry: entry.is_file() and entry.read_bytes() for entry in tmp_path.rglob("*")} == before


def test_a_full_disk_is_a_sentence_and_keeps_the_old_file(tmp_path, no_room_for):
    path = saved(tmp_path, 1)
    content = path.read_bytes()
    no_room_for(path)
    with pytest.raises(RunError, match="No space left"):
        saved(tmp_path, 1)
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


class Hostile:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (self.command,)


@pytest.mark.parametrize("kind", ["torch", "old torch", "pickle", "pickle behind a header", "pickle as metadata"])
def test_reading_a_checkpoint_cannot_run_code(tmp_path, kind):
    """A pickle under the name of a checkpoint, or inside of one, is refused unread."""
    path = tmp_path / "checkpoints" / "step-000000001.safetensors"
    path.parent.mkdir()
    hostile = Hostile(f"touch {tmp_path}/hacked")
    pickled = pickle.dumps(hostile)
    if kind == "torch":
        torch.save({"model": hostile}, path)
    elif kind == "old torch":
        torch.save({"model": hostile}, path, _use_new_zipfile_serialization=False)
    elif kind == "pickle":
        path.write_bytes(pickled)
    elif kind == "pickle behind a header":
        path.write_bytes((2).to_bytes(8, "little") + b"{}" + pickled)
    else:
        text = {"format": "jcl-checkpoint-2", "step": "1", "optimiser": base64.b64encode(pickled).decode()}
        save_with_checksum(path, {"progress.window": torch.zeros(1)}, text)
    with pytest.raises(RunError):
        load_checkpoint(path, *model_and_optimiser(), CPU)
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoints"]
    pickle.loads(pickled)  # while this is what it would have done
    assert (tmp_path / "hacked").exists()
