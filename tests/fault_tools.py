"""Bad circumstances made to order: a disk that fills up or turns read-only, and processes that are killed."""

import contextlib
import errno
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest

from jcl.runs.saver import CheckpointSaver
from jcl.settings.schema import Settings
from jcl.train.step import TrainingStep
from small_runs import tiny_settings


def settings_for(location: Path, **changes: object) -> Settings:
    """Three short epochs with a checkpoint after each."""
    return tiny_settings(location, record__checkpoint_every=1, **changes)


def be_killed_writing(path: Path) -> None:
    """A process that writes a file and is killed between writing and renaming."""
    program = (
        "import os, pathlib\n"
        "from jcl.runs.atomic import write_atomically\n"
        "os.fsync = lambda number: os.kill(os.getpid(), 9)\n"
        f"write_atomically(pathlib.Path({str(path)!r}), b'new' * 1000)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9


class SmallDisk:
    """A file system of a few megabytes of its own."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.filler = place / "filler"

    def fill(self) -> None:
        """Leave not one byte, nor room for a new file."""
        with self.filler.open("ab", buffering=0) as file:
            for size in (1 << 16, 1):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(b"\0" * size)
        number = 0
        with contextlib.suppress(OSError):
            while True:
                (self.place / f"filler-{number}").touch()
                number += 1

    def free(self) -> None:
        for filler in self.place.glob("filler*"):
            filler.unlink()

    def read_only(self) -> None:
        """Not while a file is being written; the kernel itself would not wait, but it cannot be asked to."""
        for _ in range(200):
            if self._remount("ro"):
                return
            time.sleep(0.02)
        raise AssertionError("the file system stays busy")

    def writable(self) -> None:
        assert self._remount("rw")

    def _remount(self, how: str) -> bool:
        command = ["mount", "-o", f"remount,{how}", str(self.place)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


@contextlib.contextmanager
def small_disk(place: Path, megabytes: int = 16) -> Iterator[SmallDisk]:
    """Mount one; skips the test where that is not permitted."""
    place.mkdir()
    options = f"size={megabytes}m,nr_inodes=200"
    try:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command here")
    if mounted.returncode:
        pytest.skip(f"mounting is not permitted: {mounted.stderr.decode().strip()}")
    try:
        yield SmallDisk(place)
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def at_steps(monkeypatch: pytest.MonkeyPatch, actions: dict[int, Callable[[], object]]) -> None:
    """Have things happen while the steps of these numbers (from 1) are being done."""
    original = TrainingStep.__call__

    def acting(self, batch, number, *schedule):
        result = original(self, batch, number, *schedule)
        actions.get(number + 1, lambda: None)()
        return result

    monkeypatch.setattr(TrainingStep, "__call__", acting)


def once_written(action: Callable[[], object]) -> Callable[[], object]:
    """After the checkpoint that is being written beside the steps, which a busy machine may be slow at."""

    def act() -> None:
        for saver in [each for each in gc.get_objects() if isinstance(each, CheckpointSaver)]:
            wait([saver._written] if saver._written else [])
        action()

    return act


def live(run: Path, settings: Path, lives: list[dict[str, Any]], cache: Path) -> list[dict[str, Any]]:
    """Start the run in `run` again for each life, kill it when that says, and tell what was left after each.

    A life is {"seconds": when to kill} or {"event": before or after which call while writing checkpoints}, or {} to
    let it finish. All are forks of one process, which has imported everything already.
    """
    program = Path(__file__).parent / "kill_driver.py"
    arguments = [str(program), str(run), str(settings), json.dumps(lives)]
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    ended = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


def assert_never_without_a_checkpoint(left: list[dict[str, Any]]) -> None:
    """Once there was a checkpoint there always is one, it is never older than before, and none is ever damaged."""
    newest = -1
    for number, life in enumerate(left):
        assert life["damaged"] == [], (number, life)
        assert life["newest"] >= newest, (number, life)
        newest = life["newest"]


FULL = os.strerror(errno.ENOSPC)
READ_ONLY = os.strerror(errno.EROFS)
