"""The order of the data: a pure function of seed, step and place in the global batch."""

import itertools

import numpy as np
import pytest
import torch

from runtime.data.dataset import DTYPES, write_dataset
from runtime.data.loader import BatchSizes, TrainBatches, eval_batches, read_sequences
from runtime.data.permutation import feistel_permute, mixed_seed
from runtime.data.sequences import TokenStream, decode_mask
from runtime.errors import UserError

# (tokens, block): the least there can be, one and two more, around two and three blocks, and more
SIZES = [(2, 1), (3, 1), (33, 32), (34, 32), (63, 32), (64, 32), (65, 32), (96, 32), (97, 32), (1000, 32), (12345, 64)]


def take(tokens, steps, vocab_size=65536):
    """The first steps of three micro-batches of two sequences; as one (x, y)."""
    batches = TrainBatches([(TokenStream(tokens, 16), 1)], 0, BatchSizes(2, 3, 1, 16), 0, 1337, vocab_size, "cpu")
    micro_batches = [micro_batch for _ in range(steps) for micro_batch in batches.next_step(3)]
    return [torch.cat(part) for part in zip(*micro_batches)]


def test_seeds_of_dropout_are_splitmix64s():
    """Its first outputs for the seeds 0 and 1; and the order of the numbers counts."""
    assert mixed_seed(0) == 0xE220A8397B1DCDAF >> 1 and mixed_seed(1) == 0x910A2DEC89025CC1 >> 1
    assert len({mixed_seed(seed, it, rank) for seed in range(9) for it in range(9) for rank in range(9)}) == 729


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 255, 1000, 4096, 4097])
def test_permutation_is_a_bijection(n):
    for key in (0, 1, 2, 1337, 2**63, 2**64 - 1):
        assert np.array_equal(np.sort(feistel_permute(np.arange(n), n, key)), np.arange(n))
    billions = 9_035_582_198 // 1024 * 1000  # far more than OpenWebText's windows
    places = feistel_permute(np.arange(billions - n, billions), billions, 3)
    assert 0 <= places.min() and places.max() < billions and len(set(places.tolist())) == n


def test_permutation_takes_one_key_for_all_or_one_each():
    keys = np.arange(100, dtype=np.uint64) % np.uint64(7)
    permuted = feistel_permute(np.arange(100), 100, keys)
    assert permuted.tolist() == [int(feistel_permute(i, 100, key)) for i, key in zip(range(100), keys)]


def test_permutation_has_no_memory():
    """Neither place nor neighbour predicts where an index goes. For 10,000 draws, a correlation deviates by 0.01."""
    order = feistel_permute(np.arange(n := 10_000), n, 1337)
    for other in (np.arange(n), np.roll(order, 1), feistel_permute(np.arange(n), n, 1338)):
        assert abs(np.corrcoef(order, other)[0, 1]) < 0.04
    assert 0.48 < (np.diff(order) > 0).mean() < 0.52 and (order == np.arange(n)).sum() <= 8  # deviation 0.003; 1


def test_small_permutations_are_all_reached_about_equally():
    """All 24 orders of 4 things, 100 times each in 2,400 keys: deviation 10."""
    orders = [tuple(feistel_permute(np.arange(4), 4, key)) for key in range(2400)]
    counts = [orders.count(order) for order in itertools.permutations(range(4))]
    assert 50 < min(counts) and max(counts) < 160


@pytest.mark.parametrize("n_tokens, block_size", SIZES)
def test_an_epoch_is_every_window_once_and_inside(n_tokens, block_size):
    stream = TokenStream(np.zeros(n_tokens), block_size)
    windows, max_shift = stream.per_epoch, stream.max_shift
    assert windows >= 1 and 0 <= max_shift < block_size
    assert n_tokens - 1 - windows * block_size < 2 * block_size  # left out
    for epoch in (0, 1, 2, 3, 1000):
        numbers = np.arange(epoch * windows, (epoch + 1) * windows)
        offsets = np.sort(stream.train_places(numbers, seed=1337))
        assert 0 <= offsets[0] <= max_shift and offsets[-1] + block_size + 1 <= n_tokens
        assert np.array_equal(np.diff(offsets), np.full(windows - 1, block_size))  # touching, none twice


def test_epochs_and_seeds_differ():
    stream = TokenStream(np.zeros(100_000), 16)
    windows = stream.per_epoch
    epoch = [stream.train_places(np.arange(e * windows, (e + 1) * windows), 1337) for e in range(3)]
    epoch.append(stream.train_places(np.arange(windows), 1338))
    assert windows == 6249
    for a, b in itertools.combinations(epoch, 2):
        assert (a // 16 == b // 16).mean() < 0.005  # by chance 1 in 6,249
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.06
    assert len({int(e.min()) for e in epoch}) > 1  # the shifts, too


def test_the_order_is_the_one_that_earlier_runs_had():
    """A change here breaks the resuming of every run there is."""
    short, long = TokenStream(np.zeros(1000), 32), TokenStream(np.zeros(301_966), 1024)
    assert short.train_places(np.arange(8), 1337).tolist() == [291, 35, 675, 739, 67, 771, 931, 611]
    assert long.train_places(np.arange(10**12, 10**12 + 4), 7).tolist() == [216226, 288930, 63650, 149666]


def test_uint16_and_uint32_bins_give_the_same_batches(tmp_path):
    ids, batches = np.random.default_rng(0).integers(0, 65_536, 2000), []
    for vocab_size in (65_536, 65_537):
        meta = write_dataset(tmp_path / str(vocab_size), ids, ids[:100], {"kind": "gpt2"}, vocab_size, {})
        tokens = np.memmap(tmp_path / str(vocab_size) / "train.bin", dtype=DTYPES[meta["dtype"]], mode="r")
        batches.append((meta["dtype"], take(tokens, 3, vocab_size=vocab_size)))
    (narrow, a), (wide, b) = batches
    assert (narrow, wide) == ("uint16", "uint32")
    assert a[0].dtype == a[1].dtype == torch.int64 and a[0].max() > 2**15
    assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


@pytest.mark.parametrize("n_tokens, block_size", SIZES)
@pytest.mark.parametrize("n", [1, 2, 3, 20, 1000])
def test_eval_windows_are_disjoint_and_even(n_tokens, block_size, n):
    offsets = TokenStream(np.zeros(n_tokens), block_size).eval_places(n)
    assert len(offsets) == min(n, (n_tokens - 1) // block_size)  # as many as there are disjoint ones
    assert offsets[0] == 0 and offsets[-1] + block_size + 1 <= n_tokens
    gaps = np.diff(offsets)
    if len(offsets) > 1:
        assert offsets[-1] + block_size + 1 == n_tokens  # to the end
        assert gaps.min() >= block_size and gaps.max() - gaps.min() <= 1


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("n", [1, 2, 7, 12, 13])
def test_eval_windows_are_shared_out_over_the_ranks(world_size, n, batch_size):
    stream = TokenStream(np.arange(1000, dtype=np.uint16), 16)
    ranks = [list(eval_batches(stream, n, BatchSizes(batch_size, 1, world_size, 16), rank, 1000, "cpu"))
             for rank in range(world_size)]
    assert len({len(batches) for batches in ranks}) == 1  # or ZeRO-3 hangs
    x, y = (torch.cat([batch[i] for batches in ranks for batch in batches]) for i in (0, 1))
    counts = y[:, 0] >= 0
    assert torch.equal(y[counts], x[counts] + 1) and (y[~counts] == -1).all() and x.min() >= 0
    assert x[counts, 0].tolist() == stream.eval_places(n).tolist()
    assert len(x) - n < 2 * world_size  # little is made up


def test_a_token_beyond_the_vocabulary_ends_training():
    """Read by the thread, raised where training asks for the batch."""
    tokens = np.arange(1000, dtype=np.uint16)
    tokens[500] = 1000
    with pytest.raises(UserError, match="token 1000, beyond the vocabulary of 1000"):
        take(tokens, 34, vocab_size=1000)
    with pytest.raises(UserError, match="token 999, beyond the vocabulary of 999"):
        read_sequences([(TokenStream(tokens, 16), 983)], 999)
    assert read_sequences([(TokenStream(tokens, 16), 983)], 1000)[1].max() == 999


@pytest.mark.parametrize("dtype", ["<u2", "<u4", np.int64])
def test_a_mask_is_decoded_for_every_id_and_type(dtype):
    """Also for 0, whose negative is no other number, and for ids beyond the signed half of their type."""
    ids = np.array([[0, 1, 2, 50_256, 65_535]], dtype)
    for row, expected in ((ids, ids.tolist()), (~ids.astype(np.int64), [[-1] * 5])):
        decoded, targets = decode_mask(row)
        assert decoded.tolist() == [[0, 1, 2, 50_256, 65_535]] and targets.tolist() == expected
        assert decoded.dtype == targets.dtype == np.int64
