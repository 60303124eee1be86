"""Steps of any number of micro-steps: which sequences each takes, and what its targets weigh."""

import numpy as np
import pytest
import torch
from conftest import wait_until

from runtime.data.dataset import BEGINS, COUNTS
from runtime.data.loader import STEPS_AHEAD, BatchSizes, TrainBatches
from runtime.data.ramp import make_ramp
from runtime.data.sequences import Conversations, TokenStream
from runtime.errors import UserError

BLOCK = 16
TEXT = TokenStream(np.arange(60_000, dtype=np.uint16), BLOCK)  # so the first token of a window is its offset
OFFSETS = TEXT.train_places(np.arange(3000), 1337)  # of less than an epoch
ID_OF = {int(offset): number for number, offset in enumerate(OFFSETS)}
RAMP = (1, 1, 3, 2, 2, 1, 4, 4)  # micro-steps of each step
# (micro-steps, sequences per rank in each) of each step
SMALL_FIRST = ((1, 1), (1, 1), (1, 2), (1, 3), (1, 3), (1, 6), (2, 6), (3, 6))


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


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_smaller_micro_batches_take_each_sequence_once_and_in_order(world_size):
    """The loader expects two micro-steps of 6 sequences, and gets SMALL_FIRST."""
    ranks = [loader(5, 6, 2, world_size, rank) for rank in range(world_size)]
    taken = []
    for micro_steps, micro in SMALL_FIRST:
        steps = [ids_of(own.next_step(micro_steps, micro=micro)) for own in ranks]
        for parts in zip(*steps, strict=True):  # of the ranks, in a micro-step
            assert [len(part) for part in parts] == [micro] * world_size
            for part in parts:
                taken += part
    assert taken == list(range(5, 5 + 46 * world_size))
    assert {own.position for own in ranks} == {5 + 46 * world_size}
    assert {own.trained_on[BLOCK] for own in ranks} == {46 * world_size}


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("done", range(1, 6))
def test_the_steps_of_a_ramp_are_the_same_on_any_number_of_ranks(done, world_size):
    """Stages of 6, 12, 24 and 48 sequences, of which 24 are a micro-step, on one rank, and from step `done` on others.
    """
    text = "6@0, 12@0.1, 24@0.3, 48@0.6"
    plain = iter(range(1000))
    position = 0
    for ranks, steps in ((1, range(done)), (world_size, range(done, 6))):
        batch = BatchSizes(24 // ranks, 2, ranks, BLOCK)
        ramp = make_ramp(text, None, 6, batch)
        assert [ramp.size(it) for it in range(6)] == [6, 6, 12, 12, 24, 48]
        loaders = [loader(position, batch.micro, 2, ranks, rank) for rank in range(ranks)]
        for it in steps:
            made = [ids_of(own.next_step(ramp.micro_steps(it), BLOCK, ramp.micro(it))) for own in loaders]
            for parts in zip(*made, strict=True):
                for part in parts:
                    assert part == [next(plain) for _ in part]
        position = loaders[-1].position
        assert {own.position for own in loaders} == {ramp.sequences_before(steps[-1] + 1)}
    assert position == 108 == next(plain)


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
    """Begin, micro-steps and sequences of each, of what the thread has read."""
    read = []
    read_step = TrainBatches.read_step

    def recorded(self, begin, micro_steps, micro):
        read.append((begin, micro_steps, micro))
        return read_step(self, begin, micro_steps, micro)

    monkeypatch.setattr(TrainBatches, "read_step", recorded)
    batches = loader(0, 4, 2, 1, 0)
    for _ in range(3):
        batches.next_step(2)
    assert STEPS_AHEAD == 2
    expected = [(begin, 2, 4) for begin in (0, 8, 16, 24, 32)]  # the last two before anybody asks
    assert wait_until(lambda: len(read) == 5, seconds=20) and read == expected
    assert ids_of(batches.next_step(1)) == [[24, 25, 26, 27]]  # the ramp: they are read again
    assert ids_of(batches.next_step(1)) == [[28, 29, 30, 31]]
    again = [(begin, n) for begin, n, _ in read if n == 1]
    assert again[:2] == [(24, 1), (28, 1)] and len(set(again)) == len(again)

    # Smaller micro-batches: they are read again at the first step of them, and not at the next
    assert wait_until(lambda: len(again_of(read, 4)) == 4, seconds=20)
    assert ids_of(batches.next_step(1, micro=2)) == [[32, 33]]
    assert ids_of(batches.next_step(1, micro=2)) == [[34, 35]]
    assert wait_until(lambda: len(again_of(read, 2)) == 4, seconds=20)
    assert again_of(read, 2) == [32, 34, 36, 38]


def again_of(read, micro):
    """Where the single micro-steps of so many sequences begin that were read."""
    return [begin for begin, n, own_micro in read if n == 1 and own_micro == micro]


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
    for micro_steps, micro in [*((number, 2) for number in RAMP), *SMALL_FIRST]:
        made = [micro_batch for own in ranks for micro_batch in own.next_step(micro_steps, micro=micro)]
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
    assert ids_of(batches.next_step(np.int64(2), micro=np.int64(1))) == [[0], [1]]
    assert type(batches.position) is int  # a checkpoint's manifest is JSON


@pytest.mark.parametrize("micro", [0, -1, 1.5, 2.0, "2"])
def test_what_is_no_number_of_sequences_is_refused(micro):
    batches = loader(0, 1, 2, 1, 0)
    with pytest.raises(UserError, match=f"^micro={micro} must be a whole number of at least 1: change"):
        batches.next_step(2, micro=micro)
    assert batches.position == 0
