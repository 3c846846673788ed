"""The training step, Algorithm 1 of the paper, for JCL and the methods it is compared with.

All methods share one path: a query view and M' key views per image, a momentum encoder for the keys and a queue of
negatives. They differ in the loss, the number of keys and whether gradients flow through the keys.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from jcl.core.batchnorm import (
    Statistics,
    group_batch_norm,
    has_batch_norm,
    pop_batch_stats,
    set_batch_norm_groups,
    unshuffle,
    update_running_stats,
)
from jcl.core.blocks import checkpoint_blocks, draw_drop_paths
from jcl.core.encoder import Encoder, first_stages
from jcl.core.loss import contrastive_metrics, joint_contrastive_loss, multi_key_loss
from jcl.core.queue import KeyQueue
from jcl.core.registry import Method
from jcl.distributed.device import SideStream
from jcl.distributed.group import ALONE, Ranks
from jcl.random import KEY_SHUFFLE, permutation

# (rows (n,), numbers (n,)) -> views: `rows` are positions in the whole batch, `numbers` select the view of the image: 0
# is the query, 1..M' are the keys, and above M' are further queries. A symmetric method has views 0 and 1 only, both as
# queries and as keys. With `local=True` the views are small crops.
ViewFunction = Callable[..., Tensor]


class StepMetrics(NamedTuple):
    """Metrics of a step over the whole batch."""

    loss: float
    contrastive_accuracy: float  # 0..1
    feature_std: float  # mean over the coordinates of the queries; near 0 if features collapse
    positive_similarity: float  # mean qᵀμ
    key_variance: float  # mean qᵀΣq
    positive_share: float  # mean p₊, the positive's share of the softmax


class StepResult(NamedTuple):
    """Results for the queries of one rank, on the device."""

    loss: Tensor
    contrast: Tensor  # (4,): contrastive accuracy, and the means of qᵀμ, qᵀΣq and p₊
    features: Tensor  # (micro-batches, 2, d): mean and biased variance of the queries
    queries: int

    @classmethod
    def merged(cls, parts: Sequence[Self]) -> Self:
        """The results of a batch from those of its micro-batches."""
        if len(parts) == 1:
            return parts[0]
        losses, contrasts, features, queries = zip(*parts, strict=True)
        return cls(torch.stack(losses).mean(), torch.stack(contrasts).mean(0), torch.cat(features), sum(queries))

    @torch.no_grad()
    def metrics(self, ranks: Ranks = ALONE) -> Tensor:
        """The values of `StepMetrics` over all ranks, as one tensor, with one collective operation."""
        mean, variance = self.features.unbind(1)
        features = torch.cat([mean, mean.square(), variance], dim=1).mean(0)
        shared = ranks.average(torch.cat([self.loss[None], self.contrast, features]))
        loss, accuracy, others, features = torch.split(shared, [1, 1, 3, len(features)])
        # Total variance = variance within the micro-batches of all ranks + variance between them.
        mean, squared_mean, within = features.view(3, -1)
        between = (squared_mean - mean.square()).clamp_min(0.0)
        count = ranks.count * self.queries
        feature_std = ((within + between) * (count / max(count - 1, 1))).sqrt().mean()
        return torch.cat([loss, accuracy, feature_std[None], others])


class ContrastiveLearner(nn.Module):
    """Query encoder f, key encoder g, the queue and the training step.

    `bn_groups` is the number of batch norm groups of queries and of shuffled keys (ShuffleBN). To limit memory, the
    keys are encoded in `key_passes` passes and the queries in `micro_batches`, each of whole groups. There are two
    extensions of the paper: `num_queries` query views of an image share its keys, and `num_local_queries` small crops
    are further queries. Each of several `ranks` has an equal share of the groups, and together they make the step of
    one process on the whole batch.
    """

    def __init__(
        self,
        encoder: Encoder,
        method: Method,
        *,
        num_keys: int,
        num_queries: int = 1,
        num_local_queries: int = 0,
        temperature: float,
        queue_size: int,
        embedding_dim: int,
        key_momentum: float,
        bn_groups: int = 1,
        key_passes: int = 1,
        micro_batches: int = 1,
        checkpoint_activations: bool = False,
        seed: int = 0,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__()
        for parts, kind in ((key_passes, "passes"), (micro_batches, "micro-batches")):
            if has_batch_norm(encoder) and bn_groups % (parts * ranks.count):
                raise ValueError(
                    f"{bn_groups} BN groups cannot be split evenly into {parts} {kind} on each of {ranks.count} ranks."
                )
        self.method = method
        self.loss = method.loss_function()
        self.fused_contrast: Callable[..., tuple[Tensor, Tensor]] | None = None
        self.num_keys = num_keys if method.several_keys else 2 if method.symmetric else 1
        self.num_queries = 2 if method.symmetric else num_queries
        self.num_local_queries = num_local_queries
        self.temperature = temperature
        self.key_momentum = key_momentum
        self.key_passes = key_passes
        self.micro_batches = micro_batches
        self.seed = seed
        self.ranks = ranks
        # Grouped layers also let small crops and repeated forward passes leave the running statistics alone.
        grouped = bn_groups > ranks.count or num_local_queries > 0 or checkpoint_activations
        self.query_encoder = group_batch_norm(encoder) if grouped else encoder
        self.fusible = grouped and not checkpoint_activations
        self.key_encoder = copy.deepcopy(self.query_encoder)
        self.key_encoder.requires_grad_(False)
        if checkpoint_activations:
            checkpoint_blocks(self.query_encoder)
        self.queue = KeyQueue(queue_size, embedding_dim)
        self.frozen: list[nn.Module] = []
        set_batch_norm_groups(self.query_encoder, bn_groups // (ranks.count * micro_batches))
        set_batch_norm_groups(self.key_encoder, bn_groups // (ranks.count * key_passes))

    def freeze(self, count: int) -> None:
        """Freeze the first `count` stages of both backbones, with their batch norm statistics."""
        for encoder in (self.query_encoder, self.key_encoder):
            self.frozen += first_stages(encoder.backbone, count)
        for part in self.frozen:
            part.requires_grad_(False)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        for part in self.frozen:
            part.eval()
        return self

    def forward(
        self,
        views: ViewFunction,
        images: int,
        step: int | Tensor,
        covariance_scale: float | Tensor,
        key_momentum: float | Tensor | None = None,
        backward: Callable[[Tensor], None] | None = None,
    ) -> StepResult:
        """Algorithm 1 for one mini-batch; the caller updates f.

        `images` is the number of images whose queries this rank encodes: N/W of the N in the batch. `key_momentum`
        replaces the learner's own for this step. `backward` is called with the loss of each micro-batch, to free its
        memory; without it the caller back-propagates the loss of the result.
        """
        total_keys = self.ranks.count * images * self.num_keys
        order = permutation(self.seed, KEY_SHUFFLE, step, total_keys, self.queue.rows.device)
        batches = self._make_views(views, images, order, step)
        first = next(batches)  # may be one tensor with the views of the queries
        side = SideStream(self._side_device)
        # Keys before queries, unlike MoCo: the result is the same, and where they are not encoded side by side, peak
        # memory is lower, because the activations of the queries are not yet kept for the backward pass.
        with side.work():
            self.update_key_encoder(self.key_momentum if key_momentum is None else key_momentum)
            keys = self.encode_keys(itertools.chain([first], batches), order)
        # The backward pass needs these negatives after the queue has changed.
        negatives = self.queue.rows.clone()
        results: list[StepResult] = []
        statistics: list[Statistics] = []
        for own_keys in self.ranks.share(keys).chunk(self.micro_batches):
            query = self.encode_queries(batches, statistics)
            side.join()
            result = self.contrast(query, own_keys, negatives, covariance_scale)
            if backward is not None:
                backward(result.loss / self.micro_batches)
                result = result._replace(loss=result.loss.detach())
            results.append(result)
        update_running_stats(statistics)
        # Enqueue last, so that no query is compared with keys of its own image; mean keys are not normalized.
        self.queue.enqueue(keys.flatten(0, 1) if self.method.symmetric else keys.mean(dim=1))
        return StepResult.merged(results)

    def contrast(self, query: Tensor, keys: Tensor, negatives: Tensor, covariance_scale: float | Tensor) -> StepResult:
        """The loss of the method, and metrics of queries and keys."""
        counts = [count for count in (self.num_queries, self.num_local_queries) if count]
        if self.method.symmetric:
            keys = keys.flip(1).flatten(0, 1).unsqueeze(1)  # the key of the other view
        elif counts != [1]:
            keys = torch.cat([keys.repeat_interleave(count, dim=0) for count in counts])
        options: dict[str, Any] = {"temperature": self.temperature}
        if self.method.uses_covariance:
            options["covariance_scale"] = covariance_scale
        loss, metrics = (self.fused_contrast or self._contrast)(query, keys, negatives, **options)
        with torch.autocast(query.device.type, enabled=False):
            variance, mean = torch.var_mean(query.detach(), dim=0, correction=0)
        return StepResult(loss, metrics, torch.stack([mean, variance])[None], len(query))

    def _contrast(self, query: Tensor, keys: Tensor, negatives: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        loss = self.loss(query, keys, negatives, **options)
        metrics = contrastive_metrics(query.detach(), keys.detach(), negatives, **options)
        return loss, torch.stack([values.mean() for values in metrics])

    def compile_parts(self) -> None:
        """Use own kernels (on a GPU) or compile the encoders and the loss, without renaming parameters."""
        on_gpu = self.queue.rows.is_cuda
        for encoder in (self.query_encoder, self.key_encoder):
            if not (on_gpu and self.fusible and encoder.fuse()):
                encoder.compile(dynamic=False)
        if on_gpu and self.loss in (joint_contrastive_loss, multi_key_loss) and not self.method.gradient_through_keys:
            from jcl.core.fused_loss import contrast, fits  # Triton is only there for GPUs

            self.fused_contrast = contrast if fits(self.num_keys, self.queue.rows.shape[1]) else None
        if not self.fused_contrast:
            self.contrast = torch.compile(self.contrast, dynamic=False)  # type: ignore[method-assign]

    @torch.no_grad()
    def update_key_encoder(self, momentum: float | Tensor) -> None:
        """Exponential moving average of the parameters; the batch norm buffers of g follow its own batches."""
        key_parameters: list[Tensor] = list(self.key_encoder.parameters())
        query_parameters: list[Tensor] = list(self.query_encoder.parameters())
        if not isinstance(momentum, Tensor):
            torch._foreach_lerp_(key_parameters, query_parameters, 1.0 - momentum)
            return
        torch._foreach_sub_(key_parameters, query_parameters)
        torch._foreach_mul_(key_parameters, momentum)
        torch._foreach_add_(key_parameters, query_parameters)

    def _make_views(self, views: ViewFunction, images: int, order: Tensor, step: int | Tensor) -> Iterator[Tensor]:
        """Yield the views of this rank: shuffled keys, pass by pass, then queries and small crops of micro-batches."""
        own = self.ranks.share(order)
        through_keys = self.method.gradient_through_keys
        passes = 1 if through_keys else self.key_passes
        numbers = own % self.num_keys + (0 if self.method.symmetric else 1)
        keys = list(zip((own // self.num_keys).chunk(passes), numbers.chunk(passes), strict=True))
        rows = self.ranks.rank * images + torch.arange(images, device=order.device)
        queries = [self._query_views(part) for part in rows.chunk(self.micro_batches)]
        draw_drop_paths(self.query_encoder, self.seed, step, [*(keys if through_keys else []), *queries[0]])
        parts = [*keys, queries[0][0]]
        if passes == self.micro_batches == 1 and self.num_keys != self.num_queries:
            # One call, so that the jitter of channels, which is compiled, has one shape instead of two.
            together = views(*(torch.cat(values) for values in zip(*parts, strict=True)))
            yield from torch.split(together, [len(part_rows) for part_rows, _ in parts])
        else:
            yield from (views(*part) for part in parts)
        for number, (whole, *local) in enumerate(queries):
            if number > 0:
                draw_drop_paths(self.query_encoder, self.seed, step, [whole, *local])
                yield views(*whole)
            yield from (views(*part, local=True) for part in local)

    def _query_views(self, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The rows and numbers of the queries of these images, image by image, and of their small crops if any."""
        numbers = torch.arange(self.num_queries, device=rows.device)
        if not self.method.symmetric:
            numbers = torch.where(numbers == 0, 0, self.num_keys + numbers)
        parts = [numbers]
        if self.num_local_queries:
            parts.append(self.num_keys + self.num_queries + torch.arange(self.num_local_queries, device=rows.device))
        return [(rows.repeat_interleave(len(part)), part.repeat(len(rows))) for part in parts]

    @property
    def _side_device(self) -> torch.device | None:
        """The device to encode keys, queries and small crops side by side on; None if a batch is split up."""
        together = self.micro_batches == 1 and not self.method.gradient_through_keys
        return self.queue.rows.device if together else None

    def encode_keys(self, batches: Iterator[Tensor], order: Tensor) -> Tensor:
        """Encode all shuffled keys, each rank its share, and restore their order: (N, M', d)."""
        if self.method.gradient_through_keys:
            encoded = _encode(self.query_encoder, batches)
        else:
            with torch.no_grad():
                encoded = _encode(self.key_encoder, batches, self.key_passes)
        return unshuffle(self.ranks.gather(encoded), order).view(-1, self.num_keys, encoded.shape[1])

    def encode_queries(self, batches: Iterator[Tensor], statistics: list[Statistics]) -> Tensor:
        """Encode the queries of a micro-batch, image by image, then its small crops; keep batch norm statistics."""
        side = SideStream(self._side_device if self.num_local_queries else None, number=1)
        queries: Tensor = self.query_encoder(next(batches))
        statistics.append(pop_batch_stats(self.query_encoder))
        if not self.num_local_queries:
            return queries
        with side.work():
            local = self.query_encoder(next(batches))
        pop_batch_stats(self.query_encoder)  # evaluation sees whole images
        side.join()
        return torch.cat([queries, local])


def _encode(encoder: nn.Module, batches: Iterator[Tensor], passes: int = 1) -> Tensor:
    encoded, statistics = [], []
    for _ in range(passes):
        encoded.append(encoder(next(batches)))
        statistics.append(pop_batch_stats(encoder))
    update_running_stats(statistics)
    return torch.cat(encoded)
