"""Data of any kind written as shards, which every tar reader and this program read back as they were."""

import io
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from image_files import noise_image
from shard_files import by_pixels, opened

from jcl.data import UNLABELED, ArrayImages, ImageData, open_data, write_shards
from jcl.data.encoded import EncodedImages
from jcl.errors import DataError


def test_round_trip_keeps_pixels_and_labels(folder: Path, tmp_path: Path):
    before = open_data(str(folder))
    report = write_shards(before, tmp_path / "out", images_per_shard=8)
    after = open_data(str(tmp_path / "out"))
    assert after.name == before.name == "pictures" and after.test is not None and before.test is not None
    assert after.train.class_names == after.test.class_names == ("ant", "bee", "cat", "dog")  # the last in val alone
    (folder / "train" / "bee" / "broken.png").unlink()
    (folder / "train" / "cat" / "gone.jpg").unlink()
    (folder / "val" / "bee" / "empty.jpg").unlink()
    clean = open_data(str(folder))
    assert clean.test is not None
    assert by_pixels(after.train) == by_pixels(clean.train)
    assert by_pixels(after.test) == by_pixels(clean.test)
    assert sorted(set(by_pixels(after.test).values())) == [1, 3]
    assert report["train"].left_out == {
        "bee/broken.png": "it is not an image of a known format",
        "cat/gone.jpg": "no such file or directory",
    }
    assert report["val"].left_out == {"bee/empty.jpg": "the file is empty"}


def test_report(folder: Path, tmp_path: Path):
    told: list[tuple[int, int]] = []
    out = tmp_path / "out"
    report = write_shards(
        open_data(str(folder)), out, images_per_shard=8, progress=lambda done, total: told.append((done, total))
    )
    train, val = report["train"], report["val"]
    assert (train.shards, train.images, len(train.left_out)) == (3, 23, 2)
    assert (val.shards, val.images, list(val.left_out)) == (1, 5, ["bee/empty.jpg"])
    assert train.bytes == sum(file.stat().st_size for file in out.glob("train-*.tar"))
    assert told[-1] == (31, 31) and told == sorted(told)


def test_layout_is_plain_webdataset(folder: Path, shards: Path):
    """What any tar reader sees: original bytes, and the label under the same key."""
    assert sorted(file.name for file in shards.iterdir()) == [
        "index.json",
        *(f"train-000{number}.tar" for number in range(3)),
        "val-0000.tar",
    ]
    originals = {file.read_bytes(): file.parent.name for file in (folder / "train").rglob("*.png")}
    with tarfile.open(shards / "train-0001.tar") as tar:
        assert tar.getnames() == [f"{n:06}.{ending}" for n in range(8, 16) for ending in ("png", "cls")]
        for number in range(8, 16):
            image, label = (tar.extractfile(f"{number:06}.{ending}") for ending in ("png", "cls"))
            assert image is not None and label is not None
            assert ["ant", "bee", "cat"][int(label.read())] == originals[image.read()]


def test_every_shard_has_every_class(folder: Path, tmp_path: Path):
    write_shards(open_data(str(folder)), tmp_path / "out", images_per_shard=12)
    for file in (tmp_path / "out").glob("train-*.tar"):
        labels = opened(file).labels
        assert labels is not None and labels.unique().tolist() == [0, 1, 2]


def test_same_data_gives_same_bytes(folder: Path, tmp_path: Path, shards: Path):
    for file in folder.rglob("*.png"):
        os.utime(file, (1, 1))
    data = open_data(str(folder))
    write_shards(data, tmp_path / "again", images_per_shard=8)
    write_shards(data, tmp_path / "other", images_per_shard=8, seed=1)
    for file in shards.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()
    assert (tmp_path / "other" / "train-0000.tar").read_bytes() != (shards / "train-0000.tar").read_bytes()


def test_arrays(tmp_path: Path):
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, (11, 9, 7, 3), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", x_train=pixels[:8], y_train=np.arange(8) % 4, x_test=pixels[8:], y_test=[1, 2, 3])
    data = open_data(str(tmp_path / "a.npz"))
    write_shards(data, tmp_path / "out", images_per_shard=3)
    after = open_data(str(tmp_path / "out"))
    assert after.test is not None and data.test is not None and after.train.class_names is None
    assert by_pixels(after.train) == by_pixels(data.train) and by_pixels(after.test) == by_pixels(data.test)


class NamelessFiles(EncodedImages):
    """Image files of all kinds whose names have no extension, as in a table."""

    labels, class_names, description = None, None, "nameless files"

    def __init__(self) -> None:
        self.files = []
        for number, kind in enumerate(("PNG", "BMP", "DIB", "TIFF", "PPM", "GIF", "TGA", "JPEG2000")):
            stream = io.BytesIO()
            noise_image(6, 5, number).save(stream, kind, **({"irreversible": False} if kind == "JPEG2000" else {}))
            self.files.append(stream.getvalue())

    def __len__(self) -> int:
        return len(self.files)

    def name_of(self, index: int) -> str:
        return f"train/{index}"

    def content_of(self, index: int) -> bytes:
        return self.files[index]


def test_files_without_extension(tmp_path: Path):
    source = NamelessFiles()
    write_shards(ImageData("nameless", source), tmp_path / "out")
    written = open_data(str(tmp_path / "out")).train
    assert len(written) == len(source) and by_pixels(written) == by_pixels(source)


def test_labels_stay_away_where_there_are_none(tmp_path: Path):
    pixels = torch.randint(0, 256, (4, 3, 5, 5), dtype=torch.uint8)
    some = ImageData("some", ArrayImages(pixels, torch.tensor([1, UNLABELED, 0, UNLABELED]), ("a", "b")))
    write_shards(some, tmp_path / "some")
    assert by_pixels(opened(tmp_path / "some")) == by_pixels(some.train)
    write_shards(ImageData("none", ArrayImages(pixels)), tmp_path / "none")
    assert opened(tmp_path / "none").labels is None


def test_shards_can_be_written_anew(shards: Path, tmp_path: Path):
    write_shards(open_data(str(shards)), tmp_path / "anew", images_per_shard=5)
    assert by_pixels(opened(tmp_path / "anew")) == by_pixels(opened(shards))
    assert len(list((tmp_path / "anew").glob("train-*.tar"))) == 5


def test_nothing_is_overwritten(folder: Path, shards: Path, tmp_path: Path):
    before = {file.name: file.read_bytes() for file in shards.iterdir()}
    with pytest.raises(DataError, match="exists"):
        write_shards(open_data(str(folder)), shards)
    assert {file.name: file.read_bytes() for file in shards.iterdir()} == before
    (tmp_path / "empty").mkdir()
    assert write_shards(open_data(str(folder)), tmp_path / "empty")["train"].images == 23


def test_broken_off_leaves_nothing(folder: Path, tmp_path: Path):
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    (tmp_path / "place").mkdir()
    with pytest.raises(KeyboardInterrupt):
        write_shards(open_data(str(folder)), tmp_path / "place" / "out", progress=stop)
    assert list((tmp_path / "place").iterdir()) == []


def test_nothing_readable(tmp_path: Path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_bytes(b"")
    with pytest.raises(DataError, match="None of the images"):
        write_shards(open_data(str(tmp_path / "in")), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_place_that_cannot_be_written(folder: Path, tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="file/out"):
        write_shards(open_data(str(folder)), tmp_path / "file" / "out")


def test_shards_of_the_webdataset_library(tmp_path: Path):
    """Written by its own writer, and ours read by its own reader."""
    webdataset = pytest.importorskip("webdataset", reason="the webdataset library is not installed")
    with webdataset.TarWriter(str(tmp_path / "theirs.tar")) as writer:
        for number in range(5):
            content = {"png": np.array(noise_image(6, 5, number)), "cls": number % 3, "json": {"caption": "x"}}
            writer.write({"__key__": f"sample{number:04}"} | content)
    theirs = opened(tmp_path / "theirs.tar")
    assert theirs.labels is not None and theirs.labels.tolist() == [0, 1, 2, 0, 1] and theirs.damage == {}
    for number in range(5):
        assert torch.equal(theirs.read(number), torch.from_numpy(np.array(noise_image(6, 5, number))).permute(2, 0, 1))
    write_shards(ImageData("x", theirs), tmp_path / "ours", images_per_shard=2)
    pattern = str(tmp_path / "ours" / "train-{0000..0002}.tar")
    samples = list(webdataset.WebDataset(pattern, shardshuffle=False).decode("rgb8").to_tuple("png", "cls"))
    found = {np.moveaxis(pixels, 2, 0).tobytes(): label for pixels, label in samples}
    assert found == by_pixels(theirs)
