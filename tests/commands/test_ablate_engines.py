"""Cells in processes of their own: at once on this machine, and as tasks of a Ray cluster."""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from ablation_tools import ablated, holder, small_plan
from jcl.signals import StopRequest
from jcl.studies.ablation import CellFolder
from jcl.studies.engines import (
    CellProcess,
    Slot,
    connect_ray,
    default_share,
    local_slots,
    ray_engine,
)
from launch_tools import gone, settings_options, wait_until
from small_runs import TINY_VALUES

VALUES = TINY_VALUES | {"record.knn_every": 0}


def test_what_a_cell_failed_with_before_is_not_told_again(tmp_path, monkeypatch):
    folder = CellFolder(tmp_path)
    folder.fail("the disk was full.")
    monkeypatch.setattr(sys, "executable", "/bin/false")  # it dies before it begins
    outcome = CellProcess(tmp_path, Slot()).outcome()
    assert outcome.state == "failed" and "code 1" in outcome.error


def test_a_worker_that_watches_a_process_needs_no_pytorch():
    program = "import sys, jcl.studies.engines; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


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
    assert "temperature 0.3, seed 0: stopped" in err
    assert "SIGINT received: 1 cell" in err and "Error" not in err and "Traceback" not in err
    assert all(gone(pid) for pid in seen.values())
    killed, stopped = sorted(out.glob("cells/*"))
    assert "SIGTERM received: stopped after step" in (stopped / "log.txt").read_text()
    assert list((stopped / "checkpoints").glob("step-*")) and not (stopped / "failure.json").exists()
    assert "SIGKILL" in json.loads((killed / "failure.json").read_text())["error"]


def test_a_real_ray_with_nothing_to_train(npz, tmp_path):
    """Cells that are done, that a node does not see, and that no node has room for; `tests/faults` has the others."""
    pytest.importorskip("ray")
    ablated(small_plan(npz, "temperature=0.1", train__epochs=1), tmp_path / "out")
    (done,), elsewhere, said, stop = (tmp_path / "out/cells").iterdir(), tmp_path / "elsewhere", [], StopRequest()
    with connect_ray(None) as ray:
        assert default_share(ray, "cpu", 4) == (1, 0)
        assert default_share(ray, "auto", 4, 0.5, 2.0) == (2, 0.5)
        outcomes = {each.folder: each for each in ray_engine(ray, 1, 0, said.append)([done, elsewhere], stop)}
        stop.signal_name = "SIGINT"
        waiting = list(ray_engine(ray, 1000, 0, said.append)([done], stop))
    assert outcomes[done].state == "done" and outcomes[elsewhere].state == "failed"
    assert "--out" in outcomes[elsewhere].error
    assert [outcome.state for outcome in waiting] == ["stopped"]
    assert len(said) == 1 and "1000 CPUs" in said[0]
    assert not elsewhere.exists()


def test_ray_that_is_not_there(call, npz, tmp_path, monkeypatch):
    over = ("ablate", npz, "--over", "temperature=0.1", "--engine", "ray", "--out", tmp_path / "out")
    code, _, err = call(*over, "--address", "127.0.0.1:1", *settings_options(VALUES))
    assert code == 1 and "127.0.0.1:1" in err and "Traceback" not in err
    monkeypatch.setitem(sys.modules, "ray", None)
    code, _, err = call(*over, *settings_options(VALUES))
    assert code == 2 and "joint-contrastive-learning[ray]" in err
    assert not (tmp_path / "out").exists()


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
