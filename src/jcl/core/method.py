"""Algorithm 1: one training step of JCL and of the methods it is compared with.

All methods share one path: a query view and M' key views per image, a momentum encoder for the keys, a queue of past
keys as negatives. They differ in the loss, in how many keys they use and in whether gradients reach the keys.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from jcl.core.batchnorm import (
    group_batch_norm,
    pop_batch_stats,
    set_batch_norm_groups,
    unshuffle,
    update_running_stats,
)
from jcl.core.encoder import Encoder
from jcl.core.loss import contrastive_accuracy
from jcl.core.queue import KeyQueue
from jcl.core.registry import METHODS as METHODS
from jcl.core.registry import Method as Method
from jcl.core.registry import register as register
from jcl.distributed.group import ALONE, Ranks
from jcl.random import KEY_SHUFFLE, permutation

# Makes views of the batch: rows (n,) says of which image, numbers (n,) which view of it: 0 the query, 1..M' the keys,
# those above M' further queries.
ViewFunction = Callable[[Tensor, Tensor], Tensor]


class StepFigures(NamedTuple):
    """Metrics of a step, over the whole batch."""

    loss: float
    contrastive_accuracy: float  # 0..1, without the variance term
    feature_std: float  # mean standard deviation of the queries' coordinates; near 0 when features collapse
    positive_similarity: float  # mean q·mu
    key_variance: float  # mean qᵀΣq


class StepResult(NamedTuple):
    """Results of a step for the queries of one rank; they stay on the device."""

    loss: Tensor
    contrastive_accuracy: Tensor
    positive_similarity: Tensor
    key_variance: Tensor
    feature_mean: Tensor  # (d,) of the queries' coordinates
    feature_variance: Tensor  # (d,) around that mean: the sum of squares over the number of queries
    queries: int

    @torch.no_grad()
    def figures(self, ranks: Ranks = ALONE) -> Tensor:
        """The values of `StepFigures`, in that order, over the queries of all ranks, in one exchange."""
        means = [self.loss, self.contrastive_accuracy, self.positive_similarity, self.key_variance]
        mean, variance = self.feature_mean, self.feature_variance
        shared = ranks.average(torch.cat([torch.stack(means), mean, mean.square(), variance]))
        # The variance of all rows is that within the ranks and that between them.
        mean, squared_mean, within = shared[len(means) :].view(3, -1)
        between = (squared_mean - mean.square()).clamp_min(0.0)
        count = ranks.count * self.queries
        feature_std = ((within + between) * (count / max(count - 1, 1))).sqrt().mean()
        loss, accuracy, similarity, key_variance = shared[: len(means)]
        return torch.stack([loss, accuracy, feature_std, similarity, key_variance])


class ContrastiveLearner(nn.Module):
    """Query encoder f, key encoder g, queue Q and the training step.

    `bn_groups` splits queries and shuffled keys into that many batch-norm groups (ShuffleBN). `key_passes` sends the
    keys through their encoder in that many parts, each of whole groups, so that memory does not grow with M'. The paper
    has one query an image; `num_queries` of them, of different views, are all set against the same keys. On several
    `ranks` each has an equal share of the groups; the step is that of one process on all images of the batch.
    """

    def __init__(
        self,
        encoder: Encoder,
        method: Method,
        *,
        num_keys: int,
        num_queries: int = 1,
        temperature: float,
        queue_size: int,
        embedding_dim: int,
        key_momentum: float,
        bn_groups: int = 1,
        key_passes: int = 1,
        seed: int = 0,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__()
        if bn_groups % (key_passes * ranks.count):
            raise ValueError(
                f"{bn_groups} BN groups cannot be dealt evenly to {key_passes} passes on each of {ranks.count} ranks."
            )
        self.method = method
        self.loss = method.loss_function()
        self.num_keys = num_keys if method.several_keys else 1
        self.num_queries = num_queries
        self.temperature = temperature
        self.key_momentum = key_momentum
        self.key_passes = key_passes
        self.seed = seed
        self.ranks = ranks
        self.query_encoder = group_batch_norm(encoder) if bn_groups > ranks.count else encoder
        self.key_encoder = copy.deepcopy(self.query_encoder)
        self.key_encoder.requires_grad_(False)
        self.queue = KeyQueue(queue_size, embedding_dim)
        self.bn_groups = bn_groups
        set_batch_norm_groups(self.query_encoder, bn_groups // ranks.count)
        set_batch_norm_groups(self.key_encoder, bn_groups // (ranks.count * key_passes))

    def forward(
        self, views: ViewFunction, images: int, step: int | Tensor, covariance_scale: float | Tensor
    ) -> StepResult:
        """Algorithm 1 for one mini-batch; the caller back-propagates the loss and steps f.

        `images` is how many of the batch's images this rank has queries of: all N of them, or N/W of W ranks. Views are
        asked for by the image's row in the whole batch.
        """
        # The order is MoCo's: query, momentum update, keys. Since the query's forward pass changes no parameter, the
        # keys may as well be encoded before it: the results are the same, and what they need in between is free
        # again when the query's activations, kept for the backward pass, take their place. (Where f encodes the keys
        # too, only its running statistics tell the order.)
        self.update_key_encoder()
        order = permutation(
            self.seed, KEY_SHUFFLE, step, self.ranks.count * images * self.num_keys, self.queue.rows.device
        )
        made = self._views_in_turn(views, images, order)
        keys = self.encode_keys(made, order)
        query = self.encode_queries(made)
        # A copy, because the queue moves on below while the backward pass still needs these negatives.
        result = self.contrast(query, self.ranks.share(keys), self.queue.rows.clone(), covariance_scale)
        # The mean keys go in as they are, and only now: no query meets a key of its own image from this step.
        self.queue.enqueue(keys.mean(dim=1))
        return result

    def contrast(self, query: Tensor, keys: Tensor, negatives: Tensor, covariance_scale: float | Tensor) -> StepResult:
        """The method's loss and metrics of the features; several queries of an image share its keys."""
        if self.num_queries > 1:
            keys = keys.repeat_interleave(self.num_queries, dim=0)
        scale = {"covariance_scale": covariance_scale} if self.method.uses_covariance else {}
        loss = self.loss(query, keys, negatives, temperature=self.temperature, **scale)
        return _measured(loss, query.detach(), keys.detach(), negatives)

    def compile_parts(self) -> None:
        """Compile the encoders and the loss; the parameters keep their names."""
        self.query_encoder.compile(dynamic=False)
        self.key_encoder.compile(dynamic=False)
        self.contrast = torch.compile(self.contrast, dynamic=False)  # type: ignore[method-assign]

    @torch.no_grad()
    def update_key_encoder(self) -> None:
        """Move g towards f by exponential moving average: parameters only, all in one fused call.

        Buffers are left alone: the batch-norm statistics of g follow g's own batches.
        """
        own: list[Tensor] = list(self.key_encoder.parameters())
        ahead: list[Tensor] = list(self.query_encoder.parameters())
        torch._foreach_lerp_(own, ahead, 1.0 - self.key_momentum)

    def _views_in_turn(self, views: ViewFunction, images: int, order: Tensor) -> Iterator[Tensor]:
        """The views of this rank in the order of a step: the shuffled keys, pass after pass, then the queries.

        Where more keys an image than queries go in one pass, or fewer, the queries' views are made with theirs: a
        compiler of views then has one shape to prepare for, not two.
        """
        own = self.ranks.share(order)
        passes = 1 if self.method.gradient_through_keys else self.key_passes
        keys = [part.chunk(passes) for part in (own // self.num_keys, 1 + own % self.num_keys)]
        parts = [*zip(*keys, strict=True), self._queries_asked_for(images, order.device)]
        if passes == 1 and self.num_keys != self.num_queries:
            together = views(*(torch.cat(values) for values in zip(*parts, strict=True)))
            yield from torch.split(together, [len(rows) for rows, _ in parts])
        else:
            yield from (views(*part) for part in parts)

    def _queries_asked_for(self, images: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Rows and numbers of this rank's queries, image by image, so that BN groups do not depend on the ranks."""
        rows = self.ranks.rank * images + torch.arange(images, device=device)
        further = self.num_keys + torch.arange(self.num_queries, device=device)
        numbers = torch.where(further == self.num_keys, 0, further)
        return rows.repeat_interleave(self.num_queries), numbers.repeat(images)

    def encode_keys(self, made: Iterator[Tensor], order: Tensor) -> Tensor:
        """Encode all N·M' keys in a shuffled order, each rank its share, and restore the order: (N, M', d)."""
        if self.method.gradient_through_keys:
            # End to end: f encodes its own keys, so that gradients reach everything that made them.
            encoded = self._encode_with_gradient(made)
        else:
            encoded = self._encode_without_gradient(made)
        return unshuffle(self.ranks.gather(encoded), order).view(-1, self.num_keys, encoded.shape[1])

    @torch.no_grad()
    def _encode_without_gradient(self, made: Iterator[Tensor]) -> Tensor:
        encoded, seen = [], []
        for _ in range(self.key_passes):
            encoded.append(self.key_encoder(next(made)))
            seen.append(pop_batch_stats(self.key_encoder))
        update_running_stats(seen)
        return torch.cat(encoded)

    def _encode_with_gradient(self, made: Iterator[Tensor]) -> Tensor:
        encoded: Tensor = self.query_encoder(next(made))
        update_running_stats([pop_batch_stats(self.query_encoder)])
        return encoded

    def encode_queries(self, made: Iterator[Tensor]) -> Tensor:
        """Encode the queries of this rank, image by image in batch order: (N/W·Q, d)."""
        return self._encode_with_gradient(made)


@torch.no_grad()
def _measured(loss: Tensor, query: Tensor, keys: Tensor, negatives: Tensor) -> StepResult:
    similarities = torch.einsum("nd,nmd->nm", query, keys)
    variance, mean = torch.var_mean(query, dim=0, correction=0)
    return StepResult(
        loss=loss,
        contrastive_accuracy=contrastive_accuracy(query, keys, negatives),
        positive_similarity=similarities.mean(),
        key_variance=similarities.var(dim=1, correction=0).mean(),
        feature_mean=mean,
        feature_variance=variance,
        queries=len(query),
    )
