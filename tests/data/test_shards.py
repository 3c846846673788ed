"""Shards written here and elsewhere, read back image by image, and what hostile or damaged ones do."""

import functools
import http.server
import io
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from image_files import noise_image, write_images

from jcl.data import (
    UNLABELLED,
    ArrayImages,
    BatchLoader,
    ImageData,
    ImageSource,
    ShardImages,
    UnreadableImage,
    open_data,
    shard_index,
    write_shards,
)
from jcl.data.check import check_data
from jcl.data.shard_fetching import PIPE_CONSENT
from jcl.data.shard_patterns import expand_braces
from jcl.errors import DataError, SettingsError


def png(seed: int, width: int = 6, height: int = 5) -> bytes:
    stream = io.BytesIO()
    noise_image(width, height, seed).save(stream, "PNG")
    return stream.getvalue()


def write_tar(file: Path, members: dict[str, bytes], format: int = tarfile.USTAR_FORMAT) -> Path:
    with tarfile.open(file, "w", format=format) as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return file


def write_special(file: Path, members: list[tarfile.TarInfo]) -> Path:
    """A tar with one good image, then members without content, then another good image."""
    with tarfile.open(file, "w") as tar:
        for member in [tarfile.TarInfo("first.png"), *members, tarfile.TarInfo("last.png")]:
            if member.name in ("first.png", "last.png"):
                content = png(len(member.name))
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
            else:
                tar.addfile(member)
    return file


def opened(location: Path | str) -> ShardImages:
    source = open_data(str(location)).train
    assert isinstance(source, ShardImages)
    return source


def names(source: ImageSource) -> list[str]:
    return [source.name_of(index).partition("/")[2] for index in range(len(source))]


def by_pixels(source: ImageSource) -> dict[bytes, int]:
    """The label of each image, by what it shows; equal for sources that differ in order only."""
    labels = [None] * len(source) if source.labels is None else source.labels.tolist()
    return {source.read(index).numpy().tobytes(): label for index, label in enumerate(labels)}


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


class TestWriting:
    def test_round_trip_keeps_pixels_and_labels(self, folder: Path, tmp_path: Path):
        before = open_data(str(folder))
        report = write_shards(before, tmp_path / "out", images_per_shard=8)
        after = open_data(str(tmp_path / "out"))
        assert after.name == before.name == "pictures" and after.test is not None and before.test is not None
        assert after.train.class_names == after.test.class_names == ("ant", "bee", "cat")
        (folder / "train" / "bee" / "broken.png").unlink()
        (folder / "train" / "cat" / "gone.jpg").unlink()
        (folder / "val" / "bee" / "empty.jpg").unlink()
        clean = open_data(str(folder))
        assert clean.test is not None
        assert by_pixels(after.train) == by_pixels(clean.train)
        assert by_pixels(after.test) == by_pixels(clean.test)
        assert sorted(set(by_pixels(after.test).values())) == [UNLABELLED, 1]
        assert report.splits["train"].left_out == {
            "bee/broken.png": "its content is no image of a known format",
            "cat/gone.jpg": "no such file or directory",
        }
        assert report.splits["val"].left_out == {"bee/empty.jpg": "the file is empty"}

    def test_report(self, folder: Path, tmp_path: Path):
        told: list[tuple[int, int]] = []
        out = tmp_path / "out"
        report = write_shards(
            open_data(str(folder)), out, images_per_shard=8, progress=lambda done, total: told.append((done, total))
        )
        flat = report.as_dict()
        assert (flat["train_shards"], flat["train_images"], flat["train_left_out"]) == (3, 23, 2)
        assert (flat["val_shards"], flat["val_images"], flat["val_left_out_names"]) == (1, 5, ["bee/empty.jpg"])
        assert flat["train_bytes"] == sum(file.stat().st_size for file in out.glob("train-*.tar"))
        assert json.loads(json.dumps(flat)) == flat
        assert told[-1] == (31, 31) and told == sorted(told)

    def test_layout_is_plain_webdataset(self, folder: Path, shards: Path):
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

    def test_every_shard_has_every_class(self, shards: Path):
        for file in shards.glob("train-*.tar"):
            labels = opened(file).labels
            assert labels is not None and labels.unique().tolist() == [0, 1, 2]

    def test_same_data_gives_same_bytes(self, folder: Path, tmp_path: Path, shards: Path):
        for file in folder.rglob("*.png"):
            os.utime(file, (1, 1))
        data = open_data(str(folder))
        write_shards(data, tmp_path / "again", images_per_shard=8, threads=3)
        write_shards(data, tmp_path / "other", images_per_shard=8, seed=1)
        for file in shards.iterdir():
            assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()
        assert (tmp_path / "other" / "train-0000.tar").read_bytes() != (shards / "train-0000.tar").read_bytes()

    def test_arrays(self, tmp_path: Path):
        draw = np.random.default_rng(0)
        pixels = draw.integers(0, 256, (11, 9, 7, 3), dtype=np.uint8)
        np.savez(tmp_path / "a.npz", x_train=pixels[:8], y_train=np.arange(8) % 4, x_test=pixels[8:], y_test=[1, 2, 3])
        data = open_data(str(tmp_path / "a.npz"))
        write_shards(data, tmp_path / "out", images_per_shard=3)
        after = open_data(str(tmp_path / "out"))
        assert after.test is not None and data.test is not None and after.train.class_names is None
        assert by_pixels(after.train) == by_pixels(data.train) and by_pixels(after.test) == by_pixels(data.test)

    def test_labels_stay_away_where_there_are_none(self, tmp_path: Path):
        pixels = torch.randint(0, 256, (4, 3, 5, 5), dtype=torch.uint8)
        some = ImageData("some", ArrayImages(pixels, torch.tensor([1, UNLABELLED, 0, UNLABELLED]), ("a", "b")))
        write_shards(some, tmp_path / "some")
        assert by_pixels(opened(tmp_path / "some")) == by_pixels(some.train)
        write_shards(ImageData("none", ArrayImages(pixels)), tmp_path / "none")
        assert opened(tmp_path / "none").labels is None

    def test_shards_can_be_written_anew(self, shards: Path, tmp_path: Path):
        write_shards(open_data(str(shards)), tmp_path / "anew", images_per_shard=5)
        assert by_pixels(opened(tmp_path / "anew")) == by_pixels(opened(shards))
        assert len(list((tmp_path / "anew").glob("train-*.tar"))) == 5

    def test_only_one_split(self, folder: Path, tmp_path: Path):
        write_shards(open_data(str(folder)), tmp_path / "out", splits=["train"])
        assert open_data(str(tmp_path / "out")).test is None
        with pytest.raises(SettingsError, match="The split test is not known; use train or val"):
            write_shards(open_data(str(folder)), tmp_path / "more", splits=["test"])
        with pytest.raises(SettingsError, match="at least one image, but images_per_shard is 0"):
            write_shards(open_data(str(folder)), tmp_path / "more", images_per_shard=0)

    def test_nothing_is_overwritten(self, folder: Path, shards: Path, tmp_path: Path):
        before = {file.name: file.read_bytes() for file in shards.iterdir()}
        with pytest.raises(DataError, match="is there already; nothing is overwritten"):
            write_shards(open_data(str(folder)), shards)
        assert {file.name: file.read_bytes() for file in shards.iterdir()} == before
        (tmp_path / "half.partial").mkdir()
        with pytest.raises(DataError, match=r"half\.partial is there: another process writes"):
            write_shards(open_data(str(folder)), tmp_path / "half")
        (tmp_path / "empty").mkdir()
        assert write_shards(open_data(str(folder)), tmp_path / "empty").splits["train"].images == 23

    def test_broken_off_leaves_nothing(self, folder: Path, tmp_path: Path):
        def stop(done: int, total: int) -> None:
            raise KeyboardInterrupt

        (tmp_path / "place").mkdir()
        with pytest.raises(KeyboardInterrupt):
            write_shards(open_data(str(folder)), tmp_path / "place" / "out", progress=stop)
        assert list((tmp_path / "place").iterdir()) == []

    def test_nothing_readable(self, tmp_path: Path):
        (tmp_path / "in").mkdir()
        (tmp_path / "in" / "a.png").write_bytes(b"")
        with pytest.raises(DataError, match="None of the images can be read"):
            write_shards(open_data(str(tmp_path / "in")), tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_place_that_cannot_be_written(self, folder: Path, tmp_path: Path):
        (tmp_path / "file").write_text("in the way")
        with pytest.raises(
            DataError, match=r"The shards cannot be written to .*file/out: (Not a directory|File exists)"
        ):
            write_shards(open_data(str(folder)), tmp_path / "file" / "out")


class TestBatches:
    def loader(self, source: ImageSource, **changes: object) -> BatchLoader:
        options = {"batch_size": 4, "canvas": 16, "seed": 5, "kept_bytes": 0} | changes
        return BatchLoader(source, **options)  # type: ignore[arg-type]

    @pytest.mark.parametrize("workers", [0, 1, 2])
    def test_any_start_and_any_workers_give_the_same(self, shards: Path, workers: int):
        source = opened(shards)
        unbroken = list(self.loader(source).epoch(1))
        with self.loader(source, workers=workers) as loader:
            for start in range(5):
                resumed = list(loader.epoch(1, start))
                assert len(resumed) == 5 - start
                for batch, expected in zip(resumed, unbroken[start:], strict=True):
                    assert torch.equal(batch.pixels, expected.pixels)
                    assert torch.equal(batch.samples, expected.samples)

    def test_each_image_once_an_epoch(self, shards: Path):
        with self.loader(opened(shards), batch_size=1, workers=2) as loader:
            for epoch in range(2):
                samples = torch.cat([batch.samples for batch in loader.epoch(epoch)])
                assert sorted(samples.tolist()) == list(range(23))

    def test_the_way_the_shards_are_named_does_not_matter(self, shards: Path):
        whole, pattern = opened(shards), opened(f"{shards}/train-{{0000..0002}}.tar")
        for one, other in zip(self.loader(whole).epoch(0), self.loader(pattern).epoch(0), strict=True):
            assert torch.equal(one.pixels, other.pixels)

    def test_broken_images_are_named_with_their_shard(self, tmp_path: Path):
        file = write_tar(tmp_path / "s.tar", {f"{n}.png": png(n) if n != 2 else b"spoilt" for n in range(5)})
        loader = self.loader(opened(file), batch_size=5)
        list(loader.epoch(0))
        assert loader.skipped == {"s.tar/2.png": "its content is no image of a known format"}


class TestOpening:
    def test_source_pickles_small_and_without_open_files(self, shards: Path):
        source = opened(shards)
        expected = source.read(3)
        data = pickle.dumps(source)
        assert torch.equal(pickle.loads(data).read(3), expected)
        assert len(data) < 5000

    def test_patterns(self, shards: Path):
        assert len(opened(shards / "train-0002.tar")) == 7
        assert len(opened(f"{shards}/train-{{0000,0002}}.tar")) == 15
        assert len(opened(f"{shards}/train-{{0000,0000}}.tar")) == 8
        assert len(opened(f"{shards}/train-*.tar")) == 23
        assert len(opened(f"file://{shards}/train-{{0000..0001}}.tar")) == 16
        both = open_data(f"{shards}/*.tar")
        assert len(both.train) == 23 and both.test is not None and len(both.test) == 5
        assert opened(f"{shards}/train-*.tar").class_names == ("ant", "bee", "cat")
        assert open_data(str(shards / "train-0002.tar")).name == "train-0002"
        assert open_data(f"{shards}/train-*.tar").name == "shards"

    def test_missing_shards(self, shards: Path):
        with pytest.raises(DataError, match=r"There is no shard .*train-0003\.tar; check the pattern"):
            open_data(f"{shards}/train-{{0000..0009}}.tar")
        (shards / "train-0001.tar").unlink()
        with pytest.raises(DataError, match=r"The shard .*train-0001\.tar cannot be read: No such file"):
            open_data(str(shards))

    def test_class_list_does_not_apply(self, shards: Path):
        with pytest.raises(DataError, match="A list of classes applies to a folder with class folders"):
            open_data(str(shards), classes=["ant"])

    def test_plain_tar_of_a_folder(self, tmp_path: Path):
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

    def test_labels_from_cls_and_json(self, tmp_path: Path):
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
        assert source.labels.tolist() == [7, 3, 2, UNLABELLED, UNLABELLED, UNLABELLED, 6]

    def test_class_names_as_labels(self, tmp_path: Path):
        write_tar(tmp_path / "train-0.tar", {"0.png": png(0), "0.cls": b"zebra", "1.png": png(1), "1.cls": b"ant"})
        write_tar(tmp_path / "val-0.tar", {"0.png": png(2), "0.json": b'{"label": "zebra"}', "1.png": png(3)})
        data = open_data(f"{tmp_path}/*.tar")
        assert data.train.class_names == ("ant", "zebra") and data.train.labels is not None
        assert data.train.labels.tolist() == [1, 0]
        assert data.test is not None and data.test.labels is not None
        assert data.test.labels.tolist() == [1, UNLABELLED]

    def test_further_pictures_of_a_sample_are_no_images(self, tmp_path: Path):
        members = {"a.b/0.jpg": png(0), "a.b/0.mask.png": png(1), "a.b/cat.1.jpg": png(2), "a.b/cat.2.jpg": png(3)}
        assert names(opened(write_tar(tmp_path / "s.tar", members))) == ["a.b/0.jpg", "a.b/cat.1.jpg", "a.b/cat.2.jpg"]

    def test_check_reads_shards(self, shards: Path):
        report = check_data(open_data(str(shards)), threads=4)
        assert report.splits["train"].images == 23 and report.splits["train"].unreadable == {}
        assert report.splits["train"].class_counts == {"ant": 9, "bee": 7, "cat": 7}

    def test_changed_shard_is_noticed(self, tmp_path: Path):
        file = write_tar(tmp_path / "s.tar", {"0.png": png(0)})
        source = opened(file)
        write_tar(file, {"0.png": png(1), "1.png": png(2)})
        with pytest.raises(UnreadableImage, match=r"s\.tar/0\.png cannot be read: the shard s\.tar has changed since"):
            source.read(0)

    def test_shard_cut_while_it_is_open(self, tmp_path: Path):
        file = write_tar(tmp_path / "s.tar", {"0.png": png(0), "1.png": png(1)})
        source = opened(file)
        source.read(0)
        os.truncate(file, 1024)
        with pytest.raises(UnreadableImage, match="the shard has become shorter since it was opened"):
            source.read(1)

    def test_shard_that_goes_away(self, tmp_path: Path):
        file = write_tar(tmp_path / "s.tar", {"0.png": png(0)})
        source = opened(file)
        file.unlink()
        with pytest.raises(UnreadableImage, match=r"s\.tar/0\.png cannot be read: no such file"):
            source.read(0)

    def test_more_shards_than_are_kept_open(self, tmp_path: Path):
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


class TestKeptIndex:
    @pytest.fixture(autouse=True)
    def always_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shard_index, "_KEEP_FROM", 1)

    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        file = write_tar(tmp_path / "s.tar", {"0.png": png(0), "0.cls": b"4", "1.png": png(1)})
        os.utime(file, (1, 1))
        return file

    def test_is_used_while_it_is_true(self, file: Path, own_cache: Path):
        """What is kept says "x.png" where the tar says otherwise: only reading the kept one can give it."""
        first = opened(file)
        (kept,) = (own_cache / "jcl" / "shards").iterdir()
        with np.load(kept) as arrays:
            content = dict(arrays)
        content["names_text"] = np.frombuffer(b"x.png1.png", dtype=np.uint8)
        np.savez(kept, **content)
        again = opened(file)
        assert names(first) == ["0.png", "1.png"] and names(again) == ["x.png", "1.png"]
        assert by_pixels(first) == by_pixels(again)

    @pytest.mark.parametrize("time", [1, 2], ids=["other size", "other time"])
    def test_is_dropped_when_a_shard_changes(self, file: Path, time: int):
        opened(file)
        members = {"2.png": png(0), "2.cls": b"4", "3.png": png(1)} | ({"4.png": bytes(20_000)} if time == 1 else {})
        write_tar(file, members)
        os.utime(file, (time, time))
        assert names(opened(file))[:2] == ["2.png", "3.png"]

    def test_damaged_one_is_replaced(self, file: Path, own_cache: Path):
        opened(file)
        (kept,) = (own_cache / "jcl" / "shards").iterdir()
        kept.write_bytes(kept.read_bytes()[:100])
        assert names(opened(file)) == ["0.png", "1.png"]
        with np.load(kept) as arrays:
            assert arrays["names_text"].tobytes() == b"0.png1.png"

    def test_is_not_made_of_a_file_still_changing(self, tmp_path: Path, own_cache: Path):
        opened(write_tar(tmp_path / "new.tar", {"0.png": png(0)}))
        assert not (own_cache / "jcl" / "shards").exists()


class TestBraces:
    @pytest.mark.parametrize(
        ("pattern", "expected"),
        [
            ("a.tar", ["a.tar"]),
            ("{0..3}", ["0", "1", "2", "3"]),
            ("s/{0008..0011}.tar", [f"s/{n:04}.tar" for n in range(8, 12)]),
            ("{3..1}", ["3", "2", "1"]),
            ("{1..010..4}", ["001", "005", "009"]),
            ("{a,b}-{0..1}", ["a-0", "a-1", "b-0", "b-1"]),
            ("{x,y{1..2},z{p,q}}.tar", ["x.tar", "y1.tar", "y2.tar", "zp.tar", "zq.tar"]),
            ("{,-extra}.tar", [".tar", "-extra.tar"]),
            ("{single}", ["{single}"]),
            ("{k{1,2}}", ["{k1}", "{k2}"]),
            ("{open", ["{open"]),
            ("close}{a,b}", ["close}a", "close}b"]),
            ("{open-{a,b}", ["{open-a", "{open-b"]),
            ("${HOME}/$(touch x)/`touch x`.tar", ["${HOME}/$(touch x)/`touch x`.tar"]),
        ],
    )
    def test_expansion(self, pattern: str, expected: list[str]):
        assert expand_braces(pattern) == expected

    def test_agrees_with_the_shell(self):
        shell = shutil.which("bash")
        if shell is None:
            pytest.skip("compares with bash, which is not here")
        for pattern in [
            "{x,y{1..2},z{p,q}}.tar",
            "{08..11}{a,b}",
            "{5..1..2}",
            "{a}{b,{c,d}}",
            "x{{1..3},k}y",
            "{a,b}}",
        ]:
            output = subprocess.run([shell, "-c", f"echo {pattern}"], capture_output=True, text=True, check=True).stdout
            assert expand_braces(pattern) == output.split()

    def test_too_many(self):
        for pattern in ("{0..999999999}.tar", "{0..9999}{0..9999}{0..9999}"):
            with pytest.raises(DataError, match="names more than 250,000 shards"):
                expand_braces(pattern)
        with pytest.raises(DataError, match="too many braces"):
            expand_braces("{a," * 1200 + "}" * 1200)

    def test_nothing_is_run(self, tmp_path: Path):
        for location in (f"$(touch {tmp_path}/made).tar", f"{{0..1}};touch {tmp_path}/made;.tar"):
            with pytest.raises(DataError, match="There is no shard"):
                open_data(location)
        assert list(tmp_path.iterdir()) == []


class TestHostile:
    def test_names_lead_nowhere(self, tmp_path: Path):
        """Odd names are names: the images are read, and no file but the shard is there afterwards."""
        members = {"../up.png": png(0), "/abs/olute.png": png(1), "a/../../b.png": png(2), "esc\x1b[31m\n.png": png(3)}
        file = write_tar(tmp_path / "s.tar", members, tarfile.PAX_FORMAT)
        source = opened(file)
        for index in range(4):
            assert source.read(index).shape == (3, 5, 6)
        assert source.name_of(0) == "s.tar/../up.png" and source.name_of(3) == "s.tar/esc\ufffd[31m\ufffd.png"
        assert list(tmp_path.iterdir()) == [file]

    @pytest.mark.parametrize(
        "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE]
    )
    def test_links_and_devices_are_not_followed(self, tmp_path: Path, kind: bytes):
        secret = tmp_path / "secret.png"
        noise_image(3, 3).save(secret)
        member = tarfile.TarInfo("evil.png")
        member.type, member.linkname = kind, str(secret) if kind == tarfile.SYMTYPE else "first.png"
        member.size = 5000  # of what it points to, say some programs; nothing follows
        source = opened(write_special(tmp_path / "s.tar", [member]))
        assert len(source) == 3 and source.damage == {}
        with pytest.raises(UnreadableImage, match=r"s\.tar/evil\.png/? cannot be read: it is a link or no file"):
            source.read(1)
        assert source.read(2).shape == (3, 5, 6)

    def header(self, name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
        member = tarfile.TarInfo(name)
        member.size, member.type = size, kind
        return member.tobuf(tarfile.GNU_FORMAT)

    @pytest.mark.parametrize("size", [10**6, 2**33, 2**61], ids=["million", "8 GiB", "2^61"])
    def test_huge_declared_size(self, tmp_path: Path, size: int):
        good = write_tar(tmp_path / "good.tar", {"0.png": png(0)}).read_bytes()[:1024]
        file = tmp_path / "s.tar"
        file.write_bytes(good + self.header("1.png", size) + png(1))
        source = opened(file)
        assert source.read(0).shape == (3, 5, 6) and source.damage == {"s.tar": "its end is cut off"}
        with pytest.raises(UnreadableImage, match=r"s\.tar/1\.png cannot be read"):
            source.read(1)

    @pytest.mark.parametrize("size", [2**62, 2**80, -1])
    def test_size_that_is_no_number_of_bytes(self, tmp_path: Path, size: int):
        good = write_tar(tmp_path / "good.tar", {"0.png": png(0)}).read_bytes()[:1024]
        file = tmp_path / "s.tar"
        file.write_bytes(good + self.header("1.png", size) + png(1))
        source = opened(file)
        assert len(source) == 1 and "no number where one must be" in source.damage["s.tar"]

    def test_huge_image_in_a_file_that_is_mostly_hole(self, tmp_path: Path):
        file = tmp_path / "s.tar"
        size = 2**40
        file.write_bytes(self.header("0.png", size))
        try:
            os.truncate(file, 512 + size + 1024)
        except OSError:
            pytest.skip("this file system takes no file of that size")
        with pytest.raises(UnreadableImage, match="it has 1,099,511,627,776 bytes, more than the limit"):
            opened(file).read(0)

    @pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE])
    def test_huge_name_or_attributes(self, tmp_path: Path, kind: bytes):
        good = write_tar(tmp_path / "good.tar", {"0.png": png(0)}).read_bytes()[:1024]
        file = tmp_path / "s.tar"
        file.write_bytes(good + self.header("long", 2**30, kind))
        os.truncate(file, 2**31)
        source = opened(file)
        assert len(source) == 1 and "claims 1,073,741,824 bytes for a name" in source.damage["s.tar"]

    @pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
    def test_long_and_unicode_names(self, tmp_path: Path, format: int):
        wanted = ["d/" * 100 + "ü.png", "日本/富士山.png", "n" * 300 + ".png"]
        members = dict(zip(wanted, map(png, range(3)), strict=True))
        source = opened(write_tar(tmp_path / "s.tar", members, format))
        assert names(source) == wanted
        assert [source.content_of(index) for index in range(3)] == list(members.values())

    @pytest.mark.parametrize(
        "text", [b"", b"5", b"99999 path=x\n", b"0 path=x\n", b"12 path=\n", b"9 size=-\n", b"\xff=="]
    )
    def test_malformed_attributes(self, tmp_path: Path, text: bytes):
        good = write_tar(tmp_path / "good.tar", {"0.png": png(0)}).read_bytes()
        file = tmp_path / "s.tar"
        file.write_bytes(self.header("x", len(text), tarfile.XHDTYPE) + text.ljust(512 * (len(text) > 0), b"\0") + good)
        assert opened(file).read(0).shape == (3, 5, 6)

    def test_empty_member(self, tmp_path: Path):
        source = opened(write_tar(tmp_path / "s.tar", {"0.png": b"", "1.png": png(1), "1.cls": b"", "2.json": b""}))
        with pytest.raises(UnreadableImage, match=r"s\.tar/0\.png cannot be read: the file is empty"):
            source.read(0)
        assert source.read(1).shape == (3, 5, 6) and source.labels is None

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "There are no images in the shard"),
            (bytes(1024), "There are no images in the shard"),
            (b"text " * 1000, r"The file .*s\.tar is no tar file"),
            (b"\x1f\x8b" + bytes(2000), r"s\.tar is compressed \(gzip\).*; unpack it to a plain \.tar first"),
            (b"short", "There are no images in the shard .*its end is cut off"),
        ],
    )
    def test_no_shard_at_all(self, tmp_path: Path, content: bytes, message: str):
        (tmp_path / "s.tar").write_bytes(content)
        with pytest.raises(DataError, match=message):
            open_data(str(tmp_path / "s.tar"))

    def test_any_damage_is_read_up_to_there_or_said(self, tmp_path: Path):
        """Bytes changed, lost or put in at random: never anything but images and sentences."""
        members = {f"{n}.{ending}": png(n) if ending == "png" else b"1" for n in range(6) for ending in ("png", "cls")}
        good = write_tar(tmp_path / "good.tar", members, tarfile.PAX_FORMAT).read_bytes()
        file, draw = tmp_path / "s.tar", random.Random(0)
        outcomes = set()
        for _ in range(300):
            content = bytearray(good)
            place = draw.randrange(len(members) * 1024)
            length = draw.choice([1, 1, 7, 600])
            content[place : place + length] = draw.randbytes(draw.choice([0, length, length]))
            file.write_bytes(content)
            try:
                source = opened(file)
                for index in range(len(source)):
                    source.read(index)
                outcomes.add("damage" if source.damage else "read")
            except UnreadableImage:
                outcomes.add("unreadable")
            except DataError:
                outcomes.add("refused")
        assert {"damage", "read", "unreadable"} <= outcomes

    @pytest.mark.parametrize(
        "change",
        [
            {"splits": {"train": {"../train-0000.tar": 8}}},
            {"splits": {"train": {"/etc/passwd": 8}}},
            {"splits": {"train": {"train-0000.tar": "8"}}},
            {"splits": ["train"]},
            {"class_names": 3},
        ],
    )
    def test_hostile_description(self, shards: Path, change: dict[str, object]):
        file = shards / "index.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
        with pytest.raises(DataError, match=r"index\.json is damaged; write the shards anew"):
            open_data(str(shards))

    def test_other_descriptions(self, shards: Path, tmp_path: Path):
        file = shards / "index.json"
        content = json.loads(file.read_text())
        file.write_text(json.dumps(content | {"version": 2}))
        with pytest.raises(DataError, match="are of version 2, and this program reads version 1"):
            open_data(str(shards))
        file.write_text(json.dumps(content | {"class_names": ["ant", "bee"]}))
        with pytest.raises(DataError, match=r"an image of class 2, but index\.json there names 2 classes"):
            open_data(str(shards))
        write_images(tmp_path / "other", 2)
        (tmp_path / "other" / "index.json").write_text("{}")
        assert len(open_data(str(tmp_path / "other")).train) == 2


class TestTruncated:
    def test_only_what_is_cut_off_is_lost(self, shards: Path):
        whole = opened(shards)
        before = [whole.read(index) for index in range(19)]
        last = shards / "train-0002.tar"
        with tarfile.open(last) as tar:
            cut = tar.getmembers()[6]  # the fourth image of seven
        os.truncate(last, cut.offset_data + cut.size // 2)
        source = opened(shards)
        assert len(source) == 8 + 8 + 4
        for index in range(19):
            assert torch.equal(source.read(index), before[index])
        with pytest.raises(UnreadableImage, match=r"train-0002\.tar/000019\.png cannot be read: the end of the shard"):
            source.read(19)
        assert source.damage == {"train-0002.tar": "its end is cut off, 4 of its 7 images are there"}
        assert "1 damaged shard (train-0002.tar: its end is cut off" in source.description
        assert "train-0002.tar/000019.png" in check_data(ImageData("s", source)).splits["train"].unreadable

    def test_every_length(self, tmp_path: Path):
        """However short, it gives the images that are there, with their labels, and says that more were."""
        members = {"0.png": png(0), "0.cls": b"12", "1.png": png(1), "1.cls": b"34"}
        content = write_tar(tmp_path / "whole.tar", members).read_bytes()
        file = tmp_path / "s.tar"
        first = 512 + len(png(0))  # bytes until the first image is complete
        for length in [*range(first, 3600, 37), *range(1536, 1546), *range(2048, 2060)]:
            file.write_bytes(content[:length])
            source = opened(file)
            assert source.damage and source.read(0).shape == (3, 5, 6)
            assert source.labels is None or source.labels[0] == 12

    def test_cut_between_images(self, shards: Path):
        with tarfile.open(shards / "train-0001.tar") as tar:
            boundary = tar.getmembers()[4].offset
        os.truncate(shards / "train-0001.tar", boundary)
        source = opened(shards)
        assert len(source) == 8 + 2 + 7
        assert source.damage["train-0001.tar"].endswith("2 of its 8 images are there")


class TestAddresses:
    @pytest.fixture
    def library(self) -> None:
        pytest.importorskip("webdataset", reason="the webdataset library, an optional extra, is not installed")

    def test_message_without_the_library(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setitem(sys.modules, "webdataset", None)
        monkeypatch.setitem(sys.modules, "webdataset.gopen", None)
        with pytest.raises(DataError, match=r"pip install 'joint-contrastive-learning\[shards\]'"):
            open_data("https://user:secret@example.invalid/{0000..0127}.tar?token=secret")
        with pytest.raises(DataError) as caught:
            open_data("https://user:secret@example.invalid/0.tar?token=secret")
        assert "secret" not in str(caught.value)

    def test_commands_run_only_with_consent(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.delenv(PIPE_CONSENT, raising=False)
        with pytest.raises(DataError, match=f"runs a command on this machine .* set {PIPE_CONSENT}=1"):
            open_data(f"pipe:touch {tmp_path}/made")
        assert list(tmp_path.iterdir()) == []

    def test_download_forbidden(self, tmp_path: Path):
        with pytest.raises(DataError, match=r"0\.tar is not in .* and may not be downloaded.*2 of 2 shards"):
            open_data("https://example.invalid/{0,1}.tar", root=tmp_path, download=False)

    @pytest.mark.usefixtures("library")
    def test_pipe(self, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv(PIPE_CONSENT, "1")
        told: list[str] = []
        location = f"pipe:cat {shards}/train-{{0000..0002}}.tar"
        data = open_data(location, root=tmp_path / "kept", progress=told.append)
        local = opened(f"{shards}/train-*.tar")
        assert [data.train.read(index).tolist() for index in range(23)] == [local.read(n).tolist() for n in range(23)]
        assert data.train.labels is not None and local.labels is not None
        assert torch.equal(data.train.labels, local.labels)
        assert len(told) == 3 and told[-1].startswith("Fetched 3 of 3 shards")
        shutil.rmtree(shards)  # from now on there are the copies only
        again = open_data(location, root=tmp_path / "kept", download=False)
        assert again.train.name_of(0).startswith("train-0000.tar/") and len(again.train) == 23

    @pytest.mark.usefixtures("library")
    @pytest.mark.parametrize("command", ["false", "true", "cat {file} && exit 3"])
    def test_failed_command_leaves_nothing(
        self, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
    ):
        monkeypatch.setenv(PIPE_CONSENT, "1")
        with pytest.raises(DataError, match=r"cannot be fetched into .*: (the program .* status|nothing came)"):
            open_data("pipe:" + command.format(file=shards / "train-0000.tar"), root=tmp_path / "kept")
        assert not [path for path in (tmp_path / "kept").rglob("*") if path.is_file() and path.name != ".lock"]

    @pytest.mark.usefixtures("library")
    def test_unknown_kind_of_address(self, tmp_path: Path):
        with pytest.raises(DataError, match=r"cannot be fetched into .*: .*no gopen handler"):
            open_data("gopher://example.invalid/0.tar", root=tmp_path)

    @pytest.fixture
    def server(self, shards: Path) -> Iterator[str]:
        """Serves the shards on this machine's own network for the length of the test."""
        handler = functools.partial(QuietHandler, directory=str(shards))
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        server.server_close()
        thread.join(10)

    @pytest.mark.usefixtures("library")
    @pytest.mark.skipif(shutil.which("curl") is None, reason="the webdataset library fetches with curl")
    def test_http(self, server: str, shards: Path, tmp_path: Path):
        data = open_data(server + "/train-{0000..0002}.tar", root=tmp_path / "kept")
        assert by_pixels(data.train) == by_pixels(opened(shards))
        with pytest.raises(DataError, match=r"train-0003\.tar cannot be fetched .* status 22"):
            open_data(server + "/train-{0002..0003}.tar", root=tmp_path / "kept")


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


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
