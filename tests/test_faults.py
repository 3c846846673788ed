"""Runs in bad circumstances: each is one sentence, and nothing is lost. `make test-faults` has the long forms."""

import os
import random
import shutil
import time

import numpy as np
import pytest
import torch
from rich.console import Console

import jcl
from fault_tools import (
    FULL,
    READ_ONLY,
    SmallDisk,
    assert_never_without_a_checkpoint,
    at_steps,
    live,
    once_written,
    settings_for,
    small_disk,
)
from jcl.commands.pretrain import pretrain, resume
from jcl.commands.run import Run
from jcl.data import open_data
from jcl.data.shards.write import write_shards
from jcl.errors import DataError, RunError, SettingsError
from jcl.runs.checkpoint import list_checkpoints, newest_checkpoint
from jcl.runs.metrics import read_metrics
from jcl.settings.values import settings_text
from run_tools import QUIET, assert_same, state, stop_after
from small_runs import drawn_pixels, tiny_settings, write_image_folder


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk") as small:
        yield small


def sentences(console: Console) -> list[str]:
    return [line for line in console.export_text().splitlines() if "could not be written" in line or "again" in line]


class TestDisk:
    @pytest.mark.parametrize("trouble", ["full", "read-only"])
    def test_for_a_while_costs_one_sentence_a_file_and_nothing_else(
        self, npz, unbroken, disk: SmallDisk, console, monkeypatch, trouble
    ):
        begin, end = (disk.fill, disk.free) if trouble == "full" else (disk.read_only, disk.writable)
        at_steps(monkeypatch, {5: once_written(begin), 10: once_written(end)})
        run = pretrain(settings_for(npz), disk.place / "run", console=console)
        said = sentences(console)
        reason = FULL if trouble == "full" else READ_ONLY
        checkpoints = [line for line in said if "step-000000008.safetensors could not be written" in line]
        assert len(checkpoints) == 1 and reason in checkpoints[0]
        lines = [line for line in said if "metrics.jsonl could not be written" in line]  # one may fit in what is left
        assert len(lines) <= 1 if trouble == "full" else len(lines) == 1 and reason in lines[0]
        assert len(said) == len(lines) + len(checkpoints)
        assert_same(run, unbroken)

    @pytest.mark.parametrize("trouble", ["full", "read-only"])
    def test_to_the_end_stops_with_the_last_good_checkpoint_named(
        self, npz, unbroken, disk: SmallDisk, monkeypatch, trouble
    ):
        begin, end = (disk.fill, disk.free) if trouble == "full" else (disk.read_only, disk.writable)
        folder = disk.place / "run"
        with monkeypatch.context() as patch:
            at_steps(patch, {6: once_written(begin)})
            said = (
                r"step-000000012.safetensors could not be written.*stopped after step 12.*"
                rf"step-000000004.safetensors.*`jcl resume {folder}`"
            )
            with pytest.raises(RunError, match=said):
                pretrain(settings_for(npz), folder, console=QUIET)
        with pytest.raises(RunError, match=FULL if trouble == "full" else READ_ONLY):  # nor can it be resumed yet
            resume(folder, console=QUIET)
        assert [path.name for path in list_checkpoints(folder / "checkpoints")] == ["step-000000004.safetensors"]
        end()
        assert_same(resume(folder, console=QUIET), unbroken)

    def test_a_wish_to_stop_that_cannot_be_saved_says_so(self, npz, unbroken, disk: SmallDisk, monkeypatch):
        with monkeypatch.context() as patch:
            stop_after(patch, 6, 15)
            at_steps(patch, {5: once_written(disk.fill)})
            with pytest.raises(RunError, match=r"could not be written.*stopped after step 6"):
                pretrain(settings_for(npz), disk.place / "run", console=QUIET)
        disk.free()
        assert_same(resume(disk.place / "run", console=QUIET), unbroken)

    def test_full_from_the_start_is_a_sentence(self, npz, disk: SmallDisk):
        disk.fill()
        with pytest.raises(RunError, match=FULL):
            pretrain(settings_for(npz), disk.place / "run", console=QUIET)

    def test_tensorboard_goes_without(self, npz, disk: SmallDisk, console, monkeypatch, capfd):
        at_steps(monkeypatch, {5: disk.fill, 10: disk.free})
        run = pretrain(settings_for(npz, record__tensorboard=True), disk.place / "run", console=console)
        assert run.summary["steps"] == 12
        assert "Traceback" not in capfd.readouterr().err + console.export_text()


@pytest.mark.parametrize("place", ["length", "header", "first tensor", "middle", "tail"])
def test_a_bit_flipped_in_the_newest_checkpoint(unbroken, stopped, console, place):
    newest = list_checkpoints(stopped / "checkpoints")[-1]
    content = bytearray(newest.read_bytes())
    header_end = 8 + int.from_bytes(content[:8], "little")
    at = {"length": 0, "header": 40, "first tensor": header_end, "middle": len(content) // 2, "tail": -1}[place]
    content[at] ^= 0x10
    newest.write_bytes(content)
    run = resume(stopped, console=console)
    said = console.export_text()
    assert f"Skipped checkpoint: {newest}" in said and "Resuming from" in said and "step-000000008.safetensors" in said
    assert_same(run, unbroken)


def test_no_good_checkpoint_left_is_a_sentence_and_nothing_is_begun_anew(stopped):
    for path in list_checkpoints(stopped / "checkpoints"):
        path.write_bytes(path.read_bytes()[:-1])
    before = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}
    with pytest.raises(RunError, match=r"checkpoints in .* are damaged"):
        resume(stopped, console=QUIET)
    assert {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()} == before


def test_killed_at_any_moment(npz, unbroken, tmp_path):
    (tmp_path / "settings.yaml").write_text(settings_text(settings_for(npz)))
    lives = [
        {"event": 12},  # right after it has its name
        {"event": 6},  # written, not yet flushed
        {"event": 9},  # flushed, not yet renamed
        {"seconds": random.uniform(0.2, 0.5)},
        {},
    ]
    left = live(tmp_path / "run", tmp_path / "settings.yaml", lives, tmp_path / "cache")
    assert [life["ended"] for life in left[:3]] == [-9, -9, -9] and left[-1]["ended"] == 0
    assert_never_without_a_checkpoint(left)
    assert left[0]["newest"] == 4 and left[1]["partial"] and left[2]["partial"] and left[-1]["partial"] == []
    assert_same(Run(tmp_path / "run"), unbroken)


class TestData:
    def test_a_folder_deleted_during_the_run(self, tmp_path, monkeypatch):
        photos, aside = write_image_folder(tmp_path / "photos"), tmp_path / "aside"
        settings = settings_for(photos, record__knn_every=0)
        whole = pretrain(settings, tmp_path / "whole", console=QUIET)
        with monkeypatch.context() as patch:
            at_steps(patch, {2: lambda: photos.rename(aside)})
            with pytest.raises(DataError, match=r"None of the images can be read.*after step 2"):
                pretrain(settings, tmp_path / "run", console=QUIET)
        with pytest.raises(DataError):
            resume(tmp_path / "run", console=QUIET)
        aside.rename(photos)
        again = resume(tmp_path / "run", console=QUIET)
        mine, theirs = state(again), state(whole)
        assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []

    def test_a_shard_cut_off_during_the_run(self, tmp_path, monkeypatch, console):
        """What is cut off is skipped and listed, and the rest trained on."""
        shards = tmp_path / "shards"
        write_shards(open_data(str(write_image_folder(tmp_path / "photos", 40))), shards)
        file = next(shards.glob("*.tar"))
        cut = lambda: os.truncate(file, file.stat().st_size // 2)  # noqa: E731
        with monkeypatch.context() as patch:
            at_steps(patch, {1: cut})
            settings = settings_for(shards, record__knn_every=0, data__max_failed_share=0.5)
            run = pretrain(settings, tmp_path / "run", console=console)
        assert run.summary["steps"] == 15
        assert "skipped.txt" in console.export_text()
        assert len((run.path / "skipped.txt").read_text().splitlines()) > 5


class TestTwoAtOnce:
    def test_a_run_in_progress_is_not_resumed_but_can_be_read(self, npz, tmp_path, monkeypatch):
        found = []

        def meanwhile() -> None:
            for again in (lambda: resume(tmp_path / "run", console=QUIET), lambda: pretrain_again()):
                with pytest.raises(RunError) as caught:
                    again()
                found.append(str(caught.value))
            found.append(jcl.load_backbone(tmp_path / "run")(torch.zeros(1, 3, 16, 16)))

        def pretrain_again() -> None:
            pretrain(settings_for(npz), tmp_path / "run", console=QUIET)

        at_steps(monkeypatch, {9: meanwhile})
        run = pretrain(settings_for(npz), tmp_path / "run", console=QUIET)
        resumed, trained, features = found
        assert f"Process {os.getpid()} on" in resumed and "already holds a run" in trained
        assert features.shape == (1, 128) and features.isfinite().all()
        assert run.summary["steps"] == 12 and not (run.path / ".lock").exists()


def test_checkpoints_by_the_clock_fall_between_steps(npz, unbroken, tmp_path, monkeypatch):
    """A run that saves after every step ends, and resumes, as one that does not."""
    settings = tiny_settings(npz, record__checkpoint_every=100, record__checkpoint_minutes=1e-9, record__keep=100)
    with monkeypatch.context() as patch:
        at_steps(patch, {step: lambda: time.sleep(0.05) for step in range(1, 12)})
        run = pretrain(settings, tmp_path / "run", console=QUIET)
    steps = [int(path.stem.removeprefix("step-")) for path in list_checkpoints(run.path / "checkpoints")]
    assert len(steps) > 3 and steps[-1] == 12  # a step is not saved while the one before is still written
    mine, theirs = state(run), state(unbroken)
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []
    within = next(step for step in steps if step % 4)
    for step in {within, steps[-2], *({4, 8} & set(steps))}:
        again = tmp_path / f"from-{step}"
        shutil.copytree(run.path, again, ignore=shutil.ignore_patterns("summary.json", "backbone*"))
        for path in list_checkpoints(again / "checkpoints"):
            if int(path.stem.removeprefix("step-")) > step:
                path.unlink()
        resumed = resume(again, console=QUIET)
        mine = state(resumed)
        assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []
        assert [line["step"] for line in read_metrics(again / "metrics.jsonl")] == [
            line["step"] for line in read_metrics(unbroken.path / "metrics.jsonl")
        ]


class TestFromElsewhere:
    """A run folder that somebody else has prepared."""

    def test_settings_that_would_run_a_command(self, stopped, tmp_path):
        (stopped / "settings.yaml").write_text(f"train: !!python/object/apply:os.system ['touch {tmp_path}/hacked']")
        with pytest.raises(SettingsError, match="is not valid YAML"):
            resume(stopped, console=QUIET)
        assert not (tmp_path / "hacked").exists()

    def test_a_checkpoint_that_would_run_a_command(self, stopped, tmp_path):
        class Hostile:
            def __reduce__(self):
                return os.system, (f"touch {tmp_path}/hacked",)

        good = newest_checkpoint(stopped / "checkpoints")
        torch.save({"model": Hostile()}, stopped / "checkpoints" / "step-000000099.safetensors")
        assert newest_checkpoint(stopped / "checkpoints") == good
        for path in list_checkpoints(stopped / "checkpoints"):
            torch.save({"model": Hostile()}, path)
        with pytest.raises(RunError, match="All checkpoints in"):
            resume(stopped, console=QUIET)
        assert not (tmp_path / "hacked").exists()

    def test_data_that_would_run_a_command(self, npz, tmp_path):
        class Hostile:
            def __reduce__(self):
                return os.system, (f"touch {tmp_path}/hacked",)

        evil = np.empty(40, dtype=object)
        evil[:] = [Hostile() for _ in range(40)]
        np.savez(tmp_path / "evil.npz", x_train=drawn_pixels(40), y_train=evil)
        with pytest.raises(DataError):
            pretrain(settings_for(tmp_path / "evil.npz"), tmp_path / "run", console=QUIET)
        assert not (tmp_path / "hacked").exists()
