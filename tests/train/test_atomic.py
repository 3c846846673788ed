"""Files that are replaced in one step."""

import pytest

from jcl.errors import RunError
from jcl.train.atomic import remove_partial_files, replacing


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
