"""What a checkpoint costs training: a learner with ResNet-50 and a queue of 65,536 keys, saved while it trains.

    python benchmarks/checkpoint.py [--device cuda] [--on-nan skip] [--folder DISK] [--json FILE]

Training waits for the snapshot; the rest (arrival of the copies, checksum, writing, reading back) happens in the
background, where it can still take time away from training. Both are measured: `blocked` is how long the call takes
that asks for a checkpoint, `lost` how much longer training takes from that call until the checkpoint is there than as
many steps take without. The limit is that of the time lost at the default interval: 1 % of training.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from machine import device_name, save

from jcl.data import ImageBatch
from jcl.runs.checkpoint import Progress, list_checkpoints
from jcl.runs.saver import CheckpointSaver
from jcl.settings.recipes import build_settings
from jcl.settings.resolve import resolve
from jcl.settings.resolved import DataFacts, ResolvedSettings
from jcl.settings.schema import RecordSettings, Settings
from jcl.train.build import build_learner, build_optimizer, run_view_recipe, step_options
from jcl.train.step import STEPS_BEFORE_RECORDING, TrainingStep

LIMIT_SHARE = 0.01
SIZES = {"cpu": {"batch_size": 8, "image_size": 64}, "cuda": {"batch_size": 256, "image_size": 224}}


def main() -> None:
    arguments = parse_arguments()
    device = torch.device(arguments.device)
    settings = case_settings(device, arguments.on_nan)
    learner, _ = build_learner(settings, device)
    optimizer = build_optimizer(settings, learner, device)
    step = TrainingStep(learner, optimizer, run_view_recipe(settings), 0, step_options(settings, device))
    trainer = Trainer(step, random_batch(settings, device))
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        figures = measure(trainer, Path(folder), arguments.repeats)
    minutes = RecordSettings().checkpoint_minutes
    figures |= {"interval_minutes": minutes, "lost_share": max(0.0, figures["lost_seconds"]) / (60 * minutes)}
    figures |= {"limit_share": LIMIT_SHARE, "ratio": figures["lost_share"] / LIMIT_SHARE}
    report(figures, settings, device)
    save({"on_nan": arguments.on_nan, **figures}, arguments.json, device)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--on-nan", default="stop", choices=["stop", "skip"], help="which kind of step is timed")
    parser.add_argument("--repeats", type=int, default=5, help="checkpoints; the medians count")
    parser.add_argument("--folder", type=Path, help="write into a temporary folder here")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    return parser.parse_args()


def case_settings(device: torch.device, on_nan: str) -> ResolvedSettings:
    """The paper's learner; on a CPU with small batches of small images, which its state does not depend on."""
    size = SIZES[device.type]
    values = {
        "train.batch_size": size["batch_size"],
        "views.image_size": size["image_size"],
        "data.canvas": size["image_size"],
        "model.bn_groups": 1 if device.type == "cpu" else "auto",
        "train.device": device.type,
        "train.on_nan": on_nan,
    }
    settings = build_settings("imagenet-paper", values=values)
    return resolve(settings, DataFacts(images=1_000_000, short_side=size["image_size"], decoded=True))[0]


def random_batch(settings: Settings, device: torch.device) -> ImageBatch:
    count, canvas = settings.train.batch_size, settings.data.canvas
    assert isinstance(count, int) and isinstance(canvas, int)
    pixels = torch.randint(0, 256, (count, 3, canvas, canvas), dtype=torch.uint8, device=device)
    return ImageBatch(pixels, torch.full((count, 2), canvas, device=device), torch.arange(count, device=device))


class Trainer:
    """Steps on one batch, timed from the host until the device is done."""

    def __init__(self, step: TrainingStep, batch: ImageBatch) -> None:
        self.step, self.batch = step, batch
        self.progress = Progress()
        self.train(STEPS_BEFORE_RECORDING + 3)

    def train(self, steps: int) -> float:
        """The seconds that this many steps take."""
        start = time.perf_counter()
        for _ in range(steps):
            self.advance()
        self.synchronize()
        return time.perf_counter() - start

    def train_during(self, saver: CheckpointSaver) -> tuple[float, int, float]:
        """Start a checkpoint while a step runs, and train until it is written.

        Returns the seconds that training was blocked, the number of steps, and the seconds in all.
        """
        start = time.perf_counter()
        self.advance()
        asked = time.perf_counter()
        saver.start(self.step.learner, self.step.optimizer, self.progress)
        blocked, steps = time.perf_counter() - asked, 1
        while saver.busy:
            self.advance()
            steps += 1
            self.synchronize()  # or steps would still be queued long after the checkpoint is written
        self.synchronize()
        return blocked, steps, time.perf_counter() - start

    def advance(self) -> None:
        self.progress.window = self.step(self.batch, self.progress.step, 1e-3, 1.0).clone()
        self.progress.step += 1

    def synchronize(self) -> None:
        if self.step.options.device.type == "cuda":
            torch.cuda.synchronize()


def measure(trainer: Trainer, folder: Path, repeats: int) -> dict[str, float]:
    """Medians over `repeats` checkpoints after one that is not counted, which gets the pinned memory."""
    blocked, lost, during, alone = [], [], [], []
    with CheckpointSaver(folder, keep=1, warn=print) as saver:
        for _ in range(repeats + 1):
            asking, steps, seconds = trainer.train_during(saver)
            saver.wait()
            usual = trainer.train(steps)
            blocked.append(asking)
            lost.append(seconds - usual)
            during.append(seconds)
            alone.append(usual / steps)
        size = list_checkpoints(folder)[-1].stat().st_size
    return {
        "checkpoint_bytes": size,
        "step_seconds": statistics.median(alone[1:]),
        "first_blocked_seconds": blocked[0],
        "blocked_seconds": statistics.median(blocked[1:]),
        "background_seconds": statistics.median(during[1:]),
        "lost_seconds": statistics.median(lost[1:]),
    }


def report(figures: dict[str, float], settings: Settings, device: torch.device) -> None:
    sizes = f"batch {settings.train.batch_size}, {settings.views.image_size} px"
    print(f"{settings.model.backbone}, {sizes}, on {device_name(device)}")
    print(f"{'a step':<34}{1000 * figures['step_seconds']:>10.1f} ms")
    print(f"{'a checkpoint':<34}{figures['checkpoint_bytes'] / 2**20:>10.0f} MiB")
    print(f"{'training blocked, first time':<34}{1000 * figures['first_blocked_seconds']:>10.1f} ms")
    print(f"{'training blocked':<34}{1000 * figures['blocked_seconds']:>10.1f} ms")
    print(f"{'until the checkpoint is there':<34}{1000 * figures['background_seconds']:>10.1f} ms")
    print(f"{'training time lost':<34}{1000 * figures['lost_seconds']:>10.1f} ms")
    share = 100 * figures["lost_share"]
    print(
        f"every {figures['interval_minutes']:g} minutes: {share:.3f} % of training; of the limit {figures['ratio']:.2f}"
    )


if __name__ == "__main__":
    main()
