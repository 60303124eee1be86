"""From tokens on the disk to batches on the device, and the tokenizers.

    loader.py       TrainBatches and eval_batches: the sequences per step; begin here
    sequences.py    the sequences of a dataset: windows of a text, or rows of conversations
    permutation.py  the order of an epoch, computed and not stored
    ramp.py         the sizes and lengths of early steps
    mixture.py      the datasets of a run, with their shares
    dataset.py      a dataset's folder, with meta.py, token_files.py and folders.py
    chat.py         conversations as text
    tokenizer.py    encode and decode, with folder_tokenizer.py and same_ids.py
    download.py     fetches a small file whose hash is known
    limited.py      calls a function in a process with limits, for files of others
"""
