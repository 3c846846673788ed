"""Evaluation of pooled features by neighbors, linear probes, fine-tuning and detection."""

from jcl.evaluate.features import FeatureSettings as FeatureSettings
from jcl.evaluate.features import extract_features as extract_features
from jcl.evaluate.knn import knn_accuracy as knn_accuracy
from jcl.evaluate.linear import linear_probe as linear_probe
from jcl.evaluate.neighbours import nearest_neighbours as nearest_neighbours
