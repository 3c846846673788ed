"""The screening of settings: what is refused, and how it goes on."""

import argparse
import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def screen(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    module = importlib.import_module("screen")
    monkeypatch.setattr(module, "HELD_OUT", 4)
    return module


@pytest.fixture
def asked(tmp_path):
    np.savez(tmp_path / "a.npz", x_train=np.zeros((6, 8, 8, 3), np.uint8), y_train=np.arange(6))
    return argparse.Namespace(
        data=tmp_path / "a.npz", recipe="demo", method="jcl", epochs=1, device="cpu", out=tmp_path / "out", at_once=1
    )


def test_a_run_that_was_stopped_is_resumed(screen, asked):
    split = screen.prepare(asked)
    values = screen.values_of(screen.design()[0], "jcl")
    assert "pretrain" in screen.command(0, values, split, asked)
    (asked.out / "run-0/checkpoints").mkdir(parents=True)
    assert screen.command(0, values, split, asked)[3:5] == ["resume", str(asked.out / "run-0")]


def test_a_run_without_a_checkpoint_is_begun_anew(screen, asked):
    split = screen.prepare(asked)
    (asked.out / "run-0").mkdir()
    (asked.out / "run-0/settings.yaml").write_text("")
    assert "pretrain" in screen.command(0, screen.values_of(screen.design()[0], "jcl"), split, asked)
    assert not (asked.out / "run-0").exists()


def test_results_of_another_screening_are_not_taken_for_this_ones(screen, asked):
    screen.prepare(asked)
    screen.prepare(asked)
    asked.epochs = 2
    with pytest.raises(SystemExit, match="holds another screening"):
        screen.prepare(asked)


def test_bad_input_ends_with_a_sentence_and_leaves_nothing(screen, asked, monkeypatch):
    monkeypatch.setattr(screen, "HELD_OUT", 6)
    with pytest.raises(SystemExit, match="has 6 training images; more than 6"):
        screen.prepare(asked)
    asked.data = asked.data.with_name("none.npz")
    with pytest.raises(SystemExit, match="no npz file"):
        screen.prepare(asked)
    assert not asked.out.exists()
    monkeypatch.setattr(sys, "argv", ["screen.py", "a.npz", "--out", "o", "--at-once", "0"])
    with pytest.raises(SystemExit):
        screen.parse_arguments()


def test_a_run_that_fails_is_said(screen, asked, monkeypatch):
    asked.json = None
    monkeypatch.setattr(screen, "parse_arguments", lambda: asked)
    monkeypatch.setattr(screen, "command", lambda *_: [sys.executable, "-c", "print('Error: no good.')"])
    monkeypatch.setattr(screen, "design", lambda: [(0,) * 11])
    with pytest.raises(SystemExit, match=r"1 of 1 runs failed; .*run-0.txt ends with: Error: no good"):
        screen.main()


def test_an_effect_is_what_a_setting_adds_and_chance_adds_nothing(screen):
    rows = screen.design()
    accuracies = [50.0 + 2.0 * row[0] - 1.0 * row[5] for row in rows]
    effects = screen.effects_of(rows, accuracies, "jcl")
    names = list(screen.FACTORS)
    assert effects[names[0]] == pytest.approx(2.0) and effects[names[5]] == pytest.approx(-1.0)
    others = [effect for name, effect in effects.items() if name not in (names[0], names[5])]
    assert len(others) == 9 and others == pytest.approx([0.0] * 9)
    assert screen.COVARIANCE not in screen.effects_of(rows, accuracies, "moco-v2")
