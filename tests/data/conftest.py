"""Images as a folder and as shards, for tests that may change them."""

from pathlib import Path

import pytest
from image_files import write_images

from jcl.data import open_data, write_shards


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """23 training and 5 test images in three classes, one class only in the test split, some files not readable."""
    root = tmp_path / "pictures"
    for number, name in enumerate(["ant", "bee", "cat"]):
        write_images(root / "train" / name, 7 + (number == 0) * 2, first_seed=100 * number)
    write_images(root / "val" / "bee", 3, first_seed=1000)
    write_images(root / "val" / "dog", 2, first_seed=2000)
    (root / "train" / "bee" / "broken.png").write_bytes(b"spoilt")
    (root / "train" / "cat" / "gone.jpg").symlink_to(root / "nowhere.jpg")
    (root / "val" / "bee" / "empty.jpg").write_bytes(b"")
    return root


@pytest.fixture
def shards(folder: Path, tmp_path: Path) -> Path:
    out = tmp_path / "shards"
    write_shards(open_data(str(folder)), out, images_per_shard=8)
    return out
