"""kNN against a plain computation in exact arithmetic, against scikit-learn, and its invariants."""

import functools
import math
from collections import defaultdict
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jcl.data import ImageSource, open_data
from jcl.errors import DataError
from jcl.evaluate.classification import classification_task, hold_out_split
from jcl.evaluate.features import Features
from jcl.evaluate.knn import evaluate_knn, knn_accuracy
from jcl.evaluate.neighbours import nearest_neighbours, unit_rows
from small_runs import write_image_folder


@functools.lru_cache(maxsize=10_000)
def exact_similarity(first: tuple[float, ...], second: tuple[float, ...]) -> Fraction:
    """The cosine as sign times square, in fractions: two pairs are tied exactly if their angles are equal."""
    dot = sum(Fraction(a) * Fraction(b) for a, b in zip(first, second, strict=True))
    norms = sum(Fraction(a) ** 2 for a in first) * sum(Fraction(b) ** 2 for b in second)
    return Fraction(0) if norms == 0 else (1 if dot > 0 else -1) * dot**2 / norms


def brute_neighbours(query: list[float], bank: list[list[float]], k: int) -> list[tuple[float, int]]:
    cosines = [exact_similarity(tuple(query), tuple(row)) for row in bank]
    order = sorted(range(len(bank)), key=lambda row: (-cosines[row], row))[:k]
    return [(math.copysign(math.sqrt(abs(cosines[row])), cosines[row]), row) for row in order]


def brute_ranking(
    query: list[float], bank: list[list[float]], labels: list[int], k: int, temperature: float
) -> list[int]:
    """Classes that got a vote, best first; then, where there are five or fewer, the others."""
    votes: dict[int, float] = defaultdict(float)
    neighbours = brute_neighbours(query, bank, k)
    for similarity, row in neighbours:
        votes[labels[row]] += math.exp((similarity - neighbours[0][0]) / temperature)
    others = set(labels) - set(votes) if len(set(labels)) <= 5 else set()
    return sorted(votes, key=lambda label: (-votes[label], label)) + sorted(others)


def brute_rankings(bank: Tensor, bank_labels: Tensor, queries: Tensor, k: int, temperature: float) -> list[list[int]]:
    return [brute_ranking(query, bank.tolist(), bank_labels.tolist(), k, temperature) for query in queries.tolist()]


def share_within(top: int, rankings: list[list[int]], labels: Tensor) -> float:
    """The percentage of queries whose label is among the first `top` classes."""
    found = [label in ranking[:top] for ranking, label in zip(rankings, labels.tolist(), strict=True)]
    return 100 * sum(found) / len(found)


def random_problem(
    seed: int, bank: int = 90, queries: int = 25, width: int = 6, classes: int = 8
) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(classes, width, generator=generator)
    labels = torch.randint(classes, (bank + queries,), generator=generator)
    features = centers[labels] + torch.randn(bank + queries, width, generator=generator)
    return features[:bank], labels[:bank], features[bank:], labels[bank:]


@pytest.mark.parametrize("k", [1, 7, 40])
def test_accuracy_equals_brute_force_on_random_data(k: int) -> None:
    *inputs, labels = problem = random_problem(seed=k, bank=60)
    for result in knn_accuracy(*problem, k=[k], temperature=[0.05, 0.2, 5.0]):
        rankings = brute_rankings(*inputs, k, result.temperature)
        expected = [share_within(top, rankings, labels) for top in (1, 5)]
        assert [result.top1, result.top5] == pytest.approx(expected, abs=1e-9)
        assert 0 < result.top1 <= result.top5 <= 100
        for label, images, top1 in zip(result.classes, result.class_images, result.class_top1, strict=True):
            own = (labels == label).nonzero().flatten().tolist()
            if not images:
                assert not own and top1 is None
                continue
            alone = share_within(1, [rankings[row] for row in own], labels[own])
            assert (images, top1) == (len(own), pytest.approx(alone))


small_integers = st.integers(-1, 1)


@given(data=st.data(), k=st.integers(1, 14), chunk=st.integers(1, 9), temperature=st.sampled_from([0.02, 0.1, 1.0]))
@settings(max_examples=50, deadline=None)
def test_neighbours_and_accuracy_equal_brute_force_on_tied_data(
    data: st.DataObject, k: int, chunk: int, temperature: float
) -> None:
    """Coordinates in -1, 0, 1 make ties between rows, between classes, and zero rows, everywhere."""
    bank_size, query_count = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 4))
    rows = st.lists(small_integers, min_size=4, max_size=4)
    bank = torch.tensor(data.draw(st.lists(rows, min_size=bank_size, max_size=bank_size)), dtype=torch.float32)
    queries = torch.tensor(data.draw(st.lists(rows, min_size=query_count, max_size=query_count)), dtype=torch.float32)
    bank_labels = torch.tensor(data.draw(st.lists(st.integers(0, 6), min_size=bank_size, max_size=bank_size)))
    labels = torch.tensor(data.draw(st.lists(st.integers(0, 6), min_size=query_count, max_size=query_count)))

    found = nearest_neighbours(queries, bank, k, chunk=chunk)
    expected = [brute_neighbours(query, bank.tolist(), k) for query in queries.tolist()]
    assert found.rows.tolist() == [[row for _, row in each] for each in expected]
    np.testing.assert_allclose(found.similarities, [[value for value, _ in each] for each in expected], atol=2e-7)

    (result,) = knn_accuracy(bank, bank_labels, queries, labels, k=[k], temperature=[temperature], chunk=chunk)
    rankings = brute_rankings(bank, bank_labels, queries, k, temperature)
    assert [result.top1, result.top5] == pytest.approx([share_within(top, rankings, labels) for top in (1, 5)])
    predicted = torch.tensor([ranking[0] for ranking in rankings])
    (result,) = knn_accuracy(bank, bank_labels, queries, predicted, k=[k], temperature=[temperature], chunk=chunk)
    assert result.top1 == 100


@pytest.mark.parametrize(("k", "temperature"), [(1, 0.5), (10, 0.5), (200, 0.07)])
def test_predictions_equal_scikit_learn_with_the_same_weights(k: int, temperature: float) -> None:
    from sklearn.neighbors import KNeighborsClassifier

    bank, bank_labels, queries, _ = random_problem(seed=3, bank=400, queries=150, width=16)
    reference = KNeighborsClassifier(
        n_neighbors=k, metric="cosine", algorithm="brute", weights=lambda distance: np.exp((1 - distance) / temperature)
    ).fit(bank.double().numpy(), bank_labels.numpy())
    predicted = torch.from_numpy(reference.predict(queries.double().numpy()))
    (result,) = knn_accuracy(bank, bank_labels, queries, predicted, k=[k], temperature=[temperature])
    assert result.top1 == 100


@pytest.mark.parametrize("chunk", [1, 13, 40])
def test_chunk_size_does_not_change_a_bit(chunk: int) -> None:
    bank, _, queries, _ = random_problem(seed=5, bank=20, queries=7, width=33)
    bank = torch.cat([bank, bank.flip(0)])  # every row twice, far apart
    whole = nearest_neighbours(queries, bank, 21, chunk=1000)
    parts = nearest_neighbours(queries, bank, 21, chunk=chunk)
    assert torch.equal(whole.rows, parts.rows)
    assert torch.equal(whole.similarities, parts.similarities)


def test_duplicate_rows_are_taken_by_lower_row_number() -> None:
    found = nearest_neighbours(torch.ones(1, 3), torch.ones(500, 3), 20, chunk=64)
    assert found.rows.tolist() == [list(range(20))]


@given(st.lists(st.floats(1e-6, 1e6), min_size=30, max_size=30))
@settings(max_examples=25, deadline=None)
def test_length_of_rows_does_not_matter(lengths: list[float]) -> None:
    bank, _, queries, _ = random_problem(seed=8, bank=30, queries=30)
    scale = torch.tensor(lengths, dtype=torch.float64)[:, None]
    plain = nearest_neighbours(queries, bank, 9)
    scaled = nearest_neighbours(queries * scale, bank * scale, 9)
    assert torch.equal(plain.rows, scaled.rows)
    torch.testing.assert_close(plain.similarities, scaled.similarities, rtol=0, atol=1e-7)


def test_unit_rows_lie_on_the_grid_that_makes_sums_exact() -> None:
    rows = unit_rows(torch.randn(50, 512, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(rows * 2**26, (rows * 2**26).round())
    torch.testing.assert_close(
        torch.linalg.vector_norm(rows, dim=1), torch.ones(50, dtype=torch.float64), rtol=0, atol=1e-7
    )
    backwards = rows.flip(1) @ rows.flip(1).T
    assert torch.equal(rows @ rows.T, backwards)


def test_sweep_equals_single_calls_in_listed_order() -> None:
    problem = random_problem(seed=11)
    ks, temperatures = [20, 1, 5], [1.0, 0.05]
    swept = knn_accuracy(*problem, k=ks, temperature=temperatures, chunk=16)
    assert [(result.k, result.temperature) for result in swept] == [(k, t) for k in ks for t in temperatures]
    assert swept == [knn_accuracy(*problem, k=[k], temperature=[t])[0] for k in ks for t in temperatures]


def test_k_beyond_the_bank_means_the_whole_bank() -> None:
    problem = random_problem(seed=12, bank=17)
    beyond, whole = knn_accuracy(*problem, k=[1000, 17])
    assert (beyond.k, beyond.bank) == (1000, 17)
    assert (beyond.top1, beyond.top5) == (whole.top1, whole.top5)


def test_no_queries_have_no_neighbours() -> None:
    bank, _, queries, _ = random_problem(seed=3)
    found = nearest_neighbours(queries[:0], bank, 4)
    assert found.rows.shape == found.similarities.shape == (0, 4)


def test_unlabeled_rows_are_left_out_on_both_sides() -> None:
    bank, bank_labels, queries, labels = random_problem(seed=13)
    hidden_bank, hidden_queries = torch.arange(len(bank)) % 3 == 0, torch.arange(len(queries)) % 4 == 0
    masked = knn_accuracy(
        bank, bank_labels.masked_fill(hidden_bank, -1), queries, labels.masked_fill(hidden_queries, -1), k=[5]
    )
    kept = knn_accuracy(
        bank[~hidden_bank], bank_labels[~hidden_bank], queries[~hidden_queries], labels[~hidden_queries], k=[5]
    )
    assert masked == kept
    assert masked[0].images == int((~hidden_queries).sum())


def test_test_class_unknown_to_the_bank_counts_as_wrong() -> None:
    rows = torch.eye(4)
    (result,) = knn_accuracy(rows, torch.tensor([7, 7, 900, 900]), rows, torch.tensor([7, 8, 901, 900]), k=[4])
    assert (result.classes, result.class_images) == ((7, 900), (1, 1))
    assert (result.top1, result.top5) == (50.0, 50.0)


@pytest.mark.parametrize(("classes", "top5"), [(6, 0.0), (5, 100.0), (2, 100.0)])
def test_class_without_a_vote_is_among_the_top_five_only_if_all_classes_are(classes: int, top5: float) -> None:
    rows, labels = torch.eye(classes), torch.arange(classes)
    (result,) = knn_accuracy(rows, labels, rows, labels.roll(1), k=[1])
    assert (result.top1, result.top5) == (0.0, top5)


def test_class_unknown_to_a_bank_of_few_classes_is_not_among_its_first_five() -> None:
    rows = torch.eye(3)
    (result,) = knn_accuracy(rows, torch.tensor([0, 1, 1]), rows, torch.tensor([1, 2, 0]), k=[1])
    assert (result.top1, result.unseen_class_images) == (0.0, 1) and result.top5 == pytest.approx(200 / 3)


def test_tiny_temperature_decides_like_the_nearest_neighbour() -> None:
    bank, bank_labels, queries, _ = random_problem(seed=14)
    nearest = bank_labels[nearest_neighbours(queries, bank, 1).rows[:, 0]]
    (result,) = knn_accuracy(bank, bank_labels, queries, nearest, k=[90], temperature=[1e-5])
    assert result.top1 == 100


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train_labels": torch.full((90,), -1)}, "bank has no labeled rows"),
        ({"test_features": torch.full((25, 6), float("nan"))}, "NaN"),
        ({"k": ()}, "k must be"),
        ({"k": (0, 5)}, "k must be"),
        ({"temperature": ()}, "temperature must be"),
        ({"temperature": (0.1, 0.0)}, "temperature must be"),
        ({"temperature": (float("nan"),)}, "temperature must be"),
    ],
)
def test_bad_input_is_named(changes: dict[str, object], words: str) -> None:
    names = ["train_features", "train_labels", "test_features", "test_labels"]
    arguments = dict(zip(names, random_problem(seed=0), strict=True)) | changes
    with pytest.raises((DataError, ValueError), match=words):
        knn_accuracy(**arguments)  # type: ignore[arg-type]


@given(count=st.integers(2, 300), classes=st.integers(1, 12))
@settings(max_examples=20, deadline=None)
def test_leave_out_split_parts_the_rows_of_each_class(count: int, classes: int) -> None:
    labels = torch.cat([torch.full((7,), -1), torch.arange(count) % classes])
    bank, queries = hold_out_split(labels, limit=20)
    assert sorted(bank.tolist() + queries.tolist()) == list(range(7, count + 7)) and len(queries) >= 1
    sizes = torch.bincount(labels[7:])
    if count >= 2 * classes:
        wanted = (sizes * min(0.1, 20 / count)).round().clamp_min(1)
        assert torch.bincount(labels[queries]).tolist() == wanted.tolist()
    again = hold_out_split(labels, limit=20)
    assert torch.equal(bank, again[0]) and torch.equal(queries, again[1])


def test_leave_out_split_needs_two_rows() -> None:
    with pytest.raises(DataError, match="two labeled images"):
        hold_out_split(torch.tensor([-1, 3]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_gpu_gives_the_same_bits_as_the_cpu() -> None:
    bank, bank_labels, queries, labels = random_problem(seed=15, bank=3000, queries=500, width=512)
    bank, bank_labels = torch.cat([bank, bank[:700]]), torch.cat([bank_labels, bank_labels[:700].flip(0)])
    host = nearest_neighbours(queries, bank, 200, chunk=512)
    device = nearest_neighbours(queries, bank, 200, chunk=1111, device="cuda")
    assert torch.equal(host.rows, device.rows.cpu())
    assert torch.equal(host.similarities, device.similarities.cpu())
    problem = (bank, bank_labels, queries, labels)
    assert knn_accuracy(*problem, k=[1, 20, 200]) == knn_accuracy(*problem, k=[1, 20, 200], device="cuda")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_image_folder(tmp_path / "photos", count=30)


def test_the_images_are_those_of_other_probes(folder):
    data, asked = open_data(str(folder)), []

    def features(source: ImageSource) -> Features:
        asked.append([source.name_of(row) for row in range(len(source))])
        rows = torch.arange(len(source))
        return Features(rows[:, None].float(), source.labels, rows, {})

    evaluate_knn(data, features, k=[1], temperature=[0.1], device=torch.device("cpu"))
    evaluate_knn(data, features, k=[1], temperature=[0.1], device=torch.device("cpu"), most=9)
    task = classification_task(data)
    expected = [[source.name_of(row) for row in range(len(source))] for source in (task.train, task.test)]
    assert asked[:2] == expected and asked[1] == asked[3] != []
    assert len(asked[2]) == 8 and [name for name in asked[0] if name in asked[2]] == asked[2]  # in the same order
