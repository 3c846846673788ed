import json
import shutil
from pathlib import Path

import pytest
import torch
from image_files import noise_image, write_images
from PIL import Image
from shard_files import png, write_tar

from jcl.data import ArrayImages, ImageData, open_data, open_demo
from jcl.data.check import check_data
from plain_user import unlistable


def test_folder(tmp_path: Path):
    for name in ("cat", "dog"):
        write_images(tmp_path / "train" / name, 4, width=40, height=50, first_seed=100 * ord(name[0]))
    write_images(tmp_path / "val" / "cat", 1, width=40, height=50, first_seed=1)
    write_images(tmp_path / "val" / "dog", 1, width=40, height=50, first_seed=2)
    train = tmp_path / "train"
    Image.new("L", (200, 100)).save(train / "cat" / "gray.jpg")
    noise_image(8, 60, seed=7).save(train / "dog" / "thin.png")
    (train / "dog" / "empty.png").write_bytes(b"")
    shutil.copy(train / "cat" / "000.png", train / "cat" / "twin.png")
    shutil.copy(train / "cat" / "001.png", tmp_path / "val" / "cat" / "leak.png")

    report = check_data(open_data(str(tmp_path)))
    split = report.splits["train"]
    assert split.images == 12 and split.figures["labeled"] == 12
    assert split.class_counts == {"cat": 6, "dog": 6}
    assert split.widths == (8, 40, 200) and split.heights == (50, 50, 100)
    assert split.kinds == {"PNG RGB": 10, "JPEG L": 1}
    assert split.unreadable == {"dog/empty.png": "the file is empty"}
    assert split.small == ("dog/thin.png",)
    assert split.duplicates == (("cat/000.png", "cat/twin.png"),)
    assert report.shared == ("cat/leak.png",)

    flat = report.as_dict()
    assert flat["train_images"] == 12 and flat["train_readable"] == 11 and flat["train_unreadable"] == 1
    assert flat["train_duplicates"] == 1 and flat["shared_between_splits"] == 1
    assert flat["test_images"] == 3 and flat["train_width_median"] == 40
    assert json.loads(json.dumps(flat)) == flat


def test_files_of_unsupported_formats_are_counted(tmp_path: Path):
    write_images(tmp_path, 2)
    for name in ("a.CR2", "b.cr2", "c.nef", "._d.nef", "notes.txt"):
        (tmp_path / name).write_bytes(b"x")
    report = check_data(open_data(str(tmp_path)))
    assert report.as_dict()["train_unsupported"] == 3


def test_unusual_images_are_counted(tmp_path: Path):
    noise_image(90, 30).save(tmp_path / "long.png")
    page, deep = noise_image(12, 8), Image.new("I;16", (12, 8))
    page.save(tmp_path / "pages.tif", save_all=True, append_images=[page])
    deep.save(tmp_path / "deep.png")
    flat = check_data(open_data(str(tmp_path))).as_dict()
    assert (flat["train_sixteen_bit"], flat["train_long"], flat["train_multi_page"]) == (1, 1, 1)


def test_images_that_take_the_labels_away_are_named(tmp_path: Path):
    for name in ("cat", "dog"):
        write_images(tmp_path / name, 1)
    write_images(tmp_path, 1)
    report = check_data(open_data(str(tmp_path)))
    assert report.as_dict()["train_outside_class_folders"] == 1


def test_folders_that_cannot_be_listed_are_named(tmp_path: Path):
    for split in ("train", "val"):
        write_images(tmp_path / split, 1)
    with unlistable(tmp_path / "train/lost+found"):
        report = check_data(open_data(str(tmp_path)))
    figures = report.as_dict()
    assert (figures["train_unlisted_folders"], figures["train_unlisted_folder_names"]) == (1, ["lost+found"])
    assert figures["test_unlisted_folders"] == 0


def test_an_empty_test_folder_is_told(tmp_path: Path):
    write_images(tmp_path / "train", 1)
    (tmp_path / "val").mkdir()
    report = check_data(open_data(str(tmp_path)))
    assert list(report.splits) == ["train"]
    assert str(tmp_path / "val") in report.data.why_untested


def test_arrays():
    report = check_data(open_demo(50, 20))
    split = report.splits["train"]
    assert split.images == 50 and split.widths == (32, 32, 32) and split.unreadable == {}
    assert split.class_counts["striped disc"] == 5 and split.kinds == {"array RGB": 50}
    assert split.duplicates == () and report.shared == ()


def test_files_in_shards_are_files(tmp_path: Path):
    write_tar(tmp_path / "a.tar", {"0.png": png(0), "1.png": png(1), "2.png": png(1), "3.jpg": b"no image"})
    split = check_data(open_data(str(tmp_path / "a.tar"))).splits["train"]
    assert split.kinds == {"PNG RGB": 3} and split.widths == (6, 6, 6) and split.heights == (5, 5, 5)
    assert list(split.unreadable) == ["a.tar/3.jpg"] and split.duplicates == (("a.tar/1.png", "a.tar/2.png"),)


def test_nothing_readable(tmp_path: Path):
    (tmp_path / "a.png").write_bytes(b"")
    split = check_data(open_data(str(tmp_path))).splits["train"]
    assert split.unreadable == {"a.png": "the file is empty"} and split.widths == (0, 0, 0)
    assert split.class_counts == {} and split.figures["labeled"] == 0


def test_progress_counts_all_splits_together():
    told = []
    check_data(open_demo(50, 20), progress=lambda done, total: told.append((done, total)))
    assert told == [(done, 70) for done in range(1, 71)]


def test_every_test_image_that_is_trained_on_counts(tmp_path: Path):
    write_images(tmp_path / "train" / "a", 1)
    write_images(tmp_path / "train" / "b", 1, first_seed=5)
    for name in ("a", "b"):
        write_images(tmp_path / "val" / name, 1)  # both have the pixels of train/a
    report = check_data(open_data(str(tmp_path)))
    assert report.shared == ("a/000.png", "b/000.png")


def test_interrupting_does_not_wait_for_all_images(monkeypatch: pytest.MonkeyPatch):
    read = []
    pixels = ArrayImages.read
    monkeypatch.setattr(ArrayImages, "read", lambda source, index: read.append(index) or pixels(source, index))

    def stop(done, total):
        raise KeyboardInterrupt

    pixels_of_many = torch.zeros(1500, 3, 2, 2, dtype=torch.uint8)
    with pytest.raises(KeyboardInterrupt):
        check_data(ImageData("many", ArrayImages(pixels_of_many)), progress=stop)
    assert len(read) <= 1024


def test_each_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_images(tmp_path, 3)
    read = []
    content = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path.name) or content(path))
    check_data(open_data(str(tmp_path)))
    assert sorted(name for name in read if name.endswith(".png")) == ["000.png", "001.png", "002.png"]
