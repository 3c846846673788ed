"""Features in the plane: principal components and t-SNE, both deterministic."""

from __future__ import annotations

import torch
from torch import Tensor

from jcl.evaluate.neighbours import unit_rows


def principal_components(features: Tensor) -> Tensor:
    """The first two principal components (n, 2) of the unit rows of `features` (n, d), in float64.

    The sign of each is chosen so that its largest entry is positive.
    """
    rows = unit_rows(features.cpu())
    centred = rows - rows.mean(0)
    _, _, directions = torch.linalg.svd(centred, full_matrices=False)
    components = torch.zeros(len(rows), 2, dtype=torch.float64)
    found = centred @ directions[:2].T
    components[:, : found.shape[1]] = found
    largest = components.gather(0, components.abs().argmax(0, keepdim=True))
    return components * torch.where(largest < 0, -1.0, 1.0)


def tsne(features: Tensor, perplexity: float = 30.0) -> Tensor | None:
    """Exact t-SNE (n, 2) of the unit rows of `features` (n, d), for a few hundred rows.

    None if scikit-learn is not installed or there are fewer than five rows.
    """
    try:
        from sklearn.manifold import TSNE
    except ImportError:
        return None
    count, start = len(features), principal_components(features)
    if count < 5:
        return None
    start *= 1e-4 / max(float(start[:, 0].std()), 1e-12)  # scikit-learn's own start is NaN if all rows are equal
    model = TSNE(
        perplexity=min(perplexity, (count - 1) / 3), init=start.numpy(), method="exact", max_iter=400, random_state=0
    )
    return torch.from_numpy(model.fit_transform(unit_rows(features.cpu()).numpy()))
