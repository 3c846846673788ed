"""Commands of `jcl` as processes of their own, which save themselves when the one that started them ends."""

import os
import subprocess
import sys
import time
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from jcl.errors import Interrupted
from jcl.runs.folder import RunFolder
from jcl.studies.cell_process import STARTED_BY
from jcl.train.stop import StopRequest

Result = TypeVar("Result")
Commands = Generator[subprocess.Popen[bytes], None, Result]
"""Gives each command it starts, to be gone on with when that has ended; at last returns what came of them."""

SECONDS_BETWEEN_LOOKS = 0.2
# `jcl`, which also saves itself and ends when we are killed and cannot ask it to.
_JCL = (
    "from jcl.studies.cell_process import stop_with_parent; from jcl.__main__ import main; stop_with_parent(); main()"
)


class Processes:
    """What runs beside this process, for as long as the block lasts.

    SIGTERM and Ctrl-C are heard at the next `start` or `pause`, which then leave with the exit code of a run
    that was asked to stop; at the end of the block, for whatever reason, what is still running is asked to save itself.
    """

    def __init__(self) -> None:
        self._stop = StopRequest()
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, words: list[str], log: Path) -> subprocess.Popen[bytes]:
        """Start a command that writes what it says to `log`."""
        self._leave_if_asked()
        log.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered, words and errors stand in the log in the order in which they were said.
        own = os.environ | {STARTED_BY: str(os.getpid()), "PYTHONUNBUFFERED": "1"}
        with log.open("wb") as file:
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=own)
        self._started.append(process)
        return process

    def work_through(self, tasks: Iterable[Commands[None]], at_once: int) -> None:
        """Do all tasks, `at_once` of them at a time; one begins as soon as another has done its last command."""
        waiting, going = iter(tasks), list[tuple[Commands[None], subprocess.Popen[bytes]]]()

        def go_on(task: Commands[None]) -> None:
            if (process := next(task, None)) is not None:
                going.append((task, process))

        while True:
            ended = [pair for pair in going if pair[1].poll() is not None]
            for pair in ended:
                going.remove(pair)
                go_on(pair[0])
            while len(going) < at_once and (task := next(waiting, None)) is not None:
                go_on(task)
            if not going:
                return
            self.pause()

    def pause(self) -> None:
        """Let them work for a moment."""
        time.sleep(SECONDS_BETWEEN_LOOKS)
        self._leave_if_asked()

    def __enter__(self) -> Self:
        self._stop.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._started:
            process.terminate()
        for process in self._started:  # whoever sees us gone may switch off the machine
            process.wait()
        self._stop.__exit__(kind, error, trace)

    def _leave_if_asked(self) -> None:
        if self._stop.requested:
            name = self._stop.signal_name
            print(f"{name} received: what was running saves itself; the same command goes on there.", file=sys.stderr)
            sys.exit(Interrupted.exit_code)


def jcl_command(*words: Any) -> list[str]:
    return [sys.executable, "-c", _JCL, *map(str, words)]


def training_command(
    folder: Path, result: Path, data: Path, options: Mapping[str, Any], settings: Iterable[str]
) -> list[str]:
    """What begins a run in a folder, or goes on with one that got as far as a checkpoint.

    `options` are those of `jcl pretrain` that have a flag of their own, `settings` go through `--set`.
    """
    if begun(folder):
        return jcl_command("resume", folder, "--json", result)
    RunFolder(folder).remove_unless_begun()
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    flags += [part for pair in settings for part in ("--set", pair)]
    return jcl_command("pretrain", data, *flags, "--out", folder, "--json", result)


def begun(folder: Path) -> bool:
    """Whether there is a run that can be gone on with."""
    return RunFolder(folder).checkpoints.exists()


def last_line(log: Path) -> str:
    """How a command's words end, which is where an error stands."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "nothing"
