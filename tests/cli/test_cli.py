"""The command line: one sentence for each thing that can be wrong, and nothing touched."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import jcl
from jcl.cli import app
from jcl.cli.printing import write_json
from jcl.cli.train import run_table
from jcl.commands.run import Run
from jcl.errors import RunError
from launch_tools import wait_until
from plain_user import unlistable
from run_tools import stop_after
from small_runs import TINY_VALUES, drawn_pixels, snapshot, write_image_folder

COMMANDS = [
    "pretrain",
    "resume",
    "demo",
    "knn",
    "linear",
    "finetune",
    "detect",
    "detect-table",
    "recipes",
    "check",
    "shard",
    "embed",
    "neighbours",
    "report",
    "ablate",
    "ablate-cell",
    "distribution",
    "bound",
    "cost",
    "import",
    "export",
]
SHORT = ["--set", "train.epochs=1", "--set", "record.knn_every=0"]
TINY = [part for name, value in TINY_VALUES.items() for part in ("--set", f"{name}={json.dumps(value)}")]


def test_version(call):
    assert call("--version") == (0, f"jcl {jcl.__version__}\n", "")


def test_what_a_launcher_would_set_may_be_set_to_nothing():
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "JCL_RESTARTS", "JCL_STARTED_BY")
    nothing = dict.fromkeys(names, "")
    # Refused only after it has looked at who it is.
    command = [sys.executable, "-m", "jcl", "resume", "nowhere"]
    done = subprocess.run(command, env=os.environ | nothing, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.startswith("Error: ") and "nowhere" in done.stderr, done.stderr


def test_a_parent_that_is_not_the_parent_is_refused():
    command = [sys.executable, "-m", "jcl", "--version"]
    done = subprocess.run(command, env=os.environ | {"JCL_STARTED_BY": "1"}, capture_output=True, text=True)
    assert done.returncode == 1 and "JCL_STARTED_BY" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_everywhere(call, command):
    code, out, err = call(*([command] if command else []), "--help")
    assert code == 0 and err == "" and "Usage" in out
    if command is None:
        assert all(name in out for name in COMMANDS)
        assert all(group in out for group in ("Train", "Evaluate", "Data"))


def test_every_command_is_listed_here():
    assert sorted(COMMANDS) == sorted(info.name or info.callback.__name__ for info in app.registered_commands)


def test_help_does_not_wait_for_pytorch():
    program = (
        "import sys; sys.argv = ['jcl', '--help']\n"
        "from jcl.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'torchvision', 'numpy', 'matplotlib'} & sys.modules.keys()\n"
        "print(sorted(heavy), file=sys.stderr)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stderr.strip() == "[]" and "pretrain" in ended.stdout


def test_ctrl_c_while_the_command_line_is_imported_leaves_no_trace():
    program = (
        "import os, signal, sys\n"
        "class Finger:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'jcl.cli': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finger())\n"
        "from jcl.__main__ import main\n"
        "main()"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_completion_for_bash():
    environment = os.environ | {"_JCL_COMPLETE": "source_bash"}
    command = [sys.executable, "-c", "import sys; sys.argv = ['jcl']; from jcl.cli import app; app(prog_name='jcl')"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0 and "_JCL_COMPLETE=complete_bash" in ended.stdout and "complete " in ended.stdout


def test_missing_and_empty_folders(refused, tmp_path):
    assert "There is no folder" in refused("pretrain", tmp_path / "missing", "--out", "run")
    (tmp_path / "empty").mkdir()
    assert "holds no image files" in refused("pretrain", tmp_path / "empty", "--out", "run")
    assert "jcl pretrain photos/" in refused("pretrain", "--out", "run")
    assert "did you mean cifar10" in refused("pretrain", "cifar-10", "--out", "run")


def test_no_readable_image(refused, tmp_path):
    (tmp_path / "bad").mkdir()
    for number in range(20):
        (tmp_path / "bad" / f"{number}.png").write_bytes(b"nothing")
    assert "could be read" in refused("pretrain", tmp_path / "bad", "--out", "run")


def test_a_batch_larger_than_the_data(refused, npz):
    assert "larger than the data" in refused("pretrain", npz, "--out", "run", *TINY, "--set", "train.batch_size=64")


def test_too_few_images_to_choose_a_batch(refused, tmp_path):
    np.savez(tmp_path / "few.npz", x_train=drawn_pixels(5))
    assert "5 images are too few" in refused("pretrain", tmp_path / "few.npz", "--out", "run")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--recipe", "imagenet-papr"], "did you mean imagenet-paper?"),
        (["--recipe", "missing.yaml"], "missing.yaml"),
        (["--set", "train.learning=1"], "Unknown setting 'train.learning'"),
        (["--set", "train.batch_sise=1"], "did you mean train.batch_size?"),
        (["--set", "lr=1"], "Unknown setting 'lr'"),
        (["--set", "train.lr"], "--set takes SECTION.NAME=VALUE"),
        (["--set", "train.milestones=[1, 2"], "--set"),
        (["--set", "train.lr=!!python/object/apply:os.system ['touch hacked']"], "--set"),
        (["--set", "data.root=2020-13-45"], "--set"),
        (["--set", "train.lr=quick"], "train.lr"),
        (["--set", "train.lr="], "train.lr"),
        (["--set", "method.name=[jcl]"], "method.name"),
        (["--method", "moco-v2", "--num-keys", "4"], "exactly one key"),
        (["--backbone", "resnet5"], "did you mean"),
        (["--device", "gpu"], "Unknown device 'gpu'"),
        (["--batch-size", "10", "--set", "model.bn_groups=4"], "cannot be split"),
    ],
)
def test_unknown_names_and_impossible_values(refused, npz, arguments, said):
    assert said in refused("pretrain", npz, "--out", "run", *arguments)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--epochs", "0"),
        ("--batch-size", "-8"),
        ("--batch-size", "1"),
        ("--temperature", "0"),
        ("--lr", "-1"),
        ("--lr", "nan"),
        ("--covariance-scale", "-2"),
        ("--num-keys", "0"),
        ("--seed", "-1"),
        ("--method", "moco-v3"),
    ],
)
def test_impossible_values_of_options(refused, npz, option, value):
    said = refused("pretrain", npz, "--out", "run", option, value, exit_code=2)
    assert said.startswith(f"Invalid value {value} for {option}: must ") and said.endswith("See `jcl pretrain --help`.")


def test_a_hostile_recipe_is_refused(refused, npz, tmp_path):
    (tmp_path / "evil.yaml").write_text("train: !!python/object/apply:os.system ['touch hacked']")
    assert "not valid YAML" in refused("pretrain", npz, "--recipe", tmp_path / "evil.yaml", "--out", "run")


def test_a_folder_that_holds_a_run_or_is_a_file(refused, npz, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "settings.yaml").write_text("recipe: precious\n")
    (tmp_path / "run" / "metrics.jsonl").write_text('{"kind": "train"}\n')
    assert "already holds a run" in refused("pretrain", npz, *TINY, "--out", tmp_path / "run")
    (tmp_path / "file").write_text("mine")
    assert "is a file" in refused("pretrain", npz, *TINY, "--out", tmp_path / "file")


def test_other_commands_refuse_in_a_sentence_too(refused, npz, tmp_path):
    assert "no run folder" in refused("resume", tmp_path / "missing")
    assert "no run or weights file" in refused("knn", tmp_path / "missing")
    assert "no recipe called" in refused("recipes", "cifar")
    assert "There is no folder" in refused("check", tmp_path / "missing")


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("finetune.json", "`jcl finetune --resume "),
        ("detect.json", "`jcl detect --resume "),
        ("probe.json", "linear probe"),
        ("study.json", "`jcl ablate`"),
    ],
)
def test_what_other_commands_trained_is_gone_on_with_by_them(refused, tmp_path, file, said):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / file).write_text("{}")
    assert said in refused("resume", tmp_path / "out")


def test_a_run_with_figures_of_other_commands_stays_a_run(call, finished):
    shutil.copytree(finished, "run")
    Path("run/finetune.json").write_text("{}")
    code, _, err = call("resume", "run")
    assert code == 0 and "has finished" in err


def test_values_given_with_set_are_read_as_numbers_lists_and_truth(call, npz):
    code, _, err = call(
        *("pretrain", npz, "--out", "run", *TINY, "--set", "train.lr=1e-3", "--set", "train.milestones=[1, 2]"),
        *("--set", "data.strict=true", "--set", "method.covariance_scale=5e-1", "--seed", 3),
        *("--set", "views.std=[0.2, 2e-1, 0.25]", "--set", "train.schedule=step", "--set", " record.keep = 1"),
    )
    assert code == 0, err
    settings = Run(Path("run")).settings
    assert (settings.train.lr, settings.train.milestones, settings.data.strict) == (1e-3, (1, 2), True)
    assert (settings.method.covariance_scale, settings.views.std) == (0.5, (0.2, 0.2, 0.25))
    assert (settings.train.epochs, settings.train.seed, settings.record.keep) == (3, 3, 1)


@pytest.fixture(scope="module")
def finished(npz, tmp_path_factory) -> Path:
    settings = jcl.build_settings("folder", values=TINY_VALUES | {"data.location": str(npz)})
    return jcl.pretrain(settings, tmp_path_factory.mktemp("runs") / "finished", console=Console(quiet=True)).path


def test_pretrain_reports_and_writes_flat_json(call, npz):
    code, out, err = call("pretrain", npz, *TINY, "--out", "run", "--json", "deep/figures.json")
    assert code == 0 and "Everything is in run" in out
    assert "Pre-training" in err and "data.canvas = 16: arrays are used at their own size" in err
    figures = json.loads(Path("deep/figures.json").read_text())
    assert figures == Run(Path("run")).summary
    assert {"knn_top1", "images_per_second", "loss", "seconds", "peak_memory_bytes"} <= figures.keys()
    assert not any(isinstance(value, dict | list) for value in figures.values())


def test_the_table_of_a_run_is_for_people_and_the_json_for_programs(call, finished):
    code, out, _ = call("resume", finished, "--json", "figures.json")
    figures = json.loads(Path("figures.json").read_text())
    rows = {
        cells[0]: cells[1] for line in out.splitlines() if len(cells := re.findall(r"[│┃] +(.*?) +(?=[│┃])", line)) == 2
    }
    assert code == 0 and out.splitlines()[0].strip() == "jcl on small.npz"
    low, high = figures["knn_top1_interval_low"], figures["knn_top1_interval_high"]
    assert rows["kNN top-1"] == f"{figures['knn_top1']:.1f} %" and rows["95 % interval"] == f"{low:.1f} to {high:.1f} %"
    assert rows["queries that find their own image first"] == f"{figures['contrastive_accuracy']:.1f} %"
    assert re.fullmatch(r"[\d.]+ (MiB|GiB)", rows["peak memory"]) and re.fullmatch(r"[\d.]+ s", rows["training time"])
    assert rows["steps"] == "12" and "ranks" not in rows and not any("_" in name for name in rows)
    assert max(map(len, out.splitlines()[:-1])) <= 60


def test_runs_without_a_name_get_a_new_folder_each(call, npz):
    for number in (1, 2):
        code, _, err = call("pretrain", npz, *TINY, "--set", "train.epochs=1")
        assert code == 0 and f"1 epoch, into runs/jcl-small-00{number}" in err
        assert Path(f"runs/jcl-small-00{number}/summary.json").exists()


def test_runs_that_start_at_the_same_moment_get_a_folder_each(call, npz):
    command = [sys.executable, "-m", "jcl", "pretrain", str(npz), *TINY, *SHORT]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert sorted(path.name for path in Path("runs").iterdir()) == ["jcl-small-001", "jcl-small-002"]
    assert all((path / "summary.json").exists() for path in Path("runs").iterdir())
    assert {err.partition(" into runs/")[2].split()[0] for err in said} == {"jcl-small-001", "jcl-small-002"}


def test_a_run_that_is_refused_leaves_no_folder_of_its_own_name(refused, npz, image_folder):
    assert "bn_groups" in refused("pretrain", npz, *TINY, "--set", "model.bn_groups=3")
    Path("photos").mkdir()
    shutil.copytree(image_folder, "photos", dirs_exist_ok=True)
    os.chdir("photos")
    assert "The folder runs is inside" in refused("pretrain", ".", *TINY)


def test_a_machine_whose_memory_is_too_small_is_told_so(call, npz):
    """Half a petabyte, which no machine hands out: the real allocator refuses."""
    code, _, err = call("pretrain", npz, "--out", "run", "--set", "method.queue_size=1000000000000")
    assert code == 1 and "Traceback" not in err
    assert "512,000,000,000,000 bytes" in err


def test_broken_images_are_skipped_unless_strict(call, image_folder):
    (image_folder / "cats" / "000.png").write_bytes(b"no image")
    arguments = ["pretrain", image_folder, *TINY, "--set", "train.epochs=1"]
    code, _, err = call(*arguments, "--out", "run")
    assert code == 0 and "1 unreadable image" in err and "run/skipped.txt" in err
    assert Path("run/skipped.txt").read_text().startswith("cats/000.png\t")
    code, out, err = call(*arguments, "--strict", "--out", "strict")
    assert code == 1 and out == "" and "Traceback" not in err
    assert "cats/000.png cannot be read" in err
    assert not Path("strict/backbone.safetensors").exists()


def test_a_finished_run_has_nothing_to_resume(call, finished):
    before = snapshot(finished)
    code, out, err = call("resume", finished, "--json", "figures.json")
    assert code == 0 and "nothing to resume" in err and "kNN top-1" in out
    assert json.loads(Path("figures.json").read_text()) == Run(finished).summary
    assert snapshot(finished) == before


def test_knn_on_a_run_and_on_weights(call, finished, npz, refused):
    code, out, _ = call("knn", finished, "-k", 5, "-k", 1, "--json", "knn.json")
    figures = json.loads(Path("knn.json").read_text())
    assert code == 0 and "10 queries against a bank of 34 images" in out
    assert figures["knn_top1"] == figures["knn_top1_k5_t0.1"] == pytest.approx(Run(finished).summary["knn_top1"])
    of_each = {f"knn_top{top}_k{k}_t0.1" for top in (1, 5) for k in (5, 1)}
    of_each |= {"untrained_knn_top1_k5_t0.1", "untrained_knn_top1_k1_t0.1"}
    compared = {"knn_top1_interval_low", "knn_top1_interval_high", "chance_top1", "untrained_knn_top1"}
    compared |= {"beats_chance", "beats_untrained"}
    assert set(figures) == {"knn_top1", "knn_top5", "test_images", "unseen_class_images"} | of_each | compared
    assert figures["untrained_knn_top1"] == Run(finished).metrics[0]["knn_top1"] and figures["chance_top1"] == 40
    assert figures["test_images"] == 10 and figures["unseen_class_images"] == 0
    weights = finished / "backbone.safetensors"
    assert call("knn", weights, npz, "-k", 5, "--json", "again.json")[0] == 0
    assert json.loads(Path("again.json").read_text())["knn_top1"] == figures["knn_top1"]
    out = call("knn", weights, npz)[1]
    assert re.search(r"│ 3 +│ 0.1", out), "a tenth of 34 images vote where nothing is said"
    assert "weights file" in refused("knn", weights)
    assert "0 for -k" in refused("knn", finished, "-k", 0, exit_code=2)
    assert "0 for --temperature" in refused("knn", finished, "--temperature", 0, exit_code=2)


@pytest.mark.parametrize("option", [["--batch-size", "0"], ["--workers", "-1"]])
def test_knn_options_out_of_range(call, finished, option):
    code, _, err = call("knn", finished, *option)
    least = {"--batch-size": 1, "--workers": 0}[option[0]]
    problem = f"Invalid value {option[1]} for {option[0]}: must be at least {least}."
    assert (code, err) == (2, f"Error: {problem} See `jcl knn --help`.\n")


def test_knn_needs_labels(refused, finished, tmp_path):
    np.savez(tmp_path / "bare.npz", x_train=drawn_pixels(20))
    assert "has no labels" in refused("knn", finished, tmp_path / "bare.npz")


def test_check_of_a_broken_image_states_no_size(call, tmp_path):
    (tmp_path / "broken.jpg").write_bytes(b"broken")
    code, out, _ = call("check", tmp_path, "--json", tmp_path / "figures.json")
    assert code == 0 and " px" not in out
    assert json.loads((tmp_path / "figures.json").read_text())["train_width_max"] is None


def test_check_counts_what_is_there(call, image_folder):
    (image_folder / "cats" / "000.png").write_bytes(b"no image")
    code, out, _ = call("check", image_folder, "--json", "check.json")
    figures = json.loads(Path("check.json").read_text())
    assert code == 0 and "cats/000.png cannot be read: it is not an image" in " ".join(out.split())
    assert re.search(r"images\s+│ 26 ", out) and re.search(r"classes\s+│ 2, of 13 images each", out)
    assert (figures["train_images"], figures["train_unreadable"], figures["train_classes"]) == (26, 1, 2)


def test_an_image_beside_class_folders_is_named_before_labels_are_missed(call, image_folder):
    (image_folder / "cats" / "000.png").rename(image_folder / "stray.png")
    code, out, _ = call("check", image_folder)
    assert code == 0 and "stray.png" in out
    code, _, err = call("pretrain", image_folder, *TINY, "--set", "train.epochs=1", "--out", "run")
    assert code == 0 and "stray.png" in err.partition("Pre-training")[0]
    assert "knn_top1" not in Run(Path("run")).summary


def test_a_folder_that_may_not_be_listed_is_passed_over_unless_strict(call, image_folder):
    said = "lost+found: permission denied"
    arguments = ["pretrain", image_folder, *TINY, "--set", "train.epochs=1"]
    with unlistable(image_folder / "lost+found"):
        code, out, _ = call("check", image_folder)
        assert code == 0 and said in " ".join(out.split())
        code, _, err = call(*arguments, "--out", "run")
        assert code == 0 and said in err.partition("Pre-training")[0]
        code, _, err = call(*arguments, "--strict", "--out", "strict")
        assert code == 1 and f"{image_folder}/lost+found cannot be listed: permission denied" in err
    assert "26 image files in 2 class folders" in call(*arguments, "--strict", "--out", "strict")[2]


def test_an_empty_test_folder_stops_no_training(call, tmp_path):
    photos = tmp_path / "photos"
    write_image_folder(photos / "train")
    (photos / "val").mkdir()
    said = f"The folder {photos / 'val'} holds no image files"
    code, out, _ = call("check", photos)
    assert code == 0 and said in " ".join(out.split())
    code, _, err = call("pretrain", photos, *TINY, "--set", "train.epochs=1", "--out", "run")
    assert code == 0 and said in err.partition("Pre-training")[0]
    assert "knn_top1" in Run(Path("run")).summary  # of a part of the training images, as without such a folder


def test_a_folder_that_is_called_like_a_data_set_is_told_how_to_be_meant(call, monkeypatch):
    write_image_folder(Path("demo"))
    said = "Using the data set demo, not the folder; for the folder write ./demo.\n"
    assert call("recipes")[2] == ""
    code, out, err = call("check", "demo")
    assert code == 0 and err == said and "2,500" in out
    code, out, err = call("check", "./demo")
    assert code == 0 and err == "" and "26" in out
    monkeypatch.setattr("jcl.cli.printing.rank", 1)  # the first speaks for all
    assert call("check", "demo")[2] == ""


@pytest.mark.parametrize(
    "command",
    [
        *(f"{name} missing demo" for name in ("knn", "linear", "finetune", "bound", "embed -o f.npz")),
        *("shard demo demo", "pretrain demo --recipe missing", "ablate demo --over missing=1"),
        "distribution missing.pt demo",
    ],
)
def test_every_command_says_which_of_folder_and_data_set_is_meant(call, command):
    Path("demo/photos").mkdir(parents=True)
    code, _, err = call(*command.split())
    assert code in (1, 2) and err.count("for the folder write ./demo.") == 1


def test_the_table_of_a_run_has_units_and_a_seed_as_it_is_typed():
    console = Console(file=io.StringIO(), width=100)
    figures = {"peak_memory_bytes": 3 * 2**30, "seconds": 100.0, "steps": 12_000, "seed": 12_345}
    console.print(run_table({"method": "jcl", "data": "photos"} | figures))
    rows = [[cell.strip() for cell in line.split("│")[1:3]] for line in console.file.getvalue().splitlines()]
    assert ["peak memory", "3.00 GiB"] in rows and ["training time", "1 min 40 s"] in rows
    assert ["steps", "12,000"] in rows and ["seed", "12345"] in rows


def test_recipes_are_listed_shown_and_usable_again(call, npz):
    import yaml

    code, out, _ = call("recipes")
    assert code == 0 and "imagenet-official" in out and "cifar10" in out
    code, out, _ = call("recipes", "imagenet-official")
    assert code == 0 and yaml.safe_load(out)["method"]["covariance_schedule"] == "linear"
    code, out, _ = call("recipes", "--settings")
    assert code == 0 and "method.covariance_scale" in out and "train.key_passes" in out


def test_a_recipe_s_settings_are_listed_with_its_own_values(call, tmp_path):
    (tmp_path / "[mine].yaml").write_text("train: {epochs: 7}\n")
    for recipe, epochs in ((tmp_path / "[mine].yaml", "7"), ("imagenet100-ablation", "100")):
        code, out, _ = call("recipes", recipe, "--settings")
        rows = [[cell.strip() for cell in line.split("│")] for line in out.splitlines() if "│" in line]
        title = out.splitlines()[1]
        assert code == 0 and "value" in title and "default" not in title and "…" not in out
        assert [row[2] for row in rows if row[1] == "train.epochs"] == [epochs]
        assert [row[2] for row in rows if row[1] == "record.knn_k"] == ["200"]  # not the recipe's: the default
    assert "There is no recipe called 'cifar'" in call("recipes", "cifar", "--settings")[2]


def test_the_names_of_settings_are_whole_in_a_narrow_terminal(call, monkeypatch):
    monkeypatch.setattr("jcl.cli.data.out", Console(width=60))
    out = call("recipes", "--settings")[1]
    assert "record.checkpoint_minutes" in out and "method.covariance_schedule" in out and "…" not in out


def test_a_file_in_the_way_of_the_demo_is_a_sentence(call, tmp_path):
    (tmp_path / "file").write_text("mine")
    code, _, err = call("demo", "--out", tmp_path / "file")
    assert code == 1 and "is a file" in err
    assert (tmp_path / "file").read_text() == "mine"


def test_figures_that_cannot_be_written_are_a_sentence(call, finished, tmp_path):
    (tmp_path / "file").write_text("mine")
    code, _, err = call("knn", finished, "--json", tmp_path / "file" / "knn.json")
    assert code == 1 and "could not be written" in err and "Traceback" not in err
    assert (tmp_path / "file").read_text() == "mine"


def test_figures_that_do_not_fit_on_the_disk_leave_the_old_ones(tmp_path, no_room_for):
    file = tmp_path / "knn.json"
    file.write_text("old")
    no_room_for(file)
    with pytest.raises(RunError, match="could not be written: No space left"):
        write_json({"knn_top1": 1.0}, file)
    assert file.read_text() == "old"


def test_ctrl_c_saves_the_run_and_says_how_to_go_on(npz, tmp_path):
    """A real process and a real signal, sent as soon as the first line of metrics is there."""
    command = [sys.executable, "-m", "jcl"]
    long = ["--set", "train.epochs=2000", "--set", "record.knn_every=0"]
    process = subprocess.Popen(
        [*command, "pretrain", str(npz), *TINY, *long, "--out", str(tmp_path / "run")],
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    try:
        wait_until(lambda: metrics.exists() and metrics.stat().st_size)
    finally:
        process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75
    assert "SIGINT received: stopped after step" in err and "jcl resume" in err
    assert "Error" not in err and "Traceback" not in err  # it did as it was told
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*.safetensors"))) >= 1


@pytest.mark.faults  # for its length
def test_ctrl_c_while_the_workers_start(tmp_path):
    """Sent to all processes, as a terminal does, while the one that workers are forked from imports torch."""
    photos = write_image_folder(tmp_path / "photos")
    run = tmp_path / "run"
    options = ["--set", "data.workers=2", "--set", "train.epochs=2000", "--set", "record.knn_every=0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "jcl", "pretrain", str(photos), *TINY, *options, "--out", str(run)],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_until((run / "settings.yaml").exists)
        time.sleep(0.3)
    finally:
        os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert "Traceback" not in err and "Aborted" not in err, err
    assert process.returncode == 75 and "SIGINT received: stopped after step" in err


def press_ctrl_c(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_before_the_first_step_leaves_nothing_behind(call, npz, monkeypatch):
    monkeypatch.setattr("jcl.commands.pretrain._announce", press_ctrl_c)
    code, out, err = call("pretrain", npz, *TINY, "--out", "run")
    assert (code, out, err) == (130, "", "Interrupted.\n") and not Path("run").exists()


def test_ctrl_c_leaves_a_folder_alone_that_was_there_before(call, npz, monkeypatch):
    monkeypatch.setattr("jcl.commands.pretrain._announce", press_ctrl_c)
    Path("mine").mkdir()
    for out in (["--out", "mine"], []):
        assert call("pretrain", npz, *TINY, *out)[0] == 130
    assert list(Path("mine").iterdir()) == [] and list(Path("runs").iterdir()) == []


def test_a_second_ctrl_c_says_what_is_left(call, npz, monkeypatch):
    def press_twice(*_: object, **__: object) -> None:
        press_ctrl_c()
        press_ctrl_c()

    with monkeypatch.context() as patch:
        patch.setattr("jcl.train.pretrain.PretrainTask.end_epoch", press_twice)
        code, out, err = call("pretrain", npz, *TINY, "--out", "my run")
        assert (code, out, err.splitlines()[-1]) == (130, "", "Interrupted.") and not Path("my run").exists()
    evaluate, calls = jcl.evaluate.knn.evaluate_knn, []

    def press_at_the_end(*given: object, **options: object) -> object:
        calls.append(given)
        return evaluate(*given, **options) if len(calls) == 1 else press_twice()

    monkeypatch.setattr("jcl.evaluate.knn.evaluate_knn", press_at_the_end)
    often = ["--set", "record.checkpoint_every=1", "--set", "record.knn_every=0"]
    code, out, err = call("pretrain", npz, *TINY, *often, "--out", "my run")
    assert code == 75 and out == "" and "Traceback" not in err
    assert "in step 12" in err and "step-000000008" in err and "`jcl resume 'my run'`" in err


def test_ctrl_c_before_the_summary_says_how_to_have_the_results(call, npz, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("jcl.commands.train_run.write_summary", press_ctrl_c)
        code, out, err = call("pretrain", npz, *TINY, "--out", "run")
    assert code == 75 and out == "" and "results are not written" in err and "`jcl resume run`" in err
    code, out, _ = call("resume", "run")
    assert code == 0 and "kNN top-1" in out


def test_ctrl_c_while_the_page_is_made_says_that_only_it_is_missing(call, npz, monkeypatch):
    monkeypatch.setattr("jcl.commands.report.write_report", press_ctrl_c)
    code, _, err = call("pretrain", npz, *TINY, "--set", "record.report=true", "--out", "run")
    assert code == 75 and "only its page is missing" in err and "`jcl report run`" in err
    assert Run(Path("run")).summary["steps"] == 12


def test_shards_are_written_and_trained_on(call, image_folder, tmp_path):
    out_folder = tmp_path / "shards"
    (image_folder / "cats" / "IMG_1.heic").touch()
    code, out, err = call("shard", image_folder, out_folder, "--images-per-shard", 10, "--json", "shards.json")
    assert code == 0, err
    figures = json.loads(Path("shards.json").read_text())
    assert figures["train_images"] == 26 and figures["train_shards"] == 3
    assert f"jcl pretrain {out_folder}" in out and ".heic" in err
    code, _, err = call("pretrain", out_folder, *TINY, "--out", "from-shards")
    assert code == 0, err
    again = call("shard", image_folder, out_folder)
    assert again[0] == 1 and str(out_folder) in again[2]


def test_a_damaged_shard_is_used_as_far_as_it_goes_unless_strict(call, image_folder, tmp_path):
    shards = tmp_path / "shards"
    assert call("shard", image_folder, shards, "--images-per-shard", 10)[0] == 0
    os.truncate(shards / "train-0001.tar", (shards / "train-0001.tar").stat().st_size // 2)
    arguments = ["pretrain", shards, *TINY, *SHORT]
    code, out, err = call(*arguments, "--strict", "--out", "run")
    assert code == 1 and out == "" and "Error: The shard train-0001.tar is damaged" in err
    assert not Path("run").exists()
    code, _, err = call(*arguments, "--out", "run")
    assert code == 0 and "The shard train-0001.tar is damaged" in err
    # Strict was a training; what it made can be measured though a shard was damaged since.
    settings = Path("run/settings.yaml")
    settings.write_text(settings.read_text().replace("strict: false", "strict: true"))
    code, _, err = call("knn", "run")
    assert code == 0 and "The shard train-0001.tar is damaged" in err
    assert (
        call("report", "run", "-o", "page.html")[0] == 0 and "could not be opened" not in Path("page.html").read_text()
    )


def test_class_folders_inside_of_shards_are_named_before_labels_are_missed(call, image_folder):
    subprocess.run(["tar", "-cf", "photos.tar", "-C", image_folder, "."], check=True)
    said = "folders in shards (cats, dogs)"
    code, out, _ = call("check", "photos.tar")
    assert code == 0 and said in " ".join(out.split())
    code, _, err = call("pretrain", "photos.tar", *TINY, "--set", "train.epochs=1", "--out", "run")
    assert code == 0 and said in err.partition("Pre-training")[0]
    assert "knn_top1" not in Run(Path("run")).summary


def test_a_subset_of_the_classes(call, image_folder):
    Path("classes.txt").write_text("dogs\n")
    code, _, err = call("pretrain", image_folder, *TINY, "--subset", "classes.txt", "--out", "dogs")
    assert code == 0, err
    assert "13 image files" in err and Run(Path("dogs")).summary["steps"] == 3  # one full batch of 8 in each epoch


def test_profile_names_the_parts_of_a_step_and_writes_no_run(call, npz):
    code, _, err = call("pretrain", npz, *TINY, "--profile", "--json", "profile.json")
    assert code == 0, err
    figures = json.loads(Path("profile.json").read_text())
    parts = {name: taken for name, taken in figures.items() if name.endswith("_ms") and name != "step_ms"}
    assert set(parts) >= {"views_ms", "keys_ms", "query_ms", "loss_ms", "backward_ms", "optimiser_ms"}
    assert all(taken >= 0 for taken in parts.values()) and 0 < sum(parts.values()) <= 1.01 * figures["step_ms"]
    assert not Path("runs").exists()


def test_a_run_inside_the_images_folder_is_refused(refused, image_folder):
    said = refused("pretrain", image_folder, *TINY, "--out", image_folder / "run")
    assert "is inside the image folder" in said


def test_after_a_strict_stop_the_same_command_can_be_given_again(call, image_folder):
    broken = image_folder / "cats" / "broken.png"
    broken.write_bytes(b"not an image")
    arguments = ("pretrain", image_folder, *TINY, "--strict", "--out", "run")
    code, _, err = call(*arguments)
    assert code == 1 and "broken.png" in err and not Path("run").exists()
    broken.unlink()
    assert call(*arguments)[0] == 0


def test_a_run_is_resumed_from_another_folder(call, image_folder, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        stop_after(patch, 2, signal.SIGTERM)
        patch.chdir(image_folder.parent)
        code, _, err = call("pretrain", image_folder.name, *TINY, *SHORT, "--out", tmp_path / "run")
        assert code == 75 and "stopped after step 2" in err
    assert Run(tmp_path / "run").settings.data.location == str(image_folder.resolve())
    code, _, err = call("resume", tmp_path / "run")
    assert code == 0 and Run(tmp_path / "run").summary["steps"] == 3, err


def test_profiling_needs_data_too(refused):
    assert "jcl pretrain photos/" in refused("pretrain", "--profile")


def test_a_data_sets_name_stays_a_name_beside_a_folder_of_that_name(call):
    (Path("demo") / "no images here").mkdir(parents=True)
    code, _, err = call("pretrain", "demo", *TINY, *SHORT, "--out", "run", "--set", "train.batch_size=1000")
    assert code == 0, err
    assert Run(Path("run")).settings.data.location == "demo"


def test_figures_take_the_place_of_figures_only(refused, call, npz, finished):
    copy = Path("copy.npz")
    copy.write_bytes(Path(npz).read_bytes())
    assert "already exists" in refused("check", copy, "--json", copy)
    assert "already exists" in refused("knn", finished, "--json", Path(finished) / "settings.yaml")
    assert "must end in .html" in refused("report", finished, "-o", Path(finished) / "settings.yaml")
    for foreign in ('{"images": [{"id": 1}]}', '{"editor": {"tabSize": 4}}', "[1, 2]", "notes, not JSON"):
        Path("mine.json").write_text(foreign)
        assert "does not hold results of jcl" in refused("check", copy, "--json", "mine.json")
    for free in ("", "{}"):
        Path("old.json").write_text(free)
        for _ in range(2):  # the second time over figures
            assert call("check", copy, "--json", "old.json")[0] == 0
        assert "train_images" in Path("old.json").read_text()


def test_names_cannot_steer_the_terminal(call, image_folder):
    (image_folder / "cats" / "\x1b[31mred\n.png").write_bytes(b"no image")
    code, out, _ = call("check", image_folder)
    assert code == 0 and "\x1b" not in out and "\\x1b[31mred\\n.png cannot be read" in out


def test_the_name_of_a_folder_cannot_either(call, tmp_path):
    folder = write_image_folder(tmp_path / "\x1b[31m[b]red\n")
    code, out, _ = call("check", folder)
    assert code == 0 and "\x1b" not in out and "\\x1b[31m[b]red\\n" in out
    code, out, _ = call("pretrain", folder, *TINY, "--set", "train.epochs=1", "--out", "run")
    assert code == 0 and "\x1b" not in out and "jcl on \\x1b[31m[b]red\\n" in out


@pytest.mark.parametrize(
    ("arguments", "after"),
    [
        (["knn", "a run", ""], "jcl knn 'a run'"),
        (["pretrain", "photos", "--out", ""], "jcl pretrain photos --out"),
        (["pretrain", "photos", "--out="], "--out"),
        (["check", ""], "jcl check"),
    ],
)
def test_a_variable_that_is_not_set_is_not_the_current_folder(refused, arguments, after):
    write_image_folder(Path("photos"))
    assert f"after `{after}`" in refused(*arguments)


def test_an_option_with_a_sign_of_equality_knows_the_home_folder(call, npz, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    code, _, _ = call("check", npz, "--json=~/found.json")
    assert code == 0 and (tmp_path / "found.json").is_file() and not Path("~").exists()


def test_values_may_be_empty_in_set(refused):
    assert "data.location" in refused("pretrain", "--set=data.location=")


@pytest.mark.parametrize(
    ("option", "assigned"),
    [
        (["--epochs", "3"], "train.epochs=3"),
        (["--num-keys", "2"], "method.num_keys=1"),
        (["--method", "jcl"], "method.name=moco-v2"),
        (["--strict"], "data.strict=false"),
    ],
)
def test_an_option_and_set_may_not_both_say_what_a_setting_is(refused, npz, option, assigned):
    name = assigned.partition("=")[0]
    told = f"{name} is given both with {option[0]} and with --set; leave one of them out."
    assert told in refused("pretrain", npz, *option, "--set", assigned)


def test_the_images_are_not_named_twice(refused, npz):
    told = "data.location is given both with DATA and with --set; leave one of them out."
    assert told in refused("pretrain", npz, "--set", "data.location=demo")


def test_figures_do_not_take_the_place_of_what_a_run_keeps(refused, npz, pretrained, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(pretrained, run)
    assert "summary.json is the run's own file" in refused("knn", run, "--json", run / "summary.json")
    (run / "summary.json").unlink()  # of an unfinished run, which would then pass for a finished one
    assert "summary.json is the run's own file" in refused("knn", run, "--json", run / "summary.json")
    assert "takes the name of a file" in refused("knn", run, "--json", "-")


def test_a_run_whose_images_have_moved_says_what_to_do(refused, npz, pretrained, tmp_path):
    images = tmp_path / "images.npz"
    run = tmp_path / "run"
    shutil.copytree(pretrained, run)
    settings = run / "settings.yaml"
    settings.write_text(settings.read_text().replace(str(npz), str(images)))
    assert f"no longer at {images}" in refused("knn", run)
    assert "no longer at" in refused("bound", run)
    assert "no longer at" in refused("distribution", run)
    (run / "summary.json").unlink()
    said = refused("resume", run)
    assert f"no longer at {images}" in said and str(settings) in said and "data.location" in said


def test_a_terminal_of_few_signs_gets_the_figures_all_the_same(npz, pretrained):
    command = [sys.executable, "-m", "jcl", "bound", str(pretrained), "--images", "4", "--keys", "20"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    ended = subprocess.run(command, capture_output=True, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr.decode()
    assert b"sd: of q\\xb7k/t" in ended.stdout
