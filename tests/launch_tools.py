"""Real launches of several ranks: started, watched, and their processes found by rank."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

from small_runs import TINY_VALUES

JCL = [sys.executable, "-m", "jcl"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
# 80 steps of 16 images, for 1, 2 or 4 ranks with 4 groups, and a checkpoint every 4 steps.
LONG_VALUES: dict[str, Any] = TINY_VALUES | {
    "model.bn_groups": 4,
    "train.batch_size": 16,
    "train.epochs": 40,
    "record.checkpoint_every": 2,
    "record.keep": 1000,
    "record.knn_every": 0,
}


def settings_options(values: dict[str, Any]) -> list[str]:
    return [part for name, value in values.items() for part in ("--set", f"{name}={value}")]


def wait_until(condition: Callable[[], Any], seconds: float = 90.0) -> Any:
    """What the condition gives as soon as that is true."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.002)
    return found


class Launch:
    """A command that starts ranks; nothing of it outlives the block."""

    def __init__(self, command: list[str], said: Path, **environment: str) -> None:
        self._command, self._said = command, said
        self._environment = os.environ | environment
        self._seen: set[int] = set()

    def __enter__(self) -> Self:
        with self._said.open("w") as file:
            self.process = subprocess.Popen(self._command, stdout=file, stderr=file, env=self._environment)
        return self

    def __exit__(self, *error: object) -> None:
        self.ranks()
        for pid in (self.process.pid, *self._seen):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    @property
    def said(self) -> str:
        return self._said.read_text()

    def wait(self, seconds: float = 120.0) -> int:
        return self.process.wait(seconds)

    def ranks(self) -> dict[int, int]:
        """The processes of the ranks that live now, by rank."""
        found = {}
        for pid in children(self.process.pid):
            with contextlib.suppress(OSError):
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                found |= {int(each[5:]): pid for each in variables if each.startswith(b"RANK=")}
        self._seen |= set(found.values())
        return found

    def both_ranks(self) -> dict[int, int] | None:
        """The same, once there are two."""
        found = self.ranks()
        return found if len(found) == 2 else None

    def training_ranks(self, run: Path, count: int = 2) -> dict[int, int]:
        """The same, once they train: the first one holds the lock on the run."""

        def at_work() -> dict[int, int] | None:
            assert self.process.poll() is None, self.said
            found = self.ranks()
            with contextlib.suppress(OSError, ValueError):
                holder = json.loads((run / ".lock").read_text())["pid"]
                return found if len(found) == count and holder == found[0] else None
            return None

        found: dict[int, int] = wait_until(at_work)
        return found


def children(pid: int) -> Iterator[int]:
    for place in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            # After the name, which may hold spaces: state, parent.
            if int((place / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                yield int(place.name)


def descendants(pid: int) -> Iterator[int]:
    for child in children(pid):
        yield child
        yield from descendants(child)


def gone(pid: int) -> bool:
    """Whether a process has ended, be it that its parent has not asked yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def forked_ranks(scenarios: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run `jcl` as ranks that are forks of one process which has imported everything; see `rank_driver.py`."""
    program = Path(__file__).with_name("rank_driver.py")
    command = [sys.executable, str(program), json.dumps(scenarios)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]
