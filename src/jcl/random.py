"""Randomness as a function of (seed, stream, step, sample, ...), never of history.

Every number is a hash of the words that name it, so there is no generator state to save or to share: a resumed run,
another number of ranks and another order of work all draw the same numbers. The hash is the output function of
splitmix64, chained over the words in integers that wrap alike on every device. Nothing here waits for the device, and
a step given as a tensor works in compiled graphs and CUDA graphs.
"""

from typing import Final

import torch
from torch import Tensor

# All random streams, one per purpose, with different numbers: equal words in different streams are unrelated.
# The long numbers are ASCII names of earlier versions; another number would change every draw.
VIEWS: Final = 1
DATA_ORDER: Final = 2
KEY_SHUFFLE: Final = 3
SHARD_ORDER: Final = 4
WINDOWS: Final = 5
NOISE: Final = 6
IMAGE_CHOICE: Final = 0x766965777321
LABEL_SUBSET: Final = 0x6C6162656C
VALIDATION_SPLIT: Final = 0x73706C6974
TEST_SPLIT: Final = 0x6B4E4E
PROBE_ORDER: Final = 0x6C696E656172
CLASSIFIER_INIT: Final = 0x6663
RANDOM_LAYERS: Final = 0x64726F70
DETECTION_REGIONS: Final = 0x726F6973
DETECTION_HELD_OUT: Final = 0x68656C64
DETECTION_OVERFIT: Final = 0x66657700
DETECTION_ORDER: Final = 0x6F72646572
DETECTION_AUGMENTATION: Final = 0x666C6970
REPORT_SAMPLE: Final = 0x7265706F7274

_UNIFORM_BITS: Final = 24  # what a float32 in [0, 1) holds exactly


def hash_words(*words: int | Tensor) -> Tensor:
    """Hash integers, or int64 tensors that broadcast together, into int64 values spread over all 64 bits.

    The order of the words matters, and the first words alone hash to something unrelated to the whole. The tensors
    are on one device, and so is the result.
    """
    device = next((word.device for word in words if isinstance(word, Tensor)), torch.device("cpu"))
    state = torch.zeros((), dtype=torch.int64, device=device)
    for word in words:
        # An integer is filled in on the device: nothing is copied, and no compiled graph is tied to its value.
        filled = word if isinstance(word, Tensor) else torch.full((), word, dtype=torch.int64, device=device)
        state = _mix(state ^ filled)
    return state


def uniforms(seed: int, stream: int, step: int | Tensor, samples: Tensor, numbers: Tensor, count: int) -> Tensor:
    """Draw `count` float32 values in [0, 1) for each pair of sample and view number: (n,), (n,) -> (n, count)."""
    columns = torch.arange(count, device=samples.device)
    words = hash_words(seed, stream, step, samples[:, None], numbers[:, None], columns[None, :])
    return _shift_right(words, 64 - _UNIFORM_BITS).to(torch.float32) * 2.0**-_UNIFORM_BITS


def normals(keys: Tensor, count: int) -> Tensor:
    """Draw `count` standard normal float32 values for each of n hashes: (n,) int64 -> (n, count)."""
    words = _shift_right(hash_words(keys[:, None], torch.arange(count, device=keys.device)[None, :]), 64 - 23)
    return torch.erfinv((words.to(torch.float32) + 0.5) * 2.0**-22 - 1) * 2**0.5


def permutation(seed: int, stream: int, step: int | Tensor, length: int, device: torch.device | str = "cpu") -> Tensor:
    """Draw an order of 0..length-1, every order equally likely: (length,) int64."""
    return torch.argsort(hash_words(seed, stream, step, torch.arange(length, device=device)), stable=True)


def generator(seed: int, *words: int) -> torch.Generator:
    """Make a CPU generator for host-side draws whose numbers depend only on the seed and the words."""
    return torch.Generator().manual_seed(int(hash_words(seed, *words)))


def _mix(value: Tensor) -> Tensor:
    """The output of splitmix64 with each value as its state; its constants are written as int64."""
    value = value - 0x61C8864680B583EB  # + 0x9E3779B97F4A7C15
    value = (value ^ _shift_right(value, 30)) * -0x40A7B892E31B1A47  # * 0xBF58476D1CE4E5B9
    value = (value ^ _shift_right(value, 27)) * -0x6B2FB644ECCEEE15  # * 0x94D049BB133111EB
    return value ^ _shift_right(value, 31)


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """Shift in zeros; the shift of int64 itself would repeat the sign."""
    return torch.bitwise_and(value >> bits, 2 ** (64 - bits) - 1)
