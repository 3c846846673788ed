"""Patterns and URLs of shards: expanded as in a shell, downloaded once, and never run."""

import functools
import http.server
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from shard_files import by_pixels, opened

from jcl.commands.inputs import open_target
from jcl.data import open_data
from jcl.data.shards.fetch import expand_braces
from jcl.errors import DataError, JclError
from supervised_tools import untrained_weights


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def test_missing_library_is_named_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(JclError, match=r"pip install 'joint-contrastive-learning\[shards\]'") as caught:
        open_data("https://user:secret@example.invalid/{0000..0127}.tar?token=secret", root=tmp_path)
    assert "secret" not in str(caught.value)


def test_the_library_of_a_file_system_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for url, library in (("s3://bucket/0.tar", "s3fs"), ("sftp://host/0.tar", "paramiko")):
        monkeypatch.setitem(sys.modules, library, None)
        with pytest.raises(DataError, match=library):
            open_data(url, root=tmp_path)


@pytest.mark.parametrize(
    "url",
    [
        "pipe: touch {0}/made",
        "PIPE://touch {0}/made",
        "gopher://example.invalid/0.tar",
        "reference://x.tar",
        "memory://x.tar",
        "simplecache::https://example.invalid/0.tar",
        "https://example.invalid/0.tar::file:///etc/passwd",
    ],
)
def test_other_schemes_are_refused(tmp_path: Path, url: str):
    """Some of them would run commands or expand templates."""
    with pytest.raises(DataError):
        open_data(url.format(tmp_path), root=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_download_forbidden(tmp_path: Path):
    with pytest.raises(DataError, match="2 of 2 shards"):
        open_data("https://example.invalid/{0,1}.tar", root=tmp_path, download=False)


@pytest.fixture
def server(shards: Path) -> Iterator[str]:
    """Serves the shards on this machine's own network for the length of the test."""
    pytest.importorskip("aiohttp", reason="needs the extra `shards`")
    handler = functools.partial(QuietHandler, directory=str(shards))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join(10)


def test_http(server: str, shards: Path, tmp_path: Path):
    location = server + "/train-{0000..0002}.tar"
    told: list[str] = []
    data = open_data(location, root=tmp_path / "kept", progress=told.append)
    assert by_pixels(data.train) == by_pixels(opened(f"{shards}/train-*.tar"))
    assert len(told) == 3 and "3 of 3 shards" in told[-1]
    shutil.rmtree(shards)  # from now on there are the copies only
    again = open_data(location, root=tmp_path / "kept", download=False)
    assert again.train.name_of(0).startswith("train-0000.tar/") and len(again.train) == 23


def test_results_name_their_data_without_secrets(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JCL_DATA", str(tmp_path))
    weights = untrained_weights(tmp_path / "tiny.safetensors")
    location = server.replace("//", "//me:secret@") + "/train-{0000..0002}.tar"
    target = open_target(weights, location, "cpu", Console(quiet=True))
    assert len(target.data.train) == 23
    assert target.origin["data"] == location.replace("me:secret@", "")


@pytest.mark.parametrize("name", ["missing.tar", "empty.tar"])
def test_failed_download_leaves_nothing(server: str, shards: Path, tmp_path: Path, name: str):
    (shards / "empty.tar").touch()
    with pytest.raises(DataError, match=name):
        open_data(f"{server}/{name}", root=tmp_path / "kept")
    assert not [path for path in (tmp_path / "kept").rglob("*") if path.is_file() and path.name != ".lock"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("a.tar", ["a.tar"]),
        ("s/{0008..0011}.tar", [f"s/{n:04}.tar" for n in range(8, 12)]),
        ("{3..1}", ["3", "2", "1"]),
        ("{1..010..4}", ["001", "005", "009"]),
        ("{a,b}-{0..1}", ["a-0", "a-1", "b-0", "b-1"]),
        ("{x,y{1..2},z{p,q}}.tar", ["x.tar", "y1.tar", "y2.tar", "zp.tar", "zq.tar"]),
        ("{single}", ["{single}"]),
        ("{0..2000000..1000000}", ["0", "1000000", "2000000"]),
        ("${HOME}/$(touch x)/`touch x`.tar", ["${HOME}/$(touch x)/`touch x`.tar"]),
    ],
)
def test_expansion(pattern: str, expected: list[str]):
    assert expand_braces(pattern) == expected


def test_agrees_with_the_shell():
    shell = shutil.which("bash")
    if shell is None:
        pytest.skip("compares with bash, which is not here")
    for pattern in ["{x,y{1..2},z{p,q}}.tar", "{08..11}{a,b}", "{5..1..2}", "x{{1..3},k}y"]:
        output = subprocess.run([shell, "-c", f"echo {pattern}"], capture_output=True, text=True, check=True).stdout
        assert expand_braces(pattern) == output.split()


@pytest.mark.parametrize(
    "pattern",
    [
        "{0..999999999}.tar",
        "{0..9999}{0..9999}{0..9999}",
        "{0.." + "9" * 5000 + "}",
        "{a," * 600 + "}" * 600,
        "{open-{a,b}.tar",
    ],
)
def test_patterns_that_are_refused(pattern: str):
    with pytest.raises(DataError):
        expand_braces(pattern)


def test_nothing_is_run(tmp_path: Path):
    for location in (f"$(touch {tmp_path}/made).tar", f"{{0..1}};touch {tmp_path}/made;.tar"):
        with pytest.raises(DataError):
            open_data(location)
    assert list(tmp_path.iterdir()) == []
