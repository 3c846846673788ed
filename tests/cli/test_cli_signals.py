"""Real signals to real processes: what a scheduler or a lost connection does to a run, and the same command again."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jcl import signals
from jcl.commands.run import Run
from jcl.runs.checkpoint import list_checkpoints
from jcl.signals import STOP_SIGNALS, StopRequest
from launch_tools import JCL, LONG_VALUES, Launch, gone, settings_options, wait_until
from run_tools import stop_after
from small_runs import TINY_VALUES

BEFORE_IMPORT = """
import os, signal, sys
class Sender:
    def find_spec(self, name, path=None, target=None):
        if name != {module!r}: return
        try: exec("os.kill(os.getpid(), signal.{name})")  # as dataclasses run code
        except KeyboardInterrupt:  # as some compiled modules do
            if name == "numpy": raise RecursionError
            raise
sys.meta_path.insert(0, Sender())
from jcl.__main__ import main
main()
"""


@pytest.mark.parametrize(
    ("module", "name", "code"),
    [
        *(("jcl.cli", "SIGINT", 130), ("numpy", "SIGTERM", 75)),
    ],
)
def test_a_signal_during_start_up_leaves_nothing(tmp_path: Path, module: str, name: str, code: int):
    (tmp_path / "program.py").write_text(BEFORE_IMPORT.format(module=module, name=name))
    command = [sys.executable, "-m", "program", "pretrain", "photos", "--out", str(tmp_path / "run")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ended.returncode == code and "Traceback" not in ended.stderr and "Error" not in ended.stderr
    assert not (tmp_path / "run").exists()


def test_a_signal_that_an_import_swallowed_stops_the_run(call, npz, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(signals, "received", "SIGTERM")
    code, _, err = call("pretrain", npz, *settings_options(TINY_VALUES), "--out", "run")
    assert code == 75 and "SIGTERM" in err and not Path("run").exists()


@pytest.fixture
def hangup() -> Iterator[None]:
    """SIGHUP as in a terminal, also if the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangup")
def test_a_requeued_command_continues_its_run(call, npz, monkeypatch):
    run = Path("run")
    job = ["pretrain", npz, *settings_options(TINY_VALUES | {"train.epochs": 2}), "--out", run, "--resume", "auto"]
    for step, number in ((3, signal.SIGUSR1), (6, signal.SIGHUP)):
        with monkeypatch.context() as patch:
            stop_after(patch, step, number)
            code, _, err = call(*job)
        assert code == 75 and f"{number.name} received: stopped after step {step}" in err
        assert ("Resuming from" in err) == (step > 3)
    assert call(*job)[0] == 0 and Run(run).summary["steps"] == 8
    code, out, err = call(*job)
    assert code == 0 and "finished" in err and "8" in out
    other = [str(part).replace("train.lr=0.05", "train.lr=0.5") for part in job]
    code, _, err = call(*other)
    assert code == 1 and "train.lr" in err and err.count("\n") == 1
    code, _, err = call(*job[:-2])
    assert code == 1 and "finished" in err and "--out" in err


def test_without_out_the_newest_unfinished_run_is_continued(call, npz, monkeypatch):
    job = ["pretrain", npz, *settings_options(TINY_VALUES | {"train.epochs": 1}), "--resume", "auto"]
    with monkeypatch.context() as patch:
        stop_after(patch, 2, signal.SIGTERM)
        assert call(*job)[0] == 75
    assert call(*job)[0] == 0
    assert [run.name for run in Path("runs").iterdir()] == ["jcl-small-001"]
    assert call(*job)[0] == 0
    assert len(list(Path("runs").iterdir())) == 2


def test_nohup_is_respected():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested and signal.SIGHUP in STOP_SIGNALS
    finally:
        signal.signal(signal.SIGHUP, before)


CHILD = """
import sys, time
from pathlib import Path
from jcl import signals
signals.stop_with_parent()
with signals.StopRequest() as stop:
    Path(sys.argv[1]).write_text("training")
    while not stop.requested:
        time.sleep(0.01)
Path(sys.argv[1]).write_text(f"saved after {stop.signal_name}")
"""
PARENT = """
import os, subprocess, sys
subprocess.run([sys.executable, "-c", *sys.argv[1:]], env=os.environ | {"JCL_STARTED_BY": str(os.getpid())})
"""


def test_a_process_saves_and_ends_when_its_parent_is_killed(tmp_path: Path):
    said = tmp_path / "said"
    with subprocess.Popen([sys.executable, "-c", PARENT, CHILD, str(said)]) as parent:
        wait_until(lambda: said.exists() and said.read_text())
        parent.kill()
    assert wait_until(lambda: said.read_text().startswith("saved") and said.read_text(), 30) == "saved after SIGTERM"


@pytest.mark.faults  # for its length
def test_ranks_save_and_end_when_their_launcher_is_killed(npz, tmp_path: Path):
    run = tmp_path / "run"
    values = settings_options(LONG_VALUES | {"train.epochs": 4000, "record.checkpoint_every": 4000})
    with Launch(
        [*JCL, "pretrain", str(npz), *values, "--out", str(run), "--devices", "2"], tmp_path / "said"
    ) as launch:
        ranks = launch.training_ranks(run)
        wait_until(lambda: (run / "metrics.jsonl").exists() and Run(run).metrics)
        launch.process.kill()
        wait_until(lambda: all(map(gone, ranks.values())), 30)
    assert list_checkpoints(run / "checkpoints") and not (run / "summary.json").exists()
