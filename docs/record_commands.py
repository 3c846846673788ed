"""Run every command once, on pictures drawn by code, and write `commands.md` from what they print.

python docs/record_commands.py      (about ten minutes on two CPU cores)
"""

import datetime
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

DOCS = Path(__file__).resolve().parent
LONGEST = 24  # lines of output that are shown


@dataclass(frozen=True)
class Example:
    """A command, a sentence on what it is for, and whether its output is worth showing."""

    command: str
    says: str
    hidden: bool = False


GROUPS: dict[str, list[Example]] = {
    "Train": [
        Example(
            "jcl pretrain images.npz --recipe demo --epochs 4 --out runs/jcl",
            "Pre-train a backbone; labels are not used.",
        ),
        Example(
            "jcl pretrain images.npz --recipe demo --epochs 4 --method moco-v2 --out runs/moco",
            "A baseline through the same code.",
            hidden=True,
        ),
        Example("jcl resume runs/jcl", "Continue a run that was stopped; this one has finished."),
        Example(
            "jcl demo --help",
            "`jcl demo` trains MoCo v2 and JCL on drawn objects and compares them; the README shows its table.",
        ),
    ],
    "Evaluate": [
        Example("jcl knn runs/jcl -k 20 -k 200", "Nearest neighbours vote."),
        Example("jcl linear runs/jcl --per-class", "A grid of linear probes, chosen on a part of the training images."),
        Example(
            "jcl finetune runs/jcl --labels 10% --epochs 2 --out runs/tuned",
            "The whole network, on a balanced part of the labels.",
        ),
        Example("jcl embed runs/jcl images.npz -o features.npz", "Features with names."),
        Example("jcl neighbours query.png --index features.npz -k 4", "The nearest images."),
        Example(
            "jcl detect --task box --coco shapes --init random --backbone resnet18 --heads small --short-side 64 64 "
            "--iterations 8 --batch-size 4 --rois-per-image 32 --out runs/boxes",
            "A detector on COCO's format, here on eight drawn shapes and far too short.",
        ),
        Example("jcl detect-table runs/boxes", "Finished transfers side by side."),
        Example("jcl report runs/jcl runs/moco -o both.html", "One page for several runs."),
    ],
    "Study": [
        Example(
            "jcl ablate images.npz --recipe demo --epochs 1 --over num_keys=1,3 --out runs/keys",
            "Accuracy against a setting.",
        ),
        Example("jcl ablate-cell --help", "`jcl ablate-cell` carries out one cell, for job arrays."),
        Example(
            "jcl distribution runs/jcl runs/moco images.npz --images 200 --views-per-image 8",
            "How alike the views of an image are to each network.",
        ),
        Example("jcl bound runs/jcl images.npz", "How tight the loss's bound is, and how Gaussian keys are."),
        Example("jcl cost --keys 1,4", "Time and memory of a step."),
    ],
    "Exchange": [
        Example("jcl export runs/jcl --to safetensors -o backbone.safetensors", "A backbone as a file."),
        Example(
            "jcl import resnet18.pth -o imported.safetensors", "Somebody else's weights, here torchvision's ResNet-18."
        ),
    ],
    "Data and recipes": [
        Example("jcl check images.npz", "Look before training."),
        Example("jcl shard images.npz shards", "Pack images into tar files."),
        Example("jcl recipes", "What there is to choose from."),
    ],
}


def main() -> None:
    day = datetime.date.today()
    page = [
        "# Every command",
        "",
        "What each command prints, recorded by `python docs/record_commands.py` on 600 pictures drawn by code. The",
        "runs are far too short to learn much: this page shows what to type and what comes back. `jcl COMMAND --help`",
        f"lists all options. Recorded on {os.cpu_count()} cores ({platform.machine()}), {day:%-d %B %Y}.",
        "",
    ]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prepare(folder)
        for group, examples in GROUPS.items():
            page += [f"## {group}", ""]
            for example in examples:
                page += record(example, folder)
    (DOCS / "commands.md").write_text("\n".join(page).rstrip() + "\n", encoding="utf-8")


def prepare(folder: Path) -> None:
    """Pictures with labels, one of them as a file, eight shapes in COCO's format, and weights of another library."""
    import torch
    import torchvision

    from jcl.data.synthetic import drawn_objects

    pixels, labels = drawn_objects(600, 0)
    images = pixels.permute(0, 2, 3, 1).numpy()
    parts = {"x_train": images[:500], "y_train": labels[:500], "x_test": images[500:], "y_test": labels[500:]}
    np.savez(folder / "images.npz", **parts)
    Image.fromarray(images[550]).save(folder / "query.png")
    torch.manual_seed(0)
    torch.save(torchvision.models.resnet18().state_dict(), folder / "resnet18.pth")
    _shapes(folder / "shapes")


def _shapes(folder: Path) -> None:
    (folder / "images").mkdir(parents=True)
    images, annotations = [], []
    for number in range(1, 11):
        picture = Image.new("RGB", (80, 64), (30, 30, 30))
        left, top, side = 3 * number, 2 + number, 28
        ImageDraw.Draw(picture).rectangle((left, top, left + side, top + side), fill=(240, 200, 40))
        picture.save(folder / "images" / f"{number}.png")
        images.append({"id": number, "file_name": f"{number}.png", "width": 80, "height": 64})
        box = {"bbox": [left, top, side, side], "area": side**2, "iscrowd": 0}
        annotations.append({"id": number, "image_id": number, "category_id": 1, **box})
    content = {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "square"}]}
    (folder / "instances.json").write_text(json.dumps(content))


def record(example: Example, folder: Path) -> list[str]:
    """Run a command in the folder and put it with its output on the page; one that fails ends everything."""
    print(example.command, file=sys.stderr)
    words = example.command.split()
    done = subprocess.run(
        [str(Path(sys.executable).with_name("jcl")), *words[1:]],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        env=os.environ | {"COLUMNS": "100", "NO_COLOR": "1", "PYTHONWARNINGS": "ignore"},
    )
    if done.returncode:
        raise SystemExit(f"{example.command} ended with {done.returncode}:\n{done.stdout}")
    lines = [f"**`jcl {words[1]}`**: {example.says}", "", "```", *_wrapped(example.command), "```", ""]
    return lines if example.hidden else [*lines, "```text", *_shown(done.stdout, folder), "```", ""]


def _wrapped(command: str) -> list[str]:
    """Long commands over several lines, as one would type them."""
    lines, line = [], ""
    for part in re.split(r" (?=--)", command):
        if line and len(line) + len(part) > 96:
            lines.append(line + " \\")
            line = "  " + part
        else:
            line = f"{line} {part}" if line else part
    return [*lines, line]


def _shown(output: str, folder: Path) -> list[str]:
    lines = [_without(folder, line.rstrip()) for line in output.splitlines() if line.strip()]
    if len(lines) <= LONGEST:
        return lines
    return [*lines[: LONGEST - 4], "...", *lines[-3:]]


def _without(folder: Path, line: str) -> str:
    """The line with paths as seen from the folder; a table's cells keep their width."""
    shorter = line.replace(f"{folder}/", "").replace(str(folder), ".")
    if shorter != line and line.endswith("│"):
        shorter = shorter[:-1] + " " * (len(line) - len(shorter)) + "│"
    return shorter


if __name__ == "__main__":
    main()
