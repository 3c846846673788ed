"""Images as a folder and as shards, for tests that may change them."""

import shutil
from pathlib import Path

import pytest
from image_files import write_images

from jcl.data import open_data, write_shards


@pytest.fixture(scope="session")
def _pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("folder") / "pictures"
    for number, name in enumerate(["ant", "bee", "cat"]):
        write_images(root / "train" / name, 7 + (number == 0) * 2, first_seed=100 * number)
    write_images(root / "val" / "bee", 3, first_seed=1000)
    write_images(root / "val" / "dog", 2, first_seed=2000)
    (root / "train" / "bee" / "broken.png").write_bytes(b"spoilt")
    (root / "train" / "cat" / "gone.jpg").symlink_to(root / "nowhere.jpg")
    (root / "val" / "bee" / "empty.jpg").write_bytes(b"")
    return root


@pytest.fixture(scope="session")
def _packed(_pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("packed") / "shards"
    write_shards(open_data(str(_pictures)), out, images_per_shard=8)
    return out


@pytest.fixture
def folder(_pictures: Path, tmp_path: Path) -> Path:
    """23 training and 5 test images in three classes, one class only in the test split, some files not readable."""
    return shutil.copytree(_pictures, tmp_path / "pictures", symlinks=True)


@pytest.fixture
def shards(_packed: Path, tmp_path: Path) -> Path:
    """The same, eight in each file."""
    return shutil.copytree(_packed, tmp_path / "shards")
