"""What the parser of the command line refuses, told as other errors are."""

import pytest


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["detect", "--short-side", "128"],
            "--short-side takes 2 values: least and greatest short side in training (640 800). `jcl detect --help`",
        ),
        (["detect", "--short-side", "128", "--task", "box"], "the value '--task' of --short-side does not work"),
        (["detect", "--task", "boxes"], "the value 'boxes' of --task does not work: 'boxes' is not one of 'box', "),
        (
            ["bound", "--draws", "5"],
            "the value '5' of --draws does not work: input should be greater than or equal to 100.",
        ),
        (
            ["linear", "run", "--least-crop", "2"],
            "--least-crop does not work: input should be less than or equal to 1.",
        ),
        (
            ["knn", "run", "-k", "2", "-k", "some"],
            "the value 'some' of -k does not work: input should be a valid integer",
        ),
        (["knn", "run", "--workers"], "Option '--workers' requires an argument. `jcl knn --help` tells"),
        (["check"], "Missing argument 'data'. `jcl check --help` tells"),
        (["check", "photos", "--fast"], "No such option: --fast. `jcl check --help` tells"),
        (["chekc", "photos"], "No such command 'chekc'. Did you mean 'check'? `jcl --help` tells"),
    ],
)
def test_what_the_parser_finds_wrong_is_a_sentence_too(call, arguments, said):
    code, out, err = call(*arguments)
    assert (code, out) == (2, "") and said in err
    assert err.startswith("Error: ") and err.count("\n") == 1 and err.endswith("tells what may be given.\n")


def test_without_a_command_there_is_help(call):
    code, out, err = call()
    assert (code, err) == (2, "") and "Usage: " in out and "pretrain" in out
