"""Counter-based randomness: the hash itself, the numbers drawn from it, and what they must not depend on."""

import itertools

import pytest
import torch

import jcl.random
from jcl.random import DATA_ORDER, KEY_SHUFFLE, VIEWS, generator, hash_words, permutation, uniforms


def zeros(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int64)


def splitmix64(state: int) -> int:
    """The published output function, in Python's unbounded integers."""
    value = (state + 0x9E3779B97F4A7C15) % 2**64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)


def correlation(first: torch.Tensor, second: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack((first.double(), second.double())))[0, 1])


def test_hash_of_one_word_is_the_published_splitmix64() -> None:
    # The first three outputs of splitmix64 started at 0, whose state grows by the increment each time.
    states = [0, 0x9E3779B97F4A7C15 - 2**64, 2 * 0x9E3779B97F4A7C15 - 2**64]
    outputs = [int(hash_words(state)) % 2**64 for state in states]
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_hash_chains_words_in_order() -> None:
    words = torch.randint(-(2**62), 2**62, (3, 50), generator=torch.Generator().manual_seed(0))
    hashed = hash_words(words[0], words[1], words[2])
    for column in range(words.shape[1]):
        state = 0
        for word in words[:, column].tolist():
            state = splitmix64(state ^ (word % 2**64))
        assert int(hashed[column]) % 2**64 == state


def test_numbers_are_frozen() -> None:
    """A change here would change every run that somebody wants to repeat."""
    assert int(hash_words(1, 2, 3)) == -3426316478316322125
    drawn = uniforms(1, 1, 5, torch.tensor([0, 7]), torch.tensor([0, 2]), 2)
    expected = torch.tensor([[923514, 5425664], [10712723, 1486893]]) / 2**24
    assert torch.equal(drawn, expected)
    assert permutation(0, 1, 2, 8).tolist() == [4, 6, 3, 2, 7, 1, 5, 0]


def test_integers_and_tensors_are_the_same_words() -> None:
    assert torch.equal(hash_words(4, 5, 6), hash_words(torch.tensor(4), 5, torch.tensor(6)))
    samples, numbers = torch.arange(6), torch.arange(6) % 3
    assert torch.equal(
        uniforms(3, VIEWS, 11, samples, numbers, 4), uniforms(3, VIEWS, torch.tensor(11), samples, numbers, 4)
    )
    assert torch.equal(permutation(3, KEY_SHUFFLE, 11, 9), permutation(3, KEY_SHUFFLE, torch.tensor(11), 9))


def test_words_broadcast() -> None:
    hashed = hash_words(1, torch.arange(3)[:, None], torch.arange(4)[None, :])
    assert hashed.shape == (3, 4)
    assert int(hashed[2, 3]) == int(hash_words(1, 2, 3))


def test_uniforms_are_uniform() -> None:
    drawn = uniforms(0, VIEWS, 1, torch.arange(20_000), zeros(20_000), 10)
    assert drawn.dtype == torch.float32
    assert drawn.min() >= 0
    assert drawn.max() < 1
    counts = torch.histc(drawn, bins=64, min=0, max=1)
    expected = drawn.numel() / 64
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_square - 63) < 5 * (2 * 63) ** 0.5


@pytest.mark.parametrize("other", ["seed", "stream", "step", "number", "column", "next sample"])
def test_rows_that_differ_in_one_word_are_unrelated(other: str) -> None:
    samples = torch.arange(40_000)
    words = {"seed": 1, "stream": VIEWS, "step": 5}
    changed = dict(words)
    numbers, shift, column = zeros(len(samples)), 0, 0
    if other in words:
        changed[other] += 1
    elif other == "number":
        numbers = numbers + 1
    elif other == "column":
        column = 1
    else:
        shift = 1
    base = uniforms(**words, samples=samples, numbers=zeros(len(samples)), count=2)[:, 0]
    compared = uniforms(**changed, samples=samples + shift, numbers=numbers, count=2)[:, column]
    assert abs(correlation(base, compared)) < 5 / len(samples) ** 0.5
    assert not torch.equal(base, compared)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    samples = torch.tensor([5, 900, 17, 2**40, 5])
    numbers = torch.tensor([0, 1, 2, 3, 1])
    together = uniforms(9, VIEWS, 3, samples, numbers, 6)
    order = torch.tensor([3, 0, 4, 2, 1])
    assert torch.equal(together[order], uniforms(9, VIEWS, 3, samples[order], numbers[order], 6))
    assert torch.equal(together[1:2], uniforms(9, VIEWS, 3, samples[1:2], numbers[1:2], 6))
    assert torch.equal(together[:, :2], uniforms(9, VIEWS, 3, samples, numbers, 2))


def test_permutations_hold_each_index_once() -> None:
    for length in (0, 1, 2, 1000):
        assert torch.equal(permutation(1, DATA_ORDER, 0, length).sort().values, torch.arange(length))


def test_permutations_are_uniform() -> None:
    draws = 1_200
    counts = dict.fromkeys(itertools.permutations(range(3)), 0)
    for step in range(draws):
        counts[tuple(permutation(2, DATA_ORDER, step, 3).tolist())] += 1
    expected = draws / 6
    chi_square = sum((count - expected) ** 2 / expected for count in counts.values())
    assert chi_square < 5 + 5 * (2 * 5) ** 0.5


def test_generators_depend_on_seed_and_words_only() -> None:
    assert torch.equal(torch.rand(4, generator=generator(1, 2, 3)), torch.rand(4, generator=generator(1, 2, 3)))
    seeds = {generator(*words).initial_seed() for words in itertools.product(range(4), repeat=3)}
    assert len(seeds) == 4**3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_gpu_draws_the_same_numbers() -> None:
    samples, numbers = torch.arange(1000), torch.arange(1000) % 6
    on_gpu = uniforms(1, VIEWS, 7, samples.cuda(), numbers.cuda(), 8)
    assert torch.equal(on_gpu.cpu(), uniforms(1, VIEWS, 7, samples, numbers, 8))
    assert torch.equal(permutation(1, KEY_SHUFFLE, 7, 999, "cuda").cpu(), permutation(1, KEY_SHUFFLE, 7, 999))


def test_no_two_streams_share_a_number() -> None:
    streams = [value for name, value in vars(jcl.random).items() if name.isupper() and not name.startswith("_")]
    assert len(set(streams)) == len(streams) > 10
