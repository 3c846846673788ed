"""Run folders that come from elsewhere, lose files, or are moved, removed or on a full disk while a run trains."""

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import jcl
from fault_tools import at_steps, once_written, settings_for
from jcl.commands.pretrain import pretrain, resume
from jcl.commands.report import read_run
from jcl.errors import DataError, RunError
from jcl.export import import_backbone
from jcl.runs.atomic import atomic_open, write_atomically
from jcl.runs.checkpoint import (
    read_tensors,
)
from jcl.runs.lock import is_locked, lock_folder
from plain_user import refused_like_anybody
from run_tools import QUIET, assert_same


@pytest.fixture
def victim(tmp_path) -> Path:
    file = tmp_path / "mine"
    file.write_text("mine")
    return file


class TestLinks:
    def test_resuming_replaces_files_that_are_links(self, stopped, unbroken, victim):
        new = victim.with_name("new")
        for name, target in (("backbone.safetensors", victim), ("classes.json", new)):
            (stopped / name).unlink(missing_ok=True)
            (stopped / name).symlink_to(target)
        lines = (stopped / "metrics.jsonl").rename(victim.with_name("lines"))
        (stopped / "metrics.jsonl").symlink_to(lines)
        before = lines.read_bytes()
        assert_same(resume(stopped, console=QUIET), unbroken)
        assert victim.read_text() == "mine" and not new.exists() and lines.read_bytes() == before

    @pytest.mark.parametrize("name", ["checkpoints", "tensorboard"])
    def test_resuming_refuses_subfolders_that_are_links(self, stopped, tmp_path, name):
        (stopped / name).mkdir(exist_ok=True)
        moved = (stopped / name).rename(tmp_path / "elsewhere")
        (stopped / name).symlink_to(moved)
        before = sorted(moved.iterdir())
        with pytest.raises(RunError, match=f"{name} is a link"):
            resume(stopped, console=QUIET)
        assert sorted(moved.iterdir()) == before

    def test_a_lock_that_is_a_link_is_not_followed(self, victim, tmp_path):
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / ".lock").symlink_to(victim)
        with pytest.raises(RunError), lock_folder(tmp_path / "run", print):
            pass
        assert victim.read_text() == "mine" and not is_locked(tmp_path / "run")

    def test_a_link_that_appears_during_a_write_is_replaced(self, victim, tmp_path):
        (tmp_path / "run").mkdir()
        with atomic_open(tmp_path / "run" / "summary.json") as file:
            (tmp_path / "run" / "summary.json").symlink_to(victim)
            file.write(b"new")
        assert victim.read_text() == "mine" and (tmp_path / "run" / "summary.json").read_text() == "new"

    def test_the_folder_itself_may_be_a_link(self, tmp_path):
        (tmp_path / "run").mkdir()
        (tmp_path / "latest").symlink_to("run")
        with lock_folder(tmp_path / "latest", print):
            write_atomically(tmp_path / "latest" / "summary.json", b"new")
        assert (tmp_path / "run" / "summary.json").read_text() == "new"

    def test_what_the_user_names_may_be_a_link(self, npz, tmp_path, call):
        (tmp_path / "link.json").symlink_to("new.json")
        assert call("check", npz, "--json", tmp_path / "link.json")[0] == 0
        assert "images" in (tmp_path / "new.json").read_text() and (tmp_path / "link.json").is_symlink()


class TestSettings:
    @pytest.mark.parametrize("location", ["cifar10", "http://me:secret@127.0.0.1:9/0.tar"])
    def test_those_of_others_are_printed_and_create_no_folder(self, stopped, npz, tmp_path, console, location):
        file, root = stopped / "settings.yaml", tmp_path / "made"
        file.write_text(file.read_text().replace(str(npz), location).replace("root: ''", f"root: {root}"))
        with pytest.raises(DataError, match=r"data\.root"):
            resume(stopped, console=console)
        said = console.export_text()
        assert str(root) in said and location[-6:] in said and "secret" not in said and not root.exists()


def test_a_read_only_folder_is_read_but_not_written(pretrained, npz, stopped, tmp_path, call):
    finished = Path(shutil.copytree(pretrained, tmp_path / "finished"))
    for folder in (finished, stopped):
        folder.chmod(0o555)
    with refused_like_anybody():
        assert call("knn", finished, "--device", "cpu")[0] == 0
        for command in (["resume", stopped], ["pretrain", npz, "--out", stopped / "new"]):
            code, _, err = call(*command)
            assert code == 1 and err.count("\n") == 1 and os.strerror(errno.EACCES) in err
    assert not (stopped / ".lock").exists()


def test_a_checkpoint_finds_its_lines_on_the_disk(npz, tmp_path, monkeypatch):
    synced: list[str] = []
    original = os.fsync

    def fsync(number: int) -> None:
        synced.append(Path(f"/proc/self/fd/{number}").readlink().name)
        original(number)

    monkeypatch.setattr(os, "fsync", fsync)
    pretrain(settings_for(npz, train__epochs=1), tmp_path / "run", console=QUIET)
    checkpoint = next(name for name in synced if name.startswith(".step-"))
    assert "metrics.jsonl" in synced[: synced.index(checkpoint)]


def test_a_removed_folder_is_not_created_again(npz, tmp_path, monkeypatch):
    at_steps(monkeypatch, {6: once_written(lambda: shutil.rmtree(tmp_path / "run"))})
    with pytest.raises(RunError, match="could not be written"):
        pretrain(settings_for(npz), tmp_path / "run", console=QUIET)
    assert not (tmp_path / "run").exists()


class TestBackboneFile:
    def test_a_flipped_bit_is_found(self, pretrained, tmp_path):
        run = shutil.copytree(pretrained, tmp_path / "run")
        content = bytearray((run / "backbone.safetensors").read_bytes())
        content[-5] ^= 0x10
        (run / "backbone.safetensors").write_bytes(content)
        with pytest.raises(RunError, match="checksum"):
            jcl.load_backbone(run)

    def test_files_without_a_checksum_are_loaded(self, pretrained, tmp_path):
        tensors, metadata = read_tensors(pretrained / "backbone.safetensors")
        metadata.pop("checksum")
        save_file(tensors, tmp_path / "old.safetensors", metadata)
        jcl.load_backbone(tmp_path / "old.safetensors")

    @pytest.mark.parametrize("value", [float("nan"), float("-inf")])
    def test_impossible_values_are_refused_by_name(self, pretrained, tmp_path, value):
        tensors, _ = read_tensors(pretrained / "backbone.safetensors")
        name = next(name for name in tensors if name.endswith("running_var"))
        tensors[name][0] = value
        torch.save(tensors, tmp_path / "weights.pth")
        with pytest.raises(RunError, match=name):
            import_backbone(tmp_path / "weights.pth", tmp_path / "out.safetensors", backbone="tiny_cnn")


def test_pipes_and_devices_are_not_read(pretrained, tmp_path):
    folder = Path(shutil.copytree(pretrained, tmp_path / "run"))
    for name in ("summary.json", "choices.json", "classes.json", "skipped.txt"):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
    contents = read_run(folder, "run")  # instead of waiting forever
    assert contents.summary is contents.choices is None and contents.classes == contents.skipped == {}


def test_a_path_that_is_too_long_is_a_sentence(call):
    code, _, err = call("check", "a" * 300)
    assert code == 1 and "too long" in err and err.count("\n") == 1
