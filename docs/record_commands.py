"""Run the commands of `commands.md` in order, on synthetic images, and update the recorded output on the page.

    python docs/record_commands.py      (about ten minutes on two CPU cores)

A block of text below a block with one command is that command's output. To show another output, add an empty block.
"""

import datetime
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torchvision
from PIL import Image, ImageDraw

from jcl.data import drawn_objects

PAGE = Path(__file__).resolve().parent / "commands.md"
MAX_LINES = 16  # of output shown per command
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def main() -> None:
    output = ""

    def update(block: re.Match[str]) -> str:
        nonlocal output
        language, content = block.groups()
        if language == "":
            lines = re.sub(r"\\\n\s*", "", content).splitlines()
            output = "".join(run(line, folder) for line in lines)
            return block[0]
        return f"```{language}\n{output}```"

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prepare(folder)
        page = BLOCK.sub(update, PAGE.read_text(encoding="utf-8"))
    machine = f"{os.cpu_count()} cores ({platform.machine()}), {datetime.date.today():%-d %B %Y}"
    PAGE.write_text(re.sub(r"(?<=recorded on )[^.]*", machine, page), encoding="utf-8")


def run(line: str, folder: Path) -> str:
    """Run a command in the folder and return its output, shortened; stop if it fails."""
    print(line, file=sys.stderr)
    completed = subprocess.run(
        f"{shlex.quote(sys.executable)} -m {line}",
        shell=True,  # for output that a command writes to a file with >
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        env=os.environ | {"COLUMNS": "100", "NO_COLOR": "1", "PYTHONWARNINGS": "ignore"},
    )
    if completed.returncode:
        raise SystemExit(f"{line} exited with {completed.returncode}:\n{completed.stdout}")
    text = completed.stdout.replace(f"{folder}/", "").replace(str(folder), ".")
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    if len(lines) > MAX_LINES:
        lines = [*lines[: MAX_LINES - 3], "...", *lines[-2:]]
    return "".join(f"{line}\n" for line in lines)


def prepare(folder: Path) -> None:
    """Write the files that the commands read."""
    pixels, labels = drawn_objects(600, 0)
    images = pixels.permute(0, 2, 3, 1).numpy()
    parts = {"x_train": images[:500], "y_train": labels[:500], "x_test": images[500:], "y_test": labels[500:]}
    np.savez(folder / "images.npz", **parts)
    Image.fromarray(images[550]).save(folder / "query.png")
    torch.manual_seed(0)
    torch.save(torchvision.models.resnet18().state_dict(), folder / "resnet18.pth")
    write_squares(folder / "shapes")


def write_squares(folder: Path) -> None:
    """Write ten images with a square each, annotated as COCO does."""
    (folder / "images").mkdir(parents=True)
    images, annotations = [], []
    for number in range(1, 11):
        image = Image.new("RGB", (80, 64), (30, 30, 30))
        left, top, side = 3 * number, 2 + number, 28
        ImageDraw.Draw(image).rectangle((left, top, left + side, top + side), fill=(240, 200, 40))
        image.save(folder / "images" / f"{number}.png")
        images.append({"id": number, "file_name": f"{number}.png", "width": 80, "height": 64})
        box = {"bbox": [left, top, side, side], "area": side**2, "iscrowd": 0}
        annotations.append({"id": number, "image_id": number, "category_id": 1, **box})
    content = {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "square"}]}
    (folder / "instances.json").write_text(json.dumps(content))


if __name__ == "__main__":
    main()
