"""Data sets by name, location and class list.

torchvision compares downloaded files with the checksums of the true sets; the tests give it those of small files in
the same formats.
"""

import hashlib
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from image_files import write_images
from torchvision import datasets

from jcl.data import UNLABELED, ArrayImages, open_data, open_demo
from jcl.data.named import absolute_location, class_list, default_root
from jcl.errors import DataError


def test_demo():
    data = open_data("demo")
    assert isinstance(data.train, ArrayImages) and isinstance(data.test, ArrayImages)
    assert (len(data.train), len(data.test)) == (2500, 1000)
    assert "synthetic" in data.train.description
    assert data.test.labels is not None and data.test.labels.bincount().tolist() == [100] * 10


def test_demo_splits_share_no_picture():
    data = open_demo(100, 50, seed=1)
    assert isinstance(data.train, ArrayImages) and isinstance(data.test, ArrayImages)
    both = torch.cat([data.train.pixels, data.test.pixels]).flatten(1)
    assert len(both.unique(dim=0)) == 150


@pytest.mark.parametrize(
    ("typed", "nearest"), [("cifar-10", "cifar10"), ("CIFAR100", "cifar100"), ("stl", "stl10"), ("dem", "demo")]
)
def test_unknown_name_suggests_the_nearest(typed: str, nearest: str):
    with pytest.raises(DataError, match=f"{typed}.*{nearest}.$"):
        open_data(typed)


def test_a_broken_link_is_named_as_such(tmp_path: Path):
    (tmp_path / "photos").symlink_to(tmp_path / "gone")
    with pytest.raises(DataError, match="photos: it is a broken link"):
        open_data(str(tmp_path / "photos"))


def test_file_of_another_kind(tmp_path: Path):
    (file,) = write_images(tmp_path, 1)
    with pytest.raises(DataError, match=r"000\.png"):
        open_data(str(file))


def test_array_file_whose_name_only_resembles_shards(tmp_path: Path):
    np.savez(tmp_path / "x.target.npz", x_train=np.zeros((2, 8, 8, 3), dtype=np.uint8))
    assert len(open_data(str(tmp_path / "x.target.npz")).train) == 2


def test_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_images(tmp_path / "pictures", 2)
    assert len(open_data("~/pictures").train) == 2


@pytest.mark.parametrize("pattern", ["shards/{0..3}.tar", "./shards/{a,b}.tar", "shards", "one.npz"])
def test_what_lies_here_is_named_so_that_it_is_found_from_elsewhere(tmp_path: Path, monkeypatch, pattern: str):
    (tmp_path / "shards").mkdir()
    (tmp_path / "one.npz").touch()
    monkeypatch.chdir(tmp_path)
    assert absolute_location(pattern) == str(tmp_path.resolve() / pattern)


@pytest.mark.parametrize("name", ["demo", "cifar10", "", "missing", "https://host/{0..3}.tar", "{/a,/b}/{0..3}.tar"])
def test_what_lies_elsewhere_keeps_its_name(name: str):
    assert absolute_location(name) == name


def test_classes_need_a_folder():
    with pytest.raises(DataError, match="demo"):
        open_data("demo", classes=["a"])


def test_unsupported_files_of_a_folder_give_a_warning(tmp_path: Path):
    for place in ("train/a", "train/b", "val/a"):
        write_images(tmp_path / place, 1)
        (tmp_path / place / "IMG_1.NEF").touch()
    (tmp_path / "train/b/IMG_2.dng").touch()
    told: list[str] = []
    open_data(str(tmp_path), progress=told.append)
    assert len(told) == 2 and ".dng 1, .nef 2" in told[0] and ".nef 1" in told[1]
    told.clear()
    open_data(str(tmp_path), classes=["a"], progress=told.append)
    assert len(told) == 2 and ".nef 1" in told[0] and ".nef 1" in told[1]


@pytest.mark.parametrize("split", ["train", "val"])
def test_an_image_that_takes_the_labels_away_is_named(tmp_path: Path, split: str):
    for place in ("train/a", "train/b", "val/a", "val/b"):
        write_images(tmp_path / place, 1)
    write_images(tmp_path / split, 3)
    told: list[str] = []
    open_data(str(tmp_path), progress=told.append)
    (line,) = told
    assert "000.png and 2 other images" in line and str(tmp_path / split) in line
    told.clear()
    open_data(str(tmp_path), classes=["a", "b"], progress=told.append)
    assert told == []


@pytest.mark.parametrize("places", [["."], [".", "2019"], ["2019/May"], ["a", "b"]])
def test_nothing_is_told_of_a_folder_that_is_as_it_should_be(tmp_path: Path, places: list[str]):
    for place in places:
        write_images(tmp_path / place, 1)
    (tmp_path / "notes.txt").touch()
    told: list[str] = []
    open_data(str(tmp_path), progress=told.append)
    assert told == []


def test_imagenet100_is_the_paper_s_list():
    names = class_list("imagenet100")
    assert len(set(names)) == 100
    assert all(len(name) == 9 and name[0] == "n" and name[1:].isdigit() for name in names)
    assert (names[0], names[-1]) == ("n02869837", "n02090622")


def test_class_list_from_a_file(tmp_path: Path):
    file = tmp_path / "classes.txt"
    file.write_text("# animals\nfox\n\n  bear # large\nfox\n")
    assert class_list(str(file)) == ("fox", "bear")
    file.write_text("# nothing\n")
    with pytest.raises(DataError, match=r"classes.txt"):
        class_list(str(file))
    with pytest.raises(DataError, match="imagenet101"):
        class_list("imagenet101")


def test_pipes_are_not_opened(tmp_path: Path):
    """Nobody may ever write into them."""
    for name in ("a.npz", "classes.txt"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match=r"a\.npz"):
        open_data(str(tmp_path / "a.npz"))
    with pytest.raises(DataError, match=r"classes\.txt"):
        class_list(str(tmp_path / "classes.txt"))


def test_a_folder_whose_name_only_looks_like_a_home(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="~nobody-of-that-name"):
        open_data("~nobody-of-that-name")
    write_images(Path("~nobody-of-that-name"), 3)
    assert len(open_data("~nobody-of-that-name").train) == 3
    monkeypatch.setenv("HOME", str(tmp_path))
    write_images(tmp_path / "photos", 2)
    assert len(open_data("~/photos").train) == 2


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
    with pytest.raises(DataError, match=r"cifar10.*corrupted"):
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


def test_stl10_trains_on_unlabeled_images_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
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
    assert data.train.labels is not None and data.train.labels.tolist() == [9, 0] + [UNLABELED] * 3
    # STL-10 stores columns before rows.
    expected = np.concatenate([stored["train"], stored["unlabeled"]]).transpose(0, 1, 3, 2)
    assert torch.equal(data.train.pixels, torch.from_numpy(np.ascontiguousarray(expected)))
    assert data.test.labels is not None and data.test.labels.tolist() == [1, 2]


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "stl10"])
def test_set_that_is_not_there(tmp_path: Path, name: str):
    with pytest.raises(DataError, match=rf"{name} is not in {tmp_path}"):
        open_data(name, root=tmp_path, download=False)


def test_failed_download_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(datasets.CIFAR10, "url", "http://127.0.0.1:9/cifar-10-python.tar.gz")  # nobody listens there
    with pytest.raises(DataError, match=r"cifar10.*Connection refused"):
        open_data("cifar10", root=tmp_path)


def test_default_root(own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert default_root() == own_cache / "jcl" / "data"
    monkeypatch.setenv("JCL_DATA", str(tmp_path))
    assert default_root() == tmp_path
