"""What the features are worth: pooled features of images, and the classes their nearest neighbours vote for."""

from jcl.evaluate.features import Features, extract_features, pixel_features
from jcl.evaluate.knn import KnnResult, knn_accuracy, knn_predict, leave_out_split
from jcl.evaluate.neighbours import Neighbours, nearest_neighbours

__all__ = [
    "Features",
    "KnnResult",
    "Neighbours",
    "extract_features",
    "knn_accuracy",
    "knn_predict",
    "leave_out_split",
    "nearest_neighbours",
    "pixel_features",
]
