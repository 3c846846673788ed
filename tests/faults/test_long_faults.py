"""The long forms of `tests/test_faults.py`: many random moments, every moment of a write, every step of a run."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from fault_tools import SmallDisk, assert_never_without_a_checkpoint, at_steps, live, once_written, small_disk
from jcl.commands.pretrain import pretrain, resume
from jcl.commands.run import Run
from jcl.errors import Interrupted, RunError
from jcl.runs.checkpoint import list_checkpoints, search_checkpoints
from jcl.settings.schema import Settings
from jcl.settings.values import settings_text
from run_tools import assert_same, stop_after
from small_runs import tiny_settings

pytestmark = pytest.mark.faults
QUIET = Console(quiet=True)
KILLS = 50
EVENTS_OF_THREE_WRITES = 57


def settings_for(location: Path, epochs: int = 3) -> Settings:
    values = {"train__epochs": epochs, "record__knn_every": 0, "record__keep": 1 + epochs % 2}
    return tiny_settings(location, record__checkpoint_every=1, **values)


def assert_ends_as_if_unbroken(tmp_path: Path, run: Path) -> None:
    ended = live(run, tmp_path / "settings.yaml", [{}], tmp_path / "cache")
    assert ended[-1]["ended"] == 0 and ended[-1]["partial"] == []
    live(tmp_path / "unbroken", tmp_path / "settings.yaml", [{}], tmp_path / "cache")
    assert_same(Run(run), Run(tmp_path / "unbroken"))


@pytest.mark.parametrize("seed", [0])
def test_killed_at_fifty_random_moments(npz, tmp_path, seed):
    """One run, killed after anything from no time at all to a few epochs; half of the lives end inside a write."""
    (tmp_path / "settings.yaml").write_text(settings_text(settings_for(npz, epochs=600)))
    chance = random.Random(seed)
    lives = [
        {"seconds": chance.uniform(0.0, 1.2)} if number % 2 else {"event": chance.randint(1, 300)}
        for number in range(KILLS)
    ]
    left = live(tmp_path / "run", tmp_path / "settings.yaml", lives, tmp_path / "cache")
    assert [life["ended"] for life in left] == [-9] * KILLS
    assert_never_without_a_checkpoint(left)
    assert left[-1]["newest"] > 0 and any(life["partial"] for life in left)
    assert_ends_as_if_unbroken(tmp_path, tmp_path / "run")


def test_killed_at_every_call_of_a_write(npz, tmp_path):
    """Before and after each call to do with files, in the first, second and third checkpoint of a life; one is kept."""
    (tmp_path / "settings.yaml").write_text(settings_text(settings_for(npz, epochs=1000)))
    lives = [{"event": event} for event in range(1, EVENTS_OF_THREE_WRITES)]
    left = live(tmp_path / "run", tmp_path / "settings.yaml", lives, tmp_path / "cache")
    assert [life["ended"] for life in left] == [-9] * len(lives)
    assert_never_without_a_checkpoint(left)
    assert {bool(life["partial"]) for life in left} == {False, True}


@pytest.fixture(scope="module")
def unbroken(npz, tmp_path_factory) -> Run:
    return pretrain(settings_for(npz), tmp_path_factory.mktemp("unbroken") / "run", console=QUIET)


@pytest.mark.parametrize("trouble", ["full", "read-only"])
@pytest.mark.parametrize("lasting", [1, 5, 100])
@pytest.mark.parametrize("begin", range(1, 13))
def test_a_disk_in_trouble_from_any_step_on(npz, unbroken, tmp_path, monkeypatch, trouble, lasting, begin):
    """Whenever it begins and ends: the run ends as it should, or with a sentence and can be resumed to that end."""
    with small_disk(tmp_path / "disk") as disk:
        start, stop = ways(disk, trouble)
        folder = disk.place / "run"
        with monkeypatch.context() as patch:
            at_steps(patch, {begin: once_written(start), begin + lasting: stop})
            if begin + lasting > 12:
                saved = trouble == "full" and begin > 8  # in place of the older of two checkpoints
                ended = "" if saved else ".*stopped after step 12"
                with pytest.raises(RunError, match=f"could not be written{ended}"):
                    pretrain(settings_for(npz), folder, console=QUIET)
            else:
                pretrain(settings_for(npz), folder, console=QUIET)
        if begin + lasting > 12:
            newest, damaged = search_checkpoints(folder / "checkpoints")
            assert damaged == [] and (newest is not None or begin <= 4)
            assert not saved or newest.name == "step-000000012.safetensors"
            stop()
            resume(folder, console=QUIET)
        assert_same(Run(folder), unbroken)


def ways(disk: SmallDisk, trouble: str) -> tuple[Callable[[], None], Callable[[], None]]:
    return (disk.fill, disk.free) if trouble == "full" else (disk.read_only, disk.writable)


def test_a_bit_flipped_anywhere_in_the_newest_checkpoint(npz, unbroken, tmp_path, monkeypatch):
    """At a thousand places of the header and a thousand of the tensors."""
    with monkeypatch.context() as patch:
        stop_after(patch, 10, 15)
        with pytest.raises(Interrupted):
            pretrain(settings_for(npz), tmp_path / "run", console=QUIET)
    older, newest = list_checkpoints(tmp_path / "run" / "checkpoints")
    content = newest.read_bytes()
    header_end = 8 + int.from_bytes(content[:8], "little")
    chance = random.Random(0)
    for place in chance.sample(range(header_end), 1000) + chance.sample(range(header_end, len(content)), 1000):
        changed = bytearray(content)
        changed[place] ^= 1 << chance.randrange(8)
        newest.write_bytes(changed)
        found, damaged = search_checkpoints(newest.parent)
        assert found == older and len(damaged) == 1, place
    assert_same(resume(tmp_path / "run", console=QUIET), unbroken)
