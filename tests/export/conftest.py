from collections.abc import Iterator

import pytest

from small_runs import networks_of_zeros


@pytest.fixture(scope="module")
def empty_starts() -> Iterator[None]:
    """Networks start as zeros where all weights come from files or from `unlike_new`.

    A weight that was meant to come from a file and did not is zero, which no sample network's is.
    """
    with networks_of_zeros():
        yield
