"""Braces in the names of shards."""

import shutil
import subprocess
from pathlib import Path

import pytest

from jcl.data import open_data
from jcl.data.shard_patterns import expand_braces
from jcl.errors import DataError


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("a.tar", ["a.tar"]),
        ("{0..3}", ["0", "1", "2", "3"]),
        ("s/{0008..0011}.tar", [f"s/{n:04}.tar" for n in range(8, 12)]),
        ("{3..1}", ["3", "2", "1"]),
        ("{1..010..4}", ["001", "005", "009"]),
        ("{a,b}-{0..1}", ["a-0", "a-1", "b-0", "b-1"]),
        ("{x,y{1..2},z{p,q}}.tar", ["x.tar", "y1.tar", "y2.tar", "zp.tar", "zq.tar"]),
        ("{,-extra}.tar", [".tar", "-extra.tar"]),
        ("{single}", ["{single}"]),
        ("{k{1,2}}", ["{k1}", "{k2}"]),
        ("{open", ["{open"]),
        ("close}{a,b}", ["close}a", "close}b"]),
        ("{open-{a,b}", ["{open-a", "{open-b"]),
        ("${HOME}/$(touch x)/`touch x`.tar", ["${HOME}/$(touch x)/`touch x`.tar"]),
    ],
)
def test_expansion(pattern: str, expected: list[str]):
    assert expand_braces(pattern) == expected


def test_agrees_with_the_shell():
    shell = shutil.which("bash")
    if shell is None:
        pytest.skip("compares with bash, which is not here")
    for pattern in [
        "{x,y{1..2},z{p,q}}.tar",
        "{08..11}{a,b}",
        "{5..1..2}",
        "{a}{b,{c,d}}",
        "x{{1..3},k}y",
        "{a,b}}",
    ]:
        output = subprocess.run([shell, "-c", f"echo {pattern}"], capture_output=True, text=True, check=True).stdout
        assert expand_braces(pattern) == output.split()


def test_too_many():
    for pattern in ("{0..999999999}.tar", "{0..9999}{0..9999}{0..9999}"):
        with pytest.raises(DataError, match="names more than 250,000 shards"):
            expand_braces(pattern)
    with pytest.raises(DataError, match="too many braces"):
        expand_braces("{a," * 1200 + "}" * 1200)


def test_nothing_is_run(tmp_path: Path):
    for location in (f"$(touch {tmp_path}/made).tar", f"{{0..1}};touch {tmp_path}/made;.tar"):
        with pytest.raises(DataError, match="There is no shard"):
            open_data(location)
    assert list(tmp_path.iterdir()) == []
