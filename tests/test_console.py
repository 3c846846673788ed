"""Lines for people, whole in a terminal and in a log, and numbers that read well."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from jcl.console import format_bytes, format_duration, join_words, plain_names, pluralize, print_line, shell_quote

LONG = "the run stopped after step 4 and is saved in /a/path/that/is/longer/than/the/line; go on: `jcl resume x`."


def told(text: str, *, terminal: bool, width: int = 30, lead: str = "") -> str:
    file = io.StringIO()
    print_line(Console(file=file, width=width, force_terminal=terminal, no_color=True, _environ={}), text, lead=lead)
    return file.getvalue()


def test_words_are_listed_as_people_do():
    lists = [join_words(["a", "b", "c"][:count]) for count in (1, 2, 3)]
    assert lists == ["a", "a and b", "a, b and c"]


@pytest.mark.parametrize("terminal", [False, True])
def test_paths_and_commands_can_be_copied_from_one_line(terminal):
    assert f"{LONG}\n" in told(LONG, terminal=terminal, lead="Error: ")


def test_counts():
    assert [pluralize(number, "image") for number in (0, 1, 2000)] == ["0 images", "1 image", "2,000 images"]
    assert pluralize(1, "class", "classes") == "1 class" and pluralize(3, "class", "classes") == "3 classes"


@pytest.mark.parametrize(
    ("seconds", "said"), [(6.32, "6.3 s"), (59.99, "1 min 0 s"), (100, "1 min 40 s"), (11_130, "3 h 5 min")]
)
def test_durations(seconds, said):
    assert format_duration(seconds) == said


@pytest.mark.parametrize(("count", "said"), [(2048, "2.0 KiB"), (884_396_032, "843.4 MiB"), (12 * 2**30, "12.00 GiB")])
def test_sizes(count, said):
    assert format_bytes(count) == said


def test_paths_are_quoted_where_a_shell_needs_it():
    assert shell_quote(Path("runs/photos")) == "runs/photos"
    assert shell_quote(Path("my runs/it's")) == """'my runs/it'"'"'s'"""


def test_plain_names_are_told_apart():
    assert plain_names(["MoCo v2", "run-1", "run_1", "Run 1", "猫"]) == [
        "moco_v2",
        "run_1",
        "run_1_2",
        "run_1_3",
        "run",
    ]


@pytest.mark.parametrize("lost", ["reader", "room"])
def test_work_goes_on_when_nobody_can_read_of_it(lost):
    """The last line comes by another way: standard output, which is still there."""
    program = (
        "import os\n"
        "from rich.progress import Progress\n"
        "from jcl.console import STDERR, print_line\n"
        "console = STDERR\n"
        "with Progress(console=console) as bar:\n"
        "    task = bar.add_task('work', total=3)\n"
        "    for step in range(3):\n"
        "        print_line(console, f'step {step}')\n"
        "        bar.advance(task)\n"
        "print('done')"
    )
    if lost == "reader":
        read, write = os.pipe()
        os.close(read)
    else:
        if not Path("/dev/full").exists():
            pytest.skip("there is no /dev/full here")
        write = os.open("/dev/full", os.O_WRONLY)
    try:
        ended = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=write, check=False)
    finally:
        os.close(write)
    assert (ended.returncode, ended.stdout.split()) == (0, [b"done"])
