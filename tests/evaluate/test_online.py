"""Which images kNN asks about where there is no test set."""

from pathlib import Path

import pytest
import torch

from jcl.data import ImageSource, open_data
from jcl.evaluate.classification import classification_task
from jcl.evaluate.features import Features
from jcl.evaluate.online import knn_on
from small_runs import write_image_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_image_folder(tmp_path / "photos", count=30)


def asked_about(folder: Path, unreadable: set[str], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the images whose features are the queries."""
    data = open_data(str(folder))
    asked: list[torch.Tensor] = []

    def features(source: ImageSource) -> Features:
        rows = torch.tensor([row for row in range(len(source)) if source.name_of(row) not in unreadable])
        assert source.labels is not None
        return Features(rows[:, None].float(), source.labels[rows], rows, {})

    monkeypatch.setattr("jcl.evaluate.online.knn_accuracy", lambda *parts, **_: asked.append(parts[2]) or [])
    knn_on(data, features, k=[1], temperature=[0.1], device=torch.device("cpu"))
    return {data.train.name_of(int(row)) for row in asked[0].flatten()}


def test_the_same_images_as_other_probes_whatever_cannot_be_read(folder, monkeypatch):
    test = classification_task(open_data(str(folder))).test
    probed = {test.name_of(row) for row in range(len(test))}
    assert asked_about(folder, set(), monkeypatch) == probed and len(probed) == 3
    missing = min(probed)
    assert asked_about(folder, {missing, "cats/000.png"} - (probed - {missing}), monkeypatch) == probed - {missing}


def test_others_where_none_of_them_can_be_read(folder, monkeypatch):
    probed = asked_about(folder, set(), monkeypatch)
    others = asked_about(folder, probed, monkeypatch)
    assert others and not others & probed
