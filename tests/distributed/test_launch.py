"""What ranks are told by their launcher, and what they leave to it."""

import logging
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jcl.distributed.group import LostContact, SilentRank
from jcl.distributed.launch import (
    ERROR_FOLDER,
    RankFailed,
    _failure,
    _read_errors,
    launch,
    launch_environment,
    report_to_launcher,
)
from jcl.errors import DataError, SettingsError

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "JCL_RESTARTS", "TORCHELASTIC_RESTART_COUNT")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in (*VARIABLES, ERROR_FOLDER):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def ranks_do(tmp_path: Path, monkeypatch) -> Iterator[Callable[[str], Path]]:
    """Have ranks run shell commands, which is faster than Python; gives the file to which each start adds a line."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def replace(commands: str) -> Path:
        (tmp_path / "rank").write_text(f'#!/bin/sh\necho "$RANK $@" >> {tmp_path}/starts\n{commands}\n')
        (tmp_path / "rank").chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(tmp_path / "rank"))
        return tmp_path / "starts"

    yield replace
    logging.disable(logging.NOTSET)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_the_command_line_starts_ranks(ranks_do, call):
    starts = ranks_do("exit 0")
    assert call("pretrain", "photos", "--devices", 2)[0] == 0
    assert sorted(starts.read_text().splitlines()) == [f"{rank} -m jcl pretrain photos --devices 2" for rank in (0, 1)]


def test_an_error_of_a_rank_ends_all_without_a_restart(ranks_do):
    starts = ranks_do(
        f"if [ $RANK = 1 ]; then echo '[1, \"no images.\", 3, 2]' > ${ERROR_FOLDER}/1.json; exit 3; fi; sleep 60"
    )
    with pytest.raises(RankFailed, match="On rank 1: no images") as caught:
        launch(["pretrain", "photos"], 2)
    assert caught.value.exit_code == 3 and len(starts.read_text().splitlines()) == 2


def test_ranks_are_restarted_when_one_is_killed(ranks_do, capfd):
    starts = ranks_do('echo "restarts: $JCL_RESTARTS"; kill -9 $$')
    with pytest.raises(RankFailed, match="Rank 0 was killed by SIGKILL") as caught:
        launch(["pretrain", "photos"], 1, max_restarts=1)
    assert caught.value.exit_code == 137 and len(starts.read_text().splitlines()) == 2
    printed = capfd.readouterr()
    assert "SIGKILL" in printed.err and [line[-1] for line in printed.out.splitlines()] == ["0", "1"]


def test_own_errors_go_before_deaths_and_deaths_before_lost_contact(tmp_path: Path, monkeypatch):
    monkeypatch.setenv(ERROR_FOLDER, str(tmp_path))
    assert report_to_launcher(LostContact("contact was lost."), 0)
    (tmp_path / "2.partial").write_text('[2, "ha')  # of a rank that was killed while it wrote
    lost = _read_errors(str(tmp_path))
    failed = _failure(lost, {0: 69, 1: -15})
    assert (str(failed), failed.exit_code, failed.retry) == ("contact was lost.", 69, True)
    killed = _failure(lost, {0: 69, 1: -9, 2: -15})
    assert "Rank 1" in str(killed) and "SIGKILL" in str(killed) and (killed.exit_code, killed.retry) == (137, True)
    defect = _failure(lost, {0: 69, 1: 1})  # it has shown a trace
    assert "Rank 1" in str(defect) and (defect.exit_code, defect.retry) == (1, False)
    assert report_to_launcher(SilentRank("rank 2 is silent."), 1)
    named = _failure(_read_errors(str(tmp_path)), {0: 69, 1: 69, 2: -9})
    assert (str(named), named.retry) == ("rank 2 is silent.", True)
    assert report_to_launcher(DataError("the disk is gone."), 2)
    own = _failure(_read_errors(str(tmp_path)), {0: 69, 1: 69, 2: 1})
    assert (str(own), own.exit_code, own.retry) == ("On rank 2: the disk is gone.", 1, False)


def test_without_our_launcher_a_rank_reports_its_own_error():
    assert not report_to_launcher(DataError("the disk is gone."), 0)


def test_the_environment_of_a_launcher_is_read(monkeypatch):
    assert launch_environment() == (0, 1, 0, 1, 0)
    for name, value in zip(VARIABLES, (" 3", "8", "1", "2", "", "4"), strict=True):
        monkeypatch.setenv(name, value)
    assert launch_environment() == (3, 8, 1, 2, 0)  # restarts count only below a launcher
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert launch_environment() == (3, 8, 1, 2, 4)


@pytest.mark.parametrize("name", VARIABLES)
@pytest.mark.parametrize("value", ["x", "-1", "1.5", "²", "99999999999999999999"])
def test_a_variable_that_is_not_a_number_is_named(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=name):
        launch_environment()


@pytest.mark.parametrize(
    "values",
    [
        {"RANK": "1"},
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"WORLD_SIZE": "0"},
        {"LOCAL_WORLD_SIZE": "0"},
        {"LOCAL_WORLD_SIZE": "8"},
    ],
)
def test_a_rank_beyond_the_world_size_is_an_error(monkeypatch, values):
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match="WORLD_SIZE"):
        launch_environment()
