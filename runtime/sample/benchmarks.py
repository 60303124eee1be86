"""The rows that evaluate.py scores, of HellaSwag, LAMBADA and texts, and the figures that their scores amount to."""

import numpy as np

from runtime.data.sequences import Sequences, decode_mask
from runtime.errors import UserError
from runtime.sample.generate import read_text
from runtime.untrusted import parse_json

FIELDS = {"hellaswag": 'an object with "ctx", 4 "endings" and a "label" from 0 to 3',
          "lambada": 'an object with a "text" of at least two words'}


def read_rows(task, path, encode, block_size):
    """Return (rows, labels) of JSON lines: 4 rows per line of HellaSwag, one of LAMBADA. A row is an array of ids, in
    which a token that is not to be predicted is ~id, as decode_mask() takes it. Raises UserError."""
    rows, labels, n_endings = [], [], 4 if task == "hellaswag" else 1
    for n, line in enumerate(read_text(path).rstrip().split("\n"), 1):
        try:
            fields = parse_json(line)
            if task == "hellaswag":  # completions, as in llm.c
                context, endings, label = fields["ctx"], fields["endings"], int(fields["label"])
            else:  # the last word follows the last space, as in lm_eval; a line end after it is no part of it
                context, _, word = fields["text"].rstrip().rpartition(" ")
                endings, label = [word], 0
            if not isinstance(endings, list) or len(endings) != n_endings or label not in range(n_endings):
                raise ValueError(f"there are not {n_endings} endings, or the label {label} is none of them")
            if not all(part.strip() and encode(part) for part in (context, *endings)):
                raise ValueError("a text is empty, or has no tokens")
            own = [(encode(context), encode(f" {ending}")) for ending in endings]
            if max(len(ending) for _, ending in own) > block_size:
                raise ValueError(f"what is to be predicted has over {block_size} tokens")
        except (UserError, ValueError, OverflowError, LookupError, TypeError, AttributeError, RecursionError) as error:
            reason = f"there is no {error}" if isinstance(error, LookupError) else error
            raise UserError(f"{path}, line {n} can't be scored ({reason}): give {FIELDS[task]}") from None
        rows += [np.array([*(~i for i in ids), *ending]) for ids, ending in own]
        labels.append(label)
    return rows, np.array(labels)


def text_rows(sequences: Sequences, bytes_of_tokens: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """Return (rows, the bytes of their targets), in which each token is a target once."""
    rows = sequences.all_rows()
    n_bytes = []
    for row in rows:
        _, targets = decode_mask(row[1:])
        n_bytes.append(bytes_of_tokens[targets].sum())  # 0 for a target of -1
    return rows, np.array(n_bytes)


def figures_of(task, scores, answers):
    """Return {figure: (value, standard error)} of a task. scores: what evaluate.score() returns of its rows. answers:
    the labels, or the bytes of each row of a text."""
    total, count, last, all_hit, last_hit = scores
    if task == "hellaswag":  # the ending with the lowest sum, or with the lowest mean per token
        chosen = [losses.reshape(-1, 4).argmin(axis=1) for losses in (total, total / count)]
        ratios = {"acc": (chosen[0] == answers, 1), "acc_norm": (chosen[1] == answers, 1)}  # (values, counts)
    elif task == "lambada":  # the last word, as in lm_eval, and its last token, as OpenAI
        ratios = {"acc": (all_hit, 1), "perplexity": (total, 1),
                  "last_token_acc": (last_hit, 1), "last_token_perplexity": (last, 1)}
    else:
        ratios = {"loss": (total, count), "perplexity": (total, count)}
        ratios |= {"bits_per_byte": (total / np.log(2), answers)} if answers.any() else {}
    figures = {}
    for name, (values, counts) in ratios.items():
        counts = np.broadcast_to(counts, values.shape)
        value, n = values.sum() / counts.sum(), len(values)
        error = (((values - value * counts) ** 2).sum() * n / max(1, n - 1)) ** 0.5 / counts.sum()  # of a ratio of sums
        if name.endswith("perplexity"):
            value, error = np.exp(min(value, 700)), error * np.exp(min(value, 700))  # without overflow
        figures[name] = value, error
    return figures
