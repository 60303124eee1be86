"""What the example's JSON files hold: training_history.json, and a checkpoint's extra_info.json.

runtime.untrusted.read_json() compares a file of others with these types.
"""

import json
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict  # pydantic takes Python's own from 3.12 on

from runtime.monitor.history import without_nan
from runtime.untrusted import STRICT

MAX_BYTES = 20_000_000  # of one such file: 10,000 epochs and 100,000 classes take 10 MB
Count = Annotated[int, Field(ge=0, le=10**12)]
Epoch = Annotated[int, Field(ge=0, le=10**6)]
Ranks = Annotated[int, Field(ge=1, le=10_000)]
Precision = Literal["float32", "float16", "bfloat16"]
SavedBy = Annotated[tuple[Ranks, Precision, bool], Field(strict=False)]  # a list; with offload?
Percent = Annotated[float, Field(ge=0, le=100)]
Seconds = Annotated[float, Field(ge=0, le=1e12)]


class Record(TypedDict):
    """An epoch. A loss that isn't finite is null, and measure/plain.py leaves some numbers out."""

    __pydantic_config__ = STRICT
    epoch: Epoch
    train_loss: NotRequired[float | None]
    train_acc: NotRequired[float]
    val_loss: NotRequired[float | None]
    val_acc: NotRequired[float]
    learning_rate: NotRequired[float]
    images_per_s: NotRequired[float]


class History(TypedDict):
    """training_history.json."""

    __pydantic_config__ = STRICT
    epochs: Annotated[list[Record], Field(min_length=1)]


class SavedRun(TypedDict):
    """What tells the files of one run from those of another."""

    __pydantic_config__ = STRICT
    epochs: list[Record]
    epoch: NotRequired[Epoch]


class CheckpointInfo(TypedDict):
    """extra_info.json."""

    __pydantic_config__ = STRICT
    saved_by: SavedBy
    classes: list[str]
    image_size: Count
    epoch: Epoch
    epochs: list[Record]
    steps: Count
    best_val_acc: Percent
    best_epoch: Epoch
    time: NotRequired[Seconds]


def json_text(value: dict[str, Any]) -> str:
    """Return the text of such a file. JSON has no NaN and no infinity: they become null."""
    return json.dumps(without_nan(value), indent=1, allow_nan=False) + "\n"
