"""The model card: what is written down was done and measured, and nothing else."""

import json
import shutil

import pytest
import yaml
from rich.console import Console

import jcl
from jcl.export import BackboneInfo
from jcl.export.hub import model_card
from small_runs import tiny_settings

INFO = BackboneInfo("resnet18", "imagenet", 64, 512, (0.5, 0.4, 0.3), (0.25, 0.2, 0.3))


@pytest.fixture(scope="module")
def run(npz, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    settings = tiny_settings(npz, train__epochs=1, train__seed=7, method__covariance_scale=2.5)
    return jcl.pretrain(settings, folder, console=Console(quiet=True))


def front(card: str) -> dict[str, object]:
    assert card.startswith("---\n")
    return yaml.safe_load(card.split("---\n")[1])


def test_a_run_is_described(run, npz):
    card = model_card("resnet18", INFO, run.path)
    assert "self-supervised-learning" in front(card)["tags"] and front(card)["library_name"] == "timm"
    assert "license" not in front(card) and "## License" in card
    settings = yaml.safe_load(card.split("```yaml\n")[1].split("```")[0])
    assert settings["recipe"] == "folder" and (settings["train"]["epochs"], settings["train"]["seed"]) == (1, 7)
    method = settings["method"]
    assert (method["name"], method["num_keys"], method["covariance_scale"]) == ("jcl", 2, 2.5)
    assert "small.npz" in card and f"| knn_top1 | {run.summary['knn_top1']:.2f} % |" in card
    assert str(npz.parent) not in card  # where it lies is nobody's business
    assert "contrastive_accuracy" not in card  # no measure of what features are worth
    assert 'timm.create_model("local-dir:PATH_OF_THIS_FOLDER", pretrained=True)' in card


def test_a_password_in_the_location_of_the_data_is_not_published(run, npz, tmp_path):
    folder = shutil.copytree(run.path, tmp_path / "shards")
    settings = (folder / "settings.yaml").read_text().replace(str(npz), "https://me:word@host/photos.tar?key=mine")
    (folder / "settings.yaml").write_text(settings)
    card = model_card("resnet18", INFO, folder)
    assert "`https://host/photos.tar`" in card and "word" not in card and "mine" not in card


def test_local_paths_of_weights_and_recipe_are_not_published(run, tmp_path):
    folder = shutil.copytree(run.path, tmp_path / "continued")
    settings = yaml.safe_load((folder / "settings.yaml").read_text())
    settings["recipe"], settings["model"]["init"] = "/home/me/mine.yaml", "/home/me/start.pth"
    (folder / "settings.yaml").write_text(yaml.safe_dump(settings))
    card = model_card("resnet18", INFO, folder)
    assert "/home/me" not in card and "from the weights `start.pth`" in card and "recipe: mine.yaml" in card


def test_accuracies_are_listed_if_there_are_any(run, tmp_path):
    folder = tmp_path / "unfinished"
    shutil.copytree(run.path, folder)
    (folder / "summary.json").unlink()
    assert f"| knn_top1 | {run.summary['knn_top1']:.2f} % |" in model_card("resnet18", INFO, folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines if line["kind"] == "train"))
    card = model_card("resnet18", INFO, folder)
    assert "## Evaluation" not in card and "## Training" in card


def test_a_file_from_elsewhere_makes_no_claims(tmp_path):
    card = model_card("resnet18", INFO, tmp_path / "weights.pth")
    assert "## Training" not in card and "## Evaluation" not in card
    assert "self-supervised-learning" not in front(card)["tags"]
