"""Commands that benchmarks run as processes of their own: how they end."""

import importlib
import os
import signal
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SAVES_ITSELF = """
import os, signal, sys, time
def save(*_):
    os.write(1, b"saved\\n")  # a second print inside the first one is refused
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
def test_what_runs_saves_itself_when_we_are_asked_to_end(processes, tmp_path, capsys, number):
    log, before = tmp_path / "log.txt", signal.getsignal(number)
    with pytest.raises(SystemExit) as stop, processes.Processes() as running:
        process = running.start([sys.executable, "-c", SAVES_ITSELF], log)
        while "ready" not in log.read_text():
            assert process.poll() is None
        os.kill(os.getpid(), number)
        running.pause()
    assert stop.value.code == 75
    assert log.read_text().split() == ["ready", "saved"] and process.returncode == 75
    assert f"{number.name} received" in capsys.readouterr().err
    assert signal.getsignal(number) == before


def test_nothing_is_begun_any_more_once_we_are_asked_to_end(processes, tmp_path):
    with pytest.raises(SystemExit), processes.Processes() as running:
        os.kill(os.getpid(), signal.SIGTERM)
        running.start([sys.executable, "-c", ""], tmp_path / "log.txt")
    assert not (tmp_path / "log.txt").exists()


@pytest.mark.parametrize(("at_once", "order"), [(1, "a1 a2 b1 b2"), (2, "a1 b1")])
def test_a_task_does_all_its_commands_before_another_begins_in_its_place(processes, tmp_path, at_once, order):
    begun = []

    def task(name, running):
        for number in (1, 2):
            begun.append(f"{name}{number}")
            yield running.start([sys.executable, "-S", "-c", ""], tmp_path / f"{begun[-1]}.txt")

    def nothing():
        yield from ()

    with processes.Processes() as running:
        running.work_through([nothing(), task("a", running), nothing(), task("b", running)], at_once)
    assert " ".join(begun).startswith(order) and sorted(begun) == ["a1", "a2", "b1", "b2"]
    assert len(list(tmp_path.glob("*.txt"))) == 4


def test_what_lies_beside_a_run_that_never_began_stays(processes, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "settings.yaml").write_text("")
    (folder / "notes.txt").write_text("mine")
    assert "pretrain" in processes.training_command(folder, tmp_path / "r.json", Path("a.npz"), {"seed": 1}, [])
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
