"""Triton's interpreter runs the kernels on a CPU. It must be chosen before Triton is imported, hence the process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

KERNELS = ("core/test_fused_loss.py", "core/test_fused_norm.py", "views/test_kernels.py")


@pytest.mark.skipif(torch.cuda.is_available(), reason="these tests run on the GPU")
def test_the_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    files = [str(Path(__file__).parent / name) for name in KERNELS]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--noconftest", "-p", "no:cacheprovider", *files],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout
