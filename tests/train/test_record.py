import json
from pathlib import Path

import pytest

from jcl.errors import RunError
from jcl.train.record import Record, read_metrics


def test_lines_are_whole_objects_at_once(tmp_path):
    with Record(tmp_path, tensorboard=False) as record:
        line = record.write("train", 3, 0.75, {"loss": 1.5})
        assert read_metrics(tmp_path / "metrics.jsonl") == [line]
        record.write("knn", 4, 1.0, {"knn_top1": 50.0})
        assert [each["kind"] for each in read_metrics(tmp_path / "metrics.jsonl")] == ["train", "knn"]
    assert line == {"kind": "train", "step": 3, "epoch": 0.75, "loss": 1.5}


def test_figures_that_are_not_finite_become_null(tmp_path):
    with Record(tmp_path, tensorboard=False) as record:
        record.write("train", 1, 0.1, {"loss": float("nan"), "lr": float("inf"), "speed": 1.0})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    assert json.loads(text) == {"kind": "train", "step": 1, "epoch": 0.1, "loss": None, "lr": None, "speed": 1.0}


def test_resuming_drops_what_is_about_to_be_done_again(tmp_path):
    with Record(tmp_path, tensorboard=False) as record:
        for step in (3, 6, 9, 12):
            record.write("train", step, step / 10, {"loss": float(step)})
    with Record(tmp_path, resumed_at=6, tensorboard=False) as record:
        record.write("train", 9, 0.9, {"loss": -9.0})
    assert [(line["step"], line["loss"]) for line in read_metrics(tmp_path / "metrics.jsonl")] == [
        (3, 3.0),
        (6, 6.0),
        (9, -9.0),
    ]


@pytest.mark.parametrize("torn", ['{"kind": "train", "st', '{"kind": "train"', "\x00\x00\x00"])
def test_a_torn_last_line_is_left_out_and_written_over(tmp_path, torn):
    with Record(tmp_path, tensorboard=False) as record:
        record.write("train", 3, 0.3, {"loss": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1
    with Record(tmp_path, resumed_at=3, tensorboard=False) as record:
        record.write("train", 6, 0.6, {"loss": 2.0})
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [3, 6]


def test_tensorboard_events_hold_the_same_figures(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Record(tmp_path) as record:
        for step in (1, 2, 3):
            record.write("train", step, step / 10, {"loss": float(step)})
    with Record(tmp_path, resumed_at=2) as record:  # step 3 is done again
        record.write("train", 3, 0.3, {"loss": 30.0})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 1.0), (2, 2.0), (3, 30.0)]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_full_disk_is_a_sentence(tmp_path):
    with (
        pytest.raises(RunError, match=r"metrics.jsonl could not be written: No space left"),
        Record(tmp_path, tensorboard=False) as record,
    ):
        record._file.close()
        record._file = Path("/dev/full").open("a")  # noqa: SIM115
        record.write("train", 1, 0.1, {"loss": 1.0})
