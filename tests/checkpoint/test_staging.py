"""The buffer from which a thread writes a tag while training goes on."""

import torch

from runtime.checkpoint.staging import Staging, staged_nbytes


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
