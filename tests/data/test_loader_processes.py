"""The processes that decode images: none is left behind, whatever happens to them or to their parent."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from image_files import folder_of_sizes, loader_for

from jcl.data import BatchLoader, read_all
from jcl.errors import DataError
from jcl.signals import signals_blocked
from launch_tools import gone, wait_until


def test_no_process_is_left_after_close(tmp_path: Path):
    source = folder_of_sizes(tmp_path, 12)
    loader = loader_for(source, workers=2)
    batches = loader.epoch(0)
    next(batches)
    assert len(multiprocessing.active_children()) == 2
    loader.close()
    assert multiprocessing.active_children() == []
    unfinished = read_all(source, canvas=16, batch_size=2, workers=1)
    next(unfinished)
    unfinished.close()  # type: ignore[attr-defined]
    assert multiprocessing.active_children() == []


def test_a_worker_that_is_killed_ends_the_epoch_with_a_sentence(tmp_path: Path):
    source = folder_of_sizes(tmp_path, 40)
    with loader_for(source, workers=2, cache_bytes=0) as loader:
        batches = (batch for epoch in range(1000) for batch in loader.epoch(epoch))
        next(batches)
        os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)
        with pytest.raises(DataError, match="worker"):
            list(batches)
    assert multiprocessing.active_children() == []


SCRIPT = """
import multiprocessing, sys
from jcl.data import BatchLoader, open_data
loader = BatchLoader(open_data(sys.argv[1]).train, batch_size=4, canvas=16, seed=0, workers=2, cache_bytes=0)
for epoch in range(10**6):
    for batch in loader.epoch(epoch):
        if epoch == 1:
            print("pids", *(child.pid for child in multiprocessing.active_children()), flush=True)
"""

# A forkserver that the user's program has started does not block signals.
SIGNALED = """
import multiprocessing, os, sys, time
from pathlib import Path
from jcl.data import BatchLoader, open_data
from jcl.signals import STOP_SIGNALS
def starting(child):
    ignored = (Path("/proc") / str(child.pid) / "status").read_text().split("SigIgn:")[1].split()[0]
    return not int(ignored, 16) & 1 << STOP_SIGNALS[0] - 1
other = multiprocessing.get_context("forkserver").Process(target=print)
other.start()
other.join()
with BatchLoader(open_data(sys.argv[1]).train, batch_size=4, canvas=16, seed=0, workers=2, cache_bytes=0) as loader:
    for epoch in range(8):
        assert len(list(loader.epoch(epoch))) == 3
        for child in multiprocessing.active_children():
            while starting(child):
                time.sleep(0.01)
            os.kill(child.pid, STOP_SIGNALS[epoch % len(STOP_SIGNALS)])
assert multiprocessing.active_children() == []
"""


def test_an_interrupt_while_workers_start_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Signals wait while processes start, so Ctrl-C comes once they run and before anybody could close them."""

    @contextlib.contextmanager
    def interrupted() -> Iterator[None]:
        yield
        raise KeyboardInterrupt

    source = folder_of_sizes(tmp_path / "images", 12)
    monkeypatch.setattr("jcl.data.workers.signals_blocked", interrupted)
    before = set(multiprocessing.active_children())
    with pytest.raises(KeyboardInterrupt):
        list(read_all(source, canvas=8, batch_size=4, device=torch.device("cpu"), workers=2))
    assert set(multiprocessing.active_children()) == before


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes by way of /proc")
@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="signals cannot be sent to threads here")
def test_a_signal_that_another_thread_takes_waits_too():
    """Only the main thread blocks signals while processes start, but it has to answer for all of them."""
    ended = threading.Event()
    other = threading.Thread(target=ended.wait)
    other.start()
    reached = False
    with pytest.raises(KeyboardInterrupt), signals_blocked():
        signal.pthread_kill(other.ident or 0, signal.SIGINT)
        for _ in range(100):  # time enough to answer in
            time.sleep(0.001)
        reached = True
    ended.set()
    assert reached and signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="looks at processes by way of /proc")
def test_workers_leave_signals_to_the_main_process(tmp_path: Path):
    """Ctrl-C reaches every process of a terminal; what the main process has begun goes on."""
    folder_of_sizes(tmp_path / "images", 12)
    subprocess.run([sys.executable, "-c", SIGNALED, str(tmp_path / "images")], check=True, timeout=120)


def test_workers_do_not_run_the_main_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """People write scripts without a guard against that."""
    source = folder_of_sizes(tmp_path / "images", 12)
    script = tmp_path / "script.py"
    script.write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n")
    main = types.ModuleType("__main__")
    main.__file__ = str(script)
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert sum(map(len, read_all(source, canvas=16, batch_size=4, workers=1))) == 12
    assert sys.modules["__main__"] is main and not (tmp_path / "ran").exists()


@pytest.mark.faults
def test_no_process_is_left_if_the_main_process_is_killed(tmp_path: Path):
    folder_of_sizes(tmp_path / "images", 12)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "images")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        workers = [int(word) for word in process.stdout.readline().split()[1:]]
        assert len(workers) == 2
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: all(map(gone, workers)), seconds=30)


class OddError(Exception):
    def __init__(self, name: str, place: int) -> None:
        super().__init__(f"{name} at {place}")


class OddSource:
    """Somebody's own, with an error that pickles and does not come back from it."""

    description, labels, class_names = "odd images", None, None

    def __len__(self) -> int:
        return 16

    def name_of(self, index: int) -> str:
        return str(index)

    def read(self, index: int, canvas: int | None = None, window: float | None = 0.5) -> torch.Tensor:
        if index == 13:
            raise OddError("trouble", index)
        return torch.zeros(3, 8, 8, dtype=torch.uint8)


def test_an_error_that_does_not_pickle_is_said_each_time():
    with BatchLoader(OddSource(), batch_size=8, canvas=8, seed=0, workers=1, cache_bytes=0) as loader:
        for _ in range(2):  # the second time nothing is waited for that was lost the first time
            with pytest.raises(RuntimeError, match="OddError: trouble at 13"):
                list(loader.epoch(0))
