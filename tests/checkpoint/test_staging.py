"""The buffer from which a thread writes a tag while training goes on."""

import torch

from runtime.checkpoint import staging as module
from runtime.checkpoint.staging import Decoded, Staging, beyond_memory, decoded_on_disk, staged_nbytes


def copies_of(staging, content):
    """Return the staged copies of a file's content, as a save makes them."""
    files = [("model.pt", content)]
    staging.allocate(staged_nbytes(files))
    ((_, copies),) = staging.copy(files)
    return copies


def test_a_larger_save_gets_a_larger_buffer_and_a_smaller_one_keeps_it(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")  # as a launcher does
    staging = Staging(torch.device("cpu"))
    small = {"weight": torch.arange(10.0)}
    large = {"weight": torch.arange(5000.0), "half": torch.arange(300).to(torch.bfloat16)}
    sizes = []
    for content in (small, large, small):
        copies = copies_of(staging, content)
        expected = {name: tensor.clone() for name, tensor in content.items()}
        for tensor in content.values():
            tensor += 1  # training goes on
        for name, tensor in expected.items():
            assert torch.equal(copies[name], tensor)
        sizes.append(len(staging.buffer))
    assert 40 <= sizes[0] < 20_000 < 20_600 <= sizes[1] == sizes[2]


def test_what_memory_does_not_hold_is_counted(monkeypatch):
    """A tenth stays free, and each tensor takes what is left for the next."""
    assert beyond_memory([100, 100, 100], 330, 1) == 0
    assert beyond_memory([100, 100, 100], 309, 1) == 100
    assert beyond_memory([100, 100, 100], 0, 1) == 300
    assert beyond_memory([200, 100], 210, 1) == 200  # a smaller one after it fits
    assert beyond_memory([100, 100], 421, 2) == 0 and beyond_memory([100, 100], 419, 2) == 100

    # Of a file at a time, what isn't made yet
    def fill(target):
        raise AssertionError("nothing is made")

    made = [Decoded(25, torch.device("cpu"), fill) for _ in range(4)]  # 100 bytes each
    files = [("model.pt", {"weight": torch.zeros(1000)}), ("a.pt", {"a": made[0]}), ("b.pt", {"b": made[1:]})]
    monkeypatch.setenv("WORLD_SIZE", "1")
    free = [330, 330, 309, 309, 0, 0]  # asked for each file that has such tensors
    monkeypatch.setattr(module, "available_memory", lambda: free.pop(0))
    assert [decoded_on_disk(files) for _ in range(3)] == [0, 100, 300]
