"""ZeRO-2's buckets: gradients that come early, in parts, late or never, on the second rank."""

from types import SimpleNamespace

import pytest
import torch

from runtime.engine.reduce import BucketedAllReduce
from runtime.engine.shard import Place, Shard, pieces_of
from runtime.errors import UserError

SIZES = (5, 7, 4)  # each has a bucket of its own, and the last one comes first
SHARD_SIZE = 8  # of two ranks: the second rank's begins in the middle of the second parameter


@pytest.fixture
def buckets(process_group):
    """The reducer of rank 1, whose all-reduce has this process alone."""
    module = torch.nn.ParameterList(torch.zeros(size) for size in SIZES)
    offsets = (0, 5, 12)
    places = tuple(Place(param, offset) for param, offset in zip(module, offsets, strict=True))
    half = torch.zeros(SHARD_SIZE)
    grads = torch.zeros(SHARD_SIZE)
    shard = Shard(
        master=half.clone(),
        half=half,
        grads=grads,
        optimizer=torch.optim.AdamW(module),
        group_index=0,
        pieces=pieces_of(places, SHARD_SIZE, rank=1),
        places=places,
    )
    layout = SimpleNamespace(
        shards=(shard,),
        module=module,
        bucket_size=7,
        overlaps=False,
        world_size=2,
        group=None,
        names={param: f"weight {i}" for i, param in enumerate(module)},
    )
    return BucketedAllReduce(layout)


def backward(buckets, arrivals):
    """Run a backward. arrivals: (number of the parameter, value of its gradient), in order."""
    params = list(buckets.layout.module)
    for i, value in arrivals:
        params[i].grad = torch.full((SIZES[i],), float(value))
        buckets.on_grad_ready(params[i])
    buckets.finish_backward()


def test_gradients_that_come_early_in_two_parts_are_added(buckets):
    # The bucket of parameter 2 is the first, so 0 and 1 come before their turn, 1 in three parts
    backward(buckets, [(1, 10), (0, 1), (1, 20), (0, 2), (1, 40), (2, 100)])
    expected = torch.tensor([70.0] * 4 + [100.0] * 4) / 2  # the mean over two ranks
    assert torch.equal(buckets.layout.shards[0].grads, expected)

    # A second backward adds to it. One gradient comes early, one doesn't come, nothing is left over
    backward(buckets, [(0, 8), (2, 6)])
    expected[4:] += 3
    assert torch.equal(buckets.layout.shards[0].grads, expected)


def test_a_gradient_whose_bucket_is_reduced_is_refused(buckets):
    with pytest.raises(UserError, match="^the gradient of weight 2 came twice in one backward"):
        backward(buckets, [(2, 1), (2, 1)])
