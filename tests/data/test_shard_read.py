"""Shards opened by folder, file or pattern, and read image by image and batch by batch."""

import os
import pickle
import random
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from image_files import noise_image, write_images
from shard_files import names, opened, png, write_tar

from jcl.data import UNLABELED, BatchLoader, ImageSource, UnreadableImage, open_data, write_shards
from jcl.data.check import check_data
from jcl.errors import DataError


def loader_of(source: ImageSource, **changes: object) -> BatchLoader:
    options = {"batch_size": 4, "canvas": 16, "seed": 5, "cache_bytes": 0} | changes
    return BatchLoader(source, **options)  # type: ignore[arg-type]


def test_source_pickles_small_and_without_open_files(shards: Path):
    source = opened(shards)
    expected = source.read(3)
    data = pickle.dumps(source)
    assert torch.equal(pickle.loads(data).read(3), expected)
    assert len(data) < 5000


def test_patterns(shards: Path):
    assert len(opened(shards / "train-0002.tar")) == 7
    assert len(opened(f"{shards}/train-{{0000,0002}}.tar")) == 15
    assert len(opened(f"{shards}/train-{{0000,0000}}.tar")) == 8
    assert len(opened(f"{shards}/train-*.tar")) == 23
    assert len(opened(f"{shards}/train-{{0000..0001}}.tar")) == 16
    both = open_data(f"{shards}/*.tar")
    assert len(both.train) == 23 and both.test is not None and len(both.test) == 5
    assert opened(f"{shards}/train-*.tar").class_names == ("ant", "bee", "cat", "dog")
    assert open_data(str(shards / "train-0002.tar")).name == "train-0002"
    assert open_data(f"{shards}/train-*.tar").name == "shards"


def test_missing_shards(shards: Path):
    with pytest.raises(DataError, match=r"train-0003\.tar"):
        open_data(f"{shards}/train-{{0000..0009}}.tar")
    (shards / "train-0001.tar").unlink()
    with pytest.raises(DataError, match=r"train-0001\.tar"):
        open_data(str(shards))


def test_class_list_does_not_apply(shards: Path):
    with pytest.raises(DataError, match="class"):
        open_data(str(shards), classes=["ant"])


def test_plain_tar_of_a_folder(tmp_path: Path):
    """By the `tar` program, with folders, a long name and names that are no Unicode."""
    root = tmp_path / "in"
    write_images(root / "deep" / "er", 2)
    long_name = "x" * 120 + ".PNG"
    noise_image(4, 4).save(root / long_name)
    (root / os.fsdecode(b"caf\xe9.png")).write_bytes(png(9))
    (root / "notes.txt").write_text("no image")
    (root / ".hidden.png").write_bytes(png(8))
    for kind in ("gnu", "posix", "ustar"):
        file = tmp_path / f"{kind}.tar"
        subprocess.run(["tar", f"--format={kind}", "-cf", file, "-C", tmp_path, "in"], check=kind != "ustar")
        found = opened(file)
        expected = {"in/deep/er/000.png", "in/deep/er/001.png", f"in/{long_name}", "in/caf\ufffd.png"}
        assert set(names(found)) == expected - ({f"in/{long_name}"} if kind == "ustar" else set())
        assert found.labels is None
        for index in range(len(found)):
            found.read(index)


def test_labels_from_cls_and_json(tmp_path: Path):
    members = {
        "0.cls": b"7\n",
        "0.png": png(0),
        "1.png": png(1),
        "1.json": b'{"label": 3, "caption": "x"}',
        "2.png": png(2),
        "2.json": b'{"cls": 2}',
        "3.png": png(3),
        "4.png": png(4),
        "4.json": b"[" * 100_000,
        "5.png": png(5),
        "5.cls": b"-1",
        "6.png": png(6),
        "6.json": b'{"label": 5}',
        "6.cls": b"6",
    }
    source = opened(write_tar(tmp_path / "s.tar", members))
    assert source.labels is not None and source.class_names is None
    assert source.labels.tolist() == [7, 3, 2, UNLABELED, UNLABELED, UNLABELED, 6]


def test_class_names_as_labels(tmp_path: Path):
    write_tar(tmp_path / "train-0.tar", {"0.png": png(0), "0.cls": b"zebra", "1.png": png(1), "1.cls": b"ant"})
    unlike = {"2.png": png(4), "2.cls": b"bee"}  # a class that is not trained on
    write_tar(tmp_path / "val-0.tar", {"0.png": png(2), "0.json": b'{"label": "zebra"}', "1.png": png(3)} | unlike)
    data = open_data(f"{tmp_path}/*.tar")
    assert data.train.class_names == ("ant", "zebra") and data.train.labels is not None
    assert data.train.labels.tolist() == [1, 0]
    assert data.test is not None and data.test.labels is not None
    assert data.test.labels.tolist() == [1, UNLABELED, 2] and data.test.class_names == ("ant", "zebra", "bee")


def test_names_that_read_like_numbers_in_one_split_stay_names(tmp_path: Path):
    for split, labels in {"train": ["1", "2", "other"], "val": ["1", "2"]}.items():
        samples = [{f"{place}.png": png(place), f"{place}.cls": text.encode()} for place, text in enumerate(labels)]
        write_tar(tmp_path / f"{split}.tar", {name: content for sample in samples for name, content in sample.items()})
    data = open_data(f"{tmp_path}/{{train,val}}.tar")
    assert data.train.class_names == ("1", "2", "other") and data.test is not None
    assert data.train.labels is not None and data.train.labels.tolist() == [0, 1, 2]
    assert data.test.labels is not None and data.test.labels.tolist() == [0, 1]


def warnings_of(location: object) -> list[str]:
    told: list[str] = []
    open_data(str(location), progress=told.append)
    return told


def test_class_folders_inside_give_no_labels_and_a_warning(tmp_path: Path):
    write_tar(tmp_path / "train-0.tar", {"./cat/0.png": png(0), "./cat/1.png": png(1)})
    write_tar(tmp_path / "train-1.tar", {"./emu/0.png": png(2), "./dog/1.png": png(3)})
    write_tar(tmp_path / "val-0.tar", {"cat/0.png": png(4), "dog/0.png": png(5)})
    data = open_data(f"{tmp_path}/*.tar")
    assert data.train.labels is None and data.test is not None and data.test.labels is None
    assert "(cat, dog and 1 more)" in warnings_of(f"{tmp_path}/*.tar")[0]
    found = check_data(data)
    assert found.splits["train"].figures["folders_in_shards"] == 3
    assert found.as_dict()["test_folders_in_shards"] == 2


@pytest.mark.parametrize(
    "names",
    [
        ["0.png", "1.png"],
        ["./0.png", "./1.png"],
        ["photos/0.png", "photos/1.png"],
        ["0.png", "more/1.png"],
        ["cat/0.png", "dog/1.png", "dog/1.cls"],
    ],
)
def test_nothing_is_told_of_shards_with_labels_or_without_class_folders(tmp_path: Path, names: list[str]):
    members = {name: png(place) if name.endswith(".png") else b"3" for place, name in enumerate(names)}
    assert warnings_of(write_tar(tmp_path / "s.tar", members)) == []


def test_a_folder_packed_by_tar_and_one_packed_here(tmp_path: Path):
    """What the remark advises does give the labels."""
    for name in ("cat", "dog"):
        write_images(tmp_path / "photos" / name, 2)
    subprocess.run(["tar", "-cf", tmp_path / "by-tar.tar", "-C", tmp_path, "photos"], check=True)
    assert "photos/cat, photos/dog" in warnings_of(tmp_path / "by-tar.tar")[0]
    write_shards(open_data(str(tmp_path / "photos")), tmp_path / "packed")
    assert warnings_of(tmp_path / "packed") == [] and opened(tmp_path / "packed").class_names == ("cat", "dog")


def test_strict_takes_whole_shards_only(tmp_path: Path):
    whole = write_tar(tmp_path / "train-0.tar", {"0.png": png(0), "1.png": png(1)})
    test = tmp_path / "val-0.tar"
    test.write_bytes(whole.read_bytes()[:1536])
    assert len(open_data(f"{tmp_path}/train-*.tar", strict=True).train) == 2
    with pytest.raises(DataError, match=r"val-0\.tar"):
        open_data(f"{tmp_path}/*.tar", strict=True)
    assert open_data(f"{tmp_path}/*.tar").test is not None


def test_further_pictures_of_a_sample_are_no_images(tmp_path: Path):
    members = {"a.b/0.jpg": png(0), "a.b/0.mask.png": png(1), "a.b/cat.1.jpg": png(2), "a.b/cat.2.jpg": png(3)}
    source = opened(write_tar(tmp_path / "s.tar", members | {"a.b/cat.cls": b"3", "a.b/cat.2.cls": b"4"}))
    assert names(source) == ["a.b/0.jpg", "a.b/cat.1.jpg", "a.b/cat.2.jpg"]
    assert source.labels is not None and source.labels.tolist() == [UNLABELED, 3, 4]


def test_check_reads_shards(shards: Path):
    report = check_data(open_data(str(shards)))
    assert report.splits["train"].images == 23 and report.splits["train"].unreadable == {}
    assert report.splits["train"].class_counts == {"ant": 9, "bee": 7, "cat": 7}


def test_changed_shard_is_noticed(tmp_path: Path):
    file = write_tar(tmp_path / "s.tar", {"0.png": png(0)})
    source = opened(file)
    write_tar(file, {"0.png": png(1), "1.png": png(2)})
    with pytest.raises(UnreadableImage, match=r"s\.tar/0\.png.*changed"):
        source.read(0)


def test_shard_cut_while_it_is_open(tmp_path: Path):
    file = write_tar(tmp_path / "s.tar", {"0.png": png(0), "1.png": png(1)})
    source = opened(file)
    source.read(0)
    os.truncate(file, 1024)
    with pytest.raises(UnreadableImage, match="truncated"):
        source.read(1)


def test_shard_that_goes_away(tmp_path: Path):
    file = write_tar(tmp_path / "s.tar", {"0.png": png(0)})
    source = opened(file)
    file.unlink()
    with pytest.raises(UnreadableImage, match=r"s\.tar/0\.png"):
        source.read(0)


def test_more_shards_than_are_kept_open(tmp_path: Path):
    for number in range(150):
        write_tar(tmp_path / f"{number:03}.tar", {"x.png": png(number)})
    source = opened(f"{tmp_path}/{{000..149}}.tar")
    before = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0
    order = random.Random(0).sample(range(150), 150)
    for index in order:
        expected = torch.from_numpy(np.array(noise_image(6, 5, index))).permute(2, 0, 1)
        assert torch.equal(source.read(index), expected)
    if before:
        assert len(list(Path("/proc/self/fd").iterdir())) <= before + 128


@pytest.mark.parametrize("workers", [0, 2])
def test_any_start_and_any_workers_give_the_same(shards: Path, workers: int):
    source = opened(shards)
    unbroken = list(loader_of(source).epoch(1))
    with loader_of(source, workers=workers) as loader:
        for start in range(5):
            resumed = list(loader.epoch(1, start))
            assert len(resumed) == 5 - start
            for batch, expected in zip(resumed, unbroken[start:], strict=True):
                assert torch.equal(batch.pixels, expected.pixels)
                assert torch.equal(batch.samples, expected.samples)


def test_each_image_once_an_epoch(shards: Path):
    with loader_of(opened(shards), batch_size=1, workers=2) as loader:
        for epoch in range(2):
            samples = torch.cat([batch.samples for batch in loader.epoch(epoch)])
            assert sorted(samples.tolist()) == list(range(23))


def test_the_way_the_shards_are_named_does_not_matter(shards: Path):
    whole, pattern = opened(shards), opened(f"{shards}/train-{{0000..0002}}.tar")
    for one, other in zip(loader_of(whole).epoch(0), loader_of(pattern).epoch(0), strict=True):
        assert torch.equal(one.pixels, other.pixels)


def test_broken_images_are_named_with_their_shard(tmp_path: Path):
    file = write_tar(tmp_path / "s.tar", {f"{n}.png": png(n) if n != 2 else b"spoilt" for n in range(5)})
    loader = loader_of(opened(file), batch_size=5)
    list(loader.epoch(0))
    assert loader.skipped == {"s.tar/2.png": "it is not an image of a known format"}
