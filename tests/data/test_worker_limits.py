"""Decoding processes where the system does not allow them: few open files, no space in /dev/shm, a daemon as parent."""

import multiprocessing
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from jcl.data.folder import open_folder
from jcl.data.loader import read_all
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


@pytest.mark.parametrize(
    "limit", ["ulimit -n 32", pytest.param("mount -t tmpfs -o nr_inodes=1 tmpfs /dev/shm", marks=pytest.mark.slow)]
)
def test_a_limit_of_the_system_is_one_sentence(tmp_path: Path, limit: str):
    photos = write_image_folder(tmp_path / "photos", 8)
    isolated = ["unshare", "--mount"] if limit.startswith("mount") else []
    if isolated and (shutil.which("unshare") is None or subprocess.run([*isolated, "true"], check=False).returncode):
        pytest.skip("mounting is not permitted")
    command = [*isolated, "sh", "-c", f'{limit} && exec "$@"', "sh", sys.executable, "-c", READ, str(photos)]
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
