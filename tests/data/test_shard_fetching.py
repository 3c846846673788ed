"""Shards at addresses: fetched once, never by a command without consent."""

import functools
import http.server
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from shard_files import by_pixels, opened

from jcl.data import open_data
from jcl.data.shard_fetching import PIPE_CONSENT
from jcl.errors import DataError


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def library() -> None:
    pytest.importorskip("webdataset", reason="the webdataset library, an optional extra, is not installed")


def test_message_without_the_library(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "webdataset", None)
    monkeypatch.setitem(sys.modules, "webdataset.gopen", None)
    with pytest.raises(DataError, match=r"pip install 'joint-contrastive-learning\[shards\]'"):
        open_data("https://user:secret@example.invalid/{0000..0127}.tar?token=secret")
    with pytest.raises(DataError) as caught:
        open_data("https://user:secret@example.invalid/0.tar?token=secret")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("scheme", ["pipe:", "pipe://", "PIPE://", "Pipe://"])
def test_commands_run_only_with_consent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str):
    """However the scheme is written: webdataset asks for small letters in an assertion only, which python -O drops."""
    monkeypatch.delenv(PIPE_CONSENT, raising=False)
    with pytest.raises(DataError, match=f"runs a command on this machine .* set {PIPE_CONSENT}=1"):
        open_data(f"{scheme} touch {tmp_path}/made", root=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_quotes_in_addresses_are_refused(tmp_path: Path):
    """Earlier versions of webdataset have a shell read addresses between single quotes."""
    with pytest.raises(DataError, match="holds a quote, which is no part of one; write %27"):
        open_data(f"https://example.invalid/'; touch {tmp_path}/made; '.tar", root=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_download_forbidden(tmp_path: Path):
    with pytest.raises(DataError, match=r"0\.tar is not in .* and may not be downloaded.*2 of 2 shards"):
        open_data("https://example.invalid/{0,1}.tar", root=tmp_path, download=False)
    with pytest.raises(DataError, match=r"\(1 of 1 shard missing\)"):
        open_data("https://example.invalid/0.tar", root=tmp_path, download=False)


@pytest.mark.usefixtures("library")
def test_pipe(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(PIPE_CONSENT, "1")
    told: list[str] = []
    location = f"pipe:cat {shards}/train-{{0000..0002}}.tar"
    data = open_data(location, root=tmp_path / "kept", progress=told.append)
    local = opened(f"{shards}/train-*.tar")
    assert [data.train.read(index).tolist() for index in range(23)] == [local.read(n).tolist() for n in range(23)]
    assert data.train.labels is not None and local.labels is not None
    assert torch.equal(data.train.labels, local.labels)
    assert len(told) == 3 and told[-1].startswith("Fetched 3 of 3 shards")
    shutil.rmtree(shards)  # from now on there are the copies only
    again = open_data(location, root=tmp_path / "kept", download=False)
    assert again.train.name_of(0).startswith("train-0000.tar/") and len(again.train) == 23


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("command", ["false", "true", "cat {file} && exit 3"])
def test_failed_command_leaves_nothing(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str):
    monkeypatch.setenv(PIPE_CONSENT, "1")
    with pytest.raises(DataError, match=r"cannot be fetched into .*: (the program .* status|nothing came)"):
        open_data("pipe:" + command.format(file=shards / "train-0000.tar"), root=tmp_path / "kept")
    assert not [path for path in (tmp_path / "kept").rglob("*") if path.is_file() and path.name != ".lock"]


@pytest.mark.usefixtures("library")
def test_unknown_kind_of_address(tmp_path: Path):
    with pytest.raises(DataError, match=r"cannot be fetched into .*: .*no gopen handler"):
        open_data("gopher://example.invalid/0.tar", root=tmp_path)


@pytest.fixture
def server(shards: Path) -> Iterator[str]:
    """Serves the shards on this machine's own network for the length of the test."""
    handler = functools.partial(QuietHandler, directory=str(shards))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)  # asked to stop, it looks at once
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join(10)


@pytest.mark.usefixtures("library")
@pytest.mark.skipif(shutil.which("curl") is None, reason="the webdataset library fetches with curl")
def test_http(server: str, shards: Path, tmp_path: Path):
    data = open_data(server + "/train-{0000..0002}.tar", root=tmp_path / "kept")
    assert by_pixels(data.train) == by_pixels(opened(shards))
    with pytest.raises(DataError, match=r"train-0003\.tar cannot be fetched .* status 22"):
        open_data(server + "/train-{0002..0003}.tar", root=tmp_path / "kept")
