import json
import resource

import pytest

from jcl.errors import RunError
from jcl.runs.metrics import MetricsWriter, read_metrics


def test_lines_are_whole_objects_at_once(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as record:
        line = record.write("train", 3, 0.75, {"loss": 1.5})
        assert read_metrics(tmp_path / "metrics.jsonl") == [line]
        record.write("knn", 4, 1.0, {"knn_top1": 50.0})
        assert [each["kind"] for each in read_metrics(tmp_path / "metrics.jsonl")] == ["train", "knn"]
    assert line == {"kind": "train", "step": 3, "epoch": 0.75, "loss": 1.5}


def test_figures_that_are_not_finite_become_null(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as record:
        record.write("train", 1, 0.1, {"loss": float("nan"), "lr": float("inf"), "speed": 1.0})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    assert json.loads(text) == {"kind": "train", "step": 1, "epoch": 0.1, "loss": None, "lr": None, "speed": 1.0}


def test_resuming_drops_what_is_about_to_be_done_again(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as record:
        for step in (3, 6, 9, 12):
            record.write("train", step, step / 10, {"loss": float(step)})
    with MetricsWriter(tmp_path, resumed_at=6, tensorboard=False) as record:
        record.write("train", 9, 0.9, {"loss": -9.0})
    assert [(line["step"], line["loss"]) for line in read_metrics(tmp_path / "metrics.jsonl")] == [
        (3, 3.0),
        (6, 6.0),
        (9, -9.0),
    ]


@pytest.mark.parametrize("torn", ['{"kind": "train", "st', '{"kind": "train"', "\x00\x00\x00"])
def test_a_torn_last_line_is_left_out_and_written_over(tmp_path, torn):
    with MetricsWriter(tmp_path, tensorboard=False) as record:
        record.write("train", 3, 0.3, {"loss": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1
    with MetricsWriter(tmp_path, resumed_at=3, tensorboard=False) as record:
        record.write("train", 6, 0.6, {"loss": 2.0})
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [3, 6]


def test_tensorboard_events_hold_the_same_figures(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsWriter(tmp_path) as record:
        for step in (1, 2, 3):
            record.write("train", step, step / 10, {"loss": float(step)})
    with MetricsWriter(tmp_path, resumed_at=2) as record:  # step 3 is done again
        record.write("train", 3, 0.3, {"loss": 30.0})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_lines_that_cannot_be_written_are_said_once_and_kept(tmp_path):
    """Something else takes the file's place for a while, as a disk may be full for a while."""
    said: list[str] = []
    with MetricsWriter(tmp_path, tensorboard=False, warn=said.append) as record:
        record.write("train", 1, 0.1, {"loss": 1.0})
        record.path.rename(tmp_path / "aside")
        record.path.mkdir()
        lines = [record.write("train", step, step / 10, {"loss": float(step)}) for step in (2, 3)]
        record.path.rmdir()
        (tmp_path / "aside").rename(record.path)
        with record.path.open("a") as file:
            file.write('{"kind": "tra')  # what an attempt that broke off leaves
        lines.append(record.write("train", 4, 0.4, {"loss": 4.0}))
        assert read_metrics(record.path)[1:] == lines and record.newest == {"train": lines[-1]}
        record.path.rename(tmp_path / "aside")
        record.path.mkdir()
        record.write("train", 5, 0.5, {"loss": 5.0})
        record.path.rmdir()
    assert len(said) == 2 and "metrics.jsonl could not be written: Is a directory" in said[0]
    assert [line["step"] for line in read_metrics(record.path)] == [5]  # written on closing


def test_a_full_disk_loses_no_line(tmp_path):
    """Files may not grow for a while."""
    said: list[str] = []
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    with MetricsWriter(tmp_path, tensorboard=False, warn=said.append) as record:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, unlimited[1]))
        try:
            record.write("train", 1, 0.1, {"loss": 1.0})
            record.write("train", 2, 0.2, {"loss": 1.0})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        record.write("train", 3, 0.3, {"loss": 1.0})
    assert len(said) == 1 and "metrics.jsonl could not be written: File too large" in said[0]
    assert [line["step"] for line in read_metrics(record.path)] == [1, 2, 3]


def test_tensorboard_events_that_cannot_be_written_are_said_once(tmp_path, capfd):
    said: list[str] = []
    with MetricsWriter(tmp_path, warn=said.append) as record:
        record.write("train", 1, 0.1, {"loss": 1.0})
        for file in (tmp_path / "tensorboard").iterdir():
            file.unlink()
        (tmp_path / "tensorboard").rmdir()
        (tmp_path / "tensorboard").write_bytes(b"in the way")
        for step in range(2, 6):
            record.write("train", step, step / 10, {"loss": 1.0})
    assert [line["step"] for line in read_metrics(record.path)] == [1, 2, 3, 4, 5]
    assert len(said) == 1 and "TensorBoard" in said[0]
    with MetricsWriter(tmp_path, resumed_at=5, warn=said.append) as record:
        record.write("train", 6, 0.6, {"loss": 1.0})
    assert len(said) == 2
    assert "Traceback" not in capfd.readouterr().err


def test_metrics_that_cannot_be_read_are_a_sentence(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(RunError, match="cannot be read"):
        MetricsWriter(tmp_path, tensorboard=False)


@pytest.mark.parametrize(
    "odd",
    [
        *("{}", "42", "null", '{"kind": "train", "step": "x", "epoch": 1}'),
        *('{"kind": "train", "step": 2, "epoch": Infinity}', f'{{"kind": "train", "step": 2, "epoch": 1{"0" * 400}}}'),
        *(
            '{"kind": "train", "step": 2, "epoch": 1, "loss": "low"}',
            '{"kind": "knn", "step": 2, "epoch": 1, "a": []}',
        ),
    ],
)
def test_lines_that_belong_nowhere_stop_no_resumption(tmp_path, odd):
    lines = ['{"kind": "train", "step": 1, "epoch": 0.5}', odd, '{"kind": "train", "step": 2, "epoch": 1.0}']
    (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    with MetricsWriter(tmp_path, resumed_at=5, tensorboard=False) as record:
        assert record.newest["train"]["step"] == 2
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


@pytest.mark.parametrize(
    "damage", [b'{"kind": "train", "st', b"", b"\x00" * 40, b'{"kind": "tr\xff\xfe', b"[" * 100_000]
)
def test_a_damaged_line_costs_no_other(tmp_path, damage):
    whole = [json.dumps({"kind": "train", "step": step, "epoch": step / 10}).encode() for step in (1, 2, 3, 4)]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([whole[0], damage, *whole[1:]]) + b"\n")
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    with MetricsWriter(tmp_path, resumed_at=3, tensorboard=False):
        pass
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"\n".join(whole[:3]) + b"\n"


def test_a_device_in_the_place_of_metrics_is_not_read(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/zero")
    with pytest.raises(RunError, match=r"metrics\.jsonl"):
        read_metrics(tmp_path / "metrics.jsonl")
