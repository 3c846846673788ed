import os
import random
import time
from pathlib import Path

import numpy as np
import pytest

from jcl.data import listing
from jcl.data.listing import NameTable, list_images
from plain_user import unlistable


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def settle(root: Path) -> None:
    """Let the folders have been changed a minute ago."""
    for folder in (root, *(path for path in root.rglob("*") if path.is_dir())):
        os.utime(folder, ns=(0, time.time_ns() - 60 * 10**9))


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


@pytest.fixture
def listings(own_cache: Path) -> Path:
    """Where listings are cached."""
    return own_cache / "jcl" / "listings"


@pytest.fixture
def always_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "_CACHE_FROM", 1)


@pytest.mark.usefixtures("always_cached")
class TestKeptListing:
    def test_is_used_while_it_is_true(self, tmp_path: Path, listings: Path):
        """What is kept says "x.png" where the folder says otherwise: only reading the kept one can give it."""
        root = tmp_path / "root"
        touch(root, "a.png", "sub/b.png")
        settle(root)
        assert list(list_images(root).files) == ["a.png", "sub/b.png"]
        (kept,) = listings.iterdir()
        with np.load(kept) as arrays:
            content = dict(arrays)
        content["files_text"] = np.frombuffer(b"x.pngsub/b.png", dtype=np.uint8)
        np.savez(kept, **content)
        assert list(list_images(root).files) == ["x.png", "sub/b.png"]

    def test_knows_what_is_passed_over(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        root = tmp_path / "root"
        touch(root, "a.png", "sub/b.HEIC", "sub/notes.txt")
        settle(root)
        assert list(list_images(root).unsupported) == ["sub/b.HEIC"]
        monkeypatch.setattr(listing, "_walk", lambda root: pytest.fail("walked again"))
        assert list(list_images(root).unsupported) == ["sub/b.HEIC"]

    def test_of_an_earlier_form_is_made_anew(self, tmp_path: Path, listings: Path):
        """Then nothing was kept of what is passed over."""
        root = tmp_path / "root"
        touch(root, "a.png", "b.heic")
        settle(root)
        list_images(root)
        (kept,) = listings.iterdir()
        with np.load(kept) as arrays:
            content = {name: value for name, value in arrays.items() if not name.startswith("unsupported")}
        np.savez(kept, **content)
        assert list(list_images(root).unsupported) == ["b.heic"]

    def test_is_not_made_without_a_folder_that_may_be_listed_later(self, tmp_path: Path, listings: Path):
        """That it may be does not show in the folder's time."""
        root = tmp_path / "root"
        touch(root, "a.png", "sub/b.png")
        settle(root)
        with unlistable(root / "sub"):
            assert list(list_images(root).files) == ["a.png"] and not listings.exists()
        assert list(list_images(root).files) == ["a.png", "sub/b.png"] and listings.exists()

    @pytest.mark.parametrize("change", ["add", "remove", "rename", "add folder", "remove folder"])
    def test_is_dropped_when_the_folder_changes(self, tmp_path: Path, listings: Path, change: str):
        root = tmp_path / "root"
        touch(root, "a.png", "sub/b.png", "sub/c.png")
        settle(root)
        list_images(root)
        assert list(listings.iterdir())
        if change == "add":
            touch(root, "sub/d.png")
        elif change == "remove":
            (root / "sub/c.png").unlink()
        elif change == "rename":
            (root / "sub/c.png").rename(root / "sub/e.png")
        elif change == "add folder":
            touch(root, "other/f.png")
        else:
            (root / "sub/b.png").unlink()
            (root / "sub/c.png").unlink()
            (root / "sub").rmdir()
        expected = sorted(str(path.relative_to(root)) for path in root.rglob("*.png"))
        assert list(list_images(root).files) == expected

    def test_is_not_made_while_the_folder_is_changing(self, tmp_path: Path, listings: Path):
        touch(tmp_path / "root", "a.png")
        list_images(tmp_path / "root")
        assert not listings.exists()

    def test_damaged_one_is_replaced(self, tmp_path: Path, listings: Path):
        root = tmp_path / "root"
        touch(root, "a.png")
        settle(root)
        list_images(root)
        (kept,) = listings.iterdir()
        kept.write_bytes(kept.read_bytes()[:50])
        assert list(list_images(root).files) == ["a.png"]
        with np.load(kept) as arrays:
            assert arrays["files_text"].tobytes() == b"a.png"

    def test_cache_that_cannot_be_written_does_not_matter(self, tmp_path: Path, listings: Path):
        touch(tmp_path / "root", "a.png")
        settle(tmp_path / "root")
        listings.parent.write_text("a file where the folder should be")
        assert list(list_images(tmp_path / "root").files) == ["a.png"]


def test_small_folders_are_not_kept(tmp_path: Path, listings: Path):
    touch(tmp_path / "root", "a.png")
    settle(tmp_path / "root")
    list_images(tmp_path / "root")
    assert not listings.exists()


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
    assert len(found.folders) == 1 + 2 * (depth + 1)


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
    assert list(found.folders) == ["", "all", *(f"all/{folder}" for folder in folders)]


def test_a_folder_is_named_by_the_way_with_the_fewest_links(tmp_path: Path):
    touch(tmp_path, "cats/young/deep/1.png", "dogs/2.png")
    (tmp_path / "cats/a").symlink_to("young")
    (tmp_path / "cats/young/deep/back").symlink_to("../../young")
    (tmp_path / "dogs/b").symlink_to("../cats")
    files = ["cats/young/deep/1.png", "dogs/2.png", "dogs/b/young/deep/1.png"]
    assert list(list_images(tmp_path).files) == files


@pytest.mark.usefixtures("always_cached")
def test_a_kept_listing_that_is_damaged_is_made_anew(tmp_path: Path, listings: Path):
    root = tmp_path / "root"
    touch(root, "a.png")
    settle(root)
    list_images(root)
    (kept,) = listings.iterdir()
    content = bytearray(kept.read_bytes())
    content[content.index(b"PK\x01\x02") + 8] |= 1  # says that a password is needed
    kept.write_bytes(content)
    assert list(list_images(root).files) == ["a.png"]


def test_folders_that_cannot_be_listed_are_passed_over_with_the_reason(tmp_path: Path):
    touch(tmp_path, "a/1.png", "a/deep/2.png", "b/3.png", "lost+found/4.png")
    (tmp_path / "b/link").symlink_to(tmp_path / "a/deep")
    with unlistable(tmp_path / "a/deep", tmp_path / "lost+found"):
        found = list_images(tmp_path)
    assert list(found.files) == ["a/1.png", "b/3.png"] and list(found.folders) == ["", "a", "b"]
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
