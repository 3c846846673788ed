"""What a figure was measured on, and the file it is written to."""

import datetime
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from jcl.runs.atomic import write_atomically


def device_name(device: torch.device) -> str:
    """The GPU, or the number of threads on a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def described(device: torch.device | str) -> dict[str, Any]:
    """Hardware, versions, date and command: what a reader needs to judge a figure or to repeat it."""
    on_gpu = torch.device(device).type == "cuda"
    return {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "cpu": f"{os.cpu_count()} cores, {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def save(figures: dict[str, Any], path: Path | None, device: torch.device | str) -> None:
    """Write the figures with what they were measured on, if a file was asked for."""
    if path is not None:
        text = json.dumps({"measured_on": described(device), **figures}, indent=2) + "\n"
        write_atomically(path, text.encode(), follow_links=True)
