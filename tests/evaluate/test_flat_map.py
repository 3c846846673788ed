"""Maps keep what they promise: variance by principal components, neighbours by t-SNE."""

import pytest
import torch
from torch import Tensor

from jcl.evaluate.flat_map import neighbour_map, principal_map
from jcl.evaluate.neighbours import unit_rows


def groups(count: int = 120, classes: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % classes
    centres = 2 * torch.randn(classes, 24, generator=generator)
    return centres[labels] + torch.randn(count, 24, generator=generator), labels


def of_own_class(places: Tensor, labels: Tensor) -> float:
    """The share of marks whose nearest mark is of their class."""
    nearest = torch.cdist(places, places).fill_diagonal_(torch.inf).argmin(1)
    return float((labels[nearest] == labels).float().mean())


def test_principal_components_hold_the_most_variance() -> None:
    features, _ = groups()
    rows = unit_rows(features)
    spectrum = torch.linalg.eigvalsh(torch.cov(rows.T, correction=0)).flip(0)
    assert principal_map(features).var(0, correction=0).tolist() == pytest.approx(spectrum[:2].tolist())
    places = principal_map(features)
    assert (places.gather(0, places.abs().argmax(0, keepdim=True)) > 0).all()  # of both signs this one is taken


def test_groups_stay_together_on_the_map_of_neighbours() -> None:
    features, labels = groups()
    places = neighbour_map(features)
    assert of_own_class(places, labels) > 0.95 > of_own_class(principal_map(features).float(), labels)
    assert torch.equal(places, neighbour_map(features))


@pytest.mark.parametrize("count", [1, 2, 4, 5, 9])
def test_few_rows(count: int) -> None:
    features, _ = groups(count)
    for places in (principal_map(features), neighbour_map(features)):
        assert places.shape == (count, 2) and places.isfinite().all()


def test_collapsed_features_lie_in_one_place() -> None:
    places = neighbour_map(torch.ones(40, 8))
    assert places.isfinite().all() and places.std(0).max() < 1e-3
