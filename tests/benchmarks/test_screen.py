"""The screening of settings, and the subprocesses of benchmarks."""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
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
    (failed,) = running.run_tasks(tasks, at_once=2)
    assert "log.txt" in failed and "no good" in failed and done == [1]


def test_a_run_without_checkpoint_starts_again_and_another_is_resumed(processes, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "settings.yaml").write_text("")
    (folder / "notes.txt").write_text("mine")
    arguments = (folder, tmp_path / "r.json", Path("a.npz"), {"seed": 1}, ["train.lr=1"])
    assert processes.training_command(*arguments)[3:9] == ["pretrain", "a.npz", "--seed", "1", "--set", "train.lr=1"]
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    (folder / "checkpoints").mkdir()
    assert processes.training_command(*arguments)[3:5] == ["resume", str(folder)]


@pytest.fixture
def data(tmp_path):
    np.savez(tmp_path / "a.npz", x_train=np.zeros((6, 8, 8, 3), np.uint8), y_train=np.arange(6))
    return tmp_path / "a.npz"


@pytest.fixture
def screen(processes, monkeypatch, data, tmp_path):
    """Runs the benchmark; trainings and probes only write invented results."""
    monkeypatch.setattr(importlib.import_module("held_out"), "HELD_OUT", 4)
    module = importlib.import_module("screen")

    def run(_self, command, log):
        result = Path(command[-1])
        lr, queue = module.design(2)[int(result.stem.split("-")[1])][:2]
        log.write_text("done")
        figures = {"knn_top1": 60.0 + 2 * lr, "loss": 1.0, "seconds": 2.0, "linear_top1": 70.0 + 4 * queue}
        result.write_text(json.dumps(figures))

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["screen.py", str(data), "--recipe", "demo", "--device", "cpu", *words])
        module.main()

    monkeypatch.setattr(module.Processes, "run", run)
    call.module, call.out = module, tmp_path / "out"
    return call


def test_effects_and_probes_of_runs_that_are_done(screen, tmp_path):
    vary = ("--vary", "train.lr=0.1,0.3", "--vary", "method.queue_size=16,32")
    words = ("--out", str(screen.out), "--json", str(tmp_path / "found.json"), "--at-once", "4", *vary)
    screen(*words)
    before = json.loads((tmp_path / "found.json").read_text())
    assert "linear_effects" not in before and before["effects"]["train.lr"] == pytest.approx(2.0)
    (screen.out / "run-0.txt").unlink()
    screen(*words, "--linear")
    after = json.loads((tmp_path / "found.json").read_text())
    assert after["effects"] == before["effects"] and len(after["runs"]) == 8
    assert after["linear_effects"]["method.queue_size"] == pytest.approx(4.0)
    assert not (screen.out / "run-0.txt").exists(), "what was trained is trained again"
    with pytest.raises(SystemExit, match="another screening"):
        screen("--out", str(screen.out), "--vary", "train.lr=0.1,0.2")


@pytest.mark.parametrize(
    "words", ["", "--vary train.lr=1,2 --vary train.lr=2,3", "--vary train.lr=1,1", "--vary nonsense=1,2"]
)
def test_invalid_arguments_leave_nothing(screen, words):
    with pytest.raises(SystemExit):
        screen("--out", str(screen.out), *words.split())
    assert not screen.out.exists()


@pytest.mark.parametrize(("settings", "runs"), [(7, 8), (5, 8), (8, 12), (11, 12)])
def test_an_effect_is_what_a_setting_adds(screen, settings, runs):
    rows, names = screen.module.design(settings), [f"section.s{number}" for number in range(settings)]
    effects = screen.module.effects_of(rows, [50.0 + 2.0 * row[0] - 1.0 * row[4] for row in rows], names)
    assert len(rows) == runs and len(effects) == runs - 1
    assert effects.pop(names[0]) == pytest.approx(2.0) and effects.pop(names[4]) == pytest.approx(-1.0)
    assert list(effects.values()) == pytest.approx([0.0] * (runs - 3))


@pytest.mark.faults  # for its length
def test_runs_stop_and_save_when_the_screening_is_killed(data, tmp_path):
    paths = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r})"
    program = f"{paths}; import held_out, screen; held_out.HELD_OUT = 2; screen.main()"
    words = ["--vary", "train.lr=0.1,0.3", "--epochs", "100000", "--set", "train.batch_size=2", "--recipe", "demo"]
    run = tmp_path / "out/run-0"
    lock, metrics = run / ".lock", run / "metrics.jsonl"
    command = [sys.executable, "-c", program, data, "--device", "cpu", "--out", tmp_path / "out", *words]
    with subprocess.Popen(command) as screening:
        try:
            wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0)
        finally:
            screening.kill()
    pid = json.loads(lock.read_text())["pid"]
    try:
        wait_until(lambda: not lock.exists(), 30)
        assert list((run / "checkpoints").glob("step-*"))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
