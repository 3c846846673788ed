"""The screening of settings: what is refused, and how it goes on."""

import argparse
import contextlib
import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from launch_tools import wait_until

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def screen(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(importlib.import_module("held_out"), "HELD_OUT", 4)
    return importlib.import_module("screen")


@pytest.fixture
def asked(tmp_path):
    np.savez(tmp_path / "a.npz", x_train=np.zeros((6, 8, 8, 3), np.uint8), y_train=np.arange(6))
    return argparse.Namespace(
        data=tmp_path / "a.npz",
        recipe="demo",
        method="jcl",
        epochs=1,
        device="cpu",
        out=tmp_path / "out",
        at_once=1,
        linear=False,
        json=None,
        vary={"train.lr": (0.1, 0.3), "method.queue_size": (16, 32)},
        set=["method.temperature=0.1"],
    )


def test_a_run_that_was_stopped_is_resumed(screen, asked):
    split = screen.prepare(asked)
    values = screen.values_of((1, 0, 1), asked.vary)
    words = screen.command(0, values, split, asked)
    assert "pretrain" in words
    settings = [word for before, word in itertools.pairwise(words) if before == "--set"]
    assert settings[:3] == ["method.temperature=0.1", "train.lr=0.3", "method.queue_size=16"]
    (asked.out / "run-0/checkpoints").mkdir(parents=True)
    assert screen.command(0, values, split, asked)[3:5] == ["resume", str(asked.out / "run-0")]


def test_a_run_without_a_checkpoint_is_begun_anew(screen, asked):
    split = screen.prepare(asked)
    (asked.out / "run-0").mkdir()
    (asked.out / "run-0/settings.yaml").write_text("")
    assert "pretrain" in screen.command(0, screen.values_of((0, 0), asked.vary), split, asked)
    assert list((asked.out / "run-0").iterdir()) == []


def test_results_of_another_screening_are_not_taken_for_this_ones(screen, asked):
    screen.prepare(asked)
    screen.prepare(asked)
    asked.vary |= {"train.lr": (0.1, 0.2)}
    with pytest.raises(SystemExit, match="holds another screening"):
        screen.prepare(asked)


def test_bad_input_ends_with_a_sentence_and_leaves_nothing(screen, asked, monkeypatch):
    monkeypatch.setattr(importlib.import_module("held_out"), "HELD_OUT", 6)
    with pytest.raises(SystemExit, match="has 6 training images; more than 6"):
        screen.prepare(asked)
    asked.data = asked.data.with_name("none.npz")
    with pytest.raises(SystemExit, match="no npz file"):
        screen.prepare(asked)
    asked.data.write_bytes(b"")
    with pytest.raises(SystemExit, match="no npz file"):
        screen.prepare(asked)
    np.savez(asked.data, x_train=np.zeros((9, 8, 8, 3), np.uint8), y_train=np.arange(7))
    with pytest.raises(SystemExit, match="9 images in x_train, but 7 labels in y_train"):
        screen.prepare(asked)
    whole = asked.data.read_bytes()
    asked.data.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SystemExit, match="no npz file"):
        screen.prepare(asked)
    assert not asked.out.exists()


def test_a_folder_that_cannot_be_made_is_said(screen, asked):
    asked.out.write_text("a file")
    with pytest.raises(SystemExit, match="could not be written"):
        screen.prepare(asked)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--at-once 0 --vary train.lr=1,2", "at least one run"),
        ("", "0 settings to --vary"),
        ("--vary train.lr=1,2 --vary train.lr=2,3", "a setting twice"),
        ("--vary train.lr=1,1", "not a setting with a low and a high value"),
        ("--vary train.lr=1", "not a setting with a low and a high value"),
        ("--vary train.lr=1,", "not a setting with a low and a high value"),
    ],
)
def test_what_is_asked_wrongly_is_said(screen, monkeypatch, capsys, words, message):
    monkeypatch.setattr(sys, "argv", ["screen.py", "a.npz", "--out", "o", *words.split()])
    with pytest.raises(SystemExit):
        screen.parse_arguments()
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("vary", "message"),
    [({"nonsense": (1, 2)}, "unknown setting 'nonsense'"), ({"train.lr": (0.1, "abc")}, "'abc' for train.lr")],
)
def test_settings_that_do_not_work_are_told_before_anything_is_trained(screen, asked, monkeypatch, vary, message):
    asked.vary = vary
    monkeypatch.setattr(screen, "parse_arguments", lambda: asked)
    with pytest.raises(SystemExit, match=message):
        screen.main()
    assert not asked.out.exists()


def test_numbers_are_read_as_they_are_written(screen, monkeypatch):
    words = "--vary train.weight_decay=3e-4,0.001 --vary model.bn_groups=4,16 --vary model.head=mlp,linear"
    monkeypatch.setattr(sys, "argv", ["screen.py", "a.npz", "--out", "o", *words.split()])
    found = screen.parse_arguments().vary
    assert list(found.values()) == [(3e-4, 0.001), (4, 16), ("mlp", "linear")]


def test_a_run_that_fails_is_said(screen, asked, monkeypatch):
    monkeypatch.setattr(screen, "parse_arguments", lambda: asked)
    monkeypatch.setattr(screen, "command", lambda *_: [sys.executable, "-c", "print('Error: no good.')"])
    monkeypatch.setattr(screen, "design", lambda _: [(0,) * 7])
    with pytest.raises(SystemExit, match=r"1 of 1 runs failed; .*run-0.txt ends with: Error: no good"):
        screen.main()


def writing(file, content):
    """A command that writes a file of results."""
    return [sys.executable, "-c", f"import pathlib; pathlib.Path({str(file)!r}).write_text({json.dumps(content)!r})"]


def test_a_linear_probe_follows_each_run_and_has_effects_of_its_own(screen, asked, monkeypatch, capsys):
    """Also where the runs were made before, without it."""

    def training(number, values, _, asked):
        content = {"knn_top1": 60.0 + 10 * values["train.lr"], "loss": 1.0, "seconds": 2.0}
        return writing(screen.result_file(asked, number), content)

    def probing(*words):
        number = int(words[1].name.removeprefix("run-"))
        return writing(words[-1], {"linear_top1": 70.0 + 4 * screen.design(2)[number][1]})

    monkeypatch.setattr(screen, "parse_arguments", lambda: asked)
    monkeypatch.setattr(screen, "command", training)
    monkeypatch.setattr(screen, "jcl_command", probing)
    asked.at_once, asked.json = 4, asked.out / "figures.json"
    screen.main()
    before = json.loads(asked.json.read_text())
    assert "linear_effects" not in before and before["effects"]["train.lr"] == pytest.approx(2.0)
    asked.linear = True
    monkeypatch.setattr(screen, "command", lambda *_: pytest.fail("what was trained is trained again"))
    screen.main()
    after = json.loads(asked.json.read_text())
    assert after["effects"] == before["effects"] and len(after["runs"]) == 8
    assert after["linear_effects"]["method.queue_size"] == pytest.approx(4.0)
    assert after["linear_effects"]["train.lr"] == pytest.approx(0.0)
    assert "linear 74.00 %" in capsys.readouterr().out


def test_a_probe_that_fails_is_said(screen, asked, monkeypatch):
    asked.linear, asked.at_once = True, 4
    monkeypatch.setattr(screen, "parse_arguments", lambda: asked)
    content = {"knn_top1": 60.0, "loss": 1.0, "seconds": 2.0}
    monkeypatch.setattr(screen, "command", lambda number, *_: writing(screen.result_file(asked, number), content))
    monkeypatch.setattr(screen, "jcl_command", lambda *_: [sys.executable, "-c", "print('Error: no labels.')"])
    with pytest.raises(SystemExit, match=r"8 of 8 runs failed; .*run-0-linear.txt ends with: Error: no labels"):
        screen.main()


@pytest.mark.faults  # for its length
def test_runs_end_with_a_screening_that_is_killed(asked):
    """By a signal that leaves it no time to end them; each has saved itself and can be resumed."""
    program = (
        f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); "
        "import held_out, screen; held_out.HELD_OUT = 2; screen.main()"
    )
    words = ["--vary", "train.lr=0.1,0.3", "--epochs", "100000", "--set", "train.batch_size=2", "--recipe", "demo"]
    command = [sys.executable, "-c", program, asked.data, "--device", "cpu", "--out", asked.out, *words]
    lock, metrics = asked.out / "run-0/.lock", asked.out / "run-0/metrics.jsonl"
    with subprocess.Popen(command) as screening:
        try:
            wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0)
        finally:
            screening.kill()
    run = json.loads(lock.read_text())["pid"]
    try:
        wait_until(lambda: not lock.exists(), 30)
        assert list((asked.out / "run-0/checkpoints").glob("step-*"))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(run, signal.SIGKILL)


@pytest.mark.parametrize(("settings", "runs"), [(7, 8), (5, 8), (8, 12), (11, 12)])
def test_an_effect_is_what_a_setting_adds_and_chance_adds_nothing(screen, settings, runs):
    rows, names = screen.design(settings), [f"section.s{number}" for number in range(settings)]
    assert len(rows) == runs
    effects = screen.effects_of(rows, [50.0 + 2.0 * row[0] - 1.0 * row[4] for row in rows], names)
    assert len(effects) == runs - 1
    assert effects.pop(names[0]) == pytest.approx(2.0) and effects.pop(names[4]) == pytest.approx(-1.0)
    assert list(effects.values()) == pytest.approx([0.0] * (runs - 3))
