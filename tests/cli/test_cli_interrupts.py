"""Ctrl-C at every stage of a pre-training: what is saved, what is left behind, and how to go on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import jcl
from jcl.commands.run import Run
from launch_tools import settings_options, wait_until
from run_tools import stop_after
from small_runs import TINY_VALUES, write_image_folder

TINY = settings_options(TINY_VALUES)


def test_ctrl_c_saves_the_run_and_says_how_to_go_on(call, npz, monkeypatch):
    stop_after(monkeypatch, 2, signal.SIGINT)
    code, out, err = call("pretrain", npz, *TINY, "--out", "run")
    assert code == 75 and out == ""
    assert "SIGINT received: stopped after step 2" in err and "jcl resume" in err
    assert "Error" not in err and "Traceback" not in err  # it did as it was told
    assert [path.name for path in Path("run/checkpoints").iterdir()] == ["step-000000002.safetensors"]


@pytest.mark.faults  # for its length
def test_ctrl_c_while_the_workers_start(tmp_path):
    """Sent to all processes, as a terminal does, while the one that workers are forked from imports torch."""
    photos = write_image_folder(tmp_path / "photos")
    run = tmp_path / "run"
    options = ["--set", "data.workers=2", "--set", "train.epochs=2000", "--set", "record.knn_every=0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "jcl", "pretrain", str(photos), *TINY, *options, "--out", str(run)],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_until((run / "settings.yaml").exists)
        time.sleep(0.3)
    finally:
        os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert "Traceback" not in err and "Aborted" not in err, err
    assert process.returncode == 130 and err.endswith("Interrupted.\n") and not run.exists()


def press_ctrl_c(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_before_the_first_step_leaves_nothing_behind(call, npz, monkeypatch):
    monkeypatch.setattr("jcl.commands.pretrain._announce", press_ctrl_c)
    code, out, err = call("pretrain", npz, *TINY, "--out", "run")
    assert (code, out, err) == (130, "", "Interrupted.\n") and not Path("run").exists()


def test_ctrl_c_leaves_a_folder_alone_that_was_there_before(call, npz, monkeypatch):
    monkeypatch.setattr("jcl.commands.pretrain._announce", press_ctrl_c)
    Path("mine").mkdir()
    for out in (["--out", "mine"], []):
        assert call("pretrain", npz, *TINY, *out)[0] == 130
    assert list(Path("mine").iterdir()) == [] and list(Path("runs").iterdir()) == []


def test_a_second_ctrl_c_says_what_is_left(call, npz, monkeypatch):
    def press_twice(*_: object, **__: object) -> None:
        press_ctrl_c()
        press_ctrl_c()

    with monkeypatch.context() as patch:
        patch.setattr("jcl.train.pretrain.PretrainTask.between_epochs", press_twice)
        code, out, err = call("pretrain", npz, *TINY, "--out", "my run")
        assert (code, out, err.splitlines()[-1]) == (130, "", "Interrupted.") and not Path("my run").exists()
    evaluate, calls = jcl.evaluate.knn.evaluate_knn, []

    def press_at_the_end(*given: object, **options: object) -> object:
        calls.append(given)
        return evaluate(*given, **options) if len(calls) == 1 else press_twice()

    monkeypatch.setattr("jcl.evaluate.knn.evaluate_knn", press_at_the_end)
    often = ["--set", "record.checkpoint_every=1", "--set", "record.knn_every=0"]
    code, out, err = call("pretrain", npz, *TINY, *often, "--out", "my run")
    assert code == 75 and out == "" and "Traceback" not in err
    assert "step-000000008" in err and "`jcl resume 'my run'`" in err


def test_ctrl_c_before_the_summary_says_how_to_have_the_results(call, npz, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("jcl.commands.train_run.RunTraining._write_summary", press_ctrl_c)
        code, out, err = call("pretrain", npz, *TINY, "--out", "run")
    assert code == 75 and out == "" and "`jcl resume run`" in err
    code, out, _ = call("resume", "run")
    assert code == 0 and "kNN top-1" in out


def test_ctrl_c_while_the_page_is_made_leaves_a_finished_run(call, npz, monkeypatch):
    monkeypatch.setattr("jcl.commands.report.write_report", press_ctrl_c)
    code, _, err = call("pretrain", npz, *TINY, "--set", "record.report=true", "--out", "run")
    assert code == 75 and "`jcl report run`" in err
    assert Run(Path("run")).summary["steps"] == 12
