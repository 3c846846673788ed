"""Folders of images: any nesting, class folders, train and test splits."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from jcl.console import pluralize, typed
from jcl.data.decode import decode
from jcl.data.listing import (
    Listing,
    NameTable,
    about_foreign,
    about_unlisted,
    each_kind,
    is_folder,
    kinds_of,
    list_images,
    shown_entries,
)
from jcl.data.shard_description import DESCRIPTION_FILE
from jcl.data.source import ImageData, UnreadableImage
from jcl.errors import DataError

# The first one found of each, in capitals or not; ImageNet's test set has no labels.
_TRAIN_FOLDERS: Final = ("train", "training")
_TEST_FOLDERS: Final = ("val", "valid", "validation", "test", "testing")

WITHOUT_TEST_IMAGES: Final = "Without test images accuracy is measured on a tenth of the training images."


class FolderImages:
    """Image files below one folder, read when asked for.

    Where every image lies in a sub-folder and there are several of these, the sub-folders are classes, as torchvision's
    `ImageFolder` has it. `class_names` fixes which label a class gets, so that two splits agree. `foreign` counts by
    kind the images that are passed over because nothing here can decode them; `unlisted` maps the folders that are
    passed over because they cannot be listed to the reason.
    """

    def __init__(self, root: Path, listing: Listing, class_names: tuple[str, ...] | None) -> None:
        self.root = root
        self.class_names = class_names
        self.labels = None if class_names is None else _labels(listing.files, class_names)
        self.foreign = kinds_of(listing.foreign)
        self.unlisted = {_printable(folder): reason for folder, reason in listing.unlisted.items()}
        self._files = listing.files

    @property
    def description(self) -> str:
        classes = "" if self.class_names is None else f" in {pluralize(len(self.class_names), 'class folder')}"
        return f"{pluralize(len(self), 'image file')}{classes} below {self.root}"

    def __len__(self) -> int:
        return len(self._files)

    def read(self, index: int, canvas: int | None = None) -> Tensor:
        return decode(self.path_of(index), canvas, self.name_of(index))

    def name_of(self, index: int) -> str:
        """The path below the root, with what cannot be printed replaced."""
        return _printable(self._files[index])

    def loose(self) -> list[str]:
        """The images beside several sub-folders, which would be classes without them."""
        if self.class_names is not None:
            return []
        classes = [_class_of(name) for name in self._files]
        several = len(set(classes) - {""}) > 1
        return [self.name_of(index) for index, name in enumerate(classes) if not name] if several else []

    def path_of(self, index: int) -> Path:
        return self.root / self._files[index]

    def extension_of(self, index: int) -> str:
        """How the file's name ends, such as ".jpg"."""
        return self.path_of(index).suffix.lower()

    def content_of(self, index: int) -> bytes:
        """The bytes of the image file; raises `UnreadableImage`."""
        try:
            return self.path_of(index).read_bytes()
        except OSError as error:
            raise UnreadableImage(self.name_of(index), (error.strerror or "it cannot be read").lower()) from error


def open_folder(
    root: Path, classes: Sequence[str] | None = None, cache: Path | None = None, *, strict: bool = False
) -> ImageData:
    """Open a folder of images, with its splits where it has a `train` folder beside a `val` or `test` folder.

    `classes` keeps only the images in these class folders. `cache` is where listings of large folders are kept. Folders
    below that cannot be listed are passed over; `strict` raises instead.
    """
    if not root.is_dir():
        kind = "is no folder" if root.exists() else "does not exist"
        raise DataError(f"The image folder {root} {kind}; give the path of a folder that holds images.")
    train_root, test_root = _splits(root)
    listing = _listed(train_root, classes, cache)
    if not len(listing.files):
        raise DataError(f"{_about_empty(train_root, listing)}.")
    if strict:
        _refuse_unlisted(train_root, listing)
    listing = _only_classes(train_root, listing, classes)
    class_names = _class_names(listing.files) if classes is None else tuple(classes)
    train = FolderImages(train_root, listing, class_names)
    if test_root is None:
        return ImageData(root.name, train)
    listing = _listed(test_root, classes, cache)
    if strict:
        _refuse_unlisted(test_root, listing)
    if not len(listing.files):  # made for later, perhaps; pre-training needs no test images
        why = f"{_about_empty(test_root, listing)}. {WITHOUT_TEST_IMAGES}"
        return ImageData(root.name, train, why_untested=why)
    listing = _only_classes(test_root, listing, classes)
    return ImageData(root.name, train, FolderImages(test_root, listing, _test_classes(class_names, listing.files)))


def folder_remarks(root: Path, data: ImageData) -> Iterator[str]:
    """What whoever begins something with a folder wants to know of what was found there."""
    splits = [split for split in (data.train, data.test) if isinstance(split, FolderImages)]
    foreign = sum((Counter(split.foreign) for split in splits), Counter[str]())
    if foreign:
        yield (
            f"Passed over, because their kind cannot be read: {pluralize(foreign.total(), 'file')} below {root} "
            f"({each_kind(dict(sorted(foreign.items())))}); `jcl check {typed(root)}` tells more."
        )
    if data.why_untested:
        yield data.why_untested
    for split in splits:
        if split.unlisted:
            yield f"Below {split.root} {about_unlisted(split.unlisted)}."
        if loose := split.loose():
            yield f"Below {split.root} {about_loose(loose)}."


def about_loose(names: Sequence[str]) -> str:
    """Why there are no labels, and what to do where there should be."""
    first, more = names[0].replace("\n", "\\n"), len(names) - 1
    lie, them = (f" and {pluralize(more, 'more image')} lie", "them") if more else (" lies", "it")
    return (
        f"the sub-folders are not taken for classes, because {first}{lie} beside them: no image there has a label, and "
        f"kNN cannot be measured on them; if the sub-folders are classes, move {them} into one of these or away"
    )


def _test_classes(class_names: tuple[str, ...] | None, test_files: NameTable) -> tuple[str, ...] | None:
    """The classes to train on with their labels, then those that only the test images have.

    Where no training image has a label, the class folders of the test images still say what these show.
    """
    found = _class_names(test_files)
    if found is None:
        return None
    known = class_names or ()
    return known + tuple(name for name in found if name not in known)


def _splits(root: Path) -> tuple[Path, Path | None]:
    """The folders to train on and to test with.

    A lone `train` among other folders is no split: it may as well be the class of railway pictures.
    """
    # Where two differ by capitals only, the later in this order counts: the one in small letters.
    folders = {name.lower(): name for name in sorted(entry.name for entry in shown_entries(root) if is_folder(entry))}
    train, test = (
        [root / folders[name] for name in names if name in folders] for names in (_TRAIN_FOLDERS, _TEST_FOLDERS)
    )
    if train and test:
        return train[0], test[0]
    if train and len(folders) == 1:
        return train[0], None
    return root, None


def _listed(root: Path, classes: Sequence[str] | None, cache: Path | None) -> Listing:
    listing = list_images(root, cache)
    if classes is None:
        return listing
    wanted = {"", *classes}  # nobody misses what lies in other folders
    unlisted = {folder: why for folder, why in listing.unlisted.items() if folder.partition("/")[0] in wanted}
    return replace(listing, unlisted=unlisted)


def _refuse_unlisted(root: Path, listing: Listing) -> None:
    for folder, reason in listing.unlisted.items():
        raise DataError(
            f"The folder {_printable(str(root / folder))} cannot be listed: {reason}; make it readable or move it "
            "away, or leave --strict out to pass over it."
        )


def _about_empty(root: Path, listing: Listing) -> str:
    """Why there are no images below a folder, without the full stop."""
    if "" in listing.unlisted:
        return f"The folder {root} cannot be listed: {listing.unlisted['']}"
    if any(root.glob("*.tar")):
        return (
            f"The folder {root} holds .tar files, but no {DESCRIPTION_FILE} of `jcl shard` that can be read; give the "
            f"files themselves: {typed(root / '*.tar')}"
        )
    foreign = kinds_of(listing.foreign)
    return (
        f"The folder {root} holds no image files (looked for .jpg, .png, .webp, .tif and the like in it and in all "
        f"folders below){f'; {about_foreign(foreign)}' if foreign else ''}"
        f"{f'; {about_unlisted(listing.unlisted)}' if listing.unlisted else ''}"
    )


def _only_classes(root: Path, listing: Listing, classes: Sequence[str] | None) -> Listing:
    """The part of a listing that lies in these class folders, all of it where none are named."""
    if classes is None:
        return listing
    wanted = set(classes)
    kept, foreign = (
        [name for name in names if _class_of(name) in wanted] for names in (listing.files, listing.foreign)
    )
    missing = sorted(wanted - {_class_of(name) for name in kept})
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise DataError(
            f"The folder {root} has no images of the class {', '.join(missing[:3])}{more}, which the class list names; "
            f"each class needs a sub-folder of that name"
            f"{f'; {about_unlisted(listing.unlisted)}' if listing.unlisted else ''}."
        )
    return replace(listing, files=NameTable.of(kept), foreign=NameTable.of(foreign))


def _printable(name: str) -> str:
    return os.fsencode(name).decode("utf-8", "replace")


def _class_of(name: str) -> str:
    """The first folder of a relative path, empty for a file that lies in no folder."""
    folder, slash, _ = name.partition("/")
    return folder if slash else ""


def _class_names(files: NameTable) -> tuple[str, ...] | None:
    names = {_class_of(name) for name in files}
    return tuple(sorted(names)) if len(names) > 1 and "" not in names else None


def _labels(files: NameTable, class_names: tuple[str, ...]) -> Tensor:
    numbers = {name: number for number, name in enumerate(class_names)}
    return torch.tensor([numbers[_class_of(name)] for name in files], dtype=torch.int64)
