"""What the parser of the command line refuses, told as other errors are."""

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
            "Invalid value some for -k: must be a valid integer.",
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
    ("command", "lines"), [("pretrain", 52), ("detect", 60), ("ablate", 60), ("finetune", 45), ("embed", 40), ("", 70)]
)
def test_help_fits_a_screen_and_shows_no_python_types(call, monkeypatch, command, lines):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = call(*command.split(), "--help")
    assert code == 0 and out.count("\n") <= lines and "<" not in out
    assert "INTEGER" in out or not command


@pytest.mark.parametrize("value", ["1", "abc"])
def test_odd_launcher_variables_silence_nothing(call, monkeypatch, value):
    monkeypatch.setenv("RANK", value)
    listed = subprocess.run([sys.executable, "-m", "jcl", "recipes"], capture_output=True, text=True, check=False)
    assert listed.returncode == 0 and "cifar10" in listed.stdout and listed.stderr == ""
    code, _, err = call("pretrain", "demo")
    assert code == 2 and err.startswith("Error: ") and "RANK" in err


def test_what_a_launcher_would_set_may_be_set_to_nothing(call, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "JCL_RESTARTS"):
        monkeypatch.setenv(name, "")
    code, _, err = call("resume", "nowhere")
    assert code == 1 and err.startswith("Error: ") and "nowhere" in err
