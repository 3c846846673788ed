"""The fused loss against float64; without a GPU `test_triton.py` runs these tests."""

import pytest
import torch
from torch.nn import functional as F

from jcl.core.loss import contrastive_metrics, joint_contrastive_loss, multi_key_loss
from kernel_tools import DEVICE, needs_kernels

pytest.importorskip("triton")


@pytest.mark.gpu
@needs_kernels
@pytest.mark.parametrize("scale", [None, 0.0, 4.0])
@pytest.mark.parametrize("temperature", [0.2, 0.02])
@pytest.mark.parametrize(("n", "m", "d", "k"), [(4, 1, 8, 16), (6, 5, 20, 1500), (3, 9, 128, 1024)])
def test_loss_metrics_and_gradient(n, m, d, k, temperature, scale):
    from jcl.core.fused_loss import contrast

    draw = torch.Generator().manual_seed(0)
    center = torch.randn(n, 1, d, generator=draw)
    query, keys = (F.normalize(center + torch.randn(n, count, d, generator=draw), dim=2) for count in (1, m))
    query, negatives = query[:, 0], 0.9 * F.normalize(torch.randn(k, d, generator=draw), dim=1)
    own = query.clone().to(DEVICE).requires_grad_()
    exact = query.double().requires_grad_()
    others = keys.double(), negatives.double()
    options = {"temperature": temperature} | ({} if scale is None else {"covariance_scale": scale})
    loss, metrics = contrast(own, keys.to(DEVICE), negatives.to(DEVICE), **options)
    wanted = (multi_key_loss if scale is None else joint_contrastive_loss)(exact, *others, **options)
    expected = [values.mean() for values in contrastive_metrics(exact, *others, **options)]
    (3 * loss).backward()
    (3 * wanted).backward()
    for one, other in zip([loss, *metrics], [wanted, *expected], strict=True):
        torch.testing.assert_close(one.double().cpu(), other.detach().double(), rtol=2e-5, atol=1e-6 / temperature)
    torch.testing.assert_close(own.grad.double().cpu(), exact.grad, rtol=2e-5, atol=5e-6 / temperature)


@pytest.mark.gpu
@needs_kernels
def test_a_query_that_is_not_finite_makes_the_loss_nan():
    from jcl.core.fused_loss import contrast

    rows = F.normalize(torch.randn(7, 8, generator=torch.Generator().manual_seed(0)), dim=1).to(DEVICE)
    query = rows[:2].clone()
    query[1, 3] = float("nan")
    loss, *_ = contrast(query, rows[:2, None], rows[2:], temperature=0.2, covariance_scale=4.0)
    assert loss.isnan()


@pytest.mark.gpu
@needs_kernels
def test_the_covariance_scale_may_be_a_tensor_and_no_gradient_is_asked_for():
    from jcl.core.fused_loss import contrast, fits

    rows = F.normalize(torch.randn(9, 8, generator=torch.Generator().manual_seed(0)), dim=1).to(DEVICE)
    values = rows[:2], rows[:4].view(2, 2, 8).flip(0), rows[4:]
    scale = torch.tensor(4.0, device=DEVICE)
    number, tensor = (contrast(*values, temperature=0.2, covariance_scale=value) for value in (4.0, scale))
    assert not number[0].requires_grad and all(map(torch.equal, number, tensor))
    assert fits(32, 128) and not fits(32, 2048)
