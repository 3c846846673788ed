"""Ablations that lose what they run on: a node of a cluster, or the command that started the cells."""

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from ablation_tools import ablated, holder, results, small_plan
from jcl.studies.engines import local_engine, local_slots
from launch_tools import JCL, Launch, ancestors, gone, settings_options, wait_until
from small_runs import TINY_VALUES

pytestmark = pytest.mark.faults
OVER = "temperature=0.1,0.2,0.3,0.5"
CHANGES = {"train.epochs": 40, "record.checkpoint_every": 1, "record.keep": 1000, "record.knn_every": 0}


VALUES = TINY_VALUES | {"record.knn_every": 0}


def test_a_node_killed_in_the_middle_changes_no_digit(npz, tmp_path, monkeypatch):
    """Two nodes for three cells. One dies with all its processes; its cell goes on on the other from its checkpoint."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    small = {"object_store_memory": 80 << 20, "include_dashboard": False}
    watchful = {"health_check_period_ms": 500, "health_check_failure_threshold": 4}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "_system_config": watchful, **small})
    try:
        second = cluster.add_node(num_cpus=1, **small)
        out = tmp_path / "ray"
        options = ["--engine", "ray", "--address", cluster.address, "--out", str(out)]
        command = [*JCL, "ablate", str(npz), "--over", OVER, *options, *settings_options(TINY_VALUES | CHANGES)]
        with Launch(command, tmp_path / "said") as launch:
            lost = wait_until(lambda: trained_on(second, out))
            cluster.remove_node(second, allow_graceful=False)
            assert launch.wait() == 0, launch.said
            said = launch.said
    finally:
        cluster.shutdown()
    assert "Lost node" in said and said.count(": linear") == 4
    assert [log.parent for log in out.glob("cells/*/log.txt") if "Resuming from" in log.read_text()] == [lost]

    plan = small_plan(npz, OVER, **{name.replace(".", "__"): value for name, value in CHANGES.items()})
    ablated(plan, tmp_path / "local", local_engine(local_slots("cpu", 2))).raise_if_incomplete()
    assert results(out) == results(tmp_path / "local") and len(results(out)) == 4


def trained_on(node: Any, out: Path) -> Path | None:
    """The cell that trains on a node, once it has a checkpoint."""
    (raylet,) = node.all_processes["raylet"]
    time.sleep(0.1)  # there are better uses of two cores than to look again at once
    for cell in out.glob("cells/*"):
        pid = holder(cell)
        if pid and raylet.process.pid in ancestors(pid) and any(cell.glob("checkpoints/step-*")):
            return cell
    return None


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


def test_ray_carries_out_what_is_missing_to_the_same_digits(call, npz, tmp_path, monkeypatch):
    pytest.importorskip("ray")
    ablated(small_plan(npz, "temperature=0.1,0.3"), tmp_path / "here")
    shutil.copytree(tmp_path / "here", tmp_path / "ray")
    done, missing = sorted((tmp_path / "ray/cells").iterdir())
    shutil.rmtree(missing)
    before = (done / "result.json").stat().st_mtime_ns
    options = ("--engine", "ray", "--out", tmp_path / "ray", "--json", "figures.json", *settings_options(VALUES))
    code, out, err = call("ablate", npz, "--over", "temperature=0.1,0.3", *options)
    assert code == 0, err
    assert "[2/2] temperature 0.3, seed 0: linear" in err
    assert out.lstrip().startswith("┏") and "temperature" in out  # and nothing of Ray's
    assert results(tmp_path / "ray") == results(tmp_path / "here")
    assert (done / "result.json").stat().st_mtime_ns == before
    assert json.loads(Path("figures.json").read_text())["cells_done"] == 2
