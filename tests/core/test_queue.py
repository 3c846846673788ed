import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import jcl


def test_starts_as_random_unit_rows():
    queue = jcl.KeyQueue(32, 8)
    torch.testing.assert_close(queue.rows.norm(dim=1), torch.ones(32))
    assert queue.rows.unique(dim=0).shape[0] == 32
    assert queue.filled() == 0


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 13), batches=st.lists(st.integers(0, 31), max_size=9))
def test_any_sequence_of_batches_leaves_the_newest_rows_in_a_ring(size, batches):
    queue = jcl.KeyQueue(size, 2)
    ring = [tuple(row) for row in queue.rows.tolist()]
    count = 0
    for batch in batches:
        rows = torch.arange(count, count + batch, dtype=torch.float32)[:, None].repeat(1, 2)
        queue.enqueue(rows)
        for row in rows.tolist():
            ring[count % size] = tuple(row)
            count += 1
    assert [tuple(row) for row in queue.rows.tolist()] == ring
    assert float(queue.filled()) == pytest.approx(min(1.0, count / size))


def test_rows_go_in_as_they_are():
    queue = jcl.KeyQueue(4, 3)
    short = torch.full((2, 3), 0.1)
    queue.enqueue(short)
    assert torch.equal(queue.rows[:2], short)


def test_is_saved_and_restored_with_its_place():
    queue = jcl.KeyQueue(5, 2)
    queue.enqueue(torch.ones(7, 2))
    restored = jcl.KeyQueue(5, 2)
    restored.load_state_dict(queue.state_dict())
    for twin in (queue, restored):
        twin.enqueue(torch.full((2, 2), 3.0))
    assert torch.equal(queue.rows, restored.rows)
    assert queue.enqueued == restored.enqueued == 9


def test_takes_no_gradient():
    queue = jcl.KeyQueue(4, 2)
    queue.enqueue(torch.ones(2, 2, requires_grad=True))
    assert not queue.rows.requires_grad


def test_wrong_shapes_are_named():
    with pytest.raises(ValueError, match="must be positive"):
        jcl.KeyQueue(0, 4)
    with pytest.raises(ValueError, match=r"rows \(n, 4\)"):
        jcl.KeyQueue(3, 4).enqueue(torch.ones(2, 5))
