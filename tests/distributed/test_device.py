"""Which device is used."""

import pytest
import torch

from jcl.distributed.device import choose_device
from jcl.errors import SettingsError


def test_a_gpu_that_is_not_there_is_an_error(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    current = []
    monkeypatch.setattr("torch.cuda.set_device", current.append)
    assert [choose_device("cuda:1")] == current == [torch.device("cuda:1")]  # Triton uses the current device
    with pytest.raises(SettingsError, match=r"cuda:5.*2 GPUs"):
        choose_device("cuda:5")
