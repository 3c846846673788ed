"""Commands that benchmarks run as subprocesses."""

import importlib
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from launch_tools import wait_until

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SAVES_ITSELF = """
import os, signal, sys, time
def save(*_):
    os.write(1, b"saved\\n")
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def processes(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("processes")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_commands_save_their_work_on_a_signal(processes, tmp_path, number):
    log, before, running = tmp_path / "log.txt", signal.getsignal(number), processes.Processes()

    def interrupt():
        wait_until(lambda: log.exists() and "ready" in log.read_text())
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt, daemon=True).start()
    tasks = [lambda: running.run([sys.executable, "-c", SAVES_ITSELF], log), lambda: pytest.fail("started")]
    with pytest.raises(SystemExit) as stop:
        running.run_tasks(tasks, at_once=1)
    assert stop.value.code == 75 and log.read_text().split() == ["ready", "saved"]
    assert signal.getsignal(number) == before


def test_failures_are_returned_and_other_tasks_run(processes, tmp_path):
    running, done = processes.Processes(), []
    command = [sys.executable, "-S", "-c", "raise SystemExit('Error: no good.')"]
    tasks = [lambda: running.run(command, tmp_path / "log.txt"), lambda: done.append(1)]
    assert running.run_tasks(tasks, at_once=2) == [f"{tmp_path / 'log.txt'} ends with: Error: no good."]
    assert done == [1]


def test_a_run_without_checkpoint_starts_again_and_another_is_resumed(processes, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "settings.yaml").write_text("")
    (folder / "notes.txt").write_text("mine")
    arguments = (folder, tmp_path / "r.json", Path("a.npz"), {"seed": 1}, ["train.lr=1"])
    assert processes.training_command(*arguments)[3:] == [
        *("pretrain", "a.npz", "--seed", "1", "--set", "train.lr=1", "--out", str(folder)),
        *("--json", str(tmp_path / "r.json")),
    ]
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    (folder / "checkpoints").mkdir()
    assert processes.training_command(*arguments)[3:5] == ["resume", str(folder)]
