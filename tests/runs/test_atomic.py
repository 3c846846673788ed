"""Files that are replaced in one step."""

import os
import threading

import pytest

from jcl.errors import RunError
from jcl.runs.atomic import atomic_open, remove_partial_files, write_atomically


def test_two_writers_of_one_file_do_not_mix(tmp_path):
    """As two programs at once: the file is always what one of them wrote, and in the end what the later one did."""
    file = tmp_path / "features.npz"
    with atomic_open(file) as first:
        first.write(b"a" * 1000)
        first.flush()
        with atomic_open(file) as second:
            second.write(b"b" * 10)
        assert file.read_bytes() == b"b" * 10
        first.write(b"a" * 1000)
    assert file.read_bytes() == b"a" * 2000
    assert list(tmp_path.iterdir()) == [file]


def test_a_half_written_file_is_known_as_one(tmp_path):
    with pytest.raises(RunError, match="could not be written"), atomic_open(tmp_path / "file"):
        assert len(list(tmp_path.iterdir())) == 1
        remove_partial_files(tmp_path)
        assert not list(tmp_path.iterdir())


def test_links_stay_links(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    write_atomically(tmp_path / "link", b"new", follow_links=True)
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
    write_atomically(pipe, b"new", follow_links=True)
    reader.join(timeout=10)
    assert read == [b"new"] and pipe.is_fifo() and list(tmp_path.iterdir()) == [pipe]


def test_a_link_to_what_cannot_be_written_is_a_sentence(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(RunError, match=r"link could not be written: Is a directory\."):
        write_atomically(tmp_path / "link", b"new", follow_links=True)
