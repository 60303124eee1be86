"""Steps of any number of micro-steps: which sequences each takes, and what its targets weigh."""

import numpy as np
import pytest
import torch
from conftest import wait_until

from runtime.data.dataset import BEGINS, COUNTS
from runtime.data.loader import STEPS_AHEAD, BatchSizes, TrainBatches
from runtime.data.sequences import Conversations, TokenStream
from runtime.errors import UserError

BLOCK = 16
TEXT = TokenStream(np.arange(60_000, dtype=np.uint16), BLOCK)  # so the first token of a window is its offset
OFFSETS = TEXT.train_places(np.arange(3000), 1337)  # of less than an epoch
ID_OF = {int(offset): number for number, offset in enumerate(OFFSETS)}
RAMP = (1, 1, 3, 2, 2, 1, 4, 4)  # micro-steps of each step


def loader(position, micro, accumulation, world_size, rank):
    """The TrainBatches of one rank."""
    batch = BatchSizes(micro, accumulation, world_size, BLOCK)
    return TrainBatches([(TEXT, 1)], position, batch, rank, 1337, 65_536, "cpu")


def ids_of(micro_batches):
    """[[id of each sequence] of each micro-batch]."""
    return [[ID_OF[int(first)] for first in x[:, 0]] for x, _ in micro_batches]


def test_a_micro_step_is_a_run_of_sequences_and_each_rank_has_its_part():
    """The table at the head of loader.py."""
    ranks = [loader(8, micro=2, accumulation=2, world_size=2, rank=rank) for rank in (0, 1)]
    assert ids_of(ranks[0].next_step(2)) == [[8, 9], [12, 13]]
    assert ids_of(ranks[1].next_step(2)) == [[10, 11], [14, 15]]
    assert ids_of(ranks[0].next_step(2)) == [[16, 17], [20, 21]]
    assert ranks[0].position == 24 and ranks[1].position == 16


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_ramp_takes_each_sequence_once_and_in_order(world_size):
    """Two sequences per rank and micro-step. The loader expects three micro-steps, and gets RAMP."""
    ranks = [loader(5, 2, 3, world_size, rank) for rank in range(world_size)]
    taken = []
    for micro_steps in RAMP:
        steps = [ids_of(own.next_step(micro_steps)) for own in ranks]
        assert [len(step) for step in steps] == [micro_steps] * world_size
        for parts in zip(*steps):
            taken += [number for part in parts for number in part]
    assert taken == list(range(5, 5 + sum(RAMP) * 2 * world_size))
    assert {own.position for own in ranks} == {5 + 18 * 2 * world_size}


@pytest.mark.parametrize("done", range(1, len(RAMP)))
def test_a_ramp_goes_on_at_its_position_on_other_ranks(done):
    """12 sequences per micro-step: 6 on each of two ranks, then 4 on each of three."""
    before = [loader(0, 6, 2, 2, rank) for rank in range(2)]
    for micro_steps in RAMP[:done]:
        for own in before:
            own.next_step(micro_steps)
    position = before[0].position
    assert position == 12 * sum(RAMP[:done]) == before[1].position

    after = [loader(position, 4, 2, 3, rank) for rank in range(3)]
    for micro_steps in RAMP[done:]:
        steps = [own.next_step(micro_steps) for own in before]
        again = [own.next_step(micro_steps) for own in after]
        for m in range(micro_steps):
            x, y = (torch.cat([step[m][i] for step in steps]) for i in (0, 1))
            x_again, y_again = (torch.cat([step[m][i] for step in again]) for i in (0, 1))
            assert torch.equal(x, x_again) and torch.equal(y, y_again)
    assert before[0].position == after[0].position == 12 * sum(RAMP)


def test_steps_are_read_once_and_ahead_while_their_size_stays(monkeypatch):
    """Begin and micro-steps of what the thread has read. 4 sequences per micro-step."""
    read = []
    read_step = TrainBatches.read_step

    def recorded(self, begin, micro_steps):
        read.append((begin, micro_steps))
        return read_step(self, begin, micro_steps)

    monkeypatch.setattr(TrainBatches, "read_step", recorded)
    batches = loader(0, 4, 2, 1, 0)
    for _ in range(3):
        batches.next_step(2)
    assert STEPS_AHEAD == 2
    expected = [(0, 2), (8, 2), (16, 2), (24, 2), (32, 2)]  # the last two before anybody asks
    assert wait_until(lambda: len(read) == 5, seconds=20) and read == expected
    assert ids_of(batches.next_step(1)) == [[24, 25, 26, 27]]  # the ramp: they are read again
    assert ids_of(batches.next_step(1)) == [[28, 29, 30, 31]]
    again = [(begin, n) for begin, n in read if n == 1]
    assert again[:2] == [(24, 1), (28, 1)] and len(set(again)) == len(again)


def packed(block_size=BLOCK):
    """Conversations with 1 to 12 targets each."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(4, 20, 400)
    mask = np.zeros(lengths.sum(), np.uint8)
    begins = np.append(0, np.cumsum(lengths)[:-1])
    for begin, length in zip(begins, lengths):
        answer = rng.integers(1, min(12, length - 1) + 1)
        mask[begin + length - answer : begin + length] = COUNTS
    mask[begins] |= BEGINS
    return Conversations("chat", rng.integers(0, 256, len(mask)), mask, block_size)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("mixed", [False, True], ids=["chat", "chat and text"])
def test_a_steps_loss_is_the_mean_over_its_targets_whatever_the_number(world_size, mixed):
    """As the engine averages: over the micro-steps that were made, and the ranks."""
    sources = [(packed(), 1)]
    if mixed:
        sources.append((TokenStream(np.arange(5000) % 256, BLOCK), 2))
    batch = BatchSizes(2, 4, world_size, BLOCK)
    ranks = [TrainBatches(sources, 10, batch, rank, 7, 256, "cpu") for rank in range(world_size)]
    weights = []
    for micro_steps in RAMP:
        made = [micro_batch for own in ranks for micro_batch in own.next_step(micro_steps)]
        losses = [(1 + y.double().sin()) * (y >= 0) for _, y, _ in made]  # of each target
        counted = sum(int((y >= 0).sum()) for _, y, _ in made)
        mean = sum(own.sum() for own in losses) / counted
        total = sum(own.sum() * weight for own, (_, _, weight) in zip(losses, made))
        assert total / (micro_steps * world_size) == pytest.approx(mean.item(), rel=1e-6)
        weights.append(made[0][2].item())
        assert {weight.item() for *_, weight in made} == {weights[-1]}
    assert len(set(weights)) > 3  # or the mean would be nothing to prove


@pytest.mark.parametrize("world_size", [1, 2])
def test_shorter_sequences_are_parts_of_the_whole_ones(world_size):
    """No target is lost or there twice, and what was read ahead is used."""
    whole = [loader(5, 2, 3, world_size, rank) for rank in range(world_size)]
    cut = [loader(5, 2, 3, world_size, rank) for rank in range(world_size)]
    for micro_steps, length in ((2, 4), (1, 8), (3, 8), (3, 16), (2, 1)):
        for own, own_cut in zip(whole, cut):
            expected = own.next_step(micro_steps)
            found = own_cut.next_step(micro_steps, length)
            for (x, y), (part_x, part_y) in zip(expected, found, strict=True):
                assert part_x.shape == part_y.shape == (2 * BLOCK // length, length)
                for i, piece in enumerate(torch.split(x, length, dim=1)):
                    assert torch.equal(part_x[i :: BLOCK // length], piece)
                assert torch.equal(part_y, part_x + 1)  # the text counts up
                assert torch.equal(part_y.view_as(y), y)
    assert cut[0].position == 5 + 11 * 2 * world_size == whole[0].position
    assert cut[0].trained_on == {n: 2 * world_size * steps for n, steps in ((4, 2), (8, 4), (16, 3), (1, 2))}


@pytest.mark.parametrize("length", [3, 0, -4, 32, 4.0])
def test_a_length_that_does_not_divide_is_refused(length):
    batches = loader(0, 1, 2, 1, 0)
    with pytest.raises(UserError, match=f"^a length of {length} doesn't divide block_size=16"):
        batches.next_step(1, length)
    assert batches.position == 0


def test_conversations_are_not_cut():
    batches = TrainBatches([(packed(), 1)], 0, BatchSizes(2, 1, 1, BLOCK), 0, 7, 256, "cpu")
    with pytest.raises(UserError, match="^a length of 8 would cut conversations"):
        batches.next_step(1, 8)
    assert len(batches.next_step(1, 16)) == 1


@pytest.mark.parametrize("micro_steps", [0, -1, 1.5, 2.0, "2", None])
def test_what_is_no_number_of_micro_steps_is_refused(micro_steps):
    batches = loader(0, 1, 2, 1, 0)
    with pytest.raises(UserError, match=f"^micro_steps={micro_steps} must be a whole number of at"):
        batches.next_step(micro_steps)
    assert batches.position == 0
    assert ids_of(batches.next_step(np.int64(2))) == [[0], [1]]
    assert type(batches.position) is int  # a checkpoint's manifest is JSON
