import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from image_files import noise_image, write_images

from jcl.data import ImageData, UnreadableImage, open_data
from jcl.data.folder import NO_TEST_IMAGES, FolderImages, open_folder
from jcl.errors import DataError
from plain_user import unlistable


def names(source: object) -> list[str]:
    assert isinstance(source, FolderImages)
    return [source.name_of(index) for index in range(len(source))]


def test_flat_folder_has_no_labels(tmp_path: Path):
    write_images(tmp_path, 3)
    data = open_data(str(tmp_path))
    assert names(data.train) == ["000.png", "001.png", "002.png"]
    assert data.train.labels is None and data.train.class_names is None and data.test is None
    assert data.train.read(1).shape == (3, 8, 12)


def test_class_folders_give_labels_as_imagefolder_does(tmp_path: Path):
    from torchvision.datasets import ImageFolder

    for seed, name in enumerate(["zebra", "ant", "Bee"]):
        write_images(tmp_path / name, 2 + seed, first_seed=10 * seed)
    write_images(tmp_path / "ant" / "deeper", 1)
    train = open_folder(tmp_path).train
    reference = ImageFolder(tmp_path)
    assert train.labels is not None and train.class_names == tuple(reference.classes)
    ours = dict(zip(names(train), train.labels.tolist(), strict=True))
    assert ours == {str(Path(path).relative_to(tmp_path)): label for path, label in reference.samples}


def test_image_beside_the_folders_means_no_classes(tmp_path: Path):
    write_images(tmp_path / "a", 1)
    write_images(tmp_path / "b", 1)
    write_images(tmp_path, 1)
    assert open_folder(tmp_path).train.labels is None


def test_single_folder_is_no_class(tmp_path: Path):
    write_images(tmp_path / "holiday" / "beach", 2)
    assert open_folder(tmp_path).train.labels is None


@pytest.mark.parametrize(
    ("train_name", "test_name"),
    [("train", name) for name in ("val", "valid", "validation", "test", "Val")]
    + [("Train", "Test"), ("TRAIN", "TEST"), ("training", "validation"), ("Training", "Testing")],
)
def test_splits_share_class_numbers(tmp_path: Path, train_name: str, test_name: str):
    for name in "abc":
        write_images(tmp_path / train_name / name, 2)
    for name in "bcd":
        write_images(tmp_path / test_name / name, 1)
    data = open_folder(tmp_path)
    assert data.test is not None and data.test.labels is not None
    assert data.train.class_names == ("a", "b", "c")
    assert data.test.class_names == ("a", "b", "c", "d")  # a class of its own, not an image without one
    assert data.test.labels.tolist() == [1, 2, 3]


def test_test_split_without_class_folders_has_no_labels(tmp_path: Path):
    write_images(tmp_path / "train" / "a", 1)
    write_images(tmp_path / "train" / "b", 1)
    write_images(tmp_path / "val", 2)
    data = open_folder(tmp_path)
    assert data.train.labels is not None and data.test is not None and data.test.labels is None


def test_test_images_of_a_single_training_class_have_labels(tmp_path: Path):
    for name in ("train/a", "train/b", "val/b"):
        write_images(tmp_path / name, 2)
    data = open_folder(tmp_path)
    assert data.test is not None and data.test.labels is not None
    assert data.test.class_names == ("a", "b") and data.test.labels.tolist() == [1, 1]
    write_images(tmp_path / "train", 1)  # now there are no training classes
    test = open_folder(tmp_path).test
    assert test is not None and test.labels is None


@pytest.mark.parametrize("place", ["train", "train/c"])
def test_test_split_keeps_its_labels_beside_training_images_without(tmp_path: Path, place: str):
    """An image beside the class folders to train on, or no class folders there at all, says nothing of the others."""
    for name in ("train/a", "train/b") if place == "train" else ():
        write_images(tmp_path / name, 1)
    write_images(tmp_path / place, 1)
    for name in "ab":
        write_images(tmp_path / "val" / name, 2)
    data = open_folder(tmp_path)
    assert data.train.labels is None and data.train.class_names is None
    assert data.test is not None and data.test.labels is not None
    assert data.test.class_names == ("a", "b") and data.test.labels.tolist() == [0, 0, 1, 1]


def test_train_can_be_a_class(tmp_path: Path):
    for name in ("bus", "plane", "train"):
        write_images(tmp_path / name, 1)
    data = open_folder(tmp_path)
    assert data.train.class_names == ("bus", "plane", "train") and data.test is None


def test_lone_train_folder_is_the_split(tmp_path: Path):
    write_images(tmp_path / "train" / "a", 1)
    write_images(tmp_path / "train" / "b", 1)
    assert open_folder(tmp_path).train.class_names == ("a", "b")


@pytest.mark.parametrize("beside", ["meta/info.csv", "unlabeled/0.png"])
def test_a_train_folder_with_classes_is_the_split_beside_others_without(tmp_path: Path, beside: str):
    for name in "ab":
        write_images(tmp_path / "train" / name, 1)
    (tmp_path / beside).parent.mkdir()
    shutil.copy(tmp_path / "train/a/000.png", tmp_path / beside)
    data = open_folder(tmp_path)
    assert data.train.class_names == ("a", "b") and data.test is None
    assert ("unlabeled" in data.unused) == beside.endswith("png")


def test_shards_that_others_wrote_are_to_be_named(tmp_path: Path):
    (tmp_path / "my shards").mkdir()
    (tmp_path / "my shards/a.tar").touch()
    with pytest.raises(DataError, match=r"'.*/my shards/\*\.tar'"):
        open_folder(tmp_path / "my shards")


def test_hidden_and_other_files_are_left_out(tmp_path: Path):
    write_images(tmp_path, 1)
    noise_image(3, 3).save(tmp_path / ".hidden.png")
    write_images(tmp_path / ".trash", 2)
    (tmp_path / "notes.txt").write_text("no image")
    noise_image(3, 3).save(tmp_path / "UPPER.JPG", "JPEG")
    assert names(open_folder(tmp_path).train) == ["000.png", "UPPER.JPG"]


def test_unicode_names(tmp_path: Path):
    for name in ("日本/富士山.png", "été/ñandú 1.png", "emoji/🦊.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        noise_image(4, 4).save(tmp_path / name)
    source = open_folder(tmp_path).train
    assert sorted(names(source)) == sorted(["日本/富士山.png", "été/ñandú 1.png", "emoji/🦊.png"])
    assert source.read(2).shape == (3, 4, 4)


def test_name_that_is_no_unicode_is_read_and_printable(tmp_path: Path):
    raw = os.fsencode(tmp_path) + b"/caf\xe9.png"
    try:
        Path(os.fsdecode(raw)).write_bytes(b"")
    except OSError:
        pytest.skip("this file system takes Unicode names only")
    noise_image(4, 4).save(os.fsdecode(raw), "PNG")
    source = open_folder(tmp_path).train
    assert source.read(0).shape == (3, 4, 4)
    assert source.name_of(0).encode("utf-8").decode("utf-8") == "caf\ufffd.png"


def test_links_are_followed_but_not_in_circles(tmp_path: Path):
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    write_images(root / "a", 1)
    write_images(elsewhere, 2)
    (root / "b").symlink_to(elsewhere)
    (root / "a" / "up").symlink_to(root)
    (elsewhere / "self").symlink_to(elsewhere)
    assert names(open_folder(root).train) == ["a/000.png", "b/000.png", "b/001.png"]


def test_two_links_to_one_folder_are_two_classes(tmp_path: Path):
    write_images(tmp_path / "store", 1)
    root = tmp_path / "root"
    root.mkdir()
    for name in "ab":
        (root / name).symlink_to(tmp_path / "store")
    assert open_folder(root).train.class_names == ("a", "b")


def test_dead_link_is_listed_and_unreadable(tmp_path: Path):
    (tmp_path / "gone.png").symlink_to(tmp_path / "nowhere.png")
    with pytest.raises(UnreadableImage, match=r"gone\.png"):
        open_folder(tmp_path).train.read(0)


def test_pipe_is_not_opened(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.png")
    write_images(tmp_path, 1)
    assert names(open_folder(tmp_path).train) == ["000.png"]


def test_missing_folder(tmp_path: Path):
    with pytest.raises(DataError, match="/none "):
        open_folder(tmp_path / "none")


def test_empty_folder(tmp_path: Path):
    (tmp_path / "readme.txt").write_text("nothing here")
    with pytest.raises(DataError, match="no image files"):
        open_data(str(tmp_path))


def test_a_folder_of_a_telephone_says_what_to_do(tmp_path: Path):
    (tmp_path / "IMG_1.NEF").write_bytes(b"x")
    with pytest.raises(DataError, match=r"\.nef 1"):
        open_data(str(tmp_path))


def test_source_pickles_small(tmp_path: Path):
    write_images(tmp_path, 3)
    source = open_folder(tmp_path).train
    copy = pickle.loads(pickle.dumps(source))
    assert names(copy) == names(source) and torch.equal(copy.read(2), source.read(2))


def test_only_some_classes(tmp_path: Path):
    for split in ("train", "val"):
        for name in "abcd":
            write_images(tmp_path / split / name, 2)
    data = open_data(str(tmp_path), classes=["d", "b"])
    assert data.train.class_names == ("d", "b")
    assert names(data.train) == ["b/000.png", "b/001.png", "d/000.png", "d/001.png"]
    assert data.train.labels is not None and data.train.labels.tolist() == [1, 1, 0, 0]
    assert data.test is not None and data.test.class_names == ("d", "b")


def test_class_that_is_not_there(tmp_path: Path):
    write_images(tmp_path / "a", 1)
    with pytest.raises(DataError, match="class x"):
        open_data(str(tmp_path), classes=["a", "x"])


def opened_and_told(root: Path, **options: object) -> tuple[ImageData, list[str]]:
    told: list[str] = []
    return open_data(str(root), progress=told.append, **options), told  # type: ignore[arg-type]


def test_a_folder_that_may_not_be_listed_is_a_sentence(tmp_path: Path):
    write_images(tmp_path / "photos", 1)
    with (
        unlistable(tmp_path / "photos"),
        pytest.raises(DataError, match=r"/photos.*Permission denied"),
    ):
        open_data(str(tmp_path / "photos"))


def test_a_folder_below_that_may_not_be_listed_is_passed_over_and_named(tmp_path: Path):
    for name in ("ant", "bee"):
        write_images(tmp_path / name, 2)
    with unlistable(tmp_path / "lost+found"):
        data, told = opened_and_told(tmp_path)
        assert data.train.class_names == ("ant", "bee") and len(data.train) == 4
        assert len(told) == 1 and "lost+found: permission denied" in told[0]
        with pytest.raises(DataError, match=r"/lost\+found .*permission denied"):
            open_data(str(tmp_path), strict=True)
    assert opened_and_told(tmp_path, strict=True)[1] == []


def test_several_folders_that_may_not_be_listed_are_warned_about_together(tmp_path: Path):
    write_images(tmp_path / "train", 1)
    write_images(tmp_path / "val", 1)
    with unlistable(tmp_path / "train/x", tmp_path / "train/y", tmp_path / "val/z"):
        told = opened_and_told(tmp_path)[1]
    assert len(told) == 2
    assert "2 folders" in told[0] and str(tmp_path / "train") in told[0] and "(x: permission denied" in told[0]
    assert "1 folder " in told[1] and str(tmp_path / "val") in told[1] and "(z: permission denied" in told[1]


def test_folders_outside_of_the_class_list_need_not_be_listed(tmp_path: Path):
    for name in "ab":
        write_images(tmp_path / name, 1)
    with unlistable(tmp_path / "c"):
        data, told = opened_and_told(tmp_path, classes=["a", "b"], strict=True)
        assert len(data.train) == 2 and told == []
        with pytest.raises(DataError, match="class c"):
            open_data(str(tmp_path), classes=["a", "c"])
        with pytest.raises(DataError, match=r"/c .*permission denied"):
            open_data(str(tmp_path), classes=["a", "c"], strict=True)


def test_images_that_all_lie_where_nobody_may_look(tmp_path: Path):
    write_images(tmp_path / "mine", 1)
    with unlistable(tmp_path / "mine"), pytest.raises(DataError, match=r"no image files.*permission denied"):
        open_data(str(tmp_path))


@pytest.mark.parametrize("test_name", ["val", "test"])
def test_an_empty_test_folder_is_no_test_split(tmp_path: Path, test_name: str):
    for name in "ab":
        write_images(tmp_path / "train" / name, 2)
    (tmp_path / test_name / "a").mkdir(parents=True)
    for options in ({}, {"strict": True}, {"classes": ["a", "b"]}):
        data, told = opened_and_told(tmp_path, **options)
        assert data.test is None and data.train.class_names == ("a", "b") and len(data.train) == 4
        (line,) = told
        assert str(tmp_path / test_name) in line and NO_TEST_IMAGES in line


def test_a_test_folder_of_a_telephone_says_what_to_do(tmp_path: Path):
    write_images(tmp_path / "train", 2)
    (tmp_path / "val").mkdir()
    (tmp_path / "val/IMG_1.NEF").touch()
    (line,) = opened_and_told(tmp_path)[1]
    assert ".nef 1" in line and NO_TEST_IMAGES in line


def test_a_test_folder_that_may_not_be_listed_is_no_test_split(tmp_path: Path):
    write_images(tmp_path / "train", 2)
    with unlistable(tmp_path / "val"):
        data, told = opened_and_told(tmp_path)
        assert data.test is None
        assert len(told) == 1 and f"{tmp_path / 'val'} cannot be listed: permission denied" in told[0]
        with pytest.raises(DataError, match=r"/val.*permission denied"):
            open_data(str(tmp_path), strict=True)


@pytest.mark.parametrize("strict", [False, True])
def test_a_training_folder_without_images_stays_an_error(tmp_path: Path, strict: bool):
    write_images(tmp_path / "val", 2)
    (tmp_path / "train").mkdir()
    with pytest.raises(DataError, match=r"/train .*no image files"):
        open_data(str(tmp_path), strict=strict)
    with (
        unlistable(tmp_path / "train"),
        pytest.raises(DataError, match=r"/train.*permission denied"),
    ):
        open_data(str(tmp_path), strict=strict)
