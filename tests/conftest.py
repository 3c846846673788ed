"""What tests of whole runs share."""

import errno
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from fault_tools import settings_for
from jcl.cli import main
from jcl.commands.pretrain import pretrain
from jcl.commands.run import Run
from jcl.cores import start_forkserver
from jcl.errors import Interrupted
from page_tools import evil_folder, plain_folder, small_run
from run_tools import QUIET, stop_after
from small_runs import drawn_pixels, snapshot, write_image_folder


def pytest_configure() -> None:
    """One thread, here and in every process that is started.

    Networks this small take half the time in one, tests that run side by side do not wait for each other's threads, and
    what two processes computed can be compared bit for bit: sums over several threads differ in their last digits.
    """
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    # A shell lets what it starts in the background ignore Ctrl-C, and so would every process of the tests.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the tests out of the cache and the data of whoever runs them."""
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.delenv("JCL_DATA", raising=False)
    return cache


@pytest.fixture
def no_room_for(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """A function that makes every write to a file say that the disk is full."""
    files: list[str] = []

    def flush(number: int) -> None:
        written = Path(f"/proc/self/fd/{number}").readlink().name
        if any(written.startswith(f".{file}.") for file in files):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fdatasync(number)

    if not Path("/proc/self/fd").exists():
        pytest.skip("there is no /proc/self/fd here")
    monkeypatch.setattr("jcl.runs.atomic.os.fsync", flush)
    return lambda file: files.append(file.name)


@pytest.fixture(scope="session")
def npz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """34 labeled images to train on and 10 to test with: four batches of 8 and two images left over."""
    file = tmp_path_factory.mktemp("arrays") / "small.npz"
    labels = np.arange(44) % 3
    pixels = drawn_pixels(44)
    pixels[np.arange(44), :4, :4] = (labels * 100)[:, None, None, None]  # what the class is can be seen
    np.savez(file, x_train=pixels[:34], y_train=labels[:34], x_test=pixels[34:], y_test=labels[34:])
    return file


@pytest.fixture(scope="session")
def pretrained(npz: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of one epoch on those images; only to be read."""
    return small_run(npz, tmp_path_factory.mktemp("pretrained") / "run", train__epochs=1).path


@pytest.fixture(scope="session")
def unbroken(npz: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Three epochs of four steps: lines every 3 steps, kNN and a checkpoint after each epoch; only to be read."""
    return pretrain(settings_for(npz), tmp_path_factory.mktemp("unbroken") / "run", console=QUIET)


@pytest.fixture(scope="session")
def _stopped(npz: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 10, signal.SIGTERM)
        with pytest.raises(Interrupted):
            pretrain(settings_for(npz), folder, console=QUIET)
    return folder


@pytest.fixture
def stopped(_stopped: Path, tmp_path: Path) -> Path:
    """The same run stopped after step 10, with checkpoints of steps 8 and 10."""
    return shutil.copytree(_stopped, tmp_path / "run")


@pytest.fixture
def console() -> Console:
    """What is printed to it, `export_text` returns."""
    return Console(record=True, width=1000, file=Path(os.devnull).open("w"))


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    """26 images of 20 px in two class folders: three batches of 8 and two images left over."""
    return write_image_folder(tmp_path / "photos")


@pytest.fixture(scope="session")
def page_runs(tmp_path_factory: pytest.TempPathFactory, npz: Path) -> Path:
    """A folder with three finished runs on different data, to be put on pages; only to be read."""
    folder = tmp_path_factory.mktemp("pages")
    small_run(npz, folder / "arrays/run", "moco-v2", train__lr="auto", train__precision="auto")
    small_run(evil_folder(folder / "evil-images"), folder / "evil/run", data__canvas="auto")
    small_run(plain_folder(folder / "plain-images"), folder / "plain", train__batch_size=6, views__image_size=32)
    return folder


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """Runs `jcl ARGUMENTS` in an empty folder; gives exit code, standard output and standard error."""
    monkeypatch.setenv("COLUMNS", "200")
    work = tmp_path / "work"
    work.mkdir()
    start_forkserver()  # here, since it serves later tests too, and `work` is removed after this one
    monkeypatch.chdir(work)

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["jcl", *map(str, arguments)])
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


@pytest.fixture
def refused(call, tmp_path):
    """The one sentence with which a command is refused; nothing may be written or changed anywhere."""

    def run(*arguments: object, exit_code: int | None = None) -> str:
        before = snapshot(tmp_path)
        code, out, err = call(*arguments)
        assert code in ((1, 2) if exit_code is None else (exit_code,)) and out == "" and "Traceback" not in err
        assert err.startswith("Error: ") and err.count("\n") == 1 and err.rstrip()[-1] in ".?"
        assert snapshot(tmp_path) == before
        return err.removeprefix("Error: ").rstrip()

    return run
