"""Contrastive losses as functions and as modules.

Shapes: `query` (N, d), `keys` (N, M, d), `key` (N, d), `negatives` (K, d). **Queries and keys must be unit vectors**
(`torch.nn.functional.normalize(x, dim=-1)`); negatives may be shorter, because JCL enqueues mean keys without
normalizing them. On a CPU, queries of another length raise an error and longer keys a warning; on a GPU they are not
checked, since that would synchronize with it. Every loss is computed in at least float32.
"""

import math
import warnings
from typing import Literal

import torch
from torch import Tensor, nn

Reduction = Literal["mean", "sum", "none"]
_NORMALIZE = "apply torch.nn.functional.normalize(..., dim=-1) first"
_UNIT_TOLERANCE = 0.01  # of the norm of a row, more than rounding to 16 bits changes


def joint_contrastive_loss(
    query: Tensor,
    keys: Tensor,
    negatives: Tensor,
    *,
    temperature: float = 0.2,
    covariance_scale: float | Tensor = 4.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """JCL loss, Eq. 8 of the paper: an upper bound on InfoNCE with infinitely many positive keys.

        loss = log[ exp(qᵀμ/τ + λ/(2τ²) qᵀΣq) + Σ_j exp(qᵀn_j/τ) ] - qᵀμ/τ

    μ and Σ are the mean and the biased covariance of an image's M keys k_m. Since qᵀμ is the mean of the similarities
    qᵀk_m and qᵀΣq their variance, Σ (d, d) is never computed. With M = 1 the variance is zero and this is the loss of
    MoCo.

    Args:
        query: (N, d), unit rows.
        keys: (N, M, d), M unit rows for each query; they should carry no gradient.
        negatives: (K, d), for example `KeyQueue.rows`; rows may be shorter than unit length.
        temperature: τ.
        covariance_scale: λ, a number or a tensor (N,).
        reduction: "mean" or "sum" over the queries, or "none" for the losses (N,).
    """
    query, keys, negatives = _checked(query, keys, negatives, temperature)
    # The value of a tensor is not checked, because that would synchronize with the device.
    if not isinstance(covariance_scale, Tensor) and not 0 <= covariance_scale < math.inf:
        raise ValueError(f"covariance_scale must be finite and not negative, got {covariance_scale}.")
    # A shape of (N, 1) would broadcast to all pairs of images.
    if isinstance(covariance_scale, Tensor) and covariance_scale.shape not in ((), (1,), query.shape[:1]):
        raise ValueError(
            f"covariance_scale must be a number or have the shape ({query.shape[0]},), "
            f"got {tuple(covariance_scale.shape)}."
        )
    with torch.autocast(query.device.type, enabled=False):
        similarities = _similarities(query, keys)
        q_mu = similarities.mean(dim=1) / temperature
        q_sigma_q = similarities.var(dim=1, correction=0) / temperature**2
        negative = _log_sum_negatives(query, negatives, temperature)
        return _reduce(torch.logaddexp(q_mu + covariance_scale / 2 * q_sigma_q, negative) - q_mu, reduction)


def multi_key_loss(
    query: Tensor, keys: Tensor, negatives: Tensor, *, temperature: float = 0.2, reduction: Reduction = "mean"
) -> Tensor:
    """InfoNCE of each (query, key) pair, averaged over the M keys, Eq. 3.

    `query` (N, d) and `keys` (N, M, d) have unit rows; the arguments are those of `joint_contrastive_loss`.
    """
    query, keys, negatives = _checked(query, keys, negatives, temperature)
    with torch.autocast(query.device.type, enabled=False):
        positives = _similarities(query, keys) / temperature
        negative = _log_sum_negatives(query, negatives, temperature)
        return _reduce((torch.logaddexp(positives, negative[:, None]) - positives).mean(dim=1), reduction)


def info_nce_loss(
    query: Tensor, key: Tensor, negatives: Tensor, *, temperature: float = 0.2, reduction: Reduction = "mean"
) -> Tensor:
    """InfoNCE with one positive key, Eq. 1: the loss of MoCo.

    `query` and `key` (N, d) have unit rows; the other arguments are those of `joint_contrastive_loss`.
    """
    return multi_key_loss(query, key.unsqueeze(1), negatives, temperature=temperature, reduction=reduction)


@torch.no_grad()
def contrastive_metrics(
    query: Tensor,
    keys: Tensor,
    negatives: Tensor,
    *,
    temperature: float = 0.2,
    covariance_scale: float | Tensor = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Metrics of each query, (N,): whether its mean key is closer than every negative (0 or 1), qᵀμ, qᵀΣq and p₊.

    p₊ is the positive's share of the softmax, which weights the attraction to the keys by 1 - p₊. It includes the
    covariance term of `joint_contrastive_loss`; the others do not depend on the scale.
    """
    with torch.autocast(query.device.type, enabled=False):
        variance, mean = torch.var_mean(_similarities(query, keys), dim=1, correction=0)
        positive = mean / temperature + covariance_scale / 2 * variance / temperature**2
        share = torch.sigmoid(positive - _log_sum_negatives(query, negatives, temperature))
        return (mean > (query @ negatives.T).amax(dim=1)).float(), mean, variance, share


class _Loss(nn.Module):
    def __init__(self, temperature: float = 0.2, reduction: Reduction = "mean") -> None:
        super().__init__()
        self.temperature = temperature
        self.reduction: Reduction = reduction

    def extra_repr(self) -> str:
        return f"temperature={self.temperature:g}, reduction={self.reduction!r}"


class MultiKeyLoss(_Loss):
    """`multi_key_loss` as a module: call it with query (N, d), keys (N, M, d) and negatives (K, d)."""

    def forward(self, query: Tensor, keys: Tensor, negatives: Tensor) -> Tensor:
        return multi_key_loss(query, keys, negatives, temperature=self.temperature, reduction=self.reduction)


class InfoNCELoss(_Loss):
    """`info_nce_loss` as a module: call it with query (N, d), key (N, d) and negatives (K, d)."""

    def forward(self, query: Tensor, key: Tensor, negatives: Tensor) -> Tensor:
        return info_nce_loss(query, key, negatives, temperature=self.temperature, reduction=self.reduction)


class JointContrastiveLoss(_Loss):
    """`joint_contrastive_loss` as a module: call it with query (N, d), keys (N, M, d) and negatives (K, d)."""

    def __init__(self, temperature: float = 0.2, covariance_scale: float = 4.0, reduction: Reduction = "mean") -> None:
        super().__init__(temperature, reduction)
        self.covariance_scale = covariance_scale

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, covariance_scale={self.covariance_scale:g}"

    def forward(self, query: Tensor, keys: Tensor, negatives: Tensor) -> Tensor:
        constants = {"temperature": self.temperature, "covariance_scale": self.covariance_scale}
        return joint_contrastive_loss(query, keys, negatives, **constants, reduction=self.reduction)


def _similarities(query: Tensor, keys: Tensor) -> Tensor:
    """qᵀk_m: (N, d), (N, M, d) -> (N, M)."""
    return torch.bmm(keys, query.unsqueeze(2)).squeeze(2)


def _log_sum_negatives(query: Tensor, negatives: Tensor, temperature: float) -> Tensor:
    """log Σ_j exp(qᵀn_j/τ): (N,)."""
    return torch.logsumexp(query @ negatives.T / temperature, dim=1)


def _reduce(losses: Tensor, reduction: Reduction) -> Tensor:
    if reduction == "mean":
        return losses.mean()
    if reduction == "sum":
        return losses.sum()
    if reduction == "none":
        return losses
    raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}.")


def _check_unit_rows(query: Tensor, keys: Tensor) -> None:
    """Raise unless queries are unit vectors (zeros and NaN of a broken network pass); warn of keys that are longer."""
    if not len(query):
        return
    norms = torch.linalg.vector_norm(query, dim=-1)
    if bool((((norms - 1).abs() > _UNIT_TOLERANCE) & (norms > 0)).any()):
        found = f"{float(norms.min()):.3g} to {float(norms.max()):.3g}"
        raise ValueError(f"query must have unit rows, but their norms are {found}; {_NORMALIZE}.")
    if (longest := float(torch.linalg.vector_norm(keys, dim=-1).max())) > 1 + _UNIT_TOLERANCE:
        warnings.warn(f"keys should have unit rows, but one has the norm {longest:.3g}; {_NORMALIZE}.", stacklevel=4)


def _checked(
    query: Tensor, keys: Tensor, negatives: Tensor, temperature: float | Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Check the shapes and convert the inputs to at least float32."""
    if not isinstance(temperature, Tensor) and not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be positive and finite, got {temperature}.")
    if isinstance(temperature, Tensor) and temperature.shape not in ((), (1,)):
        raise ValueError(f"temperature must be a number, got a tensor of shape {tuple(temperature.shape)}.")
    dimensions_fit = query.ndim == 2 and keys.ndim == 3 and negatives.ndim == 2
    if not (dimensions_fit and keys.shape[::2] == query.shape and negatives.shape[1] == query.shape[1]):
        raise ValueError(
            "expected query (N, d), keys (N, M, d) and negatives (K, d), "
            f"got {tuple(query.shape)}, {tuple(keys.shape)} and {tuple(negatives.shape)}."
        )
    if keys.shape[1] == 0:
        raise ValueError("expected at least one key per image, got M = 0.")
    common = torch.promote_types(torch.float32, torch.promote_types(query.dtype, keys.dtype))
    if query.device.type == "cpu" and not torch.compiler.is_compiling():
        _check_unit_rows(query.detach().to(common), keys.detach().to(common))
    return query.to(common), keys.to(common), negatives.to(common)
