import errno
import os
import random
from pathlib import Path

import pytest

from jcl.data import listing
from jcl.data.listing import NameTable, list_images
from jcl.errors import DataError
from plain_user import unlistable


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def test_name_table_is_a_sequence_of_any_names():
    words = ["b/ä.png", "", "日本.jpg", "caf\udce9.png", "b/ä.png"]
    table = NameTable.of(words)
    assert list(table) == words and len(table) == 5 and table[-1] == words[-1]
    with pytest.raises(IndexError):
        table[5]
    assert list(NameTable.of([])) == []


def test_order_does_not_depend_on_creation(tmp_path: Path):
    paths = [f"{folder}/{number}.png" for folder in ("b", "a", "a/c", "ä") for number in range(5)]
    for seed in range(2):
        touch(tmp_path / str(seed), *random.Random(seed).sample(paths, len(paths)))
    first, second = (list(list_images(tmp_path / str(seed)).files) for seed in range(2))
    assert first == second == sorted(paths)


def test_links_that_lead_nowhere_stop_nothing(tmp_path: Path):
    """One that leads to itself is no folder, and as an image one that cannot be read."""
    touch(tmp_path, "a.png")
    (tmp_path / "b.png").symlink_to("b.png")
    (tmp_path / "cats").symlink_to("cats")
    assert list(list_images(tmp_path).files) == ["a.png", "b.png"]


def test_ways_along_links_are_not_multiplied(tmp_path: Path):
    """Twenty folders with two links each to the next one: a million ways to the last."""
    depth = 20
    touch(tmp_path / "store", *(f"{level}/{level}.png" for level in range(depth + 1)))
    for level in range(depth):
        for name in ("left", "right"):
            (tmp_path / "store" / str(level) / name).symlink_to(f"../{level + 1}")
    for name in ("cats", "dogs"):  # which may be different classes of the same images
        (tmp_path / "root").mkdir(exist_ok=True)
        (tmp_path / "root" / name).symlink_to(tmp_path / "store/0")
    found = list_images(tmp_path / "root")
    ways = ["left/" * level + f"{level}.png" for level in range(depth + 1)]
    assert list(found.files) == sorted(f"{name}/{way}" for name in ("cats", "dogs") for way in ways)


def test_folders_that_all_link_to_each_other_and_upwards_are_read_once(tmp_path: Path):
    """Twelve of them have as many ways through as there are orders of twelve."""
    folders = [f"{number:02}" for number in range(12)]
    touch(tmp_path, *(f"all/{folder}/a.png" for folder in folders))
    for folder in folders:
        for other in folders:
            (tmp_path / "all" / folder / f"to-{other}").symlink_to(f"../{other}")
        (tmp_path / "all" / folder / "up").symlink_to("..")
        (tmp_path / "all" / folder / "top").symlink_to(tmp_path)
    found = list_images(tmp_path)
    assert list(found.files) == [f"all/{folder}/a.png" for folder in folders]


def test_a_folder_is_named_by_the_way_with_the_fewest_links(tmp_path: Path):
    touch(tmp_path, "cats/young/deep/1.png", "dogs/2.png")
    (tmp_path / "cats/a").symlink_to("young")
    (tmp_path / "cats/young/deep/back").symlink_to("../../young")
    (tmp_path / "dogs/b").symlink_to("../cats")
    files = ["cats/young/deep/1.png", "dogs/2.png", "dogs/b/young/deep/1.png"]
    assert list(list_images(tmp_path).files) == files


def test_folders_that_cannot_be_listed_are_passed_over_with_the_reason(tmp_path: Path):
    touch(tmp_path, "a/1.png", "a/deep/2.png", "b/3.png", "lost+found/4.png")
    (tmp_path / "b/link").symlink_to(tmp_path / "a/deep")
    with unlistable(tmp_path / "a/deep", tmp_path / "lost+found"):
        found = list_images(tmp_path)
    assert list(found.files) == ["a/1.png", "b/3.png"]
    assert found.unlisted == dict.fromkeys(["a/deep", "b/link", "lost+found"], "permission denied")
    assert list_images(tmp_path).unlisted == {} and len(list_images(tmp_path).files) == 5


def test_a_folder_too_deep_to_be_named_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Paths have an end, and folders can be nested beyond it."""
    touch(tmp_path, "a.png")
    monkeypatch.chdir(tmp_path)
    for _ in range(20):
        os.mkdir("x" * 250)  # noqa: PTH102 - the whole path cannot be given
        os.chdir("x" * 250)
    found = list_images(tmp_path)
    ((folder, reason),) = found.unlisted.items()
    assert list(found.files) == ["a.png"] and set(folder) == {"x", "/"} and "name too long" in reason


def test_the_topmost_folder_is_unlisted_as_the_others_are(tmp_path: Path):
    touch(tmp_path, "root/a.png")
    with unlistable(tmp_path / "root"):
        found = list_images(tmp_path / "root")
    assert list(found.files) == [] and found.unlisted == {"": "permission denied"}


def test_a_failing_disk_does_not_leave_images_out(tmp_path, monkeypatch):
    touch(tmp_path, "photos/1.png")

    def fail(folder):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(listing, "_visible_entries", fail)
    with pytest.raises(DataError, match="cannot be listed"):
        list_images(tmp_path / "photos")
