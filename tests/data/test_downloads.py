"""The sets known by name, from small files in their real formats.

torchvision compares the files with the checksums of the true sets; the tests give it the checksums of the small ones,
and everything else runs as it does on the true files.
"""

import hashlib
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision import datasets

from jcl.data import UNLABELLED, ArrayImages, open_data
from jcl.data.downloads import default_root
from jcl.errors import DataError

DRAW = np.random.default_rng(0)


def write(file: Path, content: bytes) -> str:
    """Write a file and give its checksum."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return hashlib.md5(content).hexdigest()


def random_bytes(*shape: int) -> np.ndarray:
    return DRAW.integers(0, 256, shape, dtype=np.uint8)


@pytest.fixture
def cifar10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    rows = {name: random_bytes(4, 3072) for name in ("data_batch_1", "data_batch_2", "test_batch")}
    folder = tmp_path / "cifar-10-batches-py"
    sums = {
        name: write(folder / name, pickle.dumps({"data": pixels, "labels": [3, 1, 4, 1]}))
        for name, pixels in rows.items()
    }
    meta = write(folder / "batches.meta", pickle.dumps({"label_names": [f"class {n}" for n in range(10)]}))
    monkeypatch.setattr(datasets.CIFAR10, "train_list", [[name, sums[name]] for name in list(rows)[:2]])
    monkeypatch.setattr(datasets.CIFAR10, "test_list", [["test_batch", sums["test_batch"]]])
    monkeypatch.setattr(datasets.CIFAR10, "meta", {"filename": "batches.meta", "key": "label_names", "md5": meta})
    return rows


def test_cifar10(tmp_path: Path, cifar10: dict[str, np.ndarray]):
    data = open_data("cifar10", root=tmp_path, download=False)
    assert isinstance(data.train, ArrayImages) and isinstance(data.test, ArrayImages)
    rows = np.concatenate([cifar10["data_batch_1"], cifar10["data_batch_2"]]).reshape(8, 3, 32, 32)
    assert torch.equal(data.train.pixels, torch.from_numpy(rows))
    assert data.train.labels is not None and data.train.labels.tolist() == [3, 1, 4, 1] * 2
    assert data.train.class_names is not None and data.train.class_names[3] == "class 3"
    assert torch.equal(data.test.pixels, torch.from_numpy(cifar10["test_batch"]).view(4, 3, 32, 32))


def test_files_present_are_not_downloaded_again(tmp_path: Path, cifar10: dict[str, np.ndarray]):
    assert len(open_data("cifar10", root=tmp_path, download=True).train) == 2 * len(cifar10["test_batch"])


def test_damaged_file_is_refused_before_it_is_read(tmp_path: Path, cifar10: dict[str, np.ndarray]):
    """The files are pickles, so nothing whose checksum is wrong may be opened."""
    assert cifar10
    with (tmp_path / "cifar-10-batches-py" / "data_batch_2").open("ab") as stream:
        stream.write(b"x")
    with pytest.raises(DataError, match=r"cifar10 is not in .* corrupted"):
        open_data("cifar10", root=tmp_path, download=False)


def test_cifar100(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, pixels = tmp_path / "cifar-100-python", random_bytes(4, 3072)
    content = pickle.dumps({"data": pixels, "fine_labels": [99, 0, 5, 7], "coarse_labels": [1, 1, 1, 1]})
    sums = {name: write(folder / name, content) for name in ("train", "test")}
    meta = write(folder / "meta", pickle.dumps({"fine_label_names": [f"class {n}" for n in range(100)]}))
    monkeypatch.setattr(datasets.CIFAR100, "train_list", [["train", sums["train"]]])
    monkeypatch.setattr(datasets.CIFAR100, "test_list", [["test", sums["test"]]])
    monkeypatch.setattr(datasets.CIFAR100, "meta", {"filename": "meta", "key": "fine_label_names", "md5": meta})
    data = open_data("cifar100", root=tmp_path, download=False)
    assert isinstance(data.train, ArrayImages)
    assert torch.equal(data.train.pixels, torch.from_numpy(pixels).view(4, 3, 32, 32))
    assert data.train.labels is not None and data.train.labels.tolist() == [99, 0, 5, 7]


def test_stl10_trains_on_unlabelled_images_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "stl10_binary"
    stored = {name: random_bytes(count, 3, 96, 96) for name, count in (("train", 2), ("unlabeled", 3), ("test", 2))}
    sums = {f"{name}_X.bin": write(folder / f"{name}_X.bin", pixels.tobytes()) for name, pixels in stored.items()}
    for name, labels in (("train", [10, 1]), ("test", [2, 3])):  # stored from 1
        sums[f"{name}_y.bin"] = write(folder / f"{name}_y.bin", bytes(labels))
    write(folder / "class_names.txt", "\n".join(f"class {n}" for n in range(10)).encode())
    train_files = ["train_X.bin", "train_y.bin", "unlabeled_X.bin"]
    monkeypatch.setattr(datasets.STL10, "train_list", [[name, sums[name]] for name in train_files])
    monkeypatch.setattr(datasets.STL10, "test_list", [[name, sums[name]] for name in ("test_X.bin", "test_y.bin")])
    data = open_data("stl10", root=tmp_path, download=False)
    assert isinstance(data.train, ArrayImages) and isinstance(data.test, ArrayImages)
    assert data.train.labels is not None and data.train.labels.tolist() == [9, 0] + [UNLABELLED] * 3
    # STL-10 stores columns before rows.
    expected = np.concatenate([stored["train"], stored["unlabeled"]]).transpose(0, 1, 3, 2)
    assert torch.equal(data.train.pixels, torch.from_numpy(np.ascontiguousarray(expected)))
    assert data.test.labels is not None and data.test.labels.tolist() == [1, 2]


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "stl10"])
def test_set_that_is_not_there(tmp_path: Path, name: str):
    with pytest.raises(DataError, match=rf"The data set {name} is not in {tmp_path} \(.*\); place its files there"):
        open_data(name, root=tmp_path, download=False)


def test_failed_download_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(datasets.CIFAR10, "url", "http://127.0.0.1:9/cifar-10-python.tar.gz")  # nobody listens there
    with pytest.raises(
        DataError, match=r"downloaded to .* \(Connection refused\); place its files there by hand, or give a"
    ):
        open_data("cifar10", root=tmp_path)


def test_default_root(own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert default_root() == own_cache / "jcl" / "data"
    monkeypatch.setenv("JCL_DATA", str(tmp_path))
    assert default_root() == tmp_path
