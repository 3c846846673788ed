"""How alike an image's views are: against plain float64 loops, in any batches, and paired between networks."""

import numpy as np
import pytest
import torch
from torch import nn

from jcl.data import ArrayImages
from jcl.errors import DataError, RunError
from jcl.studies.distribution import (
    DistributionReport,
    NamedNetwork,
    ViewSampler,
    ViewSpread,
    sample_rows,
    share_more_similar,
    spread_of,
    view_spreads,
)
from jcl.views import ViewMaker, view_recipe
from small_runs import drawn_pixels

RECIPE = view_recipe("small", 8)
CPU = torch.device("cpu")


def images(count: int = 11) -> ArrayImages:
    return ArrayImages(torch.from_numpy(drawn_pixels(count)).permute(0, 3, 1, 2).contiguous())


def network(seed: int = 0, width: int = 6) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, width))


def direct(features: torch.Tensor) -> tuple[float, float]:
    """All pairs one by one, and the diagonal of numpy's covariance, of the features (V, d) of one image."""
    rows = features.double().numpy()
    rows = rows / np.sqrt((rows**2).sum(axis=1, keepdims=True))
    pairs = [float(np.dot(first, second)) for first in rows for second in rows]
    return float(np.mean(pairs)), float(np.diag(np.cov(rows.T, bias=True)).mean())


def test_spread_equals_direct_loops() -> None:
    features = torch.randn(5, 7, 4, generator=torch.Generator().manual_seed(1)) + 1
    similarity, variance = spread_of(features)
    expected = [direct(one) for one in features]
    assert similarity.tolist() == pytest.approx([similarity for similarity, _ in expected], abs=1e-14)
    assert variance.tolist() == pytest.approx([variance for _, variance in expected], rel=1e-12)


def test_unit_features_tie_variance_to_similarity() -> None:
    similarity, variance = spread_of(torch.randn(20, 9, 5, generator=torch.Generator().manual_seed(2)))
    assert variance.tolist() == pytest.approx(((1 - similarity) / 5).tolist(), rel=1e-12)


def test_views_that_are_nearly_alike_keep_their_digits() -> None:
    """A difference of sums would leave nothing of a variance of 1e-20."""
    generator = torch.Generator().manual_seed(3)
    center = torch.randn(1, 1, 8, dtype=torch.float64, generator=generator)
    features = center + 1e-10 * torch.randn(1, 64, 8, dtype=torch.float64, generator=generator)
    units = features[0].numpy().astype(np.longdouble)
    units /= np.sqrt((units**2).sum(axis=1, keepdims=True))
    exact = ((units - units.mean(axis=0)) ** 2).mean()
    assert float(spread_of(features)[1]) == pytest.approx(float(exact), rel=1e-3) and float(exact) < 1e-20


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_streaming_equals_the_whole(batch_size: int) -> None:
    source, views = images(7), 5
    networks = [NamedNetwork("one", network(0), RECIPE), NamedNetwork("two", network(1, 9), RECIPE)]
    spreads, rows = view_spreads(
        networks, source, torch.arange(7), ViewSampler(seed=4, device=CPU, batch_size=batch_size), views
    )
    assert rows.tolist() == list(range(7))
    maker = ViewMaker(RECIPE, 4, 0, source.pixels, torch.full((7, 2), 16), torch.arange(7))
    for named, spread in zip(networks, spreads, strict=True):
        for row in range(7):
            with torch.no_grad():
                features = named.module(maker(torch.full((views,), row), torch.arange(views)))
            similarity, variance = direct(features)
            assert float(spread.similarity[row]) == pytest.approx(similarity, abs=1e-6)
            assert float(spread.variance[row]) == pytest.approx(variance, abs=1e-6)
        assert spread.width == (6 if named.name == "one" else 9)


def test_an_image_has_the_same_views_whatever_else_is_looked_at() -> None:
    source, named = images(), NamedNetwork("one", network(), RECIPE)
    sampler = ViewSampler(seed=0, device=CPU)
    few, many = sample_rows(source, 4, 7), sample_rows(source, 9, 7)
    assert set(few.tolist()) < set(many.tolist()) and len(sample_rows(source, 100, 7)) == 11
    of_few, of_many = (view_spreads([named], source, rows, sampler, 6)[0][0].similarity for rows in (few, many))
    shared = [many.tolist().index(row) for row in few.tolist()]
    assert of_few.tolist() == pytest.approx(of_many[shared].tolist(), abs=1e-6)


def test_pairs_of_a_view_with_itself_are_left_out() -> None:
    features = torch.randn(1, 6, 3, generator=torch.Generator().manual_seed(5))
    spread = ViewSpread(*spread_of(features), 6, 3)
    units = torch.nn.functional.normalize(features[0].double(), dim=1)
    others = [float(units[a] @ units[b]) for a in range(6) for b in range(6) if a != b]
    assert float(spread.similarity_of_different_views) == pytest.approx(np.mean(others), abs=1e-12)


def test_share_more_similar_counts_images() -> None:
    first = ViewSpread(torch.tensor([0.9, 0.5, 0.7, 0.8]), torch.tensor([0.1, 0.5, 0.3, 0.2]), 4, 1)
    other = ViewSpread(torch.tensor([0.8, 0.6, 0.7, 0.1]), torch.tensor([0.2, 0.4, 0.3, 0.1]), 4, 1)
    assert share_more_similar(first, other) == 50.0
    assert share_more_similar(other, first) == 25.0


def test_features_without_a_direction_are_refused() -> None:
    dead = nn.Sequential(nn.Flatten(), nn.Linear(192, 4), nn.Threshold(1e9, 0.0))
    with pytest.raises(RunError, match=r"dead .* 11 of 11"):
        view_spreads(
            [NamedNetwork("dead", dead, RECIPE)], images(), torch.arange(11), ViewSampler(seed=0, device=CPU), 3
        )


def test_too_little_to_compare_is_refused() -> None:
    with pytest.raises(DataError, match="1"):
        sample_rows(images(1), 50, 0)
    with pytest.raises(DataError, match="At least two"):
        sample_rows(images(), 1, 0)


def test_networks_get_their_mode_back() -> None:
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(192), nn.Linear(192, 4)).train()
    before = model[1].running_mean.clone()
    view_spreads([NamedNetwork("one", model, RECIPE)], images(), torch.arange(11), ViewSampler(seed=0, device=CPU), 3)
    assert model.training and torch.equal(model[1].running_mean, before)


def test_values_are_written_for_other_programs(tmp_path) -> None:
    spread = ViewSpread(torch.tensor([0.25, 1 / 3]).double(), torch.tensor([0.5, 0.125]).double(), 4, 2)
    file = tmp_path / "values.csv"
    DistributionReport({"JCL": spread}, ["a, b.png", "c.png"], {}).write_values(file)
    lines = file.read_text().splitlines()
    assert lines[0].startswith("image,jcl_similarity,") and lines[1].startswith('"a, b.png",0.25,')


def test_values_that_do_not_fit_on_the_disk_leave_the_old_ones(tmp_path, no_room_for) -> None:
    file = tmp_path / "values.csv"
    file.write_text("old")
    no_room_for(file)
    spread = ViewSpread(torch.zeros(2).double(), torch.zeros(2).double(), 4, 2)
    with pytest.raises(RunError, match="values"):
        DistributionReport({"JCL": spread}, ["a.png", "b.png"], {}).write_values(file)
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]
