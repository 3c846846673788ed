"""Principal components preserve variance, t-SNE neighbourhoods."""

import sys

import pytest
import torch
from torch import Tensor

from jcl.commands.report_sample import principal_components, tsne
from jcl.evaluate.neighbours import unit_rows


def groups(count: int = 60, classes: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % classes
    centers = 2 * torch.randn(classes, 24, generator=generator)
    return centers[labels] + torch.randn(count, 24, generator=generator), labels


def of_own_class(positions: Tensor, labels: Tensor) -> float:
    """The share of points whose nearest point is of their class."""
    nearest = torch.cdist(positions, positions).fill_diagonal_(torch.inf).argmin(1)
    return float((labels[nearest] == labels).float().mean())


def test_principal_components_hold_the_most_variance() -> None:
    features, _ = groups()
    rows = unit_rows(features)
    spectrum = torch.linalg.eigvalsh(torch.cov(rows.T, correction=0)).flip(0)
    assert principal_components(features).var(0, correction=0).tolist() == pytest.approx(spectrum[:2].tolist())
    positions = principal_components(features)
    assert (positions.gather(0, positions.abs().argmax(0, keepdim=True)) > 0).all()  # of both signs this one is taken


def test_tsne_keeps_groups_together() -> None:
    features, labels = groups()
    positions = tsne(features)
    assert of_own_class(positions, labels) > 0.95 > of_own_class(principal_components(features).float(), labels)
    assert torch.equal(positions, tsne(features))


@pytest.mark.parametrize("count", [3, 4, 5, 9])
def test_few_rows(count: int) -> None:
    features, _ = groups(count)
    components, positions = principal_components(features), tsne(features)
    assert components.shape == (count, 2) and components.isfinite().all()
    assert positions is None if count < 5 else positions.shape == (count, 2) and positions.isfinite().all()


def test_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.manifold", None)
    assert tsne(groups()[0]) is None


def test_collapsed_features_lie_in_one_place() -> None:
    positions = tsne(torch.ones(40, 8))
    assert positions.isfinite().all() and positions.std(0).max() < 1e-3
