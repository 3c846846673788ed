"""One process a run folder, whatever became of those before."""

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from jcl.errors import RunError
from jcl.runs.lock import is_locked, lock_folder

HOLD = """
import pathlib, sys, time
from jcl.runs.lock import lock_folder
with lock_folder(pathlib.Path(sys.argv[1]), print):
    print("held", flush=True)
    time.sleep(60)
"""


def held_by_another_process(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def never(text: str) -> None:
    raise AssertionError(text)


def test_a_second_process_is_refused_by_name_and_a_killed_one_leaves_nothing(tmp_path):
    process = held_by_another_process(tmp_path / "run")
    try:
        said = rf"Process {process.pid} on '{socket.gethostname()}' is training in {tmp_path}/run;"
        for _ in range(2):
            with pytest.raises(RunError, match=said), lock_folder(tmp_path / "run", never):
                pass
        assert (tmp_path / "run" / ".lock").exists()
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    with lock_folder(tmp_path / "run", never):
        assert str(os.getpid()) in (tmp_path / "run" / ".lock").read_text()
    assert list((tmp_path / "run").iterdir()) == []


def test_in_one_process_too(tmp_path):
    with lock_folder(tmp_path, never):
        with pytest.raises(RunError, match=f"Process {os.getpid()} on"), lock_folder(tmp_path, never):
            pass
        with pytest.raises(RunError), lock_folder(tmp_path, never):  # the refused one took nothing away
            pass
    with pytest.raises(ZeroDivisionError), lock_folder(tmp_path, never):
        raise ZeroDivisionError
    with lock_folder(tmp_path, never):
        pass


@pytest.mark.parametrize("content", [b"", b"\xff\x00", b"[]", b"{}", b'{"pid": "x", "host": 1}', b"9" * 100_000])
def test_what_the_file_says_is_not_trusted(tmp_path, content):
    with lock_folder(tmp_path, never):
        (tmp_path / ".lock").write_bytes(content)
        with pytest.raises(RunError, match="Another process is training in"), lock_folder(tmp_path, never):
            pass


def test_a_lock_on_a_file_that_was_removed_meanwhile_is_none(tmp_path, monkeypatch):
    """Another process finishes, and removes its file, between our opening of the file and our locking it."""
    (tmp_path / ".lock").write_bytes(b"")
    original, opened = fcntl.flock, []

    def racing(descriptor: int, operation: int) -> None:
        if not opened:
            (tmp_path / ".lock").unlink()
        opened.append(descriptor)
        original(descriptor, operation)

    monkeypatch.setattr("jcl.runs.lock.fcntl.flock", racing)
    with lock_folder(tmp_path, never):
        assert len(opened) == 2
        with pytest.raises(RunError, match="is training in"), lock_folder(tmp_path, never):
            pass


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch, number):
    def without_locks(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("jcl.runs.lock.fcntl.flock", without_locks)
    said: list[str] = []
    with lock_folder(tmp_path, said.append):
        pass
    assert len(said) == 1 and "does not support locks" in said[0] and str(tmp_path) in said[0]


def test_a_network_file_system_locks_what_is_open_for_writing(tmp_path, monkeypatch):
    original = fcntl.flock

    def as_on_a_network(descriptor: int, operation: int) -> None:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        original(descriptor, operation)

    monkeypatch.setattr("jcl.runs.lock.fcntl.flock", as_on_a_network)
    with lock_folder(tmp_path, never), pytest.raises(RunError, match="is training in"), lock_folder(tmp_path, never):
        pass


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(RunError, match="cannot be written: "), lock_folder(tmp_path / "file" / "run", never):
        pass
    (tmp_path / "run" / ".lock").mkdir(parents=True)
    with pytest.raises(RunError, match="cannot be written: "), lock_folder(tmp_path / "run", never):
        pass


def test_asking_who_holds_a_folder_neither_takes_nor_leaves_anything(tmp_path):
    folder = tmp_path / "run"
    assert not is_locked(folder) and not folder.exists()
    with lock_folder(folder, never):
        assert is_locked(folder)
    assert not is_locked(folder) and list(folder.iterdir()) == []
