import os
from pathlib import Path

import numpy as np
import pytest
import torch
from image_files import write_images

from jcl.data import ArrayImages, open_data, open_demo
from jcl.data.opening import whole_location
from jcl.data.subset import IMAGENET100, class_list
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
    with pytest.raises(DataError, match=f"called {typed}; did you mean {nearest}.$"):
        open_data(typed)


def test_unknown_name_without_a_near_one_lists_them():
    with pytest.raises(DataError, match="known data sets are demo, cifar10, cifar100 or stl10"):
        open_data("/no/such/place")


def test_file_of_another_kind(tmp_path: Path):
    (file,) = write_images(tmp_path, 1)
    with pytest.raises(DataError, match=r"000.png is no \.npz file; give a folder of images"):
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
    assert whole_location(pattern) == str(tmp_path.resolve() / pattern)


@pytest.mark.parametrize("name", ["demo", "cifar10", "", "missing", "https://host/{0..3}.tar", "{/a,/b}/{0..3}.tar"])
def test_what_lies_elsewhere_keeps_its_name(name: str):
    assert whole_location(name) == name


def test_classes_need_a_folder():
    with pytest.raises(DataError, match="demo is none"):
        open_data("demo", classes=["a"])


def test_files_of_a_folder_that_are_passed_over_are_told_in_one_line(tmp_path: Path):
    for place in ("train/a", "train/b", "val/a"):
        write_images(tmp_path / place, 1)
        (tmp_path / place / "IMG_1.HEIC").touch()
    (tmp_path / "train/b/IMG_2.dng").touch()
    told: list[str] = []
    open_data(str(tmp_path), progress=told.append)
    open_data(str(tmp_path), classes=["a"], progress=told.append)
    about = "Passed over, because their kind cannot be read:"
    check = f"`jcl check {tmp_path}` tells more."
    assert told == [
        f"{about} 4 files below {tmp_path} (.dng 1, .heic 3); {check}",
        f"{about} 2 files below {tmp_path} (.heic 2); {check}",
    ]


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize(("count", "said"), [(1, "000.png lies"), (3, "000.png and 2 more images lie")])
def test_an_image_that_takes_the_labels_away_is_named(tmp_path: Path, split: str, count: int, said: str):
    for place in ("train/a", "train/b", "val/a", "val/b"):
        write_images(tmp_path / place, 1)
    write_images(tmp_path / split, count)
    told: list[str] = []
    open_data(str(tmp_path), progress=told.append)
    (line,) = told
    assert line.startswith(f"Below {tmp_path / split} the sub-folders are not taken for classes, because {said} beside")
    assert line.endswith(f"move {'it' if count == 1 else 'them'} into one of these or away.")
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
    assert class_list("imagenet100") == IMAGENET100
    assert len(set(IMAGENET100)) == 100
    assert all(len(name) == 9 and name[0] == "n" and name[1:].isdigit() for name in IMAGENET100)
    assert (IMAGENET100[0], IMAGENET100[-1]) == ("n02869837", "n02090622")


def test_class_list_from_a_file(tmp_path: Path):
    file = tmp_path / "classes.txt"
    file.write_text("# animals\nfox\n\n  bear # large\nfox\n")
    assert class_list(str(file)) == ("fox", "bear")
    file.write_text("# nothing\n")
    with pytest.raises(DataError, match="names no class"):
        class_list(str(file))
    with pytest.raises(DataError, match="neither imagenet100 nor a text file"):
        class_list("imagenet101")


def test_pipes_are_not_opened(tmp_path: Path):
    """Nobody may ever write into them."""
    for name in ("a.npz", "classes.txt"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match=r"a\.npz is no file"):
        open_data(str(tmp_path / "a.npz"))
    with pytest.raises(DataError, match=r"classes\.txt is neither imagenet100 nor a text file"):
        class_list(str(tmp_path / "classes.txt"))


def test_a_folder_whose_name_only_looks_like_a_home(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="There is no folder"):
        open_data("~nobody-of-that-name")
    write_images(Path("~nobody-of-that-name"), 3)
    assert len(open_data("~nobody-of-that-name").train) == 3
    monkeypatch.setenv("HOME", str(tmp_path))
    write_images(tmp_path / "photos", 2)
    assert len(open_data("~/photos").train) == 2
