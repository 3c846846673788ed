"""`jcl compare`: results and errors."""

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from jcl.commands.compare import Compared, Comparison
from jcl.core.encoder import build_backbone
from jcl.evaluate.quality import Quality
from jcl.export import BackboneInfo, save_backbone
from jcl.runs.metrics import read_metrics


def test_compare_gives_what_training_recorded(call, runs):
    code, out, err = call("compare", runs["jcl"], runs["moco-v2"], "--json", "found.json")
    assert code == 0, err
    found = json.loads(Path("found.json").read_text())
    for name, path in (("jcl", runs["jcl"]), ("moco_v2", runs["moco-v2"])):
        recorded = {line["kind"]: line for line in read_metrics(path / "metrics.jsonl")}
        for measure in ("rankme", "alpha_req", "lidar"):
            assert found[f"{name}_{measure}"] == pytest.approx(recorded["quality"][measure], rel=1e-4)
        assert found[f"{name}_knn_top1"] == recorded["knn"]["knn_top1"]
    best = max("jcl", "moco_v2", key=lambda name: found[f"{name}_rankme"])
    assert found["best_rankme"] == best and 0 <= found["best_rankme_share"] <= 1
    assert found["images"] == 34 and "kNN top-1" in out


def test_a_run_named_best_keeps_its_values(call, runs, tmp_path):
    shutil.copytree(runs["moco-v2"], tmp_path / "best")
    assert call("compare", runs["jcl"], tmp_path / "best", "--json", "found.json")[0] == 0
    found = json.loads(Path("found.json").read_text())
    assert found[f"{found['best_rankme']}_rankme"] == max(found["jcl_rankme"], found["best_2_rankme"])


@pytest.mark.parametrize("images", ["location: demo", "subset: imagenet100"])
def test_compare_lists_no_accuracy_on_other_images(call, runs, tmp_path, images):
    shutil.copytree(runs["moco-v2"], tmp_path / "other")
    file = tmp_path / "other/settings.yaml"
    file.write_text(re.sub(rf"{images.partition(' ')[0]} .*", images, file.read_text()))
    assert call("compare", runs["jcl"], tmp_path / "other", "--json", "found.json")[0] == 0
    found = json.loads(Path("found.json").read_text())
    assert "jcl_knn_top1" in found and "other_knn_top1" not in found and "other_rankme" in found


def test_compare_checkpoints_and_one_run(call, runs, npz):
    first, _, last = sorted((runs["jcl"] / "checkpoints").glob("step-*.safetensors"))
    code, out, err = call("compare", first, last, npz, "--images", 20, "--views-per-image", 3, "--json", "found.json")
    assert code == 0 and "step-000000012" in out and "kNN" not in out, err
    found = json.loads(Path("found.json").read_text())
    assert call("compare", runs["jcl"], npz, "--images", 20, "--views-per-image", 3, "--json", "run.json")[0] == 0
    run = json.loads(Path("run.json").read_text())
    assert (
        found["step_000000012_safetensors_rankme"] == pytest.approx(run["rankme"])
        and found["images"] == run["images"] == 20
    )
    assert found["step_000000012_safetensors_rankme"] != found["step_000000004_safetensors_rankme"]
    assert "best_rankme" not in run and "knn_top1" not in run


def test_other_commands_take_a_checkpoint_of_a_run_too(call, runs, npz):
    newest = max((runs["jcl"] / "checkpoints").glob("step-*.safetensors"))
    for weights in (newest, runs["jcl"]):
        assert call("knn", weights, npz, "--json", f"{weights.stem}.json")[0] == 0
    mine, whole = (json.loads(Path(f"{name}.json").read_text()) for name in (newest.stem, "jcl"))
    assert [mine[name] for name in ("knn_top1", "untrained_knn_top1")] == [
        whole[name] for name in ("knn_top1", "untrained_knn_top1")
    ]


def test_a_difference_is_clear_if_almost_all_halves_of_the_images_agree():
    def run(name: str, values: list[float], knn: float | None = None) -> Compared:
        halves = [Quality(value, 1 + value, 5.0) for value in values]
        return Compared(name, Quality(sum(values) / len(values), 1 + values[0], math.nan), halves, knn)

    high, same, low = run("high", [5.0, 6.0], 90.0), run("same", [6.0, 4.0], 70.0), run("low", [1.0, 2.0], 80.0)
    found = Comparison([low, same, high], 10)
    best, shares = found.best("rankme")
    assert best is high and shares == {"low": 1.0, "same": 0.5}
    assert found.best("alpha_req")[0] is low  # the nearest to 1
    assert found.best("lidar") is None
    few = replace(low, halves=[half._replace(alpha_req=math.nan) for half in low.halves])  # too few images in a half
    assert replace(found, runs=[few, same, high]).best("alpha_req") is None
    assert [found.correlation(measure) for measure in Quality._fields] == [pytest.approx(0.5), pytest.approx(0.5), None]
    assert high.share_above(low, "lidar") == 0.5  # ties
    assert run("noise", [1.0000002]).share_above(run("one", [1.0]), "rankme") == 0.5
    equal = replace(found, runs=[replace(run, knn_top1=100.0) for run in found.runs])
    assert equal.correlation("rankme") is None


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        *(("{0} {0}", "twice"), ("{0} {1}/missing", "/missing"), ("{0} --images 1", "--images")),
        *(("{1}/no-run", "/no-run"), ("{0} {1}/gray.safetensors", "numbers of channels")),
    ],
)
def test_what_compare_refuses(refused, runs, tmp_path, arguments, named):
    gray = BackboneInfo("tiny_cnn", "imagenet", 16, 128, (0.5,), (0.2,))
    save_backbone(build_backbone("tiny_cnn", channels=1)[0], gray, tmp_path / "gray.safetensors")
    assert named in refused("compare", *arguments.format(runs["jcl"], tmp_path).split())
