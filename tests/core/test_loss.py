import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import jcl
from jcl.core.loss import InfoNCELoss, JointContrastiveLoss, MultiKeyLoss, contrastive_metrics

NAN, INFINITY = float("nan"), float("inf")
CASES = [(3, 1, 4, 5), (4, 2, 8, 16), (6, 5, 16, 7), (2, 9, 3, 33)]  # N, M, d, K


def unit_rows(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    rows = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return F.normalize(rows, dim=-1).to(dtype)


def inputs(n: int, m: int, d: int, k: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    negatives = unit_rows(k, d, seed=seed + 2, dtype=dtype) * torch.linspace(0.3, 1.0, k, dtype=dtype)[:, None]
    return [unit_rows(n, d, seed=seed, dtype=dtype), unit_rows(n, m, d, seed=seed + 1, dtype=dtype), negatives]


def joint_oracle(query: Tensor, keys: Tensor, negatives: Tensor, temperature: float, scale: float) -> Tensor:
    """Eq. 8 image by image with the explicit d×d covariance matrix, as Algorithm 1 prints it."""
    losses = []
    for q, own_keys in zip(query.double(), keys.double(), strict=True):
        mu = sum(own_keys) / len(own_keys)
        centered = own_keys - mu
        covariance = centered.T @ centered / len(own_keys)
        positive = torch.exp(q @ mu / temperature + scale / (2 * temperature**2) * (q @ covariance @ q))
        total = positive.clone()
        for negative in negatives.double():
            total = total + torch.exp(q @ negative / temperature)
        losses.append(torch.log(total) - q @ mu / temperature)
    return torch.stack(losses)


def multi_key_oracle(query: Tensor, keys: Tensor, negatives: Tensor, temperature: float) -> Tensor:
    """Eq. 2 and 3 pair by pair."""
    losses = []
    for q, own_keys in zip(query.double(), keys.double(), strict=True):
        noise = sum(torch.exp(q @ negative / temperature) for negative in negatives.double())
        pairs = [torch.exp(q @ key / temperature) for key in own_keys]
        losses.append(sum(-torch.log(pair / (pair + noise)) for pair in pairs) / len(pairs))
    return torch.stack(losses)


@pytest.mark.parametrize("shape", CASES)
@pytest.mark.parametrize(("temperature", "scale"), [(0.2, 4.0), (0.07, 1.0), (1.0, 0.0), (0.5, 10.0)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_joint_loss_equals_the_explicit_covariance_oracle(shape, temperature, scale, dtype, tolerance):
    query, keys, negatives = inputs(*shape, dtype=dtype)
    wanted = joint_oracle(query, keys, negatives, temperature, scale)
    found = jcl.joint_contrastive_loss(
        query, keys, negatives, temperature=temperature, covariance_scale=scale, reduction="none"
    )
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=0)
    mean = jcl.joint_contrastive_loss(query, keys, negatives, temperature=temperature, covariance_scale=scale)
    torch.testing.assert_close(mean.double(), wanted.mean(), rtol=tolerance, atol=0)


@pytest.mark.parametrize("shape", CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_multi_key_and_info_nce_equal_their_oracles(shape, dtype, tolerance):
    query, keys, negatives = inputs(*shape, dtype=dtype)
    wanted = multi_key_oracle(query, keys, negatives, 0.2)
    found = jcl.multi_key_loss(query, keys, negatives, reduction="none")
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=0)
    wanted = multi_key_oracle(query, keys[:, :1], negatives, 0.1)
    found = jcl.info_nce_loss(query, keys[:, 0], negatives, temperature=0.1, reduction="none")
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=0)


def test_gradients_pass_gradcheck():
    tensors = [tensor.requires_grad_() for tensor in inputs(2, 3, 4, 5)]
    for scale in (0.0, 1.0, 4.0):
        assert torch.autograd.gradcheck(
            lambda *t, scale=scale: jcl.joint_contrastive_loss(*t, temperature=0.3, covariance_scale=scale), tensors
        )
    assert torch.autograd.gradcheck(lambda *t: jcl.multi_key_loss(*t, temperature=0.3), tensors)
    query, keys, negatives = tensors
    key = keys.detach()[:, 0].clone().requires_grad_()
    assert torch.autograd.gradcheck(jcl.info_nce_loss, (query, key, negatives))


@pytest.mark.parametrize("scale", [0.0, 0.2, 1.0, 4.0, 1000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_key_is_moco_exactly_for_every_scale(scale, dtype):
    query, keys, negatives = inputs(7, 1, 16, 20, dtype=dtype)
    query.requires_grad_()
    joint = jcl.joint_contrastive_loss(query, keys, negatives, covariance_scale=scale)
    moco = jcl.info_nce_loss(query, keys[:, 0], negatives)
    assert torch.equal(joint, moco)
    assert torch.equal(torch.autograd.grad(joint, query)[0], torch.autograd.grad(moco, query)[0])


def test_scale_zero_is_info_nce_with_the_mean_key():
    query, keys, negatives = inputs(5, 6, 8, 9)
    joint = jcl.joint_contrastive_loss(query, keys, negatives, covariance_scale=0.0, reduction="none")
    plain = jcl.info_nce_loss(query, keys.mean(dim=1), negatives, reduction="none")
    torch.testing.assert_close(joint, plain, rtol=1e-12, atol=0)


def test_loss_does_not_decrease_with_the_scale():
    query, keys, negatives = inputs(32, 5, 16, 64)
    losses = [
        jcl.joint_contrastive_loss(query, keys, negatives, covariance_scale=scale, reduction="none")
        for scale in (0.0, 0.2, 1.0, 2.0, 4.0, 10.0, 100.0)
    ]
    for smaller, larger in itertools.pairwise(losses):
        assert (larger >= smaller).all()
    assert (losses[-1] > losses[0]).all()


def test_finite_at_extreme_temperature_and_scale():
    query, keys, negatives = inputs(16, 5, 8, 32, dtype=torch.float32)
    keys[0] = torch.stack([query[0], -query[0], query[0], -query[0], query[0]])  # the largest variance there is
    query.requires_grad_()
    loss = jcl.joint_contrastive_loss(query, keys, negatives, temperature=0.01, covariance_scale=100.0)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(query.grad).all()


def test_only_the_query_gets_a_gradient_when_only_it_asks():
    query, keys, negatives = inputs(4, 3, 8, 10)
    query.requires_grad_()
    jcl.joint_contrastive_loss(query, keys, negatives).backward()
    assert query.grad is not None and query.grad.abs().sum() > 0
    assert keys.grad is None and negatives.grad is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_inputs_are_computed_in_float32(dtype):
    query, keys, negatives = inputs(8, 5, 16, 64, dtype=dtype)
    for autocast in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            found = jcl.joint_contrastive_loss(query, keys, negatives, reduction="none")
        assert found.dtype == torch.float32
        wanted = joint_oracle(query, keys, negatives, 0.2, 4.0)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=0)


@pytest.mark.filterwarnings("ignore:keys should have unit rows")
@pytest.mark.parametrize("seed", range(4))
def test_closed_form_bounds_the_expected_loss_for_gaussian_keys(seed):
    """The theorem: for k ~ N(mu, Sigma), E[InfoNCE] (Eq. 4) lies below Eq. 8 with scale 1."""
    generator = torch.Generator().manual_seed(seed)
    d, count, temperature = 8, 100_000, 0.2
    query = unit_rows(1, d, seed=seed)
    mu = unit_rows(d, seed=seed + 100) * 0.9
    factor = torch.randn(d, d, generator=generator, dtype=torch.float64) * 0.06
    negatives = unit_rows(64, d, seed=seed + 200)
    gaps = []
    for spread in (1.0, 0.3, 0.1, 0.03):
        keys = mu + torch.randn(count, d, generator=generator, dtype=torch.float64) @ (spread * factor).T
        parts = keys.view(100, -1, d)  # of which the mean losses are enough
        losses = jcl.multi_key_loss(query.expand(100, d), parts, negatives, temperature=temperature, reduction="none")
        covariance = spread**2 * factor @ factor.T
        mean, variance = (query @ mu) / temperature, (query @ covariance @ query.T).squeeze() / temperature**2
        negative = torch.logsumexp(query @ negatives.T / temperature, dim=1)
        bound = torch.logaddexp(mean + variance / 2, negative) - mean
        error = 4 * losses.std() / len(parts) ** 0.5  # four standard errors of the Monte-Carlo mean
        assert losses.mean() <= bound + error
        gaps.append(float(bound - losses.mean()))
    assert abs(gaps[-1]) < 0.02 * abs(gaps[0]) + 1e-4, gaps


@pytest.mark.filterwarnings("ignore:keys should have unit rows")
def test_the_closed_form_from_many_sampled_keys_is_the_theorems():
    """With many Gaussian keys the sample statistics inside the loss approach mu and Sigma."""
    generator = torch.Generator().manual_seed(5)
    query, mu, negatives = unit_rows(1, 6, seed=1), unit_rows(6, seed=2), unit_rows(32, 6, seed=3)
    keys = mu + 0.1 * torch.randn(1, 200_000, 6, generator=generator, dtype=torch.float64)
    found = jcl.joint_contrastive_loss(query, keys, negatives, covariance_scale=1.0)
    mean, variance = (query @ mu) / 0.2, 0.01 * (query @ query.T) / 0.2**2
    negative = torch.logsumexp(query @ negatives.T / 0.2, dim=1)
    wanted = torch.logaddexp(mean + variance.squeeze(0) / 2, negative) - mean
    torch.testing.assert_close(found, wanted.squeeze(), rtol=3e-3, atol=0)


class LargestAllocation(torch.utils._python_dispatch.TorchDispatchMode):
    """Remembers the largest tensor that any operation makes."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.largest = max(self.largest, leaf.untyped_storage().nbytes())
        return out


def test_no_covariance_matrix_is_ever_held():
    """An (N, d, d) tensor would take 537 MB; the inputs take 2.4 MB at most."""
    n, m, d, k = 32, 9, 2048, 256
    query, keys, negatives = inputs(n, m, d, k, dtype=torch.float32)
    query.requires_grad_()
    with LargestAllocation() as seen:
        jcl.joint_contrastive_loss(query, keys, negatives).backward()
    assert 0 < seen.largest <= n * m * d * 4
    assert seen.largest < n * d * d * 4 / 100


def test_contrastive_accuracy_leaves_the_variance_out():
    query = F.normalize(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), dim=1)
    keys = torch.stack([torch.stack([query[0], query[0]]), torch.stack([query[1], -query[1]])])
    negatives = torch.tensor([[0.6, 0.5]])
    # The first query's mean key is itself; the second's keys cancel, so a negative is closer however they vary.
    assert contrastive_metrics(query, keys, negatives, covariance_scale=4.0)[0].tolist() == [1.0, 0.0]


def test_modules_are_the_functions():
    query, keys, negatives = inputs(4, 3, 8, 10)
    module = JointContrastiveLoss(temperature=0.1, covariance_scale=2.0, reduction="none")
    wanted = jcl.joint_contrastive_loss(query, keys, negatives, temperature=0.1, covariance_scale=2.0, reduction="none")
    assert torch.equal(module(query, keys, negatives), wanted)
    assert torch.equal(
        MultiKeyLoss(0.1)(query, keys, negatives), jcl.multi_key_loss(query, keys, negatives, temperature=0.1)
    )
    key = keys[:, 0]
    assert torch.equal(
        InfoNCELoss(0.1)(query, key, negatives), jcl.info_nce_loss(query, key, negatives, temperature=0.1)
    )


def test_reductions_agree():
    query, keys, negatives = inputs(4, 3, 8, 10)
    each = jcl.joint_contrastive_loss(query, keys, negatives, reduction="none")
    assert each.shape == (4,)
    torch.testing.assert_close(jcl.joint_contrastive_loss(query, keys, negatives, reduction="sum"), each.sum())
    torch.testing.assert_close(jcl.joint_contrastive_loss(query, keys, negatives), each.mean())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"temperature": NAN}, "temperature must be positive and finite, got nan"),
        ({"temperature": INFINITY}, "temperature must be positive and finite, got inf"),
        ({"covariance_scale": -1.0}, "covariance_scale must be finite and not negative"),
        ({"covariance_scale": NAN}, "covariance_scale .* got nan"),
        ({"covariance_scale": INFINITY}, "covariance_scale .* got inf"),
        ({"temperature": torch.ones(10)}, r"temperature .* \(10,\)"),
        ({"covariance_scale": torch.ones(4, 1)}, r"\(4,\), got \(4, 1\)"),
        ({"covariance_scale": torch.ones(3)}, r"\(4,\), got \(3,\)"),
        ({"reduction": "average"}, "reduction must be"),
        ({"keys": torch.zeros(4, 8)}, r"keys \(N, M, d\)"),
        ({"keys": torch.zeros(3, 2, 8)}, "got .4, 8., .3, 2, 8."),
        ({"keys": torch.zeros(4, 0, 8)}, "at least one key"),
        ({"negatives": torch.zeros(5, 7)}, "and .5, 7."),
    ],
)
def test_wrong_arguments_are_named(change, words):
    query, keys, negatives = inputs(4, 3, 8, 10)
    arguments = {"query": query, "keys": keys, "negatives": negatives} | change
    with pytest.raises(ValueError, match=words):
        jcl.joint_contrastive_loss(**arguments)


def test_a_scale_for_each_image():
    query, keys, negatives = inputs(4, 3, 8, 10)
    scales = torch.tensor([0.0, 1.0, 2.0, 4.0])
    each = jcl.joint_contrastive_loss(query, keys, negatives, covariance_scale=scales, reduction="none")
    for row, scale in enumerate(scales.tolist()):
        alone = slice(row, row + 1)
        one = jcl.joint_contrastive_loss(query[alone], keys[alone], negatives, covariance_scale=scale)
        torch.testing.assert_close(each[row], one)


@pytest.mark.parametrize("temperature", [0.0, -0.1, NAN, INFINITY])
def test_every_loss_refuses_a_temperature_that_is_none(temperature):
    query, keys, negatives = inputs(4, 3, 8, 10)
    with pytest.raises(ValueError, match="temperature must be positive and finite"):
        jcl.multi_key_loss(query, keys, negatives, temperature=temperature)
    with pytest.raises(ValueError, match="temperature must be positive and finite"):
        jcl.info_nce_loss(query, keys[:, 0], negatives, temperature=temperature)


def test_the_checks_stay_out_of_a_compiled_graph():
    """One graph without a break, whether temperature and scale are numbers or tensors, which are not looked at."""
    query, keys, negatives = inputs(4, 3, 8, 10)
    compiled = torch.compile(jcl.joint_contrastive_loss, backend="eager", fullgraph=True)
    for value in (0.2, 0.3, torch.tensor(0.4, dtype=torch.float64)):
        constants = {"temperature": value, "covariance_scale": 10 * value}
        wanted = jcl.joint_contrastive_loss(query, keys, negatives, **constants)
        torch.testing.assert_close(compiled(query, keys, negatives, **constants), wanted)


def test_an_empty_batch_has_an_empty_loss():
    query, keys, negatives = torch.zeros(0, 4), torch.zeros(0, 3, 4), torch.zeros(5, 4)
    for loss in (jcl.joint_contrastive_loss, jcl.multi_key_loss):
        assert loss(query, keys, negatives, reduction="none").shape == (0,)
        assert float(loss(query, keys, negatives, reduction="sum")) == 0.0


def test_rows_that_are_not_unit_vectors_are_named():
    query, keys, negatives = inputs(4, 2, 8, 16, dtype=torch.float32)
    for loss in (jcl.joint_contrastive_loss, jcl.multi_key_loss):
        for wrong in (query * 3, query / 3):
            with pytest.raises(ValueError, match="query must have unit rows"):
                loss(wrong, keys, negatives)
        with pytest.warns(UserWarning, match="keys should have unit rows"):
            loss(query, keys * 3, negatives)
    with pytest.raises(ValueError, match="unit rows"):
        InfoNCELoss()(query * 3, keys[:, 0], negatives)


def test_rounded_and_broken_rows_reach_the_loss():
    """Normalized in 16 bits, or not finite: training decides what to do about the loss."""
    query, keys, negatives = inputs(4, 2, 8, 16, dtype=torch.bfloat16)
    assert jcl.joint_contrastive_loss(query, keys, negatives).isfinite()
    assert jcl.joint_contrastive_loss(query * 0, keys, negatives).isfinite()
    assert jcl.joint_contrastive_loss(query * NAN, keys, negatives).isnan()


@pytest.mark.parametrize("scale", [0.0, 1.0, 4.0])
def test_gradient_of_eq_8_with_respect_to_the_similarities(scale: float) -> None:
    """The covariance re-weights the keys by -p (s_m - mean s); see docs/theory.md."""
    query, keys, negatives = inputs(6, 5, 16, 40)
    keys.requires_grad_()
    jcl.joint_contrastive_loss(query, keys, negatives, covariance_scale=scale, reduction="sum").backward()
    # ds_m/dk_m = q/t for unit q, so q·(dL/dk_m) = (dL/ds_m)/t.
    found = 0.2 * torch.einsum("nd,nmd->nm", query, keys.grad)
    similarities = torch.einsum("nd,nmd->nm", query, keys.detach()) / 0.2
    p = contrastive_metrics(query, keys, negatives, covariance_scale=scale)[3][:, None]
    expected = -((1 - p) - p * scale * (similarities - similarities.mean(dim=1, keepdim=True))) / 5
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_vanilla_is_jcl_with_one_minus_p_to_second_order() -> None:
    query, _, negatives = inputs(8, 5, 16, 40)
    directions = unit_rows(8, 5, 16, seed=9)
    center = query + 0.3 * unit_rows(8, 16, seed=10)

    def difference(spread: float, scale: Tensor | float | None) -> float:
        keys = F.normalize(center[:, None] + spread * directions, dim=2)
        if scale is None:
            scale = 1 - contrastive_metrics(query, keys, negatives)[3]
        joint = jcl.joint_contrastive_loss(query, keys, negatives, covariance_scale=scale, reduction="none")
        return float((joint - jcl.multi_key_loss(query, keys, negatives, reduction="none")).abs().max())

    # Halving the spread divides a third-order difference by at least 8, a second-order one by 4.
    assert difference(0.01, None) < difference(0.02, None) / 7
    assert difference(0.01, 0.0) > difference(0.02, 0.0) / 5
    assert difference(0.01, None) < 0.02 * difference(0.01, 0.0)
