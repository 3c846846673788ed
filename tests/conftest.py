"""What tests of whole runs share."""

from pathlib import Path

import numpy as np
import pytest

from small_runs import drawn_pixels, write_image_folder


@pytest.fixture(autouse=True)
def own_listings(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the tests out of the cache of whoever runs them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def npz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """34 labelled images to train on and 10 to test with: four batches of 8 and two images left over."""
    file = tmp_path_factory.mktemp("arrays") / "small.npz"
    labels = np.arange(44) % 3
    pixels = drawn_pixels(44)
    pixels[np.arange(44), :4, :4] = (labels * 100)[:, None, None, None]  # what the class is can be seen
    np.savez(file, x_train=pixels[:34], y_train=labels[:34], x_test=pixels[34:], y_test=labels[34:])
    return file


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    """26 images of 20 px in two class folders: three batches of 8 and two images left over."""
    return write_image_folder(tmp_path / "photos")
