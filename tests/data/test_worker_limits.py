"""Decoding processes where the system does not allow them: few open files, no space in /dev/shm, a daemon as parent."""

import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from jcl.data.folder import open_folder
from jcl.data.loader import read_all
from jcl.errors import DataError
from small_runs import write_image_folder

READ = """
import sys
from pathlib import Path
from jcl.data.folder import open_folder
from jcl.data.loader import read_all
from jcl.errors import DataError
try:
    print(sum(map(len, read_all(open_folder(Path(sys.argv[1])).train, canvas=8, batch_size=4, workers=8))))
except DataError as error:
    print(error)
"""


def test_too_few_open_files_are_one_sentence(tmp_path: Path):
    photos = open_folder(write_image_folder(tmp_path / "photos", 8)).train
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.open(os.devnull, os.O_RDONLY)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 12, hard))
        with pytest.raises(DataError, match=r"data\.workers=0"):
            list(read_all(photos, canvas=8, batch_size=4, workers=8))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(lowest_free)
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_no_space_in_shared_memory_is_one_sentence(tmp_path: Path):
    photos, isolated = write_image_folder(tmp_path / "photos", 8), ["unshare", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*isolated, "true"], check=False).returncode:
        pytest.skip("mounting is not permitted")
    mount = 'mount -t tmpfs -o nr_inodes=1 tmpfs /dev/shm && exec "$@"'
    command = [*isolated, "sh", "-c", mount, "sh", sys.executable, "-c", READ, str(photos)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 0 and ended.stderr == "", ended.stderr
    assert ended.stdout.count("\n") == 1 and "data.workers=0" in ended.stdout


def _count(folder: Path, found: "multiprocessing.SimpleQueue[int]") -> None:
    torch.set_num_threads(1)
    found.put(sum(map(len, read_all(open_folder(folder).train, canvas=8, batch_size=4, workers=2))))


def test_a_daemon_decodes_by_itself(tmp_path: Path):
    context = multiprocessing.get_context("fork")
    found = context.SimpleQueue()
    process = context.Process(target=_count, args=(write_image_folder(tmp_path / "photos", 8), found), daemon=True)
    process.start()
    process.join(60)
    assert process.exitcode == 0 and found.get() == 8
