"""Evaluation of pooled features by neighbours, linear probes, fine-tuning and detection."""

from jcl.evaluate.classification import LabelAmount, balanced_split, label_amount, label_subset, leave_out_split
from jcl.evaluate.features import Features, FeatureSettings, extract_features
from jcl.evaluate.knn import KnnResult, knn_accuracy
from jcl.evaluate.linear import LinearResult, ProbeGrid, linear_probe
from jcl.evaluate.neighbours import Neighbours, nearest_neighbours

__all__ = [
    "FeatureSettings",
    "Features",
    "KnnResult",
    "LabelAmount",
    "LinearResult",
    "Neighbours",
    "ProbeGrid",
    "balanced_split",
    "extract_features",
    "knn_accuracy",
    "label_amount",
    "label_subset",
    "leave_out_split",
    "linear_probe",
    "nearest_neighbours",
]
