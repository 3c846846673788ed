"""Cells in processes of their own, several at once."""

import json
import os
import signal
import sys
import threading

import pytest

from ablation_tools import holder
from jcl.signals import StopRequest
from jcl.studies.ablation import CellFolder, Slot, local_slots, run_in_slots
from launch_tools import gone, settings_options, wait_until
from small_runs import TINY_VALUES

VALUES = TINY_VALUES | {"record.knn_every": 0}


def test_what_a_cell_failed_with_before_is_not_told_again(tmp_path, monkeypatch):
    folder = CellFolder(tmp_path)
    folder.fail("the disk was full.")
    monkeypatch.setattr(sys, "executable", "/bin/false")  # it dies before it begins
    assert list(run_in_slots([Slot()], [tmp_path], StopRequest())) == [tmp_path]
    assert "code 1" in str(folder.failure())


@pytest.mark.faults  # for its length
def test_one_cell_killed_and_the_others_stopped_by_ctrl_c(call, npz, tmp_path):
    """Real processes, one killed as by a lack of memory, and a real signal to the command."""
    out, seen = tmp_path / "out", dict[str, int]()

    def meddle() -> None:
        cells = wait_until(lambda: len(found := sorted(out.glob("cells/*"))) == 2 and found)
        seen["killed"], seen["stopped"] = (wait_until(lambda cell=cell: holder(cell)) for cell in cells)
        os.kill(seen["killed"], signal.SIGKILL)
        wait_until((cells[0] / "failure.json").exists)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=meddle, daemon=True)
    thread.start()
    long = settings_options(VALUES | {"train.epochs": 5000, "record.checkpoint_every": 5000})
    code, _, err = call("ablate", npz, "--over", "temperature=0.1,0.3", "--at-once", 2, "--out", out, *long)
    thread.join()
    assert code == 75, err
    assert "[1/2] temperature 0.1, seed 0: failed: its process was killed by SIGKILL" in err
    assert "1 cell unfinished" in err and "Error" not in err and "Traceback" not in err
    assert all(gone(pid) for pid in seen.values())
    killed, stopped = sorted(out.glob("cells/*"))
    assert "SIGTERM received: stopped after step" in (stopped / "log.txt").read_text()
    assert list((stopped / "checkpoints").glob("step-*")) and not (stopped / "failure.json").exists()
    assert "SIGKILL" in json.loads((killed / "failure.json").read_text())["error"]


def test_places_on_this_machine(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert local_slots("cpu", 1) == [Slot()]
    share = max(1, len(os.sched_getaffinity(0)) // 3)
    assert local_slots("cpu", 3) == [Slot({"OMP_NUM_THREADS": str(share)}, share)] * 3
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    gpus = [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in local_slots("auto", 2)]
    assert gpus == ["0", "1", "0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-7")
    gpus = [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in local_slots("cuda", 1)]
    assert gpus == ["5", "GPU-7"]
    assert "CUDA_VISIBLE_DEVICES" not in local_slots("cuda:1", 2)[0].environment
