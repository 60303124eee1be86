"""Small tokenizers of each kind in the form of Hugging Face, trained on a text of random words."""

import json
import random

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers


def made_up_text():
    """25 kB of words of one to three syllables, with commas, dashes, numbers, capitals and line ends."""
    choose = random.Random(0)
    words = ["".join(choose.choice("bcdfghlmnprstvw") + choose.choice("aeiou") for _ in range(choose.randint(1, 3)))
             for _ in range(300)]
    sentences = []
    for number in range(700):
        chosen = choose.choices(words, k=6)
        chosen[2] += choose.choice([",", " --", "'s", f" {number}", ""])
        sentences.append(" ".join(chosen).capitalize() + choose.choice([".\n", ". ", "?\n\n"]))
    return "".join(sentences)


TEXT = made_up_text()


def byte_level_bpe():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([TEXT], trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=letters, special_tokens=["<end>", "<s>"], show_progress=False))
    return tokenizer


def unigram():
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator([TEXT], trainers.UnigramTrainer(
        vocab_size=320, special_tokens=["<end>", "<unk>"], unk_token="<unk>", show_progress=False))
    return tokenizer


def word_piece():
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator([TEXT], trainers.WordPieceTrainer(
        vocab_size=320, special_tokens=["<end>", "[UNK]"], show_progress=False))
    return tokenizer


MAKERS = {"byte-level BPE": byte_level_bpe, "Unigram": unigram, "WordPiece": word_piece}


def save_tokenizer(folder, tokenizer, end="<end>"):
    """Write a tokenizer as transformers does. Return the folder."""
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    return folder
