"""Files that are replaced in one step."""

import errno
import fcntl
import os
import threading
from pathlib import Path

import pytest

from fault_tools import be_killed_writing
from jcl.errors import RunError
from jcl.runs.atomic import remove_partial_files, replacing, write_atomically


def test_two_writers_of_one_file_do_not_mix(tmp_path):
    """As two programs at once: the file is always what one of them wrote, and in the end what the later one did."""
    file = tmp_path / "features.npz"
    with replacing(file) as first:
        first.write(b"a" * 1000)
        first.flush()
        with replacing(file) as second:
            second.write(b"b" * 10)
        assert file.read_bytes() == b"b" * 10
        first.write(b"a" * 1000)
    assert file.read_bytes() == b"a" * 2000
    assert list(tmp_path.iterdir()) == [file]


def test_a_half_written_file_is_known_as_one(tmp_path):
    with pytest.raises(RunError, match="could not be written"), replacing(tmp_path / "file"):
        assert len(list(tmp_path.iterdir())) == 1
        remove_partial_files(tmp_path)
        assert not list(tmp_path.iterdir())


def test_what_a_killed_writer_left_goes_with_the_next_write_of_that_file(tmp_path):
    for name in ("figures", "figures.json", "features[0]"):
        be_killed_writing(tmp_path / name)
    (tmp_path / ".figures.mine.partial").write_text("a file of someone else's")
    write_atomically(tmp_path / "figures", b"new")
    assert _left(tmp_path) == [".features[0]", ".figures", ".figures.json"]  # the second is someone else's
    (tmp_path / ".figures.mine.partial").unlink()
    write_atomically(tmp_path / "features[0]", b"new")
    assert _left(tmp_path) == [".figures.json"]


def _left(folder: Path) -> list[str]:
    """Of which files there are halves."""
    return sorted(entry.name.rsplit(".", 2)[0] for entry in folder.glob(".*.partial"))


def test_a_file_that_is_being_checked_is_still_its_writer_s(tmp_path):
    file = tmp_path / "file"
    with replacing(file, check=lambda _: write_atomically(file, b"other")) as stream:
        stream.write(b"new")
    assert file.read_bytes() == b"new" and list(tmp_path.iterdir()) == [file]


def test_a_file_removed_before_it_could_be_locked_is_begun_again(tmp_path, monkeypatch):
    """As a second writer does that looks into the folder at that very moment."""
    lock, begun = fcntl.flock, []

    def lock_late(*arguments):
        begun.extend(tmp_path.iterdir())
        if len(begun) == 1:
            begun[0].unlink()
        lock(*arguments)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    write_atomically(tmp_path / "file", b"new")
    assert len(begun) == 2 and [file.name for file in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"new"


def test_where_there_are_no_locks_nothing_is_taken_for_abandoned(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with replacing(tmp_path / "file") as first:
        write_atomically(tmp_path / "file", b"second")
        first.write(b"first")
    assert (tmp_path / "file").read_bytes() == b"first"


def test_links_stay_links(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    write_atomically(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "new"
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes here")
def test_pipes_stay_pipes_and_hand_on_what_is_written(tmp_path):
    """As `--json >(jq .)` or `--json /dev/stdout` have it; replaced by a file, the reader would wait for ever."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write_atomically(pipe, b"new")
    reader.join(timeout=10)
    assert read == [b"new"] and pipe.is_fifo() and list(tmp_path.iterdir()) == [pipe]


def test_a_link_to_what_cannot_be_written_is_a_sentence(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(RunError, match=r"link could not be written: Is a directory\."):
        write_atomically(tmp_path / "link", b"new")
