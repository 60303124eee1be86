"""Files of torch.save of others: torch.load reads them in a moment, or they are refused."""

import io
import struct
import zipfile
from collections import OrderedDict

import pytest
import torch
from conftest import done, stage

from runtime.torch_files import SAFE_GLOBALS, check_pickle, check_stored, check_torch_file

START = b"\x80\x02"  # the protocol


def saved(content, **how):
    file = io.BytesIO()
    torch.save(content, file, **how)
    return file


CONTENT = {
    "model": OrderedDict({"a": torch.ones(3, 2), "b": torch.nn.Parameter(torch.ones(2))}),
    "half": torch.zeros(2, dtype=torch.bfloat16),
    "shapes": [torch.Size([3, 2]), (1, (2.5, None))],
    "numbers": {0: 2**40, "x": [True, "y", -1.0]},
}


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])
def test_what_torch_saves_is_read(is_zip):
    file = saved(CONTENT, _use_new_zipfile_serialization=is_zip)
    assert check_torch_file(file) is is_zip


@pytest.mark.parametrize("number", [2, 3])
def test_what_a_run_saves_is_read(train, number):
    run = done(train(stage(number), "--max_iters=1", ranks=2))
    files = sorted(run.out_dir.glob("iter_1/*.pt"))
    assert len(files) == (3 if number == 2 else 4)
    for path in files:
        with open(path, "rb") as file:
            assert check_torch_file(file, SAFE_GLOBALS)


def doubled(times):
    """The operations for a tuple that is twice the tuple before, so many times."""
    operations = b")"
    for i in range(times):
        operations += b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86"
    return operations


DICT_OF = b"}%sK\x01s."
LONG_NUMBER = b"\x8a\x09" + struct.pack("<q", 2**61 - 1) + b"\0"
REFUSED = {
    "a tuple as a key": (DICT_OF % doubled(60), "a key that is neither text nor a small number"),
    "tuples in tuples": (DICT_OF % (b")" + b"\x85" * 300_000), "a key that is neither text"),
    "a long number as a key": (DICT_OF % LONG_NUMBER, "a key that is neither text"),
    "two keys": (b"}(X\1\0\0\0xK\1" + doubled(60) + b"K\1u.", "a key that is neither text"),
    "an OrderedDict of pairs": (b"ccollections\nOrderedDict\n]" + doubled(60) + b"K\1\x86a\x85R.",
                                "an OrderedDict in another form"),
    "a set": (b"cbuiltins\nset\n]" + doubled(60) + b"a\x85R.", "it names builtins.set"),
    "a large array": (b"cbuiltins\nbytearray\nJ\0\0\0\x7f\x85R.", "it names builtins.bytearray"),
    "a copy of a repeated number": (
        b"ctorch._utils\n_rebuild_device_tensor_from_cpu_tensor\n)R.", "it names torch._utils"),
    "a call of a list": (b"])R.", "calls what is no function"),
    "a new object of a list": (b"])\x81.", "calls what is no function"),
    "an enumeration's value": (b"cx\ny\n" + doubled(60) + b"\x85R.", "in another form"),
    "a storage's key": (b"(X\7\0\0\0storageNX\1\0\0\x000" + doubled(60) + b"tQ.",
                        "in another form"),
    "a state of pairs": (b"ccollections\nOrderedDict\n)R]" + doubled(60) + b"K\1\x86ab.",
                         "an object whose state is no dict"),
    "many operations": (b"]" * 2_000_001 + b".", "more than 2,000,000 steps"),
    "one state, often": (b"}q\0(" + b"".join(b"K%cN" % i for i in range(1, 101)) + b"u"
                         b"ccollections\nOrderedDict\n)R" + b"h\0b" * 20_000 + b".",
                         "more than 2,000,000 steps"),
    "another protocol": (b"\x80\4N.", "its pickle has the protocol 4, and torch.save's is 2"),
    "an operation of old Python": (b"I5\n.", "it holds INT"),
    "an empty stack": (b"s.", "its pickle is damaged"),
    "no memo": (b"h\5.", "its pickle is damaged"),
    "no end": (b"]", "pickle exhausted before seeing STOP"),
}


@pytest.mark.parametrize("operations, why", REFUSED.values(), ids=REFUSED)
def test_what_takes_long_is_refused(operations, why):
    with pytest.raises(ValueError, match=why):
        check_pickle(START + operations, {"x.y"})


def zipped(compression):
    """A file of torch.save, which Python's zipfile has packed again."""
    file = io.BytesIO()
    with zipfile.ZipFile(saved(CONTENT)) as old, zipfile.ZipFile(file, "w", compression) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return file


def test_compressed_files_and_other_ends_are_refused():
    check_stored(saved(CONTENT))
    with pytest.raises(ValueError, match="it is compressed, which torch.save doesn't do"):
        check_stored(zipped(zipfile.ZIP_DEFLATED))
    with pytest.raises(ValueError, match="its end is not what torch.save writes"):
        check_stored(zipped(zipfile.ZIP_STORED))

    # A table of contents that is elsewhere than the end says: PyTorch and Python read two tables
    content = saved(CONTENT).getvalue()
    for moved in (content[:-98] + b"PK" + content[-98:], content + b"x"):
        with pytest.raises((ValueError, zipfile.BadZipFile)):
            check_stored(io.BytesIO(moved))
