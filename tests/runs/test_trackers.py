"""Experiment trackers, with their real libraries and stores on the local disk: wandb offline, SQLite for the others."""

import json
import math
import signal
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from jcl.commands.pretrain import pretrain, resume
from jcl.errors import Interrupted, SettingsError
from jcl.runs.folder import read_run_id
from jcl.runs.trackers import open_tracker
from run_tools import QUIET, stop_after
from small_runs import tiny_settings

Figures = dict[tuple[str, int], float]


@pytest.fixture
def store(tmp_path, monkeypatch) -> Path:
    """A folder for what the trackers write; nothing goes to the network."""
    place = tmp_path / "store"
    place.mkdir()
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{place}/mlflow.db")
    monkeypatch.setenv("TRACKIO_DIR", str(place / "trackio"))  # read when trackio is imported, by one test only
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(place)  # MLflow puts artifacts below it
    return place


def stopped_and_resumed(name: str, npz: Path, folder: Path, monkeypatch) -> Figures:
    """Train with a tracker, stopping after 5 of 8 steps, and return the figures in `metrics.jsonl`."""
    pytest.importorskip(name)
    settings = tiny_settings(npz, record__track=name, record__report=True, train__epochs=2)
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        stop_after(patch, 5, signal.SIGTERM)
        pretrain(settings, folder, console=QUIET)
    if name == "wandb":
        time.sleep(1)  # it names its folders by the second: resumed in the same one, it would write over the first
    run = resume(folder, console=QUIET)
    return {
        (f"{line['kind']}/{figure}", line["step"]): value
        for line in run.metrics
        for figure, value in line.items()
        if figure not in ("kind", "step", "epoch") and value is not None
    }


def leveldb_records(log: bytes) -> Iterator[bytes]:
    """The records of a .wandb file: 7 bytes, then LevelDB's log format, whose blocks of 32 KiB split records."""
    position, record = 7, b""
    while position + 7 <= len(log):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, size, kind = struct.unpack_from("<IHB", log, position)
        record += log[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield record
            record = b""


def test_wandb(npz, store, tmp_path, monkeypatch):
    expected = stopped_and_resumed("wandb", npz, tmp_path / "run", monkeypatch)
    from wandb.proto import wandb_internal_pb2

    found: Figures = {}
    files = sorted((tmp_path / "run/wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2 and {file.name for file in files} == {f"run-{read_run_id(tmp_path / 'run')}.wandb"}
    for file in files:
        for data in leveldb_records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            line = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            if "step" in line:
                found |= {(name, line["step"]): value for name, value in line.items() if "/" in name}
            config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
            assert not config or config["train"]["batch_size"] == 8
    assert any(name.startswith("report") for name, _ in found)
    figures = {key: value for key, value in found.items() if not key[0].startswith("report")}
    assert figures == pytest.approx(expected)
    assert len(list((tmp_path / "run/wandb").glob("offline-run-*/files/media/html/report*.html"))) == 1


def test_mlflow(npz, store, tmp_path, monkeypatch):
    expected = stopped_and_resumed("mlflow", npz, tmp_path / "run", monkeypatch)
    from mlflow import MlflowClient

    client = MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("jcl").experiment_id])
    assert run.info.status == "FINISHED" and run.data.tags["jcl.run_id"] == read_run_id(tmp_path / "run")
    assert run.data.params["train.batch_size"] == "8" and run.data.params["record.track"] == "mlflow"
    names = {name for name, _ in expected}
    found = {(name, one.step): one.value for name in names for one in client.get_metric_history(run.info.run_id, name)}
    assert found == pytest.approx(expected)
    assert [artifact.path for artifact in client.list_artifacts(run.info.run_id)] == ["report.html"]


def test_trackio(npz, store, tmp_path, monkeypatch):
    expected = stopped_and_resumed("trackio", npz, tmp_path / "run", monkeypatch)
    from trackio.sqlite_storage import SQLiteStorage

    name = f"run-{read_run_id(tmp_path / 'run')}"
    assert SQLiteStorage.get_runs("jcl") == [name]
    lines = SQLiteStorage.get_logs("jcl", name)
    found = {(figure, line["step"]): value for line in lines for figure, value in line.items() if "/" in figure}
    assert found == pytest.approx(expected)
    assert SQLiteStorage.get_run_config("jcl", name)["train"]["batch_size"] == 8
    assert any("report" in line for line in lines) and list((store / "trackio/media").rglob("*.html"))


def test_a_missing_library_is_a_message_and_leaves_nothing_behind(npz, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SettingsError, match=r"joint-contrastive-learning\[wandb\]"):
        pretrain(tiny_settings(npz, record__track="wandb"), tmp_path / "run", console=QUIET)
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_goes_on_without_a_tracker_that_does_not_start(npz, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        stop_after(patch, 5, signal.SIGTERM)
        pretrain(tiny_settings(npz, train__epochs=2), folder, console=QUIET)
    text = (folder / "settings.yaml").read_text()
    (folder / "settings.yaml").write_text(text.replace("track: none", "track: mlflow"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nowhere://at/all")
    console = Console(record=True, quiet=False, file=(tmp_path / "said").open("w"))
    assert resume(folder, console=console).summary["steps"] == 8
    assert "mlflow could not be started" in " ".join(console.export_text().split())


def test_a_tracker_that_fails_is_reported_once(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    said: list[str] = []
    with open_tracker("mlflow", tmp_path, "0123", tiny_settings("images"), resumed=False, warn=said.append) as tracker:
        tracker.write("train", 1, 0.1, {"loss": 1.0, "lr": math.inf})
        tracker._id = "none"  # as if somebody had deleted the run
        for step in (2, 3, 4):
            tracker.write("train", step, 0.2, {"loss": 1.0})
    assert len(said) == 1 and said[0].startswith("mlflow has failed")
