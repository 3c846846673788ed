"""Image sources, decoding, and batches in a reproducible order."""

from jcl.data.batch import ImageBatch as ImageBatch
from jcl.data.folder import FolderImages as FolderImages
from jcl.data.loader import BatchLoader as BatchLoader
from jcl.data.loader import read_all as read_all
from jcl.data.named import open_data as open_data
from jcl.data.named import open_demo as open_demo
from jcl.data.shards.read import ShardImages as ShardImages
from jcl.data.shards.write import write_shards as write_shards
from jcl.data.source import UNLABELED as UNLABELED
from jcl.data.source import ArrayImages as ArrayImages
from jcl.data.source import ImageData as ImageData
from jcl.data.source import ImageSource as ImageSource
from jcl.data.source import UnreadableImage as UnreadableImage
from jcl.data.source import all_class_names as all_class_names
from jcl.data.synthetic import drawn_objects as drawn_objects
