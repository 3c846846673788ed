"""Train a run with resolved settings and opened data, and write its results."""

import contextlib
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from jcl.commands.run import Run, RunContext, class_accuracies, write_classes
from jcl.console import pluralize, shell_quote
from jcl.core.registry import METHODS
from jcl.data import BatchLoader, ImageData
from jcl.data.shards.fetch import without_secrets
from jcl.data.source import class_name, fingerprint
from jcl.distributed.device import PeakMemory
from jcl.distributed.group import fail_together
from jcl.errors import DataError, Interrupted, RunError, first_line
from jcl.evaluate.baselines import baseline_warning, compare_online
from jcl.evaluate.knn import KnnResult, online_knn
from jcl.export import backbone_info, save_backbone
from jcl.export.loading import initial_tensors, read_initial
from jcl.export.reading import WeightsFile
from jcl.runs.checkpoint import Progress, checkpoint_to_resume, load_checkpoint, load_tensors
from jcl.runs.folder import RunFolder
from jcl.runs.json_object import describe_differences
from jcl.runs.trackers import Tracker, open_tracker
from jcl.settings.resolved import Choice, ResolvedSettings
from jcl.settings.schema import affects_results, setting_names
from jcl.settings.values import values_of, with_values
from jcl.studies.distribution import online_quality
from jcl.train.build import build_learner, build_optimizer, run_view_recipe, step_options
from jcl.train.display import Display, collapse_warning, health
from jcl.train.pretrain import PretrainTask
from jcl.train.step import TrainingStep
from jcl.train.trainer import Trainer


class RunTraining:
    """The training of a run. Invalid settings raise as it is made, before anything is written."""

    def __init__(self, settings: ResolvedSettings, data: ImageData, context: RunContext) -> None:
        self.settings, self.data, self.context = settings, data, context
        train, device = settings.train, context.device
        self.learner, self.feature_width = build_learner(settings, device, context.ranks)
        self.loader = BatchLoader(
            data.train,
            batch_size=train.batch_size,
            canvas=settings.data.canvas,
            windows=settings.data.windows,
            seed=train.seed,
            workers=settings.data.workers,
            device=device,
            strict=settings.data.strict,
            max_failed_share=settings.data.max_failed_share,
            ranks=context.ranks,
            num_keys=self.learner.num_keys,
        )
        self.optimizer = build_optimizer(settings, self.learner, device)
        recipe, options = run_view_recipe(settings), step_options(settings, device)
        self.step = TrainingStep(self.learner, self.optimizer, recipe, train.seed, options)

    def run(self, folder: RunFolder, label: str | None = None, *, resumed: bool = False) -> Run:
        """Train, then write the backbone, the summary and the page."""
        settings, context = self.settings, self.context
        progress = self._restore(folder) if resumed else Progress(ranks=context.ranks.count)
        self._compare_with_checkpoint(progress)
        with contextlib.ExitStack() as opened:
            tracker = context.on_first(lambda: self._open_tracker(folder, progress, resumed))
            if tracker is not None:
                opened.enter_context(tracker)
            memory = PeakMemory(context.device)
            trainer, knn = self._train(folder, progress, label or settings.method.name, tracker, resumed)
            self._write_results(folder, trainer, knn, memory.read())
            if context.ranks.first and settings.record.report:
                self._write_page(folder)
            if tracker is not None:
                tracker.add_page(folder.report_file)
        return Run(folder.path)

    def _open_tracker(self, folder: RunFolder, progress: Progress, resumed: bool) -> Tracker | None:
        settings, log = self.settings, self.context.log
        if settings.record.track == "none":
            return None
        public = with_values(settings, {"data.location": without_secrets(settings.data.location)})
        name, path, run_id = settings.record.track, folder.path.resolve(), folder.identify(progress.run)
        return open_tracker(name, path, run_id, public, resumed=resumed, warn=log)

    def _train(
        self, folder: RunFolder, progress: Progress, label: str, tracker: Tracker | None, resumed: bool
    ) -> tuple[Trainer, KnnResult | None]:
        """Train to the last epoch; returns the trainer and the kNN after the last step, if it was measured."""
        settings, context, record = self.settings, self.context, self.settings.record
        ranks = context.ranks
        describe = partial(health, queue_size=settings.method.queue_size, embedding_dim=settings.model.embedding_dim)
        display = Display(context.console, label, describe, faster_options(settings))
        backbone = self.learner.query_encoder.backbone
        unreadable: dict[str, str] = {}  # images that only kNN reads
        measured: list[KnnResult] = []

        def after_each_batch(_done: int, _total: int) -> None:
            trainer.stop_evaluation()

        options = (settings, context.device, unreadable, after_each_batch)
        knn = online_knn(self.data, backbone, *options, ranks, measured.append)
        evaluate = {} if knn is None else {"knn": knn}
        evaluate["quality"] = online_quality(self.data.train, backbone, *options)
        trainer = Trainer(
            PretrainTask(settings, self.step, self.loader, evaluate),
            display,
            progress,
            ranks,
            log_every=record.log_every,
            save_every=record.checkpoint_every * self.loader.steps_per_epoch,
            save_seconds=60 * record.checkpoint_minutes,
        )
        try:
            with trainer.writing_to(folder, record.keep, tensorboard=record.tensorboard, tracker=tracker):
                trainer.run()
        finally:
            self.loader.close()
            if ranks.first and folder.checkpoints.exists():  # otherwise unusable data has left nothing behind
                folder.list_skipped(unreadable | self.loader.skipped, context.log, overwrite=not resumed)
        last = trainer.record.newest.get("knn", {}).get("step") == progress.step
        if knn is not None and ranks.any(last and not measured):  # resumed after the last evaluation
            with contextlib.suppress(DataError):
                knn()
        return trainer, measured[-1] if measured and last else None

    def _write_results(self, folder: RunFolder, trainer: Trainer, knn: KnnResult | None, peak_memory: int) -> None:
        """Write the backbone, the accuracy of each class and the summary, on the first rank."""
        ranks, info = self.context.ranks, backbone_info(self.settings, self.feature_width)
        with fail_together(ranks):
            if ranks.first:
                save_backbone(self.learner.query_encoder.backbone, info, folder.backbone_file)
                if knn is not None:
                    names = [class_name(self.data.train, label) for label in knn.classes]
                    write_classes(folder, class_accuracies(knn, names))
                # Last: the summary marks the run as finished.
                summary = self._write_summary(folder, trainer, peak_memory)
                for warning in self._final_warnings(summary, trainer.record.newest.get("train", {})):
                    self.context.log(f"Warning: {warning}")

    def _final_warnings(self, summary: dict[str, Any], last: dict[str, Any]) -> Iterator[str]:
        """What is wrong with a finished run, from its summary and its last line of metrics."""
        if skipped := summary.get("skipped_steps"):
            lost = f"{skipped:,} of {summary['steps']:,} steps were skipped"
            yield f"{lost} because the loss was not finite. Use a lower --lr."
        if warning := collapse_warning(last, self.settings.model.embedding_dim):
            yield warning
        if warning := baseline_warning("knn_top1", summary, "Train longer or on more images."):
            yield warning

    def _write_summary(self, folder: RunFolder, trainer: Trainer, peak_memory: int) -> dict[str, Any]:
        settings, record, progress = self.settings, trainer.record, trainer.progress
        train, *measured = (record.newest.get(kind, {}) for kind in ("train", "quality", "knn"))
        quality, knn = (line if line.get("step") == progress.step else {} for line in measured)  # of the last step
        summary: dict[str, Any] = {
            "method": settings.method.name,
            "data": settings.data.location,
            "seed": settings.train.seed,
            "epochs": settings.train.epochs,
            "steps": progress.step,
            "ranks": progress.ranks,
            "loss": train.get("loss"),
            "contrastive_accuracy": train.get("contrastive_accuracy"),
            "images_per_second": progress.step * settings.train.batch_size / progress.seconds,
            "seconds": progress.seconds,
            "peak_memory_bytes": peak_memory,
            **{name: value for name, value in (quality | knn).items() if name not in ("kind", "step", "epoch")},
        }
        if knn:
            summary["test_held_out"] = self.data.labeled_test is None
        if settings.train.on_nan == "skip":
            summary["skipped_steps"] = progress.skipped_steps
        summary |= compare_online(record.first.get("knn", {}), knn, initialized=bool(settings.model.init))
        folder.write_summary(summary)
        return summary

    def load_initial(self, weights: WeightsFile | None = None) -> list[str]:
        """Load `model.init` into both encoders, from the first rank, which returns what was loaded and what was not."""
        ranks, learner = self.context.ranks, self.learner
        tensors: dict[str, Tensor] = {}
        lines: list[str] = []
        with fail_together(ranks):
            if ranks.first and (found := weights or read_initial(self.settings)):
                tensors, lines = initial_tensors(found, self.settings, learner.query_encoder.backbone)
        tensors = ranks.broadcast(tensors)
        for encoder in (learner.query_encoder, learner.key_encoder):
            load_tensors(encoder.backbone, tensors)
        return lines

    def _restore(self, folder: RunFolder) -> Progress:
        """Load the newest good checkpoint; the first rank reads it and sends it to the others."""
        context, ranks = self.context, self.context.ranks
        path = context.on_first(lambda: checkpoint_to_resume(folder.checkpoints, context.log))
        received = ranks.broadcast(path.read_bytes() if path and ranks.count > 1 else b"")
        with tempfile.NamedTemporaryFile(suffix=".safetensors") as copy:
            if received and not ranks.first:
                copy.write(received)
                copy.flush()
                path = Path(copy.name)
            if path is None:  # the run stopped before its first checkpoint
                self.load_initial()
                return Progress(ranks=ranks.count)
            progress = load_checkpoint(path, self.learner, self.optimizer, context.device)
        if progress.ranks != ranks.count:
            progress.settings.pop("model.bn_groups", None)  # adapted to the number of ranks
        progress.ranks = ranks.count
        return progress

    def _compare_with_checkpoint(self, progress: Progress) -> None:
        """Print what has changed since the checkpoint was written, and raise if the run cannot continue with it."""
        names = [name for name in setting_names() if affects_results(name) and name not in ("recipe", "data.location")]
        before, now = progress.settings, values_of(self.settings, names)
        both = [name for name in names if name in before]  # versions may differ in the settings they have
        progress.settings = now
        if other := describe_differences({name: now[name] for name in both}, {name: before[name] for name in both}):
            self.context.log(f"Settings have changed since the checkpoint: {other}.")
        old, new = progress.steps_per_epoch, self.loader.steps_per_epoch
        if old not in (0, new):
            epoch, old_epoch = (f"{progress.step / steps:.3g}" for steps in (new, old))
            place = f"training and its learning rate continue at epoch {epoch} instead of {old_epoch}"
            self.context.log(f"An epoch now has {new:,} steps instead of {old:,}, so {place}.")
        progress.steps_per_epoch = new
        # Only the first rank writes checkpoints, so only it needs the fingerprints.
        self.context.on_first(lambda: self._check_images_and_steps(progress))

    def _check_images_and_steps(self, progress: Progress) -> None:
        before, progress.images = progress.images, {}
        for split, images in self.data.splits.items():
            progress.images[split] = found = fingerprint(images)
            if before.get(split, found) != found:
                self.context.log(f"These images have changed since the checkpoint: {images.description}.")
        epochs = self.settings.train.epochs
        if progress.step > (steps := epochs * progress.steps_per_epoch):
            beyond = f"beyond the {steps:,} steps of {pluralize(epochs, 'epoch')}"
            changed = "train.epochs, train.batch_size or the number of images has changed"
            raise RunError(f"The run is at step {progress.step:,}, {beyond}: {changed}. Undo it, or start a new run.")

    def machine_choices(self) -> list[Choice]:
        """What "auto" means for settings that depend on the machine."""
        device = self.context.device
        options, on_gpu = step_options(self.settings, device), device.type == "cuda"
        precision = str(options.precision).removeprefix("torch.")
        why = "faster on a GPU" if options.compiled else "Triton is not installed"
        choices = [
            Choice("train.device", str(device), "a GPU is available" if on_gpu else "no GPU is available"),
            Choice("train.precision", precision, "fastest safe choice on this device"),
            Choice("train.compile", options.compiled, why if on_gpu else "not worth it on a CPU"),
            Choice("train.cuda_graph", options.recorded, "faster on a GPU" if on_gpu else "needs a GPU"),
        ]
        return [each for each in choices if getattr(self.settings.train, each.name.partition(".")[2]) == "auto"]

    def _write_page(self, folder: RunFolder) -> None:
        """Write the page. The run counts as finished even if that fails."""
        try:
            from jcl.commands.report import write_report  # Matplotlib would make every command start a second later

            device = str(self.context.device)
            with self.context.console.status("writing the report"):
                write_report([folder.path], folder.report_file, device=device, data=self.data, force=True)
        except KeyboardInterrupt:
            again = f"write it with `jcl report {shell_quote(folder.path)}`"
            raise Interrupted(f"Stopped: the run is finished, only its report is missing; {again}.") from None
        except Exception as error:
            self.context.log(f"Could not write the report {folder.report_file}: {first_line(error)}.")


def faster_options(settings: ResolvedSettings) -> str:
    """Options that make this run faster, for a first try."""
    helps = {
        "fewer --epochs": True,
        "--image-size 96": settings.views.image_size > 96,
        "--backbone resnet18": settings.model.backbone not in ("tiny_cnn", "resnet18"),
        "--method moco-v2": METHODS[settings.method.name].several_keys,
    }
    return ", ".join(option for option, is_faster in helps.items() if is_faster)
