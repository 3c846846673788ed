"""Algorithm 1 against a plain second writing of it in float64."""

import copy
import math
from collections.abc import Callable
from statistics import fmean, pvariance, stdev

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jcl.core.method import ContrastiveLearner, StepMetrics
from jcl.core.registry import METHODS
from jcl.random import KEY_SHUFFLE, permutation

IMAGES, DIM, QUEUE, SEED = 8, 5, 16, 3
Momentum = Callable[[int], float | Tensor]
TEMPERATURE, MOMENTUM, SCALE, RATE = 0.3, 0.8, 2.5, 0.2


class TinyEncoder(nn.Module):
    """A convolution, batch norm and a linear head; unit rows in whatever precision it is in."""

    def __init__(self, bn_momentum: float = 0.1) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, momentum=bn_momentum), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 9, DIM)
        )

    def forward(self, images: Tensor) -> Tensor:
        return F.normalize(self.layers(images), dim=1)


class RandomViews:
    """Every (row, number) has its own random image; remembers which were asked for."""

    def __init__(
        self, step: int, keys: int, dtype: torch.dtype = torch.float64, queries: int = 1, local: int = 0
    ) -> None:
        draw = torch.Generator().manual_seed(100 + step)
        base = torch.randn(IMAGES, 1, 3, 5, 5, generator=draw, dtype=torch.float64)
        noise = torch.randn(IMAGES, keys + queries + local, 3, 5, 5, generator=draw, dtype=torch.float64)
        self.all = (base + 0.3 * noise).to(dtype)
        self.asked: list[tuple[int, int]] = []

    def __call__(self, rows: Tensor, numbers: Tensor, local: bool = False) -> Tensor:
        self.asked += list(zip(rows.tolist(), numbers.tolist(), strict=True))
        views = self.all[rows, numbers]
        return views.flip(3) if local else views


def make_learner(method: str, num_keys: int = 3, dtype: torch.dtype = torch.float64, **options) -> ContrastiveLearner:
    torch.manual_seed(0)
    options = {"bn_groups": 2, "seed": SEED} | options
    return ContrastiveLearner(
        TinyEncoder(options.pop("bn_momentum", 0.1)),
        METHODS[method],
        num_keys=num_keys,
        temperature=TEMPERATURE,
        queue_size=QUEUE,
        embedding_dim=DIM,
        key_momentum=MOMENTUM,
        **options,
    ).to(dtype)


def train(
    learner: ContrastiveLearner, steps: int, dtype: torch.dtype = torch.float64, momentum: Momentum | None = None
) -> list[Tensor]:
    optimiser = torch.optim.SGD(learner.query_encoder.parameters(), lr=RATE, momentum=0.9)
    losses = []
    for step in range(steps):
        learner.train()
        views = RandomViews(step, learner.num_keys, dtype, learner.num_queries, learner.num_local_queries)
        result = learner(views, IMAGES, step, SCALE, momentum(step) if momentum else None)
        optimiser.zero_grad()
        result.loss.backward()
        optimiser.step()
        losses.append(result.loss.detach())
    return losses


def forward_in_groups(encoder: TinyEncoder, images: Tensor, groups: int) -> Tensor:
    """Each group with its own statistics; the running ones move once, towards the mean of the groups'."""
    norm = encoder.layers[1]
    start = norm.running_mean.clone(), norm.running_var.clone()
    outputs, ends = [], []
    for part in images.chunk(groups):
        norm.running_mean, norm.running_var = start[0].clone(), start[1].clone()
        outputs.append(encoder(part))
        ends.append((norm.running_mean, norm.running_var))
    norm.running_mean = torch.stack([mean for mean, _ in ends]).mean(0)
    norm.running_var = torch.stack([variance for _, variance in ends]).mean(0)
    return torch.cat(outputs)


def written_out_loss(method: str, query: Tensor, keys: Tensor, negatives: Tensor) -> Tensor:
    """One image, one key, one negative at a time."""
    total = query.new_zeros(())
    for q, own in zip(query, keys, strict=True):
        others = [torch.exp(q @ negative / TEMPERATURE) for negative in negatives]
        if method == "jcl":
            mean = own.mean(0)
            covariance = sum(torch.outer(key - mean, key - mean) for key in own) / len(own)
            positive = torch.exp(q @ mean / TEMPERATURE + SCALE / (2 * TEMPERATURE**2) * (q @ covariance @ q))
            total = total + torch.log(positive + sum(others)) - q @ mean / TEMPERATURE
        else:
            for key in own:
                positive = torch.exp(q @ key / TEMPERATURE)
                total = total - torch.log(positive / (positive + sum(others))) / len(own)
    return total / len(query)


def enqueued(queue: Tensor, place: int, keys: Tensor) -> tuple[Tensor, int]:
    queue = queue.clone()
    for key in keys:
        queue[place % QUEUE] = key
        place += 1
    return queue, place


def assert_state(learner: ContrastiveLearner, f: nn.Module, g: nn.Module, queue: Tensor) -> None:
    """The learner has the weights and statistics of f and g, and this queue."""
    for mine, theirs in ((learner.query_encoder, f), (learner.key_encoder, g)):
        for name, value in theirs.state_dict().items():
            if "num_batches" not in name:
                torch.testing.assert_close(mine.state_dict()[name], value, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(learner.queue.rows, queue, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("method", "queries", "local"),
    [
        *((name, 1, 0) for name in METHODS if not METHODS[name].symmetric),
        ("multi-key", 2, 0),
        ("jcl", 2, 3),
        ("multi-key-backprop", 2, 3),
    ],
)
def test_steps_equal_a_plain_writing_of_algorithm_1(method, queries, local):
    learner = make_learner(method, num_queries=queries, num_local_queries=local)
    keys_per_image = learner.num_keys
    assert keys_per_image == (3 if METHODS[method].several_keys else 1)
    torch.manual_seed(0)
    f = TinyEncoder().double()
    g = copy.deepcopy(f)
    queue, place = learner.queue.rows.clone(), 0
    optimiser = torch.optim.SGD(f.parameters(), lr=RATE, momentum=0.9)
    found = train(learner, 3)  # the third overwrites the oldest keys
    last = keys_per_image + 1
    for step in range(3):
        views = RandomViews(step, keys_per_image, queries=queries, local=local)
        asking = views.all[:, [0, *range(last, last + queries - 1)]].flatten(0, 1)
        through_keys = method == "multi-key-backprop"
        if not through_keys:
            query = forward_in_groups(f, asking, 2)
        with torch.no_grad():
            for own, other in zip(g.parameters(), f.parameters(), strict=True):
                own.copy_(MOMENTUM * own + (1 - MOMENTUM) * other)
        flat = views.all[:, 1:last].flatten(0, 1)
        order = permutation(SEED, KEY_SHUFFLE, step, len(flat), torch.device("cpu"))
        if through_keys:  # f sees keys and queries, and its running statistics move towards the keys' first
            shuffled = forward_in_groups(f, flat[order], 2)
            query = forward_in_groups(f, asking, 2)
        else:
            with torch.no_grad():
                shuffled = forward_in_groups(g, flat[order], 2)
        keys = shuffled[order.argsort()].view(IMAGES, keys_per_image, DIM)
        if local:  # small crops do not move the running statistics
            kept = copy.deepcopy(dict(f.named_buffers()))
            small = forward_in_groups(f, views.all[:, last + queries - 1 :].flip(4).flatten(0, 1), 2)
            f.load_state_dict(kept, strict=False)
            query = torch.cat([query, small])
        repeated = [key for count in (queries, local) for key in keys for _ in range(count)]
        loss = written_out_loss(method, query, torch.stack(repeated), queue)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        queue, place = enqueued(queue, place, keys.detach().mean(1))
        torch.testing.assert_close(found[step], loss.detach(), rtol=1e-10, atol=1e-12)
    assert_state(learner, f, g, queue)


def test_a_symmetric_method_contrasts_each_of_two_views_with_the_key_of_the_other():
    """loss(q1, k2) + loss(q2, k1), averaged; both keys enter the queue."""
    learner = make_learner("moco-v2-symmetric")
    assert (learner.num_keys, learner.num_queries) == (2, 2)
    torch.manual_seed(0)
    f = TinyEncoder().double()
    g = copy.deepcopy(f)
    queue, place = learner.queue.rows.clone(), 0
    optimiser = torch.optim.SGD(f.parameters(), lr=RATE, momentum=0.9)
    found = train(learner, 3)
    for step in range(3):
        both = RandomViews(step, 2, queries=2).all[:, :2].flatten(0, 1)  # a1 a2 b1 b2 ...
        query = forward_in_groups(f, both, 2)
        with torch.no_grad():
            for own, other in zip(g.parameters(), f.parameters(), strict=True):
                own.copy_(MOMENTUM * own + (1 - MOMENTUM) * other)
            order = permutation(SEED, KEY_SHUFFLE, step, len(both), torch.device("cpu"))
            keys = forward_in_groups(g, both[order], 2)[order.argsort()]
        first = written_out_loss("moco-v2", query[0::2], keys[1::2, None], queue)
        second = written_out_loss("moco-v2", query[1::2], keys[0::2, None], queue)
        loss = (first + second) / 2
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        queue, place = enqueued(queue, place, keys)
        torch.testing.assert_close(found[step], loss.detach(), rtol=1e-10, atol=1e-12)
    assert_state(learner, f, g, queue)


def test_a_key_momentum_given_as_a_tensor_equals_a_number():
    numbers, tensors = make_learner("jcl"), make_learner("jcl")
    train(numbers, 4, momentum=lambda step: 0.5 + step / 8)
    train(tensors, 4, momentum=lambda step: torch.tensor(0.5 + step / 8, dtype=torch.float64))
    for name, value in numbers.state_dict().items():
        torch.testing.assert_close(tensors.state_dict()[name], value, rtol=1e-12, atol=1e-12)
    constant = make_learner("jcl")
    train(constant, 4)
    assert not torch.allclose(constant.queue.rows, tensors.queue.rows)


def test_no_query_meets_a_key_of_its_own_image_from_the_same_step():
    learner = make_learner("jcl")
    before = learner.queue.rows.clone()
    views = RandomViews(0, 3)
    seen = []

    joint_loss = learner.loss

    def loss(query: Tensor, keys: Tensor, negatives: Tensor, **constants: float) -> Tensor:
        seen.append(negatives.clone())
        return joint_loss(query, keys, negatives, **constants)

    learner.loss = loss
    learner(views, IMAGES, 0, SCALE)
    assert torch.equal(seen[0], before)
    assert not torch.equal(learner.queue.rows[:IMAGES], before[:IMAGES])
    assert torch.equal(learner.queue.rows[IMAGES:], before[IMAGES:])


def test_mean_keys_are_enqueued_shorter_than_unit_rows():
    learner = make_learner("jcl")
    learner(RandomViews(0, 3), IMAGES, 0, SCALE)
    lengths = learner.queue.rows.norm(dim=1)
    assert (lengths[:IMAGES] < 1 - 1e-6).all()
    torch.testing.assert_close(lengths[IMAGES:], torch.ones(QUEUE - IMAGES, dtype=torch.float64))


@pytest.mark.parametrize("method", METHODS)
def test_gradients_only_where_they_belong(method):
    learner = make_learner(method)
    calls = []

    def keep(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        output.retain_grad()
        calls.append(output)

    learner.query_encoder.register_forward_hook(keep)
    learner(RandomViews(0, learner.num_keys), IMAGES, 0, SCALE).loss.backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in learner.query_encoder.parameters())
    assert all(parameter.grad is None for parameter in learner.key_encoder.parameters())
    assert not learner.queue.rows.requires_grad
    if method == "multi-key-backprop":
        assert sorted(len(output) for output in calls) == [IMAGES, IMAGES * 3]
        assert all(output.grad.any(dim=1).all() for output in calls)  # every single key
    else:
        assert [len(output) for output in calls] == [IMAGES * learner.num_queries]


@pytest.mark.parametrize("method", METHODS)
def test_every_view_is_asked_for_exactly_once(method):
    learner = make_learner(method, bn_groups=4, key_passes=2)
    views = RandomViews(0, learner.num_keys)
    learner(views, IMAGES, 0, SCALE)
    if METHODS[method].symmetric:  # as a shuffled key and as a query
        wanted = [(row, number) for row in range(IMAGES) for number in (0, 1)]
        keys, queries = views.asked[: len(wanted)], views.asked[len(wanted) :]
        assert queries == wanted == sorted(keys) != keys
        return
    wanted = [(row, number) for row in range(IMAGES) for number in range(learner.num_keys + 1)]
    assert sorted(views.asked) == wanted
    assert [pair for pair in views.asked if pair[1] == 0] == [(row, 0) for row in range(IMAGES)]
    keys = [pair for pair in views.asked if pair[1] > 0]
    assert keys != sorted(keys)  # they come shuffled


@pytest.mark.parametrize("bn_momentum", [0.1, 0.01])
@pytest.mark.parametrize("passes", [2, 4])
def test_several_key_passes_equal_one(passes, bn_momentum):
    """Also for networks whose batch norms have a momentum of their own, and after a change of precision."""
    whole, parts = (
        make_learner("jcl", bn_groups=4, key_passes=count, bn_momentum=bn_momentum) for count in (1, passes)
    )
    for one, other in zip(train(whole, 3), train(parts, 3), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(parts.state_dict()[name], value, rtol=1e-9, atol=1e-12)
    start = make_learner("jcl", bn_momentum=bn_momentum).key_encoder.layers[1].running_mean
    assert not torch.allclose(start, parts.key_encoder.layers[1].running_mean, atol=1e-4)


def test_one_key_makes_jcl_moco_v2_bit_for_bit():
    jcl, moco = make_learner("jcl", 1, torch.float32), make_learner("moco-v2", 1, torch.float32)
    assert train(jcl, 5, torch.float32) == train(moco, 5, torch.float32)
    for name, value in jcl.state_dict().items():
        assert torch.equal(moco.state_dict()[name], value), name


def test_the_shuffle_is_a_function_of_seed_and_step():
    def asked(seed: int, step: int) -> list[tuple[int, int]]:
        views = RandomViews(0, 3)
        make_learner("jcl", seed=seed)(views, IMAGES, step, SCALE)
        return [pair for pair in views.asked if pair[1] > 0]

    assert asked(0, 0) == asked(0, 0)
    assert asked(0, 0) != asked(0, 1)
    assert asked(0, 0) != asked(1, 0)
    assert asked(0, 7) == [tuple(pair) for pair in asked(0, torch.tensor(7))]


def test_the_same_step_twice_from_the_same_state_is_bit_identical():
    first, second = make_learner("jcl"), make_learner("jcl")
    assert train(first, 3) == train(second, 3)
    assert all(
        torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )


def test_figures_of_a_step_are_those_of_plain_loops():
    draw = torch.Generator().manual_seed(1)
    query = F.normalize(torch.randn(IMAGES, DIM, generator=draw, dtype=torch.float64), dim=1)
    keys = F.normalize(query[:, None] + 0.5 * torch.randn(IMAGES, 3, DIM, generator=draw, dtype=torch.float64), dim=2)
    negatives = F.normalize(torch.randn(QUEUE, DIM, generator=draw, dtype=torch.float64), dim=1)
    result = make_learner("jcl").contrast(query.clone().requires_grad_(), keys, negatives, SCALE)
    similarities = [[float(q @ key) for key in own] for q, own in zip(query, keys, strict=True)]
    closest = [max(float(q @ negative) for negative in negatives) for q in query]
    found_first = [fmean(own) > negative for own, negative in zip(similarities, closest, strict=True)]
    assert 0 < sum(found_first) < IMAGES  # or it would say little
    metrics = StepMetrics(*result.metrics().tolist())
    assert metrics.loss == float(result.loss)
    assert metrics.contrastive_accuracy == pytest.approx(fmean(found_first))
    assert metrics.positive_similarity == pytest.approx(fmean(fmean(own) for own in similarities))
    assert metrics.key_variance == pytest.approx(fmean(pvariance(own) for own in similarities))
    negative = [sum(math.exp(float(q @ n) / TEMPERATURE) for n in negatives) for q in query]
    scaled = [[value / TEMPERATURE for value in own] for own in similarities]
    positive = [math.exp(fmean(own) + SCALE / 2 * pvariance(own)) for own in scaled]
    assert metrics.positive_share == pytest.approx(fmean(p / (p + n) for p, n in zip(positive, negative, strict=True)))
    assert metrics.feature_std == pytest.approx(fmean(stdev(column) for column in query.T.tolist()))
    assert result.loss.requires_grad and not result.metrics().requires_grad


def test_metrics_of_a_step_are_float32_under_autocast():
    draw = torch.Generator().manual_seed(1)
    shapes = ((IMAGES, DIM), (IMAGES, 3, DIM), (QUEUE, DIM))
    query, keys, negatives = (F.normalize(torch.randn(*shape, generator=draw), dim=-1) for shape in shapes)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = make_learner("jcl", dtype=torch.float32).contrast(query, keys, negatives, SCALE)
    variance = result.contrast[2]
    assert variance.dtype == torch.float32 and float(variance.bfloat16()) != float(variance)


def test_a_step_that_broke_off_leaves_nothing_behind_for_the_next():
    learner, untouched = (make_learner("jcl", bn_groups=4, key_passes=2) for _ in range(2))
    before = copy.deepcopy(learner.state_dict())
    made = RandomViews(0, 3)
    asked = []

    def breaking(rows: Tensor, numbers: Tensor) -> Tensor:
        asked.append(rows)
        if len(asked) == 2:
            raise RuntimeError("out of memory")
        return 100 * made(rows, numbers)

    with pytest.raises(RuntimeError, match="out of memory"):
        learner(breaking, IMAGES, 0, SCALE)
    learner.load_state_dict(before)
    train(learner, 1)
    train(untouched, 1)
    for name, value in untouched.state_dict().items():
        assert torch.equal(learner.state_dict()[name], value), name


def test_passes_that_do_not_divide_the_groups_are_refused():
    with pytest.raises(ValueError, match=r"4 BN groups .* 3 passes"):
        make_learner("jcl", bn_groups=4, key_passes=3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_key_passes_update_running_statistics_on_a_gpu_too():
    on_cpu = make_learner("jcl", bn_groups=4, key_passes=2)
    on_gpu = make_learner("jcl", bn_groups=4, key_passes=2).to("cuda")
    views = RandomViews(0, 3)
    on_cpu(views, IMAGES, 0, SCALE)
    on_gpu(lambda rows, numbers: views(rows.cpu(), numbers.cpu()).cuda(), IMAGES, 0, SCALE)
    for name, value in on_cpu.state_dict().items():
        torch.testing.assert_close(on_gpu.state_dict()[name].cpu(), value, rtol=1e-6, atol=1e-8)
