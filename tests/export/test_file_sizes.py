"""Small files that ask for much memory are refused before they are read."""

import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from jcl.data.arrays import open_npz
from jcl.errors import DataError, RunError
from jcl.evaluate.feature_file import read_feature_file
from jcl.export.reading import read_weights
from jcl.runs.checkpoint import newest_checkpoint, read_tensors, save_with_checksum


@pytest.fixture
def low_limit(monkeypatch):
    """A bomb of megabytes instead of gigabytes."""
    monkeypatch.setattr("jcl.paths._ALWAYS_FINE", 2**20)


def test_compressed_arrays_that_grow_a_hundredfold(tmp_path: Path, low_limit):
    file = tmp_path / "zeros.npz"
    np.savez_compressed(file, x_train=np.zeros((4000, 32, 32, 3), np.uint8))
    assert file.stat().st_size < 2**17
    with pytest.raises(DataError, match="of memory"):
        open_npz(file)
    with pytest.raises(DataError, match="of memory"):
        read_feature_file(file)
    noise = np.random.default_rng(0).integers(0, 9, (600, 32, 32, 3), dtype=np.uint8)
    np.savez_compressed(file, x_train=noise)
    assert len(open_npz(file).train) == 600


def test_compressed_weights_that_grow_a_hundredfold(tmp_path: Path, low_limit):
    plain, bomb = tmp_path / "plain.pth", tmp_path / "bomb.pth"
    torch.save({"weight": torch.zeros(1 << 22)}, plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as target:
        for member in source.infolist():
            target.writestr(member.filename, source.read(member))
    with pytest.raises(RunError, match="of memory"):
        read_weights(bomb)
    assert read_weights(plain).tensors["weight"].numel() == 1 << 22


def test_a_header_of_very_many_tensors(tmp_path: Path):
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"tensor.{number}": empty for number in range(150_000)}).encode()
    file = tmp_path / "many.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(RunError, match="of memory"):
        read_weights(file)


@pytest.mark.parametrize("length", [0, 3 << 30, 2**64 - 1])
def test_a_sparse_checkpoint_is_not_read(tmp_path: Path, length: int):
    file = tmp_path / "step-000000001.safetensors"
    file.write_bytes(length.to_bytes(8, "little") + b'{"sha256":"')
    os.truncate(file, 4 << 30)
    with pytest.raises(RunError, match=file.name):
        read_tensors(file)
    assert newest_checkpoint(tmp_path) is None


def test_a_checkpoint_with_a_tail_is_damaged_whatever_its_checksum(tmp_path: Path):
    file = tmp_path / "weights.safetensors"
    save_with_checksum(file, {"weight": torch.ones(3)}, {})
    read_tensors(file)
    os.truncate(file, 4 << 30)  # hashing it would take seconds
    with pytest.raises(RunError, match="cannot be read"):
        read_tensors(file)
