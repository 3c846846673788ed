"""Contrastive pre-training as a task of the trainer."""

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from jcl.core.method import StepMetrics
from jcl.data import BatchLoader, ImageBatch
from jcl.errors import DataError, OtherRankFailed
from jcl.runs.checkpoint import Progress
from jcl.settings.resolved import ResolvedSettings
from jcl.train.schedule import backbone_share, covariance_scale, key_momentum, learning_rate
from jcl.train.step import MAX_SKIPPED_IN_A_ROW, TrainingStep
from jcl.train.trainer import Trainer, TrainingTask


class PretrainTask(TrainingTask):
    """Algorithm 1 on the batches of a loader. The functions in `evaluate`, by kind of metrics, run every few epochs."""

    advice = "A lower --lr or a higher --temperature usually helps; --on-nan skip leaves out single steps."

    def __init__(
        self,
        settings: ResolvedSettings,
        step: TrainingStep,
        loader: BatchLoader,
        evaluate: Mapping[str, Callable[[], dict[str, float]]] | None = None,
    ) -> None:
        self.settings, self.training_step, self.loader = settings, step, loader
        self.evaluate = dict(evaluate or {})
        self.module, self.optimizer = step.learner, step.optimizer
        self.epochs, self.steps_per_epoch = settings.train.epochs, loader.steps_per_epoch
        self.batch_size = loader.batch_size
        self._scale = 0.0
        self._warned = False  # of an unreadable image

    def batches(self, epoch: int, start: int) -> Iterator[ImageBatch]:
        self._scale = covariance_scale(self.settings.method, epoch, self.epochs)
        return self.loader.epoch(epoch, start=start)

    def learning_rate(self, step: int) -> float:
        return learning_rate(self.settings.train, step, self.steps_per_epoch)

    def step(self, batch: ImageBatch, step: int, lr: float) -> Tensor:
        momentum = key_momentum(self.settings.method, step, self.epochs * self.steps_per_epoch)
        share = backbone_share(self.settings.train, step, self.steps_per_epoch)
        return self.training_step(batch, step, lr, self._scale, momentum, share)

    def metrics(self, progress: Progress) -> dict[str, float]:
        count = len(StepMetrics._fields)
        skipped = int(progress.window[count:].sum())  # empty unless `train.on_nan` is skip
        means = StepMetrics(*(progress.window[:count] / (progress.window_steps - skipped)).tolist())
        progress.skipped_steps += skipped
        metrics = means._asdict() | {
            "contrastive_accuracy": 100.0 * means.contrastive_accuracy,
            "queue_filled": float(self.training_step.learner.queue.filled()),
            "covariance_scale": self._scale,
        }
        if self.settings.train.on_nan == "skip":
            metrics["skipped_steps"] = progress.skipped_steps
        return metrics

    def problem(self) -> str | None:
        if self.training_step.skipped_in_a_row() < MAX_SKIPPED_IN_A_ROW:
            return None
        return f"At least {MAX_SKIPPED_IN_A_ROW} steps in a row were skipped because the loss was not finite"

    def warning(self) -> str | None:
        """The first unreadable image; all of them are counted and listed when training ends."""
        if self._warned or not self.loader.skipped:
            return None
        self._warned = True
        name, reason = next(iter(self.loader.skipped.items()))
        return f"Skipped {name}: {reason}."

    def before_stop(self) -> None:
        self._merge_skipped()

    def _merge_skipped(self) -> None:
        """Merge the unreadable images of all ranks, so that the first can list them."""
        for skipped in self.training_step.ranks.gather_objects(self.loader.skipped):
            self.loader.skipped.update(skipped)

    def between_epochs(self, trainer: Trainer) -> None:
        """Evaluate. The untrained network, or the weights at the start, are the baseline of all later results."""
        self._merge_skipped()
        epoch, every = trainer.progress.step // self.steps_per_epoch, self.settings.record.knn_every
        if epoch in (0, self.epochs) or (every and epoch % every == 0):
            self._measure(trainer)

    def _measure(self, trainer: Trainer) -> None:
        step = trainer.progress.step
        trainer.clock.lap()
        if self.evaluate:
            trainer.display.evaluating(step)
        for kind, evaluate in list(self.evaluate.items()):
            measured = trainer.record.newest.get(kind, {}).get("step") == step  # if training stopped right after it
            if trainer.ranks.any(trainer.ranks.first and measured):
                continue
            metrics, problem = {}, ""
            try:
                metrics = evaluate()
            except (DataError, OtherRankFailed) as error:
                problem = str(error)
            problem = next(filter(None, trainer.ranks.gather_objects(problem)), "")
            if problem:  # training itself does not need it
                del self.evaluate[kind]
                trainer.display.newest.pop("rankme", None)  # of an earlier epoch
                title = {"knn": "kNN", "quality": "RankMe"}.get(kind, kind)
                trainer.display.warn(f"{title} is skipped from now on: {problem}")
            else:
                first = trainer.record.first.get(kind, {"step": step} | metrics)
                if kind == "knn" and self.settings.model.init and first["step"] == 0:  # the weights at the start
                    metrics["start_knn_top1"] = first["knn_top1"]
                trainer.display.show(trainer.record.write(kind, step, self.epoch_at(step), metrics))
        if "knn" not in self.evaluate:
            trainer.display.report(step)
        trainer.clock.restart()
