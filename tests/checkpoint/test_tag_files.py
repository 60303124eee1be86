"""A tag's files one by one, in this process: on the disk in order, hashed, searched, and cut into
padded pieces."""

import hashlib
import json
import os

import pytest
import torch
from conftest import MOMENTS, Payload
from deepspeed.runtime.utils import see_memory_usage

from runtime.checkpoint.errors import CheckpointError
from runtime.checkpoint.tag_reader import TagReader
from runtime.checkpoint.tag_writer import TagWriter
from runtime.checkpoint.tags import TagStore
from runtime.checkpoint.verify import verify_files
from runtime.files import file_digest


def test_a_tag_is_on_the_disk_before_it_has_its_name_and_an_older_one_goes_last(process_group, disk_calls, tmp_path):
    writer = TagWriter(TagStore(tmp_path), keep_last=1, group=None, copy_recovery_script=lambda out_dir: None)
    for tag in ("iter_1", "iter_2"):
        disk_calls.clear()
        work = tmp_path / f"{tag}.saving"
        work.mkdir()
        files = [(str(work / name), torch.zeros(3)) for name in ("model.pt", "optim.pt")]
        assert writer.write(files, {"tag": tag, "state": {}}, []) is None
    (manifest,) = [call for call in disk_calls if call[0] == "fsync" and "/.manifest.json." in call[1]]
    order = [[("fsync", f"{work}/model.pt"), ("fsync", f"{work}/optim.pt"), manifest],
             [("replace", f"{work}/manifest.json")], [("fsync", str(work))], [("rename", f"{tmp_path}/iter_2")],
             [("replace", f"{tmp_path}/latest")], [("rename", f"{tmp_path}/iter_1.saving")]]
    for earlier, later in zip(order, order[1:]):
        assert max(map(disk_calls.index, earlier)) < min(map(disk_calls.index, later))


def test_all_of_a_large_file_is_hashed(tmp_path):
    """20 MB, of which the last byte changes. Real files have gigabytes."""
    path = tmp_path / "mp_rank_00_model_states.pt"
    content = bytes(20_000_000)
    path.write_bytes(content)
    entry = file_digest(path)
    assert entry == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    (problem,) = verify_files(tmp_path, {path.name: entry})
    assert problem == f"{path} has changed since it was saved (its sha256 differs)"


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_changed_file_is_found_by_one_of_the_ranks(tmp_path, world_size):
    for name in "abcd":
        torch.save(torch.zeros(9), tmp_path / name)
    files = {name: file_digest(tmp_path / name) for name in "abcd"}
    for name in "abcd":
        saved = (tmp_path / name).read_bytes()
        place = saved.index(bytes(36))  # of the tensor
        (tmp_path / name).write_bytes(saved[:place] + b"x" + saved[place + 1 :])
        (problem,) = [
            text
            for rank in range(world_size)
            for text in verify_files(tmp_path, files, rank, world_size)
        ]
        assert problem == f"{tmp_path}/{name} has changed since it was saved (its sha256 differs)"
        (tmp_path / name).write_bytes(saved)


@pytest.mark.parametrize(
    "name", ["mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"]
)
@pytest.mark.parametrize(
    "content, word",
    [
        (Payload("mark"), "posix.mkdir"),
        (see_memory_usage, "deepspeed.runtime.utils.see_memory_usage"),
    ],
)
def test_no_file_of_a_tag_may_name_what_is_not_allowed(tmp_path, name, content, word):
    """Nor what DeepSpeed's own modules hold beyond the few names of the list."""
    torch.save({"state": content}, tmp_path / name)
    (problem,) = verify_files(tmp_path, {name: file_digest(tmp_path / name)})
    assert problem == f"{tmp_path}/{name} contains {word}, which could run code: not read"
    torch.save(
        {"state": content}, tmp_path / name, _use_new_zipfile_serialization=False
    )  # can't be looked into
    (problem,) = verify_files(tmp_path, {name: file_digest(tmp_path / name)})
    assert problem.startswith(f"{tmp_path}/{name}")


def test_pieces_of_stage_3_are_put_together_without_their_padding(tmp_path):
    """Parameters of 15, 7 and 3 elements in two groups, by 2 ranks: each is padded by one."""
    groups = [{"a": torch.Size((3, 5)), "b": torch.Size((7,))}, {"c": torch.Size((3,))}]
    whole = {
        kind: {name: torch.rand(shape) for group in groups for name, shape in group.items()}
        for kind in ("weight", *MOMENTS)
    }

    def pieces(kind, rank):
        padded = [
            [torch.nn.functional.pad(whole[kind][name].flatten(), (0, 1)) for name in group]
            for group in groups
        ]
        return [torch.cat([p.chunk(2)[rank] for p in group]) for group in padded]

    for rank in (0, 1):
        state = {
            i: {"step": 5, **{kind: pieces(kind, rank)[i] for kind in MOMENTS}} for i in (0, 1)
        }
        inner = {
            "fp32_flat_groups": pieces("weight", rank),
            "optimizer_state_dict": {"state": state},
        }
        model = {
            "param_shapes": groups,
            "frozen_param_shapes": None,
            "shared_params": {"d": "a"},
            "module": {"table": torch.arange(3)},
            "buffer_names": ["table"],
        }
        for kind, content in (("model", model), ("optim", {"optimizer_state_dict": inner})):
            torch.save(content, tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt")
    shards = TagReader(
        tmp_path, {"files": os.listdir(tmp_path), "stage": 3, "world_size": 2, "state": {}}
    )
    assert shards.step == 5 and list(shards.shapes) == ["a", "b", "c"]
    for kind, tensors in whole.items():
        assert all(torch.equal(shards.get(name, kind), tensor) for name, tensor in tensors.items())
    assert shards.ties == [["a", "d"]] and torch.equal(shards.get("d"), whole["weight"]["a"])
    assert shards.tensors().params == {**groups[0], **groups[1], "d": torch.Size((3, 5))}
    assert shards.buffers["table"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("ties", [[["a", "b"]], [["x", "y"]]], ids=["two parameters", "none"])
def test_ties_of_no_single_parameter_are_refused(whole, ties):
    """Somebody else may have written a manifest."""
    out_dir = whole(2).out_dir
    manifest = json.loads((out_dir / "iter_8" / "manifest.json").read_text())
    names = {"a": "transformer.wpe.weight", "b": "transformer.wte.weight"}
    manifest["state"]["ties"] = [[names.get(name, name) for name in group] for group in ties]
    with pytest.raises(CheckpointError, match=" is .* is (2|0) parameters"):
        TagReader(out_dir / "iter_8", manifest)
