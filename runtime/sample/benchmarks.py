"""The rows that evaluate.py scores, of HellaSwag, LAMBADA and texts, and the figures of them."""

from collections.abc import Callable
from typing import Any

import numpy as np

from runtime.data.sequences import Sequences, decode_mask
from runtime.errors import UserError
from runtime.prepare.json_records import unique_fields
from runtime.sample.generate import read_text
from runtime.untrusted import parse_json

FIELDS = {
    "hellaswag": 'an object with "ctx", 4 "endings" and a "label" from 0 to 3',
    "lambada": 'an object with a "text" of at least two words',
}
ENDINGS = {"hellaswag": 4, "lambada": 1}  # of a line
LARGEST_LOG = 700  # of a perplexity in float64
# What a line of something else raises
LINE_ERRORS = (
    UserError, ValueError, OverflowError, LookupError, TypeError, AttributeError, RecursionError)

Encode = Callable[[str], list[int]]


def read_rows(
    task: str, path: str, encode: Encode, block_size: int
) -> tuple[list[np.ndarray], np.ndarray]:
    """Return (rows, labels) of JSON lines: 4 rows per line of HellaSwag, one of LAMBADA.

    A row is an array of ids, in which a token that is not to be predicted is ~id, as decode_mask()
    takes it. Raises UserError.
    """
    rows = []
    labels = []
    for number, line in enumerate(read_text(path).rstrip().split("\n"), 1):
        try:
            fields = parse_json(line, fields_of=unique_fields)
            context, endings, label = parts_of(task, fields)
            own = rows_of(context, endings, encode, block_size)
        except LINE_ERRORS as error:
            reason = str(error)
            if isinstance(error, LookupError):
                reason = f"there is no {error}"
            raise UserError(f"{path}, line {number} can't be scored ({reason}): give "
                            f"{FIELDS[task]}") from None
        rows += own
        labels.append(label)
    return rows, np.array(labels)


def parts_of(task: str, fields: Any) -> tuple[str, list[str], int]:
    """Return (context, endings, which of them is right) of a line. Raises LINE_ERRORS."""
    if task == "hellaswag":  # completions, as in llm.c
        context = fields["ctx"]
        endings = fields["endings"]
        label = int(fields["label"])
    else:  # the last word follows the last space, as in lm_eval; a line end is no part of it
        context, _, word = fields["text"].rstrip().rpartition(" ")
        endings = [word]
        label = 0
    # The file's own numbers aren't trusted
    n_endings = ENDINGS[task]
    if not isinstance(endings, list) or len(endings) != n_endings or label not in range(n_endings):
        raise ValueError(f"there are not {n_endings} endings, or the label {label} is none of them")
    return context, endings, label


def rows_of(
    context: str, endings: list[str], encode: Encode, block_size: int
) -> list[np.ndarray]:
    """Return a row for each ending. Raises LINE_ERRORS."""
    for part in (context, *endings):
        if not part.strip() or not encode(part):
            raise ValueError("a text is empty, or has no tokens")
    # The context has no targets
    rows = []
    asked = [~token for token in encode(context)]
    for ending in endings:
        predicted = encode(f" {ending}")
        if len(predicted) > block_size:
            raise ValueError(f"what is to be predicted has over {block_size} tokens")
        rows.append(np.array(asked + predicted))
    return rows


def text_rows(
    sequences: Sequences, bytes_of_tokens: np.ndarray
) -> tuple[list[np.ndarray], np.ndarray]:
    """Return (rows, the bytes of their targets), in which each token is a target once.

    bytes_of_tokens: as token_bytes() returns them.
    """
    rows = sequences.all_rows()
    # The first token of a row isn't predicted
    n_bytes = []
    for row in rows:
        _, targets = decode_mask(row[1:])
        n_bytes.append(bytes_of_tokens[targets].sum())  # 0 for a target of -1
    return rows, np.array(n_bytes)


def figures_of(
    task: str, scores: np.ndarray, answers: np.ndarray
) -> dict[str, tuple[float, float]]:
    """Return {figure: (value, standard error)} of a task.

    scores: what evaluate.score() returns of its rows. answers: the labels, or the bytes of each
    row of a text.
    """
    figures = {}
    for name, (values, counts) in ratios_of(task, scores, answers).items():
        value, error = ratio_of_sums(values, np.broadcast_to(counts, values.shape))
        if name.endswith("perplexity"):
            value = np.exp(min(value, LARGEST_LOG))
            error = error * value
        figures[name] = (value, error)
    return figures


def ratios_of(
    task: str, scores: np.ndarray, answers: np.ndarray
) -> dict[str, tuple[np.ndarray, np.ndarray | int]]:
    """Return {figure: (values, counts)}: a figure is the sum of values over the sum of counts.

    Perplexities are logarithms here.
    """
    total, count, last, all_hit, last_hit = scores
    if task == "hellaswag":  # the ending with the lowest sum, or with the lowest mean per token
        by_sum = total.reshape(-1, 4).argmin(axis=1)
        by_mean = (total / count).reshape(-1, 4).argmin(axis=1)
        return {"acc": (by_sum == answers, 1), "acc_norm": (by_mean == answers, 1)}
    if task == "lambada":  # the last word, as in lm_eval, and its last token, as OpenAI
        return {
            "acc": (all_hit, 1),
            "perplexity": (total, 1),
            "last_token_acc": (last_hit, 1),
            "last_token_perplexity": (last, 1),
        }
    ratios = {"loss": (total, count), "perplexity": (total, count)}
    if answers.any():
        ratios["bits_per_byte"] = (total / np.log(2), answers)
    return ratios


def ratio_of_sums(values: np.ndarray, counts: np.ndarray) -> tuple[float, float]:
    """Return (the sum of values over that of counts, its standard error)."""
    # By the delta method, as for a mean of values that weigh differently
    n = len(values)
    value = values.sum() / counts.sum()
    residuals = values - value * counts
    variance = (residuals**2).sum() * n / max(1, n - 1)
    return value, variance**0.5 / counts.sum()
