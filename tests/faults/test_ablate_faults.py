"""Cells of an ablation whose command is killed."""

import json
import os
import signal

import pytest

from ablation_tools import holder
from launch_tools import JCL, Launch, gone, settings_options, wait_until
from small_runs import TINY_VALUES

pytestmark = pytest.mark.faults


def test_cells_do_not_outlive_the_command_that_started_them(npz, tmp_path):
    """Killed, it cannot pass anything on; the cell notices, saves itself, and goes on with the next command."""
    out = tmp_path / "out"
    long = settings_options(TINY_VALUES | {"train.epochs": 5000, "record.checkpoint_every": 5000})
    command = [*JCL, "ablate", str(npz), "--over", "temperature=0.1", "--out", str(out), *long]
    with Launch(command, tmp_path / "said") as launch:
        (cell,) = wait_until(lambda: list(out.glob("cells/*")))
        pid = wait_until(lambda: holder(cell))
        os.kill(launch.process.pid, signal.SIGKILL)
        wait_until(lambda: gone(pid), seconds=20)
    assert "SIGTERM received: stopped after step" in (cell / "log.txt").read_text()
    assert len(list(cell.glob("checkpoints/step-*"))) == 1
    assert json.loads((cell / "cell.json").read_text())["seed"] == 0 and not (cell / "failure.json").exists()
