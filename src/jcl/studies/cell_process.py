"""A cell in a process of its own, so that nothing that happens to it happens to others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jcl.errors import Interrupted, RunError
from jcl.studies.ablation_folder import CellFolder

STARTED_BY = "JCL_CELL_STARTED_BY"
"""Names the process without which a cell is to stop."""

SECONDS_BETWEEN_LOOKS = 0.2
_SECONDS_BETWEEN_LOOKS_AT_PARENT = 1.0
# What a person or a scheduler sends to have a process end; the cell can go on later.
_WISHES = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class Outcome:
    """How the process of a cell ended; a stopped one goes on when it is started again."""

    folder: Path
    state: Literal["done", "failed", "stopped"]
    sentence: str = ""


class CellProcess:
    """`jcl ablate-cell FOLDER`, which writes what it says to the cell's log."""

    def __init__(
        self, folder: Path, *, workers: int | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        self.folder = CellFolder(folder)
        command = [sys.executable, "-m", "jcl", "ablate-cell", str(folder)]
        if workers is not None:
            command += ["--workers", str(workers)]
        self.folder.forget_failure()  # or it would be told again should the process die before it begins
        own = {STARTED_BY: str(os.getpid()), "COLUMNS": "120"}
        try:
            with self.folder.log_file.open("ab") as log:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=os.environ | dict(environment or {}) | own,
                    start_new_session=True,  # a Ctrl-C in the terminal is for us, who pass it on
                )
        except OSError as error:
            raise RunError(f"the cell {folder} could not be started: {error.strerror}.") from None
        self._asked_to_stop = False

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def ask_to_stop(self) -> None:
        """Have it save itself and end."""
        if not self._asked_to_stop:
            self._asked_to_stop = True
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def outcome(self) -> Outcome:
        """How it ended; waits until it has."""
        while not self.ended:
            time.sleep(SECONDS_BETWEEN_LOOKS)
        folder, code = self.folder, self._process.returncode
        if code == 0 and folder.result_file.exists():
            return Outcome(folder.path, "done")
        if code == Interrupted.exit_code or -code in _WISHES:
            return Outcome(folder.path, "stopped")
        sentence = folder.failure()
        if sentence is None:
            sentence = _about_end(code, folder.log_file)
            folder.fail(sentence)
        return Outcome(folder.path, "failed", sentence)


def _about_end(code: int, log: Path) -> str:
    if code == -signal.SIGKILL:
        return "its process was ended by SIGKILL, as happens when memory runs out; its checkpoints are untouched."
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"its process {how}; {log} may tell why."


def stop_with_parent() -> None:
    """Have this process stop, as by SIGTERM, once the process that started it as a cell is gone."""
    parent = os.environ.get(STARTED_BY)
    if parent is not None:
        threading.Thread(target=_watch, args=(int(parent),), name="parent", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_SECONDS_BETWEEN_LOOKS_AT_PARENT)
    os.kill(os.getpid(), signal.SIGTERM)
