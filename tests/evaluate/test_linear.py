"""The fast linear probe: a grid trained at once is as good as its cells alone, and no choice sees the test set."""

import math
from typing import Any

import pytest
import torch

from jcl.errors import DataError, RunError, SettingsError
from jcl.evaluate.classification import stratified_split
from jcl.evaluate.linear import ProbeGrid, linear_probe, standardizer, train_probes
from jcl.settings.commands import LinearOptions
from jcl.settings.values import validated

SMALL_GRID = ProbeGrid((0.003, 0.03), (0.0, 1e-3, 1e-1))


def draw(count: int, seed: int, *, classes: int = 6, width: int = 20, noise: float = 2.0):
    """Features around a center for each class, overlapping, each with an offset and a scale of its own, and labels."""
    fixed = torch.Generator().manual_seed(99)
    centers = torch.randn(classes, width, generator=fixed)
    offset, scale = 10 * torch.randn(width, generator=fixed), torch.rand(width, generator=fixed) * 5 + 0.1
    own = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes
    features = centers[labels] + noise * torch.randn(count, width, generator=own)
    return features * scale + offset, labels


@pytest.fixture(scope="module")
def problem():
    return (*draw(600, seed=0), *draw(600, seed=1))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_probes_train_where_gradients_are_off(problem, mode):
    expected = linear_probe(*problem, epochs=2)
    with mode():
        inputs = [part.clone() for part in problem]
        assert linear_probe(*inputs, epochs=2) == expected


def test_wrong_lengths_epochs_and_batches_are_refused(problem):
    features, labels, queries, query_labels = problem
    for wrong in ((features, labels[1:], queries, query_labels), (features, labels, queries, query_labels[1:])):
        with pytest.raises(DataError, match="rows of features"):
            linear_probe(*wrong)
    for option in ("epochs", "batch_size"):
        with pytest.raises(ValueError, match=option):
            linear_probe(*problem, **{option: 0})


@pytest.mark.parametrize("kind", [torch.int16, torch.float16])
def test_features_and_labels_of_short_types_are_converted(kind):
    (features, labels), (queries, query_labels) = draw(120, seed=0), draw(60, seed=1)
    features, queries = features.to(kind), queries.to(kind)
    short = linear_probe(features, labels.to(torch.uint8), queries, query_labels.int(), epochs=3)
    assert short == linear_probe(features.float(), labels, queries.float(), query_labels, epochs=3)
    assert short == linear_probe(features.float(), labels, queries.double(), query_labels, epochs=3)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_each_cell_equals_the_same_probe_trained_alone(dtype, tolerance):
    features, labels = draw(100, seed=0)
    features = standardizer(features)(features).to(dtype)
    options = {"epochs": 5, "batch_size": 32, "seed": 4}
    together = train_probes(features, labels, 6, SMALL_GRID.cells, **options)
    for number, cell in enumerate(SMALL_GRID.cells):
        alone = train_probes(features, labels, 6, [cell], **options)
        for grid, single in ((together.weights, alone.weights), (together.biases, alone.biases)):
            assert single.abs().max() > 100 * tolerance
            torch.testing.assert_close(grid[number], single[0], rtol=0, atol=tolerance)


def test_a_probe_is_what_torch_trains_with_its_own_parts():
    """nn.Linear, cross entropy, SGD and CosineAnnealingLR on the same batches: one full batch an epoch."""
    features, labels = draw(50, seed=0)
    features = standardizer(features)(features).double()
    layer = torch.nn.Linear(20, 6, dtype=torch.float64)
    torch.nn.init.zeros_(layer.weight)
    torch.nn.init.zeros_(layer.bias)
    groups = [{"params": [layer.weight], "weight_decay": 0.02}, {"params": [layer.bias], "weight_decay": 0.0}]
    optimiser = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 30)
    for _ in range(30):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(layer(features), labels).backward()
        optimiser.step()
        schedule.step()
    ours = train_probes(features, labels, 6, [(0.1, 0.02)], epochs=30, batch_size=50, seed=0)
    torch.testing.assert_close(ours.weights[0], layer.weight.detach(), rtol=0, atol=1e-10)
    torch.testing.assert_close(ours.biases[0], layer.bias.detach(), rtol=0, atol=1e-10)


def logistic_regression(**options: float) -> Any:
    from sklearn.linear_model import LogisticRegression  # here, as it takes a second

    return LogisticRegression(**options)


def test_accuracy_is_that_of_logistic_regression(problem):
    x_train, y_train, x_test, y_test = problem
    standardise = standardizer(x_train)
    best = max(
        logistic_regression(C=strength, max_iter=2000)
        .fit(standardise(x_train), y_train)
        .score(standardise(x_test), y_test)
        for strength in (0.01, 0.1, 1.0)
    )
    ours = linear_probe(x_train, y_train, x_test, y_test)
    assert 30 < 100 * best < 95  # neither hopeless nor trivial
    assert ours.scores.top1 == pytest.approx(100 * best, abs=2.0)
    assert ours.validation_top1 == pytest.approx(ours.scores.top1, abs=10)


def test_a_converged_probe_reaches_the_loss_of_logistic_regression():
    """Where the problem has one minimum, given by weight decay, both find it."""
    features, labels = draw(300, seed=0)
    features = standardizer(features)(features).double()
    decay = 0.05
    ours = train_probes(features, labels, 6, [(0.3, decay)], epochs=400, batch_size=300, seed=0)
    reference = logistic_regression(C=1 / (decay * len(features)), tol=1e-10, max_iter=5000).fit(features, labels)
    torch.testing.assert_close(ours.weights[0], torch.from_numpy(reference.coef_), rtol=0, atol=1e-3)


def test_the_choice_does_not_know_the_test_labels(problem):
    x_train, y_train, x_test, y_test = problem
    right = linear_probe(x_train, y_train, x_test, y_test, grid=SMALL_GRID, epochs=20)
    shuffled = linear_probe(x_train, y_train, x_test, y_test[torch.randperm(600)], grid=SMALL_GRID, epochs=20)
    assert (right.lr, right.weight_decay, right.validation_top1) == (
        shuffled.lr,
        shuffled.weight_decay,
        shuffled.validation_top1,
    )
    assert shuffled.scores.top1 < right.scores.top1 - 20


def test_the_choice_is_the_best_on_the_held_out_training_rows(problem):
    """Each cell trained by itself on the kept rows and judged on the others, ties by the loss: the same choice."""
    x_train, y_train, x_test, y_test = problem
    grid = ProbeGrid((0.01, 3.0), (0.0, 0.1))
    result = linear_probe(x_train, y_train, x_test, y_test, grid=grid, epochs=10, seed=2)
    features = standardizer(x_train)(x_train)
    kept, held_out = stratified_split(y_train, 2)
    judged = {}
    for cell in grid.cells:
        probe = train_probes(features[kept], y_train[kept], 6, [cell], epochs=10, batch_size=256, seed=2)
        logits = probe(features[held_out])[:, 0]
        share = (logits.argmax(1) == y_train[held_out]).double().mean().item()
        judged[cell] = (share, -torch.nn.functional.cross_entropy(logits, y_train[held_out]).item())
    best = max(judged, key=judged.get)
    assert (result.lr, result.weight_decay) == best
    assert result.validation_top1 == pytest.approx(100 * judged[best][0])
    assert min(judged.values())[0] < judged[best][0]


def test_same_seed_same_figures_other_seed_other_order(problem):
    first, again, other = (linear_probe(*problem, grid=SMALL_GRID, epochs=5, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first.validation_top1 != other.validation_top1


def test_one_cell_needs_no_choice_and_no_held_out_images():
    features = torch.eye(3)
    result = linear_probe(features, torch.arange(3), features, torch.arange(3), grid=ProbeGrid((0.1,), (0.0,)))
    assert result.scores.top1 == 100 and result.validation_top1 is None and result.edges == ()
    with pytest.raises(DataError, match="single training image"):
        linear_probe(features, torch.arange(3), features, torch.arange(3))


def test_standardising():
    features = torch.randn(500, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 100, 0.01]) + 7
    scaled = standardizer(features)(features)
    torch.testing.assert_close(scaled.mean(0), torch.zeros(3), rtol=0, atol=1e-4)
    torch.testing.assert_close(scaled.std(0, correction=0), torch.ones(3), rtol=1e-4, atol=0)


@pytest.mark.parametrize("value", [0.0, 0.1, -1234.567])
def test_constant_features_change_nothing(problem, value):
    x_train, y_train, x_test, y_test = problem
    plain = linear_probe(x_train, y_train, x_test, y_test, grid=SMALL_GRID, epochs=10)
    more = [torch.cat([x, torch.full((len(x), 2), value)], 1) for x in (x_train, x_test)]
    scaled = standardizer(more[0])(more[0])
    assert scaled.isfinite().all() and scaled[:, -2:].abs().max() < 1e-2
    result = linear_probe(more[0], y_train, more[1], y_test, grid=SMALL_GRID, epochs=10)
    assert result.scores.top1 == pytest.approx(plain.scores.top1, abs=0.5)


def test_classes_with_one_image_and_classes_nobody_trained_on(problem):
    x_train, y_train, x_test, y_test = problem
    # Of class 5 a single training image is left, of class 2 none: neither is among the held-out rows.
    keep = (y_train != 2) & ((y_train != 5) | (torch.arange(600) == 5))
    result = linear_probe(x_train[keep], y_train[keep], x_test, y_test, grid=SMALL_GRID, epochs=10)
    assert result.classes == (0, 1, 3, 4, 5)
    assert result.scores.unseen_class_images == 100 and result.scores.images == 600
    assert result.scores.class_images == (100,) * 5
    assert result.scores.top1 == pytest.approx(sum(result.scores.class_top1) / 6)  # unseen_class_images count as wrong


def test_rows_without_a_label_are_ignored_on_both_sides(problem):
    x_train, y_train, x_test, y_test = problem
    plain = linear_probe(x_train, y_train, x_test, y_test, grid=SMALL_GRID, epochs=5)
    noise = 1e6 * torch.randn(50, 20)
    nobody = torch.full((50,), -1)
    padded = linear_probe(
        torch.cat([x_train, noise]),
        torch.cat([y_train, nobody]),
        torch.cat([noise, x_test]),
        torch.cat([nobody, y_test]),
        grid=SMALL_GRID,
        epochs=5,
    )
    assert padded == plain


def test_top_five_of_three_classes_is_everything():
    x_train, y_train = draw(90, seed=0, classes=3)
    x_test, y_test = draw(90, seed=1, classes=3)
    found = linear_probe(x_train, y_train, x_test, y_test, grid=SMALL_GRID, epochs=5).scores
    assert found.top5 == 100 and found.top1 < 100


def test_labels_need_not_be_consecutive(problem):
    x_train, y_train, x_test, y_test = problem
    names = torch.tensor([3, 10, 11, 500, 501, 9999])
    plain = linear_probe(x_train, y_train, x_test, y_test, grid=SMALL_GRID, epochs=5)
    renamed = linear_probe(x_train, names[y_train], x_test, names[y_test], grid=SMALL_GRID, epochs=5)
    assert renamed.scores == plain.scores and renamed.classes == tuple(names.tolist())


def test_a_cell_that_goes_astray_is_not_chosen(problem):
    grid = ProbeGrid((0.01, 1e30), (0.0, 1e10))
    result = linear_probe(*problem, grid=grid, epochs=3)
    assert (result.lr, result.weight_decay) == (0.01, 0.0)


@pytest.mark.parametrize("rates", [(1e30,), (1e30, 1e35)])
def test_a_grid_that_goes_astray_as_a_whole_is_a_sentence(problem, rates):
    with pytest.raises(RunError, match="diverged"):
        linear_probe(*problem, grid=ProbeGrid(rates, (1e10,)), epochs=3)


def test_edges_of_the_grid():
    grid = ProbeGrid((0.1, 1.0, 10.0), (0.0, 0.1, 0.2))
    assert grid.edges((1.0, 0.1)) == () and grid.edges((1.0, 0.0)) == ()  # less than no weight decay there is not
    assert grid.edges((10.0, 0.2)) == ("highest learning rate", "highest weight decay")
    assert grid.edges((0.1, 0.1)) == ("lowest learning rate",)
    assert ProbeGrid((0.1,), (0.5,)).edges((0.1, 0.5)) == ()


@pytest.mark.parametrize("grid", [{"lr": (0.0,)}, {"weight_decay": (-1.0,)}, {"lr": (math.nan,)}])
def test_grids_that_make_no_sense(grid):
    with pytest.raises(SettingsError, match=next(iter(grid))):
        validated(LinearOptions, {"weights": "w"} | grid, "the options")


def test_what_cannot_be_probed_is_a_sentence(problem):
    x_train, y_train, x_test, y_test = problem
    with pytest.raises(DataError, match="at least two classes"):
        linear_probe(x_train, torch.zeros(600, dtype=torch.int64), x_test, y_test)
    with pytest.raises(DataError, match="NaN or infinite"):
        linear_probe(x_train / 0, y_train, x_test, y_test)
    with pytest.raises(DataError, match="NaN or infinite"):
        linear_probe(x_train, y_train, x_test / 0, y_test)
    with pytest.raises(DataError, match="test set has no labeled rows"):
        linear_probe(x_train, y_train, x_test, torch.full((600,), -1), grid=SMALL_GRID, epochs=1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_gpu_finds_what_the_cpu_finds(problem):
    here, there = (linear_probe(*problem, grid=SMALL_GRID, epochs=10, device=device) for device in ("cpu", "cuda"))
    assert (here.lr, here.weight_decay) == (there.lr, there.weight_decay)
    assert there.scores.top1 == pytest.approx(here.scores.top1, abs=0.5)
