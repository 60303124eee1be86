"""Read the rows of HellaSwag and LAMBADA that evaluate.py scores."""

import json

import numpy as np

from runtime.errors import UserError
from runtime.sample.generate import read_text

FIELDS = {"hellaswag": 'an object with "ctx", 4 "endings" and a "label" from 0 to 3',
          "lambada": 'an object with a "text" of at least two words'}


def read_rows(task, path, encode, block_size):
    """Return (rows, labels) of JSON lines: 4 rows per line of HellaSwag, one of LAMBADA. A row is an array of ids, in
    which a token that is not to be predicted is ~id, as in runtime/data/loader.py. Raises UserError."""
    rows, labels = [], []
    for n, line in enumerate(read_text(path).rstrip().split("\n"), 1):
        try:
            fields = json.loads(line)
            if task == "hellaswag":  # completions, as in llm.c
                context, endings, label = fields["ctx"], fields["endings"], int(fields["label"])
            else:  # the last word follows the last space, as in lm_eval
                context, _, word = fields["text"].rpartition(" ")
                endings, label = [word], 0
            own = [(encode(context), encode(f" {ending}")) for ending in endings if context.strip() and ending.strip()]
            if (not isinstance(endings, list) or len(own) != (4 if task == "hellaswag" else 1)
                    or label not in range(len(own)) or max(len(ending) for _, ending in own) > block_size):
                raise ValueError(f"a text is empty or has over {block_size} tokens, or the label is wrong")
        except (UserError, ValueError, LookupError, TypeError, AttributeError) as error:
            reason = f"there is no {error}" if isinstance(error, LookupError) else error
            raise UserError(f"{path}, line {n} can't be scored ({reason}): give {FIELDS[task]}") from None
        rows += [np.array([*(~i for i in ids), *ending]) for ids, ending in own]
        labels.append(label)
    return rows, np.array(labels)
