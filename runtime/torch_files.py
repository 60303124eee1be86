"""Check a file of torch.save before torch.load reads it.

PyTorch's weights_only keeps a file from running code, but not from taking hours or all memory: a
dict whose key is tuples in tuples, 60 deep, has a few hundred bytes and is hashed in 2^60 steps. So
the operations of its pickle are followed here, without making what they describe.
"""

import os
import pickletools
import struct
import zipfile
from typing import Any, BinaryIO

import torch

MAX_OPERATIONS = 2_000_000  # GPT-2 XL's files have 100,000
MAX_PICKLE_BYTES = 20_000_000  # and 1 MB
LEGACY_PICKLES = 5  # of torch.save before 1.6: a number, its version, the system, the content, keys

# What torch.save names to rebuild a tensor. All of them make views of the file
REBUILDERS = {
    "collections.OrderedDict",
    "torch.Size",
    "torch.device",
    "torch._utils._rebuild_meta_tensor_no_storage",
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor_v3",
}
# The classes in DeepSpeed's files. A file that names anything else could run code when it is read
SAFE_GLOBALS = {
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
}
CONSTANTS = {"BININT", "BININT1", "BININT2", "BINUNICODE", "SHORT_BINSTRING", "NONE", "NEWTRUE",
             "NEWFALSE"}
TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}

# The last bytes of a zip file: the directory's size and place, where that is said, and no comment
ZIP_END = struct.Struct("<4s36xQQ" + "4s4xQ4x" + "4s16xH")


class CouldRunCode(ValueError):
    """A pickle names a function or class that is not allowed."""


class Name(str):
    """A function or class that a pickle names."""


class Opaque:
    """A value that nothing here asks for: a tensor, or a number that may be no key."""


class Dict(Opaque):
    """A dict, whose keys have been checked."""

    def __init__(self) -> None:
        self.size = 0  # keys and values


def check_torch_file(file: BinaryIO, classes: set[str] | frozenset[str] = frozenset()) -> bool:
    """Return whether a file of torch.save is a zip file, which can be memory-mapped.

    classes: what it may name besides REBUILDERS. Raises ValueError unless torch.load reads it with
    weights_only in a moment, and zipfile.BadZipFile and OSError.
    """
    file.seek(0)

    # The first bytes tell which of two formats it has
    is_zip = file.read(4) == b"PK\x03\x04"

    # Before PyTorch 1.6: pickles one after another
    if not is_zip:
        file.seek(0)
        for _ in range(LEGACY_PICKLES):
            check_pickle(file, classes)
        return False

    # A zip file. PyTorch's own reader finds the pickle, so that what is checked is what is read
    check_stored(file)
    file.seek(0)
    reader: Any = torch._C.PyTorchFileReader(file)
    start = reader.get_record_offset("data.pkl")
    file.seek(start)
    check_pickle(file.read(MAX_PICKLE_BYTES), classes)
    return True


def check_stored(file: BinaryIO) -> None:
    """Raise ValueError if a zip file of torch.save is compressed, which torch.save doesn't do.

    A few MB that somebody else has compressed can fill the memory. Raises zipfile.BadZipFile, too.
    """
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            if member.compress_type != zipfile.ZIP_STORED:
                raise ValueError("it is compressed, which torch.save doesn't do")

    # Python has looked for the directory right before the end, and PyTorch where the end says it is
    end = file.seek(-ZIP_END.size, os.SEEK_END)
    signature, size, start, locator, where, last, comment = ZIP_END.unpack(file.read())
    has_signatures = (signature, locator, last) == (b"PK\x06\x06", b"PK\x06\x07", b"PK\x05\x06")
    if not has_signatures or where != end or start + size != end or comment:
        raise ValueError("its end is not what torch.save writes")


def check_pickle(pickled: bytes | BinaryIO, classes: set[str] | frozenset[str]) -> None:
    """Raise ValueError unless a pickle holds tensors and plain containers, with plain keys.

    pickled: the pickle, or a file that is read to the pickle's end. classes: as above.
    """
    # A damaged pickle takes from an empty stack, or asks for a number that was never kept
    checker = PickleChecker(REBUILDERS | classes)
    try:
        for operation, argument, _ in pickletools.genops(pickled):
            checker.follow(operation.name, argument)
    except (IndexError, KeyError, AttributeError):
        raise ValueError("its pickle is damaged") from None


class PickleChecker:
    """Follows a pickle's operations. Its stack has constants, tuples, lists and Opaque values."""

    def __init__(self, callable_names: set[str]) -> None:
        self.callable_names = callable_names
        self.stack: list[Any] = []
        self.below: list[list] = []  # the stacks below each MARK
        self.memo: dict[int, Any] = {}
        self.steps = 0  # of PyTorch, so far

    def follow(self, operation: str, argument: Any) -> None:
        """Do what an operation does to the stack.

        Raises ValueError if it isn't allowed. IndexError, KeyError, AttributeError: it is damaged.
        """
        self.spend(1)
        if operation in CONSTANTS:
            self.stack.append(argument)
        elif operation in ("LONG1", "BINFLOAT"):  # as keys, some are as slow as tuples in tuples
            self.stack.append(Opaque())
        # Names, and what was kept under a number
        elif operation == "GLOBAL":
            self.stack.append(Name(argument.replace(" ", ".")))
        elif operation in ("BINGET", "LONG_BINGET"):
            self.stack.append(self.memo[argument])
        elif operation in ("BINPUT", "LONG_BINPUT"):
            self.memo[argument] = self.stack[-1]
        # A container begins
        elif operation == "MARK":
            self.below.append(self.stack)
            self.stack = []
        elif operation == "PROTO":
            if argument != 2:
                raise ValueError(f"its pickle has the protocol {argument}, and torch.save's is 2")
        elif operation != "STOP":
            self.make(operation)

    def make(self, operation: str) -> None:
        """Do an operation that makes or fills a container or an object. Raises as follow() does."""
        if operation in TUPLES:
            items = [self.stack.pop() for _ in range(TUPLES[operation])]
            self.stack.append(tuple(reversed(items)))
        # Containers, of what is on the stack since the last MARK
        elif operation == "TUPLE":
            items = self.since_mark()
            self.stack.append(tuple(items))
        elif operation == "EMPTY_LIST":
            self.stack.append([])
        elif operation == "EMPTY_DICT":
            self.stack.append(Dict())
        # Items of a list, and of a dict
        elif operation == "APPEND":
            item = self.stack.pop()
            self.stack[-1].append(item)
        elif operation == "APPENDS":
            items = self.since_mark()
            self.stack[-1].extend(items)
        elif operation == "SETITEM":
            value = self.stack.pop()
            key = self.stack.pop()
            self.set_items([key, value])
        elif operation == "SETITEMS":
            items = self.since_mark()
            self.set_items(items)
        # Calls, an object's state, and the bytes of a tensor
        elif operation in ("REDUCE", "NEWOBJ"):
            arguments = self.stack.pop()
            function = self.stack.pop()
            self.stack.append(self.call(function, arguments))
        elif operation == "BUILD":
            # PyTorch copies the state, which is one step for each key and value
            state = self.stack.pop()
            if not isinstance(state, Dict):
                raise ValueError("it has an object whose state is no dict")
            self.spend(state.size)
        elif operation == "BINPERSID":
            self.check_plain(self.stack.pop())
            self.stack.append(Opaque())
        else:
            raise ValueError(f"it holds {operation}, which torch.save doesn't write")

    def spend(self, steps: int) -> None:
        """Count the work of PyTorch. Raises ValueError if it is too much."""
        self.steps += steps
        if self.steps > MAX_OPERATIONS:
            raise ValueError(f"its pickle has more than {MAX_OPERATIONS:,} steps")

    def since_mark(self) -> list:
        """Return what is on the stack since the last MARK, and remove it."""
        items = self.stack
        self.stack = self.below.pop()
        return items

    def set_items(self, items: list) -> None:
        """Put keys and values into the dict on the stack, whose keys must be constants."""
        # A key is hashed, which takes 2^depth steps for tuples in tuples
        for key in items[::2]:
            if isinstance(key, Opaque | Name | tuple | list):
                raise ValueError("it has a dict with a key that is neither text nor a small number")
        self.stack[-1].size += len(items)

    def call(self, function: Any, arguments: Any) -> Opaque:
        """Return what stands for the result of a function or class. Raises ValueError."""
        if not isinstance(function, Name) or not isinstance(arguments, tuple):
            raise ValueError("it calls what is no function")

        # What is called has to be on the list, since it would run
        if function not in self.callable_names:
            raise CouldRunCode(f"it names {function}, which is not read")
        if function == "collections.OrderedDict":
            if arguments:
                raise ValueError("it has an OrderedDict in another form than torch.save's")
            return Dict()

        # Ours are made of constants. Those of PyTorch may take tuples, such as a tensor's shape
        if not function.startswith("torch."):
            self.check_plain(arguments)
        for argument in arguments:
            if isinstance(argument, tuple | list):
                self.spend(len(argument))
        return Opaque()

    def check_plain(self, arguments: Any) -> None:
        """Raise ValueError unless this is a tuple without a tuple, a list or a dict in it."""
        if not isinstance(arguments, tuple):
            raise ValueError("it has arguments in another form than torch.save's")
        self.spend(len(arguments))
        for argument in arguments:
            if isinstance(argument, tuple | list | Dict):
                raise ValueError("it has arguments in another form than torch.save's")
