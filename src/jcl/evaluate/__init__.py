"""Evaluation of pooled features by neighbours, linear probes, fine-tuning and detection."""

from jcl.evaluate.classification import hold_out_split, label_amount, label_subset, stratified_split
from jcl.evaluate.features import Features, FeatureSettings, extract_features
from jcl.evaluate.knn import KnnResult, knn_accuracy
from jcl.evaluate.linear import LinearResult, ProbeGrid, linear_probe
from jcl.evaluate.neighbours import Neighbours, nearest_neighbours

__all__ = [
    "FeatureSettings",
    "Features",
    "KnnResult",
    "LinearResult",
    "Neighbours",
    "ProbeGrid",
    "extract_features",
    "hold_out_split",
    "knn_accuracy",
    "label_amount",
    "label_subset",
    "linear_probe",
    "nearest_neighbours",
    "stratified_split",
]
