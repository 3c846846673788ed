"""Where tests of Triton kernels run: on a GPU or, in `test_triton.py`, in Triton's interpreter."""

import os

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_kernels = pytest.mark.skipif(DEVICE.type == "cpu" and not INTERPRETED, reason="no CUDA device and no interpreter")
