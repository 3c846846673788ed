"""Sparse files that ask for much memory are refused before they are read."""

import os
from pathlib import Path

import pytest
import torch

from jcl.errors import RunError
from jcl.runs.checkpoint import newest_checkpoint, read_tensors, save_with_checksum


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
