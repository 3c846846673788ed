"""Data sets of Hugging Face's `datasets`."""

from pathlib import Path
from typing import Any

import torch

from jcl.data.decode import describe_failure
from jcl.data.encoded import EncodedImages
from jcl.data.source import UNLABELED, ImageData, Refused, UnreadableImage
from jcl.errors import DataError, first_line, import_extra
from jcl.paths import expand_user, hub_name

_TEST_SPLITS = ("validation", "test", "val", "valid")  # in order of preference
_LABELS = ("label", "labels", "fine_label", "cls")


class HubImages(EncodedImages):
    """A split of a data set; the files stay encoded in its Arrow table until read."""

    def __init__(self, rows: Any, split: str, dataset: str) -> None:
        import datasets

        kinds = rows.features
        columns = [name for name, kind in kinds.items() if isinstance(kind, datasets.Image)]
        if not columns:
            raise DataError(f"{dataset} has no column of images in the split {split}; it has {', '.join(kinds)}.")
        column = next((name for name in ("image", "img") if name in columns), columns[0])
        self._rows = rows.select_columns(column).cast_column(column, datasets.Image(decode=False))
        self._column, self._split = column, split
        self.description = f"{len(rows):,} images in the split {split} of {dataset}"
        classes = [name for name, kind in kinds.items() if isinstance(kind, datasets.ClassLabel)]
        numbers = [name for name in _LABELS if getattr(kinds.get(name), "dtype", "").startswith(("int", "uint"))]
        label = next(iter([*numbers, *classes]), None)
        values = [] if label is None else rows.with_format(None)[label][:]
        labels = torch.tensor([UNLABELED if value is None else value for value in values], dtype=torch.int64)
        self.labels = labels if bool((labels != UNLABELED).any()) else None
        self.class_names = tuple(kinds[label].names) if label in classes and self.labels is not None else None

    def __len__(self) -> int:
        return len(self._rows)

    def name_of(self, index: int) -> str:
        return f"{self._split}/{index}"

    def content_of(self, index: int) -> bytes:
        """The bytes of the image file, in the table or beside it; raises `UnreadableImage`."""
        value = self._rows[index][self._column] or {}
        try:
            if not value.get("bytes") and not value.get("path"):
                raise Refused("the image is missing")
            content: bytes = value.get("bytes") or Path(value["path"]).read_bytes()
        except (OSError, Refused) as error:
            raise UnreadableImage(self.name_of(index), describe_failure(error)) from error
        return content


def open_hub(location: str, download: bool) -> ImageData:
    """Open `hf:USER/DATASET`, `hf:USER/DATASET:SPLIT` or `hf:USER/DATASET:CONFIG:SPLIT`; the name may also be a folder.

    Without a split, `train` or the only one is used; `validation` or `test` has the test images.
    """
    datasets = import_extra("datasets", "hf", f"Opening {location}")
    dataset, *parts = hub_name(location).split(":")
    folder = expand_user(dataset)
    place = str(folder) if folder.is_dir() else dataset
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            found = datasets.load_from_disk(place)
        else:
            offline = datasets.DownloadConfig(local_files_only=not download)
            found = datasets.load_dataset(place, parts[0] if len(parts) > 1 else None, download_config=offline)
    except Exception as error:  # of the network, the files or the name
        raise DataError(f"The data set {location} cannot be opened: {first_line(error)}.") from None
    splits = dict(found) if isinstance(found, dict) else {"train": found}
    split = parts[-1] if parts else "train" if "train" in splits else next(iter(splits))
    if split not in splits or (not parts and split != "train" and len(splits) > 1):
        raise DataError(f"Name a split, such as hf:{dataset}:{next(iter(splits))}; {dataset} has {', '.join(splits)}.")
    test = next((name for name in _TEST_SPLITS if name in splits and split not in _TEST_SPLITS), None)
    train = HubImages(splits[split], split, dataset)
    return ImageData(Path(dataset).name, train, HubImages(splits[test], test, dataset) if test else None)
