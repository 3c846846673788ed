"""Image sources, decoding, and batches in a reproducible order."""

from jcl.data.batch import ImageBatch
from jcl.data.folder import FolderImages
from jcl.data.loader import BatchLoader, read_all
from jcl.data.named import open_data, open_demo
from jcl.data.shards.read import ShardImages
from jcl.data.shards.write import ShardReport, write_shards
from jcl.data.source import UNLABELLED, ArrayImages, ImageData, ImageSource, UnreadableImage, all_class_names
from jcl.data.synthetic import drawn_objects

__all__ = [
    "UNLABELLED",
    "ArrayImages",
    "BatchLoader",
    "FolderImages",
    "ImageBatch",
    "ImageData",
    "ImageSource",
    "ShardImages",
    "ShardReport",
    "UnreadableImage",
    "all_class_names",
    "drawn_objects",
    "open_data",
    "open_demo",
    "read_all",
    "write_shards",
]
