"""What the parser of the command line refuses, told as other errors are."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["detect", "--short-side", "128"], "--short-side"),
        (["detect", "--task", "boxes"], "'box', 'mask'"),
        (["bound", "--draws", "5"], "--draws"),
        (["pretrain", "photos", "--image-size", "0"], "Invalid value 0 for --image-size: must be at least 1"),
        (["resume", "missing", "--device"], "--device"),
        (["linear", "run", "--least-crop", "2"], "Invalid value 2 for --least-crop: must be at most 1."),
        (
            ["knn", "run", "-k", "2", "-k", "some"],
            "Invalid value some for -k: must be an integer.",
        ),
        (["knn", "run", "--workers"], "--workers"),
        (["check"], "See `jcl check --help`."),
        (["check", "photos", "--fast"], "--fast"),
        (["chekc", "photos"], "Did you mean 'check'? See `jcl --help`."),
    ],
)
def test_parser_errors_are_one_sentence(call, arguments, said):
    code, out, err = call(*arguments)
    assert (code, out) == (2, "") and said in err
    assert err.startswith("Error: ") and err.count("\n") == 1 and err.endswith("--help`.\n")


def test_without_a_command_there_is_help(call):
    code, out, err = call()
    assert (code, err) == (2, "") and "Usage: " in out and "pretrain" in out


@pytest.mark.parametrize(
    ("command", "lines"), [("pretrain", 50), ("detect", 60), ("ablate", 60), ("finetune", 45), ("embed", 40), ("", 70)]
)
def test_help_fits_a_screen_and_shows_no_python_types(call, monkeypatch, command, lines):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = call(*command.split(), "--help")
    assert code == 0 and out.count("\n") <= lines and "<" not in out
    assert "INTEGER" in out or not command


@pytest.mark.parametrize("value", ["1", "abc"])
def test_odd_launcher_variables_silence_nothing(value):
    def jcl(*arguments: str) -> subprocess.CompletedProcess:
        environment = os.environ | {"RANK": value}
        command = [sys.executable, "-m", "jcl", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    listed = jcl("recipes")
    assert listed.returncode == 0 and "cifar10" in listed.stdout and listed.stderr == ""
    refused = jcl("pretrain", "demo")
    assert refused.returncode == 2 and refused.stderr.startswith("Error: ") and "RANK" in refused.stderr
