"""Whole runs on several ranks, real processes: started, killed, stopped, resumed. `make test-faults` has long forms."""

import json
import os
import random
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest
import torch

from jcl.commands.run import Run
from jcl.random import DATA_ORDER, permutation
from jcl.runs.checkpoint import list_checkpoints, read_tensors, search_checkpoints
from jcl.runs.folder import read_skipped
from jcl.runs.lock import lock_folder
from launch_tools import JCL, LONG_VALUES, TORCHRUN, Launch, forked_ranks, settings_options, wait_until
from run_tools import assert_same
from small_runs import TINY_VALUES, write_image_folder

STEPS = 32  # two an epoch, checkpoints after every fourth
LONG = LONG_VALUES["train.epochs"]


def command(npz: Path, run: Path, epochs: int = STEPS // 2) -> list[str]:
    return ["pretrain", str(npz), "--out", str(run), *settings_options(LONG_VALUES | {"train.epochs": epochs})]


def launched(npz: Path, place: Path, *epochs: int) -> Run:
    """What two ranks come to, started by `jcl pretrain --devices 2`."""
    with Launch([*JCL, *command(npz, place / "run", *epochs), "--devices", "2"], place / "said") as launch:
        assert launch.wait() == 0, launch.said
    (place / "run" / "said.txt").write_text(launch.said)
    return Run(place / "run")


@pytest.fixture(scope="module")
def unbroken(npz, tmp_path_factory) -> Run:
    return launched(npz, tmp_path_factory.mktemp("unbroken"))


@pytest.fixture(scope="module")
def unbroken_long(npz, tmp_path_factory) -> Run:
    """One long enough to be broken off while it trains."""
    return launched(npz, tmp_path_factory.mktemp("long"), LONG)


def weights_after(run: Path, step: int) -> dict[str, torch.Tensor]:
    tensors, _ = read_tensors(run / "checkpoints" / f"step-{step:09}.safetensors")
    return {name: value.double() for name, value in tensors.items() if name.startswith("model.")}


def furthest(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest difference, relative where values are larger than 1."""
    assert mine.keys() == theirs.keys()
    return max(
        float((mine[name] - theirs[name]).abs().max()) / max(1.0, float(theirs[name].abs().max())) for name in mine
    )


def assert_never_without_a_checkpoint(run: Path) -> None:
    newest, damaged = search_checkpoints(run / "checkpoints")
    assert newest is not None and damaged == []


def assert_said_once_and_in_one_folder(run: Run, said: str, steps: int) -> None:
    assert said.count("Pre-training") == 1 and said.count("Everything is in") == 1
    assert "2 ranks" in said and "rror" not in said and "torch" not in said, said
    assert [entry.name for entry in run.path.parent.iterdir() if entry.is_dir()] == ["run"]
    assert run.summary["ranks"] == 2 and run.summary["steps"] == steps
    assert not (run.path / ".lock").exists()


def test_two_ranks_say_everything_once_and_write_one_folder(npz, tmp_path):
    """Two forks of one process, as a launcher would have started them; test_launch.py has the launcher itself.

    They do not import PyTorch's compiler, which they do not use.
    """
    (ended,) = forked_ranks([{"ranks": 2, "arguments": command(npz, tmp_path / "runs/run", 2)}])
    assert ended["codes"] == [0, 0], ended["said"]
    assert_said_once_and_in_one_folder(Run(tmp_path / "runs/run"), ended["said"], 4)


@pytest.mark.slow
def test_a_launch_of_two_ranks_says_everything_once_and_writes_one_folder(unbroken):
    assert_said_once_and_in_one_folder(unbroken, (unbroken.path / "said.txt").read_text(), STEPS)


@pytest.mark.faults
def test_torchrun_starts_ranks_again_of_which_one_was_killed(npz, unbroken_long, tmp_path):
    """Ranks that find each other anew in a store which outlived them, and a run that ends as if nothing had been."""
    run = tmp_path / "run"
    started = [*TORCHRUN, "--max-restarts=1", "-m", "jcl", *command(npz, run, LONG)]
    with Launch(started, tmp_path / "said") as launch:
        ranks = launch.training_ranks(run)
        wait_until(lambda: list_checkpoints(run / "checkpoints"))
        time.sleep(random.uniform(0.0, 0.5))
        os.kill(ranks[random.randrange(2)], signal.SIGKILL)
        assert_never_without_a_checkpoint(run)
        assert launch.wait() == 0, launch.said
    assert launch.said.count("Resuming from") == 1 and launch.said.count("Everything is in") == 1
    assert_same(Run(run), unbroken_long)


@pytest.mark.faults  # for its length
def test_a_launch_outlives_killed_ranks_and_stops_when_asked_to(npz, unbroken_long, tmp_path):
    run = tmp_path / "run"
    with Launch([*JCL, *command(npz, run, LONG), "--devices=2"], tmp_path / "said") as launch:
        ranks = launch.training_ranks(run)
        wait_until(lambda: list_checkpoints(run / "checkpoints"))
        wait_until(lambda: list((run / "checkpoints").glob(".*")))  # a checkpoint is being written
        os.kill(ranks[0], signal.SIGKILL)
        assert_never_without_a_checkpoint(run)
        again = launch.training_ranks(run)
        assert not set(again.values()) & set(ranks.values())
        before = len(list_checkpoints(run / "checkpoints"))
        wait_until(lambda: len(list_checkpoints(run / "checkpoints")) > before)
        launch.process.send_signal(signal.SIGTERM)
        assert launch.wait() == 75, launch.said
    said = launch.said
    assert said.count("Rank 0 was killed by SIGKILL") == 1
    assert said.count("SIGTERM received: stopped after step") == 1 and "Error" not in said, said
    assert "Traceback" not in said and "rank 1" not in said and "torch/" not in said
    (ended,) = forked_ranks([{"ranks": 2, "arguments": ["resume", str(run)]}])
    assert ended["codes"] == [0, 0] and "Resuming on" not in ended["said"]
    assert_same(Run(run), unbroken_long)


@pytest.mark.faults  # for its length; test_launch.py has it without real ranks
def test_an_error_ends_a_launch_with_one_sentence_and_no_restart(tmp_path):
    missing = tmp_path / "nowhere"
    with Launch(
        [*JCL, "pretrain", str(missing), "--out", str(tmp_path / "run"), "--devices", "2"], tmp_path / "said"
    ) as it:
        assert it.wait() == 1
    assert it.said.count("\n") == 1 and it.said.startswith("Error: ") and str(missing) in it.said, it.said
    assert not (tmp_path / "run").exists()


@pytest.mark.faults  # for its length
def test_launches_at_the_same_moment_have_folders_of_their_own_that_all_their_ranks_know(npz, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    started = [*JCL, *command(npz, Path("unused"), 1), "--devices", "2"]
    started = [argument for argument in started if argument not in ("--out", "unused")]
    with Launch(started, tmp_path / "one") as one, Launch(started, tmp_path / "other") as other:
        assert (one.wait(), other.wait()) == (0, 0), one.said + other.said
    runs = sorted(Path("runs").iterdir())
    assert [run.name for run in runs] == ["jcl-small-001", "jcl-small-002"]
    assert [Run(run).summary["ranks"] for run in runs] == [2, 2]
    said = sorted(each.said.partition(", into runs/")[2].split()[0] for each in (one, other))
    assert said == [run.name for run in runs]


@pytest.mark.faults  # for its length
def test_ctrl_c_before_the_first_step_of_a_launch_says_so_once_and_leaves_nothing(npz, tmp_path):
    run = tmp_path / "run"
    with Launch([*JCL, *command(npz, run), "--devices", "2"], tmp_path / "said") as launch:
        wait_until(lambda: f"into {run}" in launch.said)
        launch.process.send_signal(signal.SIGINT)
        code = launch.wait()
    if (run / "checkpoints").exists():
        pytest.skip("the first step came before Ctrl-C")
    assert code == 130 and launch.said.count("Interrupted.") == 1 and "checkpoint" not in launch.said, launch.said
    assert not run.exists()


@pytest.fixture(scope="module")
def nearly_done(unbroken, tmp_path_factory) -> Path:
    """The run of two ranks as it was four steps before its end."""
    place = tmp_path_factory.mktemp("nearly") / "run"
    shutil.copytree(unbroken.path, place, ignore=shutil.ignore_patterns("summary.json", "backbone*", "said.txt"))
    for path in list_checkpoints(place / "checkpoints")[-1:]:
        path.unlink()
    return place


@pytest.mark.slow
def test_other_numbers_of_ranks_and_errors(npz, unbroken, nearly_done, tmp_path):
    """Resumed on 1, 2 and 4 ranks; what cannot be done is said by one rank, and all of them end.

    One process for all of them: it takes longer to start than what they do.
    """
    places = {count: tmp_path / str(count) for count in (1, 2, 4)}
    for place in places.values():
        shutil.copytree(nearly_done, place)
    machines = [str(tmp_path / machine) for machine in ("one", "another")]
    for machine, count in zip(machines, (26, 27), strict=True):
        write_image_folder(Path(machine) / "photos", count)
    few_groups = settings_options(TINY_VALUES | {"train.epochs": 1, "record.knn_every": 0, "model.bn_groups": 1})
    write_image_folder(tmp_path / "cut-off/val", 6)
    for file in sorted(write_image_folder(tmp_path / "cut-off/train", 12).rglob("*.png"))[6:]:
        file.write_bytes(b"cut off")  # the second of two ranks can read none of its images
    knn_options = ["-k", "3", "--device", "cpu", "--workers", "0", "--json"]
    knn = ["knn", str(unbroken.path), str(tmp_path / "cut-off"), *knn_options]
    resumed = [{"ranks": count, "arguments": ["resume", str(place)]} for count, place in places.items()]
    others = [
        {"ranks": 1, "arguments": command(npz, tmp_path / "alone")},
        {"ranks": 2, "arguments": ["pretrain", str(npz), "--out", str(tmp_path / "few"), *few_groups]},
        {"ranks": 3, "arguments": command(npz, tmp_path / "uneven")},
        {"ranks": 2, "arguments": command(npz, unbroken.path)},
        {"ranks": 2, "arguments": [*knn, str(tmp_path / "knn-2.json")]},
        {"ranks": 1, "arguments": [*knn, str(tmp_path / "knn-1.json")]},
        {"ranks": 2, "arguments": ["resume", str(nearly_done)]},
        {"ranks": 2, "arguments": command(npz, tmp_path / "unmeasured", 2), "unmeasured": True},
        {"ranks": 2, "arguments": command(Path("photos"), tmp_path / "strange"), "places": machines},
    ]
    with lock_folder(nearly_done, warn=print):
        done = forked_ranks(resumed + others)
    *ended, alone, few, uneven, occupied, measured, measured_alone, held, unmeasured, strange = done
    for (count, place), how in zip(places.items(), ended, strict=True):
        assert how["codes"] == [0] * count, how["said"]
        assert furthest(weights_after(place, STEPS), weights_after(unbroken.path, STEPS)) <= (1e-5 if count != 2 else 0)
    assert alone["codes"] == [0]
    assert furthest(weights_after(unbroken.path, 4), weights_after(tmp_path / "alone", 4)) <= 1e-6
    assert [line["step"] for line in Run(tmp_path / "alone").metrics] == [line["step"] for line in unbroken.metrics]
    assert few["codes"] == [0] * 2 and few["said"].count("model.bn_groups = 2: instead of 1") == 1
    assert uneven["codes"] == [2] * 3 and uneven["said"].count("\n") == 1
    assert "--batch-size 16" in uneven["said"] and "3 ranks" in uneven["said"]
    assert occupied["codes"] == [1] * 2 and occupied["said"].count("\n") == 1
    assert "already holds a run" in occupied["said"]
    assert measured["codes"] == [0, 0] and measured_alone["codes"] == [0]
    assert (
        "Skipped 6" in measured["said"]
        and "Skipped 6" in measured_alone["said"]
        and measured_alone["said"].endswith(measured["said"].rpartition("┘")[2])
    )
    assert json.loads((tmp_path / "knn-2.json").read_text()) == json.loads((tmp_path / "knn-1.json").read_text())
    assert held["codes"] == [1, 1] and held["said"].count("\n") == 1
    assert f"Process {os.getpid()} on" in held["said"]
    assert unmeasured["codes"] == [0, 0] and unmeasured["said"].count("skipped from now on") == 2, unmeasured["said"]
    assert "kNN is skipped from now on: a decoding process was killed." in unmeasured["said"]
    assert {line["kind"] for line in Run(tmp_path / "unmeasured").metrics} == {"train"}
    assert strange["codes"] == [1, 1] and strange["said"].count("\n") == 1, strange["said"]
    assert strange["said"].startswith("Error on rank 1: ") and "27 image files" in strange["said"]
    assert socket.gethostname() in strange["said"]
    assert not (tmp_path / "strange").exists()


@pytest.mark.faults  # for its length
def test_images_that_any_rank_cannot_read_are_listed_or_end_all_of_them(tmp_path):
    """Ones that only the second rank meets: left out, or with --strict named in the first step or in a later one."""
    values = LONG_VALUES | {"train.epochs": 1}
    order = permutation(0, DATA_ORDER, 0, 48).view(3, 2, 8)  # of the seed 0: steps, ranks, images
    met = {"left-out": order[:, 1, 0].tolist(), "at-once": [int(order[0, 1, 4])], "later": [int(order[2, 1, 4])]}
    unreadable, scenarios = {}, []
    for place, numbers in met.items():
        photos, run = write_image_folder(tmp_path / place, 48), tmp_path / "runs" / place
        files = sorted(photos.rglob("*.png"))
        for number in numbers:
            files[number].write_bytes(b"no image")
        unreadable[place] = sorted(str(files[number].relative_to(photos)) for number in numbers)
        strict = [] if place == "left-out" else ["--strict"]
        arguments = ["pretrain", str(photos), "--out", str(run), *strict, *settings_options(values)]
        scenarios.append({"ranks": 2, "unkept": True, "arguments": arguments})
    left_out, at_once, later = forked_ranks(scenarios)
    assert left_out["codes"] == [0, 0], left_out["said"]
    assert list(read_skipped(tmp_path / "runs/left-out/skipped.txt")) == unreadable["left-out"]
    assert left_out["said"].count("3 unreadable images") == 1
    for place, ended in (("at-once", at_once), ("later", later)):
        assert ended["codes"] == [1, 1] and ended["said"].count("Error") == 1, ended["said"]
        assert f"Error: The image {unreadable[place][0]} cannot be read: it is not an image" in ended["said"]
    assert not (tmp_path / "runs/at-once").exists()
    assert "Training stopped after step 2;" in later["said"]
    assert [path.stem for path in list_checkpoints(tmp_path / "runs/later/checkpoints")] == ["step-000000002"]


@pytest.mark.faults  # for its length
@pytest.mark.parametrize("what", ["rank", "workers"])
def test_a_rank_that_keeps_others_waiting_is_named(tmp_path, what):
    """It is halted as a whole, or only the processes that read its images, as on a disk that hangs."""
    photos = write_image_folder(tmp_path / "photos", 480)  # halted in the first of 30 steps: later, all are in memory
    values = LONG_VALUES | {"train.rank_timeout": 4, "data.workers": 1, "record.checkpoint_minutes": 1e-9}
    run = tmp_path / "run"
    arguments = ["pretrain", str(photos), "--out", str(run), *settings_options(values)]
    scenario = {"ranks": 2, "arguments": arguments, "stop": what, "after": str(run / "checkpoints")}
    (ended,) = forked_ranks([scenario])
    assert ended["codes"] == [69] and ended["said"].count("Error") == 1 and "Traceback" not in ended["said"]
    assert ended["seconds"] < 25
    assert "the newest checkpoint is" in ended["said"] and "`jcl resume" in ended["said"]
    assert "No answer from rank 1 (on " in ended["said"]
