"""`jcl distribution`, `jcl bound` and `jcl cost`: results, files and errors."""

import csv
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torchvision.models import resnet18

from jcl.commands.bound import bound_along_training
from jcl.commands.compare import split_arguments
from jcl.commands.run import open_trained
from jcl.errors import RunError
from jcl.settings.commands import BoundOptions
from small_runs import drawn_pixels, networks_of_zeros

CPU = torch.device("cpu")


def test_distribution_of_two_runs(call, runs):
    arguments = ("distribution", runs["jcl"], runs["moco-v2"], "--views-per-image", 6)
    code, out, err = call(*arguments, "--json", "one.json", "--values", "each.csv", "-o", "figure.png")
    assert code == 0, err
    figures = json.loads(Path("one.json").read_text())
    assert (figures["images"], figures["views_per_image"], figures["view_recipe"]) == (34, 6, "small")
    rows = list(csv.DictReader(Path("each.csv").read_text().splitlines()))
    jcl, moco = ([float(row[f"{name}_similarity"]) for row in rows] for name in ("jcl", "moco_v2"))
    assert jcl != moco and np.histogram(jcl, 10, (0, 1))[0].sum() == 34
    assert figures["jcl_similarity_mean"] == pytest.approx(np.mean(jcl))
    share = 100 * sum(one > other for one, other in zip(jcl, moco, strict=True)) / 34
    assert figures["jcl_more_alike_than_moco_v2_percent"] == pytest.approx(share)
    assert f"{share:.1f} %" in out and "6 × 6 pairs" in out
    assert Image.open("figure.png").size[0] == 1500
    code, _, err = call(*arguments, "--json", "two.json", "--batch-size", 7)
    two = json.loads(Path("two.json").read_text())
    assert code == 0, err
    measured = [name for name, value in figures.items() if isinstance(value, float) and name != "seconds"]
    assert [two[name] for name in measured] == pytest.approx([figures[name] for name in measured], rel=1e-5)


def test_distribution_of_weights_files_on_other_images(call, runs, image_folder):
    shutil.copy(runs["jcl"] / "backbone.safetensors", "mine.safetensors")
    shutil.copy(runs["moco-v2"] / "backbone.safetensors", "yours.safetensors")
    arguments = (
        "mine.safetensors",
        "yours.safetensors",
        image_folder,
        "--views-per-image",
        3,
        "--images",
        9,
        "--workers",
        0,
    )
    code, out, err = call("distribution", *arguments, "--json", "f.json", "--values", "v.csv")
    assert code == 0, err
    figures = json.loads(Path("f.json").read_text())
    assert figures["images"] == 9 and figures["view_recipe"] == "moco-v2"
    assert "mine_safetensors_more_alike_than_yours_safetensors_percent" in figures and "mine" in out
    assert all(".png," in line for line in Path("v.csv").read_text().splitlines()[1:])


@pytest.mark.parametrize("command", ["distribution", "compare", "bound"])
def test_unreadable_images_are_reported(call, runs, image_folder, command):
    (image_folder / "cats/000.png").write_bytes(b"not an image")
    few = ("--keys", 20) if command == "bound" else ("--views-per-image", 2)
    code, _, err = call(command, runs["jcl"], image_folder, "--workers", 0, *few)
    assert code == 0 and "1 unreadable image: cats/000.png" in err, err


def test_distribution_of_the_projection(call, runs):
    code, _, err = call("distribution", runs["jcl"], "--of", "projection", "--views-per-image", 3, "--json", "f.json")
    figures = json.loads(Path("f.json").read_text())
    assert code == 0 and figures["jcl_feature_width"] == 16 and figures["feature"] == "projection", err


def test_a_folder_is_called_by_its_whole_name(call, runs, tmp_path):
    folders = [tmp_path / name for name in ("temperature-0.1-seed-0", "temperature-0.2-seed-0")]
    for folder in folders:
        shutil.copytree(runs["jcl"], folder)
    code, out, err = call("distribution", *folders, "--views-per-image", 2, "--images", 4, "--json", "f.json")
    assert code == 0 and all(folder.name in out for folder in folders), err
    assert "temperature_0_1_seed_0_similarity_mean" in json.loads(Path("f.json").read_text())


def test_distribution_refuses(refused, runs, npz, tmp_path):
    run = runs["jcl"]
    np.savez(tmp_path / "single.npz", x_train=drawn_pixels(1))
    assert "At least two" in refused("distribution", run, tmp_path / "single.npz")
    assert "At least two" in refused("distribution", run, "--images", 1)
    assert "--views-per-image" in refused("distribution", run, "--views-per-image", 1)
    assert "--precision" in refused("distribution", run, "--precision", "half")
    assert "twice" in refused("distribution", run, run)
    assert "missing" in refused("distribution", tmp_path / "missing")
    assert "missing" in refused("distribution", run, tmp_path / "missing")
    assert "backbone.safetensors" in refused("distribution", run / "backbone.safetensors")
    assert "no projection head" in refused("distribution", run / "backbone.safetensors", npz, "--of", "projection")
    assert "moco-v9" in refused("distribution", run, "--views", "moco-v9")
    assert "validation" in refused("distribution", run, "--split", "validation")
    assert ".png" in refused("distribution", run, "-o", "figure.pdf")
    assert ".csv" in refused("distribution", run, "--values", "each.xlsx")
    (tmp_path / "mine.csv").write_text("mine")
    assert "--force" in refused("distribution", run, npz, "--values", tmp_path / "mine.csv")
    assert (tmp_path / "mine.csv").read_text() == "mine"
    assert "Unknown device" in refused("distribution", run, "--device", "gpu")


def test_the_last_argument_may_be_data(runs, npz, tmp_path):
    one, two = runs.values()
    assert split_arguments([str(one)]) == ([one], None)
    assert split_arguments([str(one), str(two)]) == ([one, two], None)
    assert split_arguments([str(one), str(npz)]) == ([one], str(npz))
    (npy := tmp_path / "images.npy").touch()
    assert split_arguments([str(one), str(npy)]) == ([one], str(npy))
    assert split_arguments([str(one), "cifar10"]) == ([one], "cifar10")
    assert split_arguments([str(one), str(two / "backbone.safetensors")])[1] is None


def test_bound_of_a_run_without_covariance_states_no_scale(call, runs):
    assert call("bound", runs["moco-v2"], "--images", 4, "--keys", 20, "--json", "moco.json")[0] == 0
    assert json.loads(Path("moco.json").read_text()).get("covariance_scale") is None


def test_bound_along_a_run(call, runs):
    arguments = ("bound", runs["jcl"], "--images", 5, "--keys", 24)
    code, out, err = call(*arguments, "--scales", "0.5,1,4", "--json", "one.json", "-o", "bound.png")
    assert code == 0, err
    figures = json.loads(Path("one.json").read_text())
    steps = [4, 8, 12]  # the checkpoints of three epochs of four steps
    for step in steps:
        assert str(step) in out
        infinite, jensen = figures[f"infinite_keys_loss_step{step}"], figures[f"jensen_loss_step{step}"]
        assert infinite <= jensen and figures[f"closed_form_loss_scale1_step{step}"] > 0
        assert figures[f"infinite_keys_error_step{step}"] > 0
        assert 0 <= figures[f"rejected_percent_step{step}"] <= 100
    assert figures["jensen_loss"] == figures["jensen_loss_step12"] and figures["queue_filled"] == 1
    assert 2 < figures["gaussian_reference_rejected_percent"] < 9
    assert "below 1" in out and Image.open("bound.png").size[0] == 1950
    checkpoint = runs["jcl"] / "checkpoints" / "step-000000008.safetensors"
    code, _, err = call("bound", checkpoint, "--images", 5, "--keys", 24, "--json", "two.json", "--batch-size", 5)
    assert code == 0, err
    assert json.loads(Path("two.json").read_text())["jensen_loss"] == pytest.approx(
        figures["jensen_loss_step8"], rel=1e-5
    )


def test_bound_counts_the_images_of_all_checkpoints(runs):
    seen: list[tuple[int, int]] = []
    options = BoundOptions(run=runs["jcl"], images=5, keys=24, batch_size=24, workers=0)
    bound_along_training(options, runs["jcl"], lambda *counts: seen.append(counts))
    assert seen == [(done, 15) for done in range(1, 16)]


def test_bound_of_gaussian_keys(call):
    lists = ("--dimensions", "4,8", "--spreads", "0.3", "--temperatures", "0.2", "--scales", "1")
    code, out, err = call("bound", *lists, "--draws", 500, "--json", "f.json", "-o", "bound.png")
    assert code == 0 and "Gaussian keys, 500" in out, err
    figures = json.loads(Path("f.json").read_text())
    assert len(figures) == 18 and figures["closed_form_loss_scale1_d8_spread0.3_t0.2"] > 0
    assert Path("bound.png").stat().st_size > 10_000


@pytest.mark.parametrize("command", ["bound", "cost", "distribution"])
def test_a_picture_takes_the_place_of_another_one_only_when_asked_to(call, refused, command):
    Path("mine.png").write_text("mine")
    # What is wrong besides shows that nothing was done first.
    wrong = {"bound": ("missing",), "cost": ("--device", "gpu"), "distribution": ("missing",)}[command]
    assert "mine.png already exists" in refused(command, *wrong, "-o", "mine.png")
    assert "mine.png" not in refused(command, *wrong, "-o", "mine.png", "--force")
    lists = ("--dimensions", "4", "--spreads", "0.3", "--temperatures", "0.2", "--draws", 100)
    assert call("bound", *lists, "-o", "mine.png", "--force")[0] == 0 and Image.open("mine.png").size[0] > 1000


def test_figures_that_are_not_finite_are_null(call):
    lists = ("--dimensions", "4", "--spreads", "0.3", "--temperatures", "1e-300", "--draws", 100)
    code, _, err = call("bound", *lists, "--json", "f.json")
    assert code == 0 and "Traceback" not in err
    assert "NaN" not in Path("f.json").read_text() and None in json.loads(Path("f.json").read_text()).values()


def test_a_picture_that_cannot_be_written_is_one_sentence_and_loses_no_figures(call, tmp_path):
    lists = ("--dimensions", "4", "--spreads", "0.3", "--temperatures", "0.2", "--draws", 100)
    (tmp_path / "file").write_text("mine")
    code, out, err = call("bound", *lists, "--json", "f.json", "-o", tmp_path / "file" / "bound.png")
    assert code == 1 and "Gaussian keys" in out and "bound.png" in err and "Traceback" not in err
    assert err.count("\n") == 1 and json.loads(Path("f.json").read_text())


@pytest.mark.parametrize(
    "command",
    [
        ("bound",),
        ("distribution", "run"),
        ("linear", "run"),
        ("finetune", "run"),
        ("shard", "images", "shards"),
        ("detect", "--task", "box", "--coco", "coco", "--init", "random"),
    ],
)
def test_a_seed_that_no_generator_takes_is_refused(call, command):
    for seed in (2**63, -1):
        code, out, err = call(*command, "--seed", seed)
        assert code == 2 and out == "" and "--seed" in err and "Traceback" not in err


def test_bound_refuses(refused, runs, tmp_path):
    run = runs["jcl"]
    assert "no projection head, key encoder or queue" in refused("bound", run / "backbone.safetensors")
    assert "missing" in refused("bound", tmp_path / "missing")
    assert "At least two" in refused("bound", run, "--images", 1)
    assert "--keys" in refused("bound", run, "--keys", 5)
    assert "--scales" in refused("bound", "--scales", "1;4")
    assert "--scales" in refused("bound", "--scales", "-1")
    assert "--dimensions" in refused("bound", "--dimensions", "8.5")
    for name, wrong in (("dimensions", "1"), ("spreads", "0,1.5"), ("spreads", "0.5,0"), ("temperatures", "nan")):
        assert f"--{name}" in refused("bound", f"--{name}", wrong)
    assert "--draws" in refused("bound", run, "--draws", 500)
    assert "--temperatures" in refused("bound", run, "--temperatures", "0.1")
    assert "--batch-size" in refused("bound", "--batch-size", 7)
    assert "--temperatures" in refused("bound", "--temperatures", "0")


@pytest.mark.parametrize("head", ["mlp", "linear"])
def test_bound_of_a_checkpoint_of_mocos_program(call, refused, npz, tmp_path_factory, head):
    """Both encoders and the queue are those of the file."""
    torch.manual_seed(0)
    file, networks = tmp_path_factory.mktemp("moco") / "checkpoint_0199.pth.tar", {}
    for name in ("encoder_q", "encoder_k"):
        networks[name] = network = resnet18()
        network.conv1, network.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()  # for 32 px
        mlp = nn.Sequential(nn.Linear(512, 24), nn.ReLU(), nn.Linear(24, 16))
        network.fc = mlp if head == "mlp" else nn.Linear(512, 16)
    queue = nn.functional.normalize(torch.randn(16, 40), dim=0)
    state = {f"module.{name}.{part}": v for name, own in networks.items() for part, v in own.state_dict().items()}
    state |= {"module.queue": queue, "module.queue_ptr": torch.zeros(1)}
    torch.save({"epoch": 200, "arch": "resnet18", "state_dict": state, "optimizer": {}}, file)
    with networks_of_zeros():  # all weights come from the file
        run = open_trained(file)
        learner, _ = run.learner(file, CPU)
    assert run.settings.method.temperature == (0.2 if head == "mlp" else 0.07)
    images = torch.randn(2, 3, 32, 32)
    for mine, theirs in ((learner.query_encoder, "encoder_q"), (learner.key_encoder, "encoder_k")):
        with torch.no_grad():
            wanted = nn.functional.normalize(networks[theirs].eval()(images), dim=1)
            torch.testing.assert_close(mine(images), wanted, rtol=1e-5, atol=1e-6)
    assert torch.equal(learner.queue.rows, queue.T)
    if head == "mlp":
        assert "data" in refused("bound", file)
        arguments = ("bound", file, npz, "--images", 2, "--keys", 20, "--workers", 0, "--temperatures", 0.1)
        with networks_of_zeros():
            code, out, err = call(*arguments, "--json", "f.json")
        assert code == 0 and "keys pushed away" in out, err
        found = json.loads(Path("f.json").read_text())
        assert (found["temperature"], found["covariance_scale"], found["queue_filled"]) == (0.1, None, 1)
        assert 0 < found["positive_share_scale4"] < 1
    state["module.queue"][3, 5] = math.nan
    torch.save({"arch": "resnet18", "state_dict": state}, file)
    with pytest.raises(RunError, match="NaN"):
        open_trained(file)


def test_bound_needs_views_that_vary(refused, runs, tmp_path):
    same = tmp_path / "same"
    shutil.copytree(runs["jcl"], same)
    settings = same / "settings.yaml"
    settings.write_text(settings.read_text().replace("recipe: small", "recipe: none"))
    assert "identical" in refused("bound", same, "--images", 3, "--keys", 20)


def test_a_learner_is_what_its_checkpoint_holds(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(runs["jcl"] / "checkpoints")
    assert open_trained(Path("step-000000008.safetensors")).learner(Path("step-000000008.safetensors"), CPU)[1] == 8
    run = open_trained(runs["jcl"])
    learner, _ = run.learner(run.checkpoints[-1], CPU)
    assert not learner.training and float(learner.queue.filled()) == 1
    keys, queries = (list(encoder.parameters()) for encoder in (learner.key_encoder, learner.query_encoder))
    assert any(not torch.equal(*pair) for pair in zip(keys, queries, strict=True))
    shutil.copytree(runs["jcl"], tmp_path / "empty")
    shutil.rmtree(tmp_path / "empty" / "checkpoints")
    with pytest.raises(RunError, match="empty"):
        open_trained(tmp_path / "empty")


def test_cost_refuses(refused):
    assert "--keys" in refused("cost", "--keys", "0,1")
    assert "--keys" in refused("cost", "--keys", "one")
    assert "no recipe called" in refused("cost", "--recipe", "nothing")
    assert "Unknown device" in refused("cost", "--device", "gpu")
    assert ".png" in refused("cost", "-o", "cost.svg")
