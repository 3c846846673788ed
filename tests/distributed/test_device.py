"""Which device is used, and what is said of one that is not there."""

import pytest

from jcl.distributed.device import choose_device
from jcl.errors import SettingsError


@pytest.mark.parametrize(("gpus", "said"), [(1, "there is only 1 GPU."), (2, "there are only 2 GPUs.")])
def test_a_gpu_beyond_those_there_are_is_a_sentence(monkeypatch, gpus, said):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert str(choose_device("cuda:0")) == "cuda:0"
    with pytest.raises(SettingsError, match=f"the device cuda:5 was asked for, but {said}"):
        choose_device("cuda:5")
