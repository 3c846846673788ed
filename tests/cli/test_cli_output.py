"""Standard output that nobody reads, or for which there is no room: in real processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jcl.cli.printing import out


def printed_into(place: int, *arguments: object) -> tuple[int, str]:
    """Exit code and standard error of `jcl ARGUMENTS` whose standard output leads there."""
    command = [sys.executable, "-m", "jcl", *map(str, arguments)]
    ended = subprocess.run(command, stdout=place, stderr=subprocess.PIPE, text=True, check=False)
    return ended.returncode, ended.stderr


def test_output_that_nobody_reads_is_no_error():
    """As with `| head -1`, but for certain."""
    read, write = os.pipe()
    os.close(read)
    try:
        assert printed_into(write, "recipes") == (0, "")
    finally:
        os.close(write)


full_disk = pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")


@full_disk
def test_output_for_which_there_is_no_room_is_a_sentence():
    with Path("/dev/full").open("w") as full:
        code, err = printed_into(full.fileno(), "recipes")
    assert code == 1 and err.startswith("Error: Cannot write to standard output: No space")
    assert err.count("\n") == 1


@full_disk
def test_figures_are_written_though_the_table_cannot_be_printed(call, image_folder, monkeypatch):
    monkeypatch.setattr(out, "quiet", False)
    monkeypatch.setattr(out, "failure", None)
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        code, _, err = call("check", image_folder, "--json", "figures.json")
    assert code == 1 and "Cannot write to standard output" in err
    assert json.loads(Path("figures.json").read_text())["train_images"] == 26
