"""Folders of images: any nesting, class folders, train and test splits."""

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from jcl.console import join_words, list_some, pluralize, shell_quote
from jcl.data.decode import describe_failure
from jcl.data.encoded import EncodedImages, ImageFile, open_file
from jcl.data.listing import OPTIONAL_EXTENSIONS, Listing, NameTable, has_images, list_images, sub_folders
from jcl.data.source import ImageData, UnreadableImage
from jcl.errors import DataError
from jcl.paths import printable

# In order of preference, in upper or lower case; ImageNet's folder `test` has no labels.
_TRAIN_FOLDERS: Final = ("train", "training")
_TEST_FOLDERS: Final = ("val", "valid", "validation", "test", "testing")

NO_TEST_IMAGES: Final = "Without test images, accuracy is measured on a tenth of the training images."


class FolderImages(EncodedImages):
    """Image files below one folder, read when needed.

    If every image is in a sub-folder and there are several of these, the sub-folders are classes, as in torchvision's
    `ImageFolder`. `class_names` fixes the label of each class, so that two splits agree.
    """

    def __init__(
        self, root: Path, listing: Listing, class_names: tuple[str, ...] | None, channels: int | None = None
    ) -> None:
        self.root, self.channels = root, channels
        self.class_names = class_names
        numbers = {name: number for number, name in enumerate(class_names or ())}
        self.labels = torch.tensor([numbers[_class_of(name)] for name in listing.files]) if numbers else None
        self.listing = replace(listing, files=NameTable.of(listing.files))

    @property
    def description(self) -> str:
        classes = "" if self.class_names is None else f" in {pluralize(len(self.class_names), 'class folder')}"
        return f"{pluralize(len(self), 'image file')}{classes} below {self.root}"

    def __len__(self) -> int:
        return len(self.listing.files)

    def name_of(self, index: int) -> str:
        """The relative path, with undecodable bytes replaced."""
        return printable(self.listing.files[index])

    def content_of(self, index: int) -> bytes:
        """The bytes of the image file; raises `UnreadableImage`."""
        try:
            return (self.root / self.listing.files[index]).read_bytes()
        except OSError as error:
            raise UnreadableImage(self.name_of(index), describe_failure(error)) from error

    def header_of(self, index: int) -> ImageFile:  # without reading the whole file
        return open_file(self.root / self.listing.files[index])

    def stray_images(self) -> list[str]:
        """The images next to several sub-folders, which keep these from being classes."""
        if self.class_names is not None:  # of a million images this is known in no time
            return []
        classes = [_class_of(name) for name in self.listing.files]
        several = len(set(classes) - {""}) > 1
        return [self.name_of(index) for index, name in enumerate(classes) if several and not name]

    def warnings(self) -> list[str]:
        """What a user should know about skipped files and missing labels."""
        found = [f"{note} below {self.root}." for note in _describe_skipped(self.listing)]
        if stray := self.stray_images():
            more = f" and {pluralize(len(stray) - 1, 'other image')}" if len(stray) > 1 else ""
            found.append(f"No labels, because images are outside of class folders below {self.root}: {stray[0]}{more}.")
        return found


def open_folder(root: Path, classes: Sequence[str] | None = None, *, strict: bool = False) -> ImageData:
    """Open a folder, or its `train` and `val` or `test` folders; `strict` raises if a folder cannot be listed."""
    train_root, test_root = _splits(root)
    listing = _list_classes(train_root, classes, strict)
    if not len(listing.files):
        raise DataError(f"{_explain_empty(train_root, listing)}.")
    class_names = _class_names(listing.files) if classes is None else tuple(classes)
    train = FolderImages(train_root, listing, class_names)
    unused = _describe_unused(root, train_root, test_root)
    if test_root is None:
        return ImageData(root.name, train, unused=unused)
    listing = _list_classes(test_root, classes, strict)
    if not len(listing.files):  # pre-training needs no test images
        why = f"{_explain_empty(test_root, listing)}. {NO_TEST_IMAGES}"
        return ImageData(root.name, train, why_untested=why, unused=unused)
    test_classes = _class_names(listing.files, class_names)
    if test_classes is not None:  # the training classes keep their labels
        test_classes = tuple(dict.fromkeys((class_names or ()) + test_classes))
    return ImageData(root.name, train, FolderImages(test_root, listing, test_classes), unused=unused)


def _splits(root: Path) -> tuple[Path, Path | None]:
    """The folders to train on and to test with; a `train` folder among others may be a class, unless it has classes."""
    folders = {name.lower(): name for name in sub_folders(root)}  # of names that differ in case, the lower-case one
    train, test = (
        [root / folders[name] for name in names if name in folders] for names in (_TRAIN_FOLDERS, _TEST_FOLDERS)
    )
    if train and test:
        return train[0], test[0]
    if train:
        others = [folder for name in folders.values() if (folder := root / name) != train[0]]
        others = [folder for folder in others if _has_images_below(folder)]
        if not others or (len(sub_folders(train[0])) > 1 and not any(map(sub_folders, others))):
            return train[0], None
    return root, None


def _describe_unused(root: Path, train: Path, test: Path | None) -> str:
    """A sentence about images that are in neither split; empty if there are none, or if there are no splits."""
    if train == root:
        return ""
    places = [str(root)] if has_images(root) else []
    others = {root / name for name in sub_folders(root)} - {train, test}
    places += [str(folder) for folder in others if _has_images_below(folder)]
    if not places:
        return ""
    test_images = f", {test} the test images" if test else ""
    return f"Not used: the images in {join_words(sorted(places))}. {train} has the training images{test_images}."


def _has_images_below(folder: Path) -> bool:
    """Whether a folder, or one of its first sub-folders, has images; false if they cannot be listed."""
    with contextlib.suppress(DataError, OSError):
        return any(map(has_images, (folder, *(folder / name for name in sub_folders(folder)[:3]))))
    return False


def _list_classes(root: Path, classes: Sequence[str] | None, strict: bool) -> Listing:
    """List the images, of these classes if they are given; then other folders need not be listable."""
    listing = whole = list_images(root)
    wanted = set(classes or ())
    if classes is not None:
        files, unsupported = (
            [name for name in names if _class_of(name) in wanted] for names in (whole.files, whole.unsupported)
        )
        unlisted = {name: why for name, why in whole.unlisted.items() if name.partition("/")[0] in {"", *wanted}}
        listing = Listing(files, unsupported, unlisted)
    for folder, reason in listing.unlisted.items() if strict else ():
        name = printable(str(root / folder))
        raise DataError(f"The folder {name} cannot be listed: {reason}. Fix its permissions or omit --strict.")
    if whole.files and (missing := sorted(wanted - {_class_of(name) for name in listing.files})):
        problem = f"The folder {root} has no sub-folder with images of the class {list_some(missing, 3)}"
        raise DataError(f"{'. '.join([problem, *_describe_skipped(listing)])}.")
    return listing


def _explain_empty(root: Path, listing: Listing) -> str:
    """Why a folder has no images, without the full stop."""
    if "" in listing.unlisted:
        return f"The folder {root} cannot be listed: {listing.unlisted['']}"
    if any(root.glob("*.tar")):
        return f"The folder {root} holds .tar files; to use them as shards, give {shell_quote(root / '*.tar')}"
    if (root / "settings.yaml").is_file():
        return f"{root} is a run, not a folder of images; to continue the run, use `jcl resume {shell_quote(root)}`"
    problem = f"The folder {root} holds no image files (.jpg, .png, .webp, .tif, ...)"
    return ". ".join([problem, *_describe_skipped(listing)])


def _describe_skipped(listing: Listing) -> list[str]:
    """A note about files of unsupported formats and one about folders that cannot be listed, without full stops."""
    notes = []
    counts = Counter(Path(name).suffix.lower() for name in listing.unsupported)
    if counts:
        kinds = ", ".join(f"{extension} {count:,}" for extension, count in sorted(counts.items()))
        files = pluralize(len(listing.unsupported), "file")
        remedy = "convert to JPEG or PNG"
        if missing := {extra for extension, extra in OPTIONAL_EXTENSIONS.items() if extension in counts}:
            remedy = f"run: pip install 'joint-contrastive-learning[{','.join(sorted(missing))}]'"
        notes.append(f"Skipping {files} of unsupported formats ({kinds}; {remedy})")
    if unlisted := listing.unlisted:
        reasons = list_some((f"{printable(folder)}: {reason}" for folder, reason in unlisted.items()), 1)
        notes.append(f"Skipping {pluralize(len(unlisted), 'folder')} that cannot be listed ({reasons})")
    return notes


def _class_of(name: str) -> str:
    """The first folder of a relative path, empty for a file in no folder."""
    folder, slash, _ = name.partition("/")
    return folder if slash else ""


def _class_names(files: Sequence[str], known: Sequence[str] | None = None) -> tuple[str, ...] | None:
    """The folders, if there are several or one is a known class, and no image is outside of them."""
    names = {_class_of(name) for name in files}
    return tuple(sorted(names)) if (len(names) > 1 or names & set(known or ())) and "" not in names else None
