"""The index of shards and its cache; shards and descriptions that are hostile, damaged or truncated."""

import io
import json
import os
import random
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from image_files import noise_image, write_images
from shard_files import by_pixels, names, opened, png, write_tar

from jcl.data import ImageData, UnreadableImage, open_data
from jcl.data.check import check_data
from jcl.errors import DataError


@pytest.fixture
def always_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jcl.data.shards.index._CACHE_FROM", 1)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = write_tar(tmp_path / "s.tar", {"0.png": png(0), "0.cls": b"4", "1.png": png(1)})
    os.utime(file, (1, 1))
    return file


@pytest.mark.usefixtures("always_cached")
def test_cached_index_is_used_while_it_is_valid(file: Path, own_cache: Path):
    """What is kept says "x.png" where the tar says otherwise: only reading the kept one can give it."""
    first = opened(file)
    (kept,) = (own_cache / "jcl" / "shards").iterdir()
    with np.load(kept) as arrays:
        content = dict(arrays)
    content["names"] = np.frombuffer(b"x.png\x001.png\x00", dtype=np.uint8)
    np.savez(kept, **content)
    again = opened(file)
    assert names(first) == ["0.png", "1.png"] and names(again) == ["x.png", "1.png"]
    assert by_pixels(first) == by_pixels(again)


@pytest.mark.usefixtures("always_cached")
@pytest.mark.parametrize("time", [1, 2], ids=["other size", "other time"])
def test_cached_index_is_dropped_when_a_shard_changes(file: Path, time: int):
    opened(file)
    members = {"2.png": png(0), "2.cls": b"4", "3.png": png(1)} | ({"4.png": bytes(20_000)} if time == 1 else {})
    write_tar(file, members)
    os.utime(file, (time, time))
    assert names(opened(file))[:2] == ["2.png", "3.png"]


@pytest.mark.usefixtures("always_cached")
def test_damaged_cache_is_replaced(file: Path, own_cache: Path):
    opened(file)
    (kept,) = (own_cache / "jcl" / "shards").iterdir()
    kept.write_bytes(kept.read_bytes()[:100])
    assert names(opened(file)) == ["0.png", "1.png"]
    with np.load(kept) as arrays:
        assert arrays["names"].tobytes() == b"0.png\x001.png\x00"


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    return member.tobuf(tarfile.GNU_FORMAT)


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


def test_names_lead_nowhere(tmp_path: Path):
    """Odd names are names: the images are read, and no file but the shard is there afterwards."""
    members = {"../up.png": png(0), "/abs/olute.png": png(1), "a/../../b.png": png(2), "esc\x1b[31m\n.png": png(3)}
    file = write_tar(tmp_path / "s.tar", members, tarfile.PAX_FORMAT)
    source = opened(file)
    for index in range(4):
        assert source.read(index).shape == (3, 5, 6)
    assert source.name_of(0) == "s.tar/../up.png" and source.name_of(3) == "s.tar/esc\x1b[31m\n.png"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_are_not_followed(tmp_path: Path, kind: bytes):
    secret = tmp_path / "secret.png"
    noise_image(3, 3).save(secret)
    member = tarfile.TarInfo("evil.png")
    member.type, member.linkname = kind, str(secret) if kind == tarfile.SYMTYPE else "first.png"
    member.size = 5000  # of what it points to, say some programs; nothing follows
    source = opened(write_special(tmp_path / "s.tar", [member]))
    assert len(source) == 3 and source.damage == {}
    with pytest.raises(UnreadableImage, match="evil"):
        source.read(1)
    assert source.read(2).shape == (3, 5, 6)


@pytest.mark.parametrize("size", [10**6, 2**33, 2**61], ids=["million", "8 GiB", "2^61"])
def test_huge_declared_size(tmp_path: Path, size: int):
    good = write_tar(tmp_path / "good.tar", {"0.png": png(0)}).read_bytes()[:1024]
    file = tmp_path / "s.tar"
    file.write_bytes(good + header("1.png", size) + png(1))
    source = opened(file)
    assert source.read(0).shape == (3, 5, 6) and "truncated" in source.damage["s.tar"]
    with pytest.raises(UnreadableImage, match=r"s\.tar/1\.png"):
        source.read(1)


@pytest.mark.parametrize("size", [2**62, 2**80, -1, -1024])
def test_size_that_is_no_number_of_bytes(tmp_path: Path, size: int):
    good = write_tar(tmp_path / "good.tar", {"0.png": png(0)}).read_bytes()[:1024]
    file = tmp_path / "s.tar"
    file.write_bytes(good + header("1.png", size) + png(1))
    source = opened(file)
    assert source.read(0).shape == (3, 5, 6) and source.damage
    for index in range(1, len(source)):
        with pytest.raises(UnreadableImage):
            source.read(index)


def test_huge_image_in_a_file_that_is_mostly_hole(tmp_path: Path):
    file = tmp_path / "s.tar"
    size = 2**40
    file.write_bytes(header("0.png", size))
    try:
        os.truncate(file, 512 + size + 1024)
    except OSError:
        pytest.skip("this file system takes no file of that size")
    with pytest.raises(UnreadableImage, match="1,099,511,627,776"):
        opened(file).read(0)


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE])
def test_huge_name_or_attributes(tmp_path: Path, kind: bytes):
    good = write_tar(tmp_path / "good.tar", {"0.png": png(0)}).read_bytes()[:1024]
    file = tmp_path / "s.tar"
    file.write_bytes(good + header("long", 2**30, kind))
    os.truncate(file, 2**31)
    source = opened(file)
    assert len(source) == 1 and source.damage


def test_endless_chain_of_headers(tmp_path: Path):
    """Each header announces the name of the next one."""
    file = write_tar(tmp_path / "s.tar", {"0.png": png(0)})
    file.write_bytes(
        file.read_bytes()[:1024] + 5000 * (header("x", 2, tarfile.GNUTYPE_LONGNAME) + b"a".ljust(512, b"\0"))
    )
    source = opened(file)
    assert source.read(0).shape == (3, 5, 6) and source.damage


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_and_unicode_names(tmp_path: Path, format: int):
    wanted = ["d/" * 100 + "ü.png", "日本/富士山.png", "n" * 300 + ".png"]
    members = dict(zip(wanted, map(png, range(3)), strict=True))
    source = opened(write_tar(tmp_path / "s.tar", members, format))
    assert names(source) == wanted
    assert [source.content_of(index) for index in range(3)] == list(members.values())


@pytest.mark.parametrize("text", [b"", b"5", b"99999 path=x\n", b"0 path=x\n", b"12 path=\n", b"9 size=-\n", b"\xff=="])
def test_malformed_attributes(tmp_path: Path, text: bytes):
    good = write_tar(tmp_path / "good.tar", {"0.png": png(0)}).read_bytes()
    file = tmp_path / "s.tar"
    file.write_bytes(header("x", len(text), tarfile.XHDTYPE) + text.ljust(512 * (len(text) > 0), b"\0") + good)
    try:
        source = opened(file)
        assert source.read(0).shape == (3, 5, 6) or source.damage
    except DataError:
        pass  # reported


def test_empty_member(tmp_path: Path):
    source = opened(write_tar(tmp_path / "s.tar", {"0.png": b"", "1.png": png(1), "1.cls": b"", "2.json": b""}))
    with pytest.raises(UnreadableImage, match=r"s\.tar/0\.png"):
        source.read(0)
    assert source.read(1).shape == (3, 5, 6) and source.labels is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no images"),
        (bytes(1024), "no images"),
        (b"\x1f\x8b" + bytes(2000), "decompress"),
        (b"short", "no images"),
    ],
)
def test_no_shard_at_all(tmp_path: Path, content: bytes, message: str):
    (tmp_path / "s.tar").write_bytes(content)
    with pytest.raises(DataError, match=message):
        open_data(str(tmp_path / "s.tar"))


def test_any_damage_is_read_up_to_there_or_said(tmp_path: Path):
    """Bytes changed, lost or put in at random: never anything but images and sentences."""
    members = {f"{n}.{ending}": png(n) if ending == "png" else b"1" for n in range(6) for ending in ("png", "cls")}
    good = write_tar(tmp_path / "good.tar", members, tarfile.PAX_FORMAT).read_bytes()
    file, draw = tmp_path / "s.tar", random.Random(0)
    outcomes = set()
    for _ in range(100):
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


def test_only_what_is_cut_off_is_lost(shards: Path):
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
    with pytest.raises(UnreadableImage, match=r"train-0002\.tar/000019\.png"):
        source.read(19)
    assert list(source.damage) == ["train-0002.tar"] and "4 of 7 images" in source.damage["train-0002.tar"]
    said: list[str] = []
    open_data(str(shards), progress=said.append)
    assert len(said) == 1 and "train-0002.tar" in said[0] and "4 of 7 images" in said[0]
    with pytest.raises(DataError, match=r"train-0002\.tar"):
        open_data(str(shards), strict=True)
    checked = check_data(ImageData("s", source))
    assert "train-0002.tar/000019.png" in checked.splits["train"].unreadable
    assert checked.as_dict()["train_damaged_shard_names"] == ["train-0002.tar"]


def test_every_length(tmp_path: Path):
    """However short, it gives the images that are there, with their labels, and says that more were."""
    members = {"0.png": png(0), "0.cls": b"12", "1.png": png(1), "1.cls": b"34"}
    content = write_tar(tmp_path / "whole.tar", members).read_bytes()
    file = tmp_path / "s.tar"
    first = 512 + len(png(0))  # bytes until the first image is complete
    for length in [*range(first, 3600, 111), 1536, 1537, 1545, 2048, 2049, 2059]:
        file.write_bytes(content[:length])
        source = opened(file)
        assert source.damage and source.read(0).shape == (3, 5, 6)
        assert source.labels is None or source.labels[0] == 12


def test_cut_between_images(shards: Path):
    with tarfile.open(shards / "train-0001.tar") as tar:
        boundary = tar.getmembers()[4].offset
    os.truncate(shards / "train-0001.tar", boundary)
    source = opened(shards)
    assert len(source) == 8 + 2 + 7
    assert source.damage["train-0001.tar"].endswith("2 of 8 images")


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
def test_hostile_description(shards: Path, change: dict[str, object]):
    file = shards / "index.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(DataError, match=r"index\.json"):
        open_data(str(shards))


def test_other_descriptions(shards: Path, tmp_path: Path):
    file = shards / "index.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"version": 2}))
    with pytest.raises(DataError, match="version"):
        open_data(str(shards))
    file.write_text(json.dumps(content | {"class_names": ["ant", "bee"]}))
    with pytest.raises(DataError, match="class 2"):
        open_data(str(shards))
    write_images(tmp_path / "other", 2)
    (tmp_path / "other" / "index.json").write_text("{}")
    assert len(open_data(str(tmp_path / "other")).train) == 2


def test_joined_shards_are_reported(tmp_path: Path):
    first = write_tar(tmp_path / "a.tar", {"0.png": png(0), "0.cls": b"4", "1.png": png(1), "1.cls": b"4"})
    second = write_tar(tmp_path / "b.tar", {"0.cls": b"7", "0.png": png(2), "1.json": b'{"label": 7}', "1.png": png(3)})
    (tmp_path / "cat.tar").write_bytes(first.read_bytes() + second.read_bytes())
    source = opened(tmp_path / "cat.tar")
    assert len(source) == 2 and any("joined tar files" in warning for warning in source.warnings())
    with tarfile.open(first, "a") as joined, tarfile.open(second) as more:  # as `tar -A` does
        for member in more:
            joined.addfile(member, more.extractfile(member))
    source = opened(first)
    assert source.labels is not None and source.labels.tolist() == [4, 4]
    assert any("0.cls twice" in warning for warning in source.warnings())
