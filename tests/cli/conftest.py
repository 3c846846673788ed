"""Runs that several modules of this folder read."""

from pathlib import Path

import pytest

from jcl.commands.pretrain import pretrain
from small_runs import tiny_settings


@pytest.fixture(scope="session")
def runs(npz, tmp_path_factory) -> dict[str, Path]:
    """Two finished runs on the same data that differ in the method; every checkpoint is kept. Only to be read."""
    folder = tmp_path_factory.mktemp("studied")
    changes = {"record__knn_every": 0, "record__checkpoint_every": 1, "record__keep": 9}
    return {
        method: pretrain(tiny_settings(npz, method, **changes), folder / method).path for method in ("jcl", "moco-v2")
    }
