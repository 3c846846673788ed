"""Run folders that come from elsewhere, lose files, or are moved, removed or on a full disk while a run trains."""

import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import jcl
from fault_tools import at_steps, once_written, settings_for, small_disk
from jcl.commands.pretrain import pretrain, resume
from jcl.commands.report import write_report
from jcl.errors import DataError, Interrupted, RunError
from jcl.export import import_backbone, save_backbone
from jcl.runs.atomic import atomic_open, write_atomically
from jcl.runs.checkpoint import (
    list_checkpoints,
    read_tensors,
    search_checkpoints,
)
from jcl.runs.lock import is_locked, lock_folder
from jcl.runs.metrics import MetricsWriter, read_metrics
from launch_tools import settings_options
from plain_user import refused_like_anybody
from run_tools import QUIET, assert_same, assert_same_backbone, stop_after
from small_runs import TINY_VALUES


@pytest.fixture
def victim(tmp_path) -> Path:
    file = tmp_path / "mine"
    file.write_text("mine")
    return file


class TestLinks:
    @pytest.mark.parametrize("dangling", [False, True])
    @pytest.mark.parametrize(
        "name", [".lock", "backbone.safetensors", "choices.json", "metrics.jsonl", "report.html", "run_id"]
    )
    def test_resuming_refuses_links(self, npz, stopped, victim, name, dangling):
        settings = settings_for(npz)
        (stopped / name).unlink(missing_ok=True)
        (stopped / name).symlink_to(victim.with_name("new") if dangling else victim)
        for again in (lambda: resume(stopped, console=QUIET), lambda: pretrain(settings, stopped, resume="auto")):
            with pytest.raises(RunError, match=f"{name} is a link"):
                again()
        assert victim.read_text() == "mine" and not victim.with_name("new").exists()

    def test_resuming_refuses_subfolders_that_are_links(self, stopped, tmp_path):
        moved = (stopped / "checkpoints").rename(tmp_path / "elsewhere")
        (stopped / "checkpoints").symlink_to(moved)
        before = sorted(moved.iterdir())
        with pytest.raises(RunError, match="checkpoints is a link"):
            resume(stopped, console=QUIET)
        assert sorted(moved.iterdir()) == before

    def test_tensorboard_as_a_link_is_not_written_to(self, tmp_path):
        (tmp_path / "run").mkdir()
        (tmp_path / "away").mkdir()
        (tmp_path / "run" / "tensorboard").symlink_to(tmp_path / "away")
        said: list[str] = []
        with MetricsWriter(tmp_path / "run", warn=said.append) as record:
            record.write("train", 1, 0.1, {"loss": 1.0})
        assert len(said) == 1 and "tensorboard is a link" in said[0] and not list((tmp_path / "away").iterdir())

    def test_a_report_refuses_a_link_that_nobody_named(self, pretrained, victim, tmp_path):
        run = shutil.copytree(pretrained, tmp_path / "run", ignore=shutil.ignore_patterns("report.html"))
        (run / "report.html").symlink_to(victim)
        with pytest.raises(RunError, match="is a link"):
            write_report([run], run / "report.html", device="cpu")
        assert victim.read_text() == "mine"

    @pytest.mark.parametrize("how", ["hard link", "pipe"])
    def test_locks_and_metrics_are_files_of_their_own(self, victim, tmp_path, how):
        folder = tmp_path / "run"
        folder.mkdir()
        with MetricsWriter(folder, tensorboard=False, warn=lambda _: None) as record:
            for name in (".lock", "metrics.jsonl"):
                (folder / name).unlink(missing_ok=True)
                os.link(victim, folder / name) if how == "hard link" else os.mkfifo(folder / name)
            with pytest.raises(RunError), lock_folder(folder, print):
                pass
            assert not is_locked(folder)
            record.write("train", 1, 0.1, {"loss": 1.0})
            (folder / "metrics.jsonl").unlink()
        assert victim.read_text() == "mine" and len(read_metrics(folder / "metrics.jsonl")) == 1

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
        (tmp_path / "real").mkdir()
        (tmp_path / "out").symlink_to("real")
        (tmp_path / "link.json").symlink_to("new.json")
        (tmp_path / "link.html").symlink_to("new.html")
        options = settings_options(TINY_VALUES | {"train.epochs": 1})
        train = ["pretrain", npz, *options, "--out", tmp_path / "out", "--json", tmp_path / "link.json"]
        assert call(*train)[0] == 0 and call("report", tmp_path / "out", "-o", tmp_path / "link.html")[0] == 0
        assert "knn_top1" in (tmp_path / "new.json").read_text() and "<html" in (tmp_path / "new.html").read_text()
        assert (tmp_path / "real" / "summary.json").is_file() and (tmp_path / "link.json").is_symlink()


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
        for command in (["knn", finished, "--device", "cpu"], ["report", finished, "-o", "page.html"]):
            assert call(*command)[0] == 0
        for command in (["report", finished], ["resume", stopped], ["pretrain", npz, "--out", stopped / "new"]):
            code, _, err = call(*command)
            assert code == 1 and err.count("\n") == 1 and os.strerror(errno.EACCES) in err
    assert not (stopped / ".lock").exists()


class TestMetrics:
    def test_damaged_lines_are_counted_and_the_file_is_kept(self, stopped, unbroken, console):
        lines = (stopped / "metrics.jsonl").read_bytes().splitlines(keepends=True)
        damaged = b"".join([lines[0], b'{"kind": "tr\xff\n', *lines[2:], b'{"kind"'])
        (stopped / "metrics.jsonl").write_bytes(damaged)
        again = resume(stopped, console=console)
        (kept,) = stopped.glob("metrics.jsonl.damaged*")
        said = console.export_text()
        assert "1 damaged line" in said and kept.name in said and kept.read_bytes() == damaged
        assert len(again.metrics) == len(unbroken.metrics) - 1

    def test_a_torn_line_after_the_checkpoint_is_no_loss(self, stopped, unbroken):
        with (stopped / "metrics.jsonl").open("ab") as file:
            file.write(b'{"kind": "tr')
        assert_same(resume(stopped, console=QUIET), unbroken)
        assert not list(stopped.glob("metrics.jsonl.damaged*"))

    def test_a_checkpoint_finds_its_lines_on_the_disk(self, npz, tmp_path, monkeypatch):
        synced: list[str] = []
        original = os.fsync

        def fsync(number: int) -> None:
            synced.append(Path(f"/proc/self/fd/{number}").readlink().name)
            original(number)

        monkeypatch.setattr(os, "fsync", fsync)
        pretrain(settings_for(npz, train__epochs=1), tmp_path / "run", console=QUIET)
        checkpoint = next(name for name in synced if name.startswith(".step-"))
        assert "metrics.jsonl" in synced[: synced.index(checkpoint)]


class TestMoved:
    @pytest.mark.parametrize("step", [6, 12])
    def test_training_in_a_moved_folder_stops_and_resumes_there(self, npz, unbroken, tmp_path, monkeypatch, step):
        old, new = tmp_path / "old", tmp_path / "new"
        with monkeypatch.context() as patch:
            at_steps(patch, {step: once_written(lambda: old.rename(new))})
            with pytest.raises(RunError, match=f"was moved or removed; step {step} is not saved"):
                pretrain(settings_for(npz), old, console=QUIET)
        assert not old.exists()
        assert_same(resume(new, console=QUIET), unbroken)

    def test_a_removed_folder_is_said_and_not_created_again(self, npz, tmp_path, monkeypatch):
        at_steps(monkeypatch, {6: once_written(lambda: shutil.rmtree(tmp_path / "run"))})
        with pytest.raises(RunError, match="step 6 is not saved"):
            pretrain(settings_for(npz), tmp_path / "run", console=QUIET)
        assert not (tmp_path / "run").exists()

    def test_no_checkpoint_is_written_into_an_emptied_folder(self, npz, tmp_path, monkeypatch):
        """`rm -r` leaves the folder if a file appears in it meanwhile."""

        def empty() -> None:
            shutil.rmtree(tmp_path / "run" / "checkpoints")
            for file in (tmp_path / "run").iterdir():
                file.unlink()

        at_steps(monkeypatch, {6: once_written(empty)})
        with pytest.raises(RunError, match="was moved or removed"):
            pretrain(settings_for(npz), tmp_path / "run", console=QUIET)
        assert not (tmp_path / "run" / "checkpoints").exists()

    def test_no_checkpoint_is_written_into_a_folder_that_took_its_place(self, npz, tmp_path, monkeypatch):
        def swap() -> None:
            (tmp_path / "run").rename(tmp_path / "old")
            (tmp_path / "run").mkdir()
            (tmp_path / "run" / "other").write_text("other")

        at_steps(monkeypatch, {6: once_written(swap)})
        with pytest.raises(RunError, match="was moved or removed"):
            pretrain(settings_for(npz), tmp_path / "run", console=QUIET)
        assert (tmp_path / "run" / "other").read_text() == "other" and not (tmp_path / "run" / "checkpoints").exists()


class TestFullDisk:
    @pytest.mark.parametrize("keep", [2, 1])
    def test_older_checkpoints_make_room_but_not_the_newest(self, npz, unbroken, tmp_path, monkeypatch, keep):
        with small_disk(tmp_path / "disk") as disk:
            folder = disk.place / "run"
            with monkeypatch.context() as patch:
                stop_after(patch, 10, 15)
                at_steps(patch, {9: once_written(disk.fill)})
                with pytest.raises(Interrupted if keep == 2 else RunError):
                    pretrain(settings_for(npz, record__keep=keep), folder, console=QUIET)
            names = [path.name for path in list_checkpoints(folder / "checkpoints")]
            assert names == ["step-000000008.safetensors", "step-000000010.safetensors"][:keep]
            disk.free()
            assert_same_backbone(resume(folder, console=QUIET), unbroken)

    def test_too_little_space_is_said_at_the_start(self, npz, tmp_path, monkeypatch, console):
        with small_disk(tmp_path / "disk", megabytes=4) as disk:
            disk.filler.write_bytes(b"\0" * (7 << 19))
            at_steps(monkeypatch, {1: disk.free})
            pretrain(settings_for(npz), disk.place / "run", console=console)
        assert "is nearly full" in console.export_text()


class TestWhoseCheckpoint:
    def test_one_of_another_run_is_refused(self, stopped, unbroken):
        shutil.copy(list_checkpoints(unbroken.path / "checkpoints")[-1], stopped / "checkpoints")
        newest, damaged = search_checkpoints(stopped / "checkpoints")
        assert newest.name == "step-000000010.safetensors" and "another run" in damaged[0]
        for path in list_checkpoints(stopped / "checkpoints")[:-1]:
            path.unlink()
        with pytest.raises(RunError, match="of another run"):
            resume(stopped, console=QUIET)

    def test_a_run_that_lost_its_id_takes_that_of_its_checkpoint(self, stopped, unbroken):
        before = (stopped / "run_id").read_text()
        (stopped / "run_id").unlink()
        assert_same(resume(stopped, console=QUIET), unbroken)
        assert (stopped / "run_id").read_text() == before

    def test_one_of_another_step_is_refused(self, stopped):
        older = list_checkpoints(stopped / "checkpoints")[0]
        older.rename(older.with_name("step-000000011.safetensors"))
        newest, damaged = search_checkpoints(stopped / "checkpoints")
        assert newest.name == "step-000000010.safetensors" and "step 8" in damaged[0]


class TestBackboneFile:
    def test_a_flipped_bit_is_found(self, pretrained, tmp_path):
        run = shutil.copytree(pretrained, tmp_path / "run")
        content = bytearray((run / "backbone.safetensors").read_bytes())
        content[-5] ^= 0x10
        (run / "backbone.safetensors").write_bytes(content)
        with pytest.raises(RunError, match="checksum"):
            jcl.load_backbone(run)

    def test_equal_weights_give_equal_bytes(self, pretrained, tmp_path):
        """safetensors itself writes metadata in a random order."""
        network, files = jcl.load_backbone(pretrained), [tmp_path / f"{number}.safetensors" for number in range(8)]
        for file in files:
            save_backbone(network, network.info, file)
        assert {file.read_bytes() for file in files} == {(pretrained / "backbone.safetensors").read_bytes()}

    def test_files_without_a_checksum_are_loaded(self, pretrained, tmp_path):
        tensors, metadata = read_tensors(pretrained / "backbone.safetensors")
        metadata.pop("sha256")
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


@pytest.mark.parametrize("content", ["{}", '{"steps": 3}'])
def test_a_summary_of_nothing_is_a_sentence(pretrained, tmp_path, call, content):
    run = shutil.copytree(pretrained, tmp_path / "run")
    (run / "summary.json").write_text(content)
    code, _, err = call("resume", run)
    assert code == 1 and "summary.json is not the summary of a run" in " ".join(err.split())


@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="there is no /proc here")
@pytest.mark.parametrize("command", ["resume", "report"])
def test_the_folder_of_a_process_that_has_ended_is_a_sentence(call, command):
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # until it is waited for, its folder is there, but empty
    code, _, err = call(command, f"/proc/{process.pid}/cwd")
    process.wait()
    assert code == 1 and "Traceback" not in err and "/cwd" in err


@pytest.mark.parametrize("name", ["summary.json", "choices.json", "classes.json", "skipped.txt"])
def test_pipes_and_devices_are_not_read(pretrained, tmp_path, call, name):
    folder = Path(shutil.copytree(pretrained, tmp_path / "run"))
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    assert call("report", folder)[0] == 0  # instead of waiting forever


def test_a_path_that_is_too_long_is_a_sentence(call):
    code, _, err = call("check", "a" * 300)
    assert code == 1 and "too long" in err and err.count("\n") == 1
