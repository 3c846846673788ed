"""The index of shards that is kept between runs."""

import os
from pathlib import Path

import numpy as np
import pytest
from shard_files import by_pixels, names, opened, png, write_tar

from jcl.data import shard_index


@pytest.fixture(autouse=True)
def always_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_index, "_KEEP_FROM", 1)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = write_tar(tmp_path / "s.tar", {"0.png": png(0), "0.cls": b"4", "1.png": png(1)})
    os.utime(file, (1, 1))
    return file


def test_is_used_while_it_is_true(file: Path, own_cache: Path):
    """What is kept says "x.png" where the tar says otherwise: only reading the kept one can give it."""
    first = opened(file)
    (kept,) = (own_cache / "jcl" / "shards").iterdir()
    with np.load(kept) as arrays:
        content = dict(arrays)
    content["names_text"] = np.frombuffer(b"x.png1.png", dtype=np.uint8)
    np.savez(kept, **content)
    again = opened(file)
    assert names(first) == ["0.png", "1.png"] and names(again) == ["x.png", "1.png"]
    assert by_pixels(first) == by_pixels(again)


@pytest.mark.parametrize("time", [1, 2], ids=["other size", "other time"])
def test_is_dropped_when_a_shard_changes(file: Path, time: int):
    opened(file)
    members = {"2.png": png(0), "2.cls": b"4", "3.png": png(1)} | ({"4.png": bytes(20_000)} if time == 1 else {})
    write_tar(file, members)
    os.utime(file, (time, time))
    assert names(opened(file))[:2] == ["2.png", "3.png"]


def test_damaged_one_is_replaced(file: Path, own_cache: Path):
    opened(file)
    (kept,) = (own_cache / "jcl" / "shards").iterdir()
    kept.write_bytes(kept.read_bytes()[:100])
    assert names(opened(file)) == ["0.png", "1.png"]
    with np.load(kept) as arrays:
        assert arrays["names_text"].tobytes() == b"0.png1.png"


def test_is_not_made_of_a_file_still_changing(tmp_path: Path, own_cache: Path):
    opened(write_tar(tmp_path / "new.tar", {"0.png": png(0)}))
    assert not (own_cache / "jcl" / "shards").exists()
