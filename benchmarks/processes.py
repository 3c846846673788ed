"""Runs `jcl` commands as subprocesses that save their work when the benchmark is stopped."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from jcl.errors import Interrupted, JclError
from jcl.runs.folder import RunFolder
from jcl.signals import STARTED_BY, StopRequest

POLL_SECONDS = 0.2


class CommandFailed(JclError):
    """A command exited with an error."""


class Processes:
    """Runs tasks in threads, each of which starts commands with `run`.

    On SIGTERM or Ctrl-C all commands are asked to save and stop, and the program exits with the code of an interrupted
    run.
    """

    def __init__(self) -> None:
        self._stop = StopRequest()
        self._running: set[subprocess.Popen[bytes]] = set()

    def run(self, command: list[str], log: Path) -> None:
        """Run a command to its end, with its output in `log`."""
        self._raise_if_stopped()
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {STARTED_BY: str(os.getpid()), "PYTHONUNBUFFERED": "1"}
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=environment
            )
        self._running.add(process)
        if self._stop.requested:  # since the check above
            process.terminate()
        code = process.wait()
        self._running.discard(process)
        self._raise_if_stopped()
        if code != 0:
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise CommandFailed(f"{log} ends with: {lines[-1] if lines else 'nothing'}")

    def jcl(self, result: Path, *words: Any) -> None:
        """Run a command of `jcl` that writes its figures to `result`, with its output in a text file beside it."""
        self.run(jcl_command(*words, "--json", result), result.with_suffix(".txt"))

    def train(
        self, folder: Path, result: Path, data: Path | str, options: Mapping[str, Any], settings: Iterable[str]
    ) -> None:
        """Start a run, or resume one that has a checkpoint; `settings` are passed with --set."""
        self.run(training_command(folder, result, data, options, settings), result.with_suffix(".txt"))

    def _raise_if_stopped(self) -> None:
        if self._stop.requested:
            raise Interrupted("stopped")

    def run_tasks(self, tasks: Iterable[Callable[[], None]], at_once: int) -> list[str]:
        """Run all tasks, `at_once` at a time; returns the messages of those that failed."""
        failed = []
        with self._stop, ThreadPoolExecutor(at_once) as pool:
            pending = {pool.submit(task) for task in tasks}
            try:
                while pending:
                    done, pending = wait(pending, timeout=POLL_SECONDS)
                    for future in done:
                        if isinstance(error := future.exception(), JclError):
                            failed.append(str(error))
                        elif error is not None:
                            raise error
                    if self._stop.requested:
                        break
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                for process in list(self._running):
                    process.terminate()
        if self._stop.requested:
            print(f"{self._stop.signal_name}: stopped; the same command continues.", file=sys.stderr)
            sys.exit(Interrupted.exit_code)
        return failed


def jcl_command(*words: Any) -> list[str]:
    return [sys.executable, "-m", "jcl", *map(str, words)]


def training_command(
    folder: Path, result: Path, data: Path | str, options: Mapping[str, Any], settings: Iterable[str]
) -> list[str]:
    """The command of `Processes.train`."""
    if has_checkpoints(folder):
        return jcl_command("resume", folder, "--json", result)
    RunFolder(folder).remove_unless_started()
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    flags += [part for pair in settings for part in ("--set", pair)]
    return jcl_command("pretrain", data, *flags, "--out", folder, "--json", result)


def has_checkpoints(folder: Path) -> bool:
    return RunFolder(folder).checkpoints.exists()
