"""The tokenizer of a folder, and whether its ids are those of a dataset: by vocabulary, not by the bytes of files.

Tests with `index` in their name may fetch GPT-2's tokenizer."""

import json
import shutil

import numpy as np
import pytest
from conftest import NO_SHAPE, ROOT, SOURCE, done, launch, random_gpt2
from small_tokenizers import MAKERS, TEXT, byte_level_bpe, save_tokenizer
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from runtime.data.dataset import write_dataset
from runtime.data.folder_tokenizer import check_ids, tokenizer_meta, tokenizer_of_folder, tokenizer_of_weights
from runtime.data.mixture import open_datasets, same_tokenizer
from runtime.data.same_ids import have_same_ids
from runtime.data.tokenizer import RANKS_FILE, gpt2_encoding, numpy_encoder, tokenizer_of
from runtime.errors import UserError
from runtime.export import hf

GPT2 = {"kind": "gpt2"}


@pytest.fixture(scope="module")
def gpt2_files(tmp_path_factory):
    """A folder with GPT-2's tokenizer.json, vocab.json, merges.txt and tokenizer_config.json."""
    folder = tmp_path_factory.mktemp("gpt2")
    hf.write_tokenizer(str(folder), GPT2, 32)
    return folder


def edit_json(file, edit):
    content = json.loads(file.read_text())
    edit(content)
    file.write_text(json.dumps(content))


def old_form(content):
    """As files of 2020 are: merges as strings, other defaults, another post-processor."""
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    for key in ("type", "byte_fallback", "ignore_merges", "fuse_unk"):
        del content["model"][key]
    content["model"] |= {"continuing_subword_prefix": None, "unk_token": "<|endoftext|>"}
    del content["pre_tokenizer"]["use_regex"]
    content["post_processor"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False}
    content["truncation"] = {"max_length": 8, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}


def add_token(content, token, special):
    content["added_tokens"].append({"id": 50257, "content": token, "single_word": False, "lstrip": False,
                                    "rstrip": False, "normalized": False, "special": special})


def swap_tokens(content):
    vocab = content["model"]["vocab"]
    vocab["Ġthe"], vocab["Ġto"] = vocab["Ġto"], vocab["Ġthe"]


def swap_merges(content):
    merges = content["model"]["merges"]
    merges[-1], merges[-2] = merges[-2], merges[-1]


SAME = {
    "old": old_form,
    "with a token for padding": lambda content: add_token(content, "[PAD]", special=True),
}
OTHER = {
    "two tokens": swap_tokens,
    "two merges": swap_merges,
    "a space in front": lambda content: content["pre_tokenizer"].update(add_prefix_space=True),
    "a word": lambda content: add_token(content, "    ", special=False),
}


@pytest.mark.parametrize("edit", [*SAME, *OTHER])
def test_gpt2_is_known_by_its_vocabulary_and_merges_index(gpt2_files, tmp_path, edit):
    shutil.copy(gpt2_files / "tokenizer.json", tmp_path)
    edit_json(tmp_path / "tokenizer.json", (SAME | OTHER)[edit])
    found = tokenizer_of_folder(tmp_path)
    assert have_same_ids(found["tokenizer"], GPT2) is have_same_ids(GPT2, found["tokenizer"]) is (edit in SAME)
    if edit in SAME:
        assert tokenizer_of(found["tokenizer"])[0](TEXT) == gpt2_encoding().encode(TEXT)
        assert found["tokenizer"]["end_of_text"] == 50256


def test_gpt2s_vocab_and_merges_are_its_tokenizer_index(gpt2_files, tmp_path):
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(gpt2_files / name, tmp_path)
    found = tokenizer_of_folder(tmp_path)
    assert (found["vocab_size"], found["tokenizer"]["end_of_text"]) == (50257, 50256)
    assert tokenizer_of(found["tokenizer"])[0](f"{TEXT}<|endoftext|>") == [*gpt2_encoding().encode(TEXT), 50256]
    assert have_same_ids(found["tokenizer"], GPT2)
    whole = tokenizer_of_folder(gpt2_files)["tokenizer"]
    assert have_same_ids(found["tokenizer"], whole) and found["tokenizer"]["sha256"] != whole["sha256"]

    # With RoBERTa's prefix space, and with the tokens of a later file, it isn't
    (tmp_path / "tokenizer_config.json").write_text('{"add_prefix_space": true}')
    assert not have_same_ids(tokenizer_of_folder(tmp_path)["tokenizer"], GPT2)
    (tmp_path / "tokenizer_config.json").write_text('{"pad_token": "[PAD]", "eos_token": {"content": "[PAD]"}}')
    (tmp_path / "added_tokens.json").write_text('{"[PAD]": 50257}')
    padded = tokenizer_of_folder(tmp_path)
    assert (padded["vocab_size"], padded["tokenizer"]["end_of_text"]) == (50258, 50257)
    assert have_same_ids(padded["tokenizer"], GPT2)
    (tmp_path / "added_tokens.json").write_text('{"covid": 50257}')
    assert not have_same_ids(tokenizer_of_folder(tmp_path)["tokenizer"], GPT2)


def test_gpt2s_ranks_in_a_folder_index(tmp_path):
    gpt2_encoding()
    shutil.copy(RANKS_FILE, tmp_path / "vocab.tiktoken")
    assert tokenizer_of_folder(tmp_path) == {"tokenizer": GPT2, "vocab_size": 50257}
    assert tokenizer_meta(str(tmp_path)) == (GPT2, 50257)
    (tmp_path / "vocab.tiktoken").write_text("IQ== 0\n")
    with pytest.raises(UserError, match="vocab.tiktoken is a tokenizer in a form that isn't read here: write its tok"):
        tokenizer_of_folder(tmp_path)


def test_kinds_differ_from_each_other(tmp_path):
    metas = [GPT2, {"kind": "char", "chars": "abc"}, {"kind": "char", "chars": "abd"}]
    for kind, make in MAKERS.items():
        folder = save_tokenizer(tmp_path / kind, make())
        metas.append(tokenizer_of_folder(folder)["tokenizer"])
    for i, a in enumerate(metas):
        assert [have_same_ids(a, b) for b in metas] == [i == j for j in range(len(metas))]


def test_an_exported_vocabulary_of_characters_is_that_of_its_data(tmp_path):
    for name, chars in (("same", "\n abc"), ("other", "\n acb"), ("more", "\n abcd")):
        (tmp_path / name).mkdir()
        hf.write_tokenizer(tmp_path / name, {"kind": "char", "chars": chars}, 32)
        found = tokenizer_of_folder(tmp_path / name)
        assert have_same_ids({"kind": "char", "chars": "\n abc"}, found["tokenizer"]) is (name == "same")


def test_scores_count_and_where_files_are_does_not(tmp_path):
    tokenizer = MAKERS["Unigram"]()
    first = tokenizer_of_folder(save_tokenizer(tmp_path / "a", tokenizer))["tokenizer"]
    folder = save_tokenizer(tmp_path / "b", tokenizer)
    edit_json(folder / "tokenizer.json", lambda content: content.update(padding=None, version="1.0"))
    assert have_same_ids(first, tokenizer_of_folder(folder)["tokenizer"])
    edit_json(folder / "tokenizer.json", lambda content: content["model"]["vocab"][300].__setitem__(1, -2.5))
    assert not have_same_ids(first, tokenizer_of_folder(folder)["tokenizer"])


@pytest.mark.parametrize("change, same", [
    (lambda tokenizer: tokenizer.add_special_tokens(["<pad>"]), True),
    (lambda tokenizer: tokenizer.add_tokens([AddedToken("the", normalized=False)]), False),
    (lambda tokenizer: setattr(tokenizer, "normalizer", normalizers.NFC()), False),
    (lambda tokenizer: setattr(tokenizer, "pre_tokenizer", pre_tokenizers.Sequence(
        [pre_tokenizers.Punctuation("isolated"), tokenizer.pre_tokenizer])), False)],
    ids=["special token", "word", "normalizer", "pre-tokenizer"])
def test_a_changed_bpe(tmp_path, change, same):
    first = tokenizer_of_folder(save_tokenizer(tmp_path / "a", byte_level_bpe()))
    tokenizer = byte_level_bpe()
    change(tokenizer)
    second = tokenizer_of_folder(save_tokenizer(tmp_path / "b", tokenizer))
    assert have_same_ids(first["tokenizer"], second["tokenizer"]) is same


@pytest.mark.parametrize("files, words", [
    ({"spiece.model": "x"}, "spiece.model is a tokenizer in a form that isn't read here: write its tokenizer.json with "
     "transformers, by AutoTokenizer.from_pretrained('"),
    ({"vocab.txt": "x"}, "vocab.txt is a tokenizer in a form that isn't read here: "),
    ({"tokenizer.pkl": "x"}, "tokenizer.pkl is a tokenizer in a form that isn't read here: "),
    ({"vocab.json": "{}"}, "theirs has vocab.json without merges.txt: restore it, or write its tokenizer.json"),
    ({"vocab.json": "{}", "merges.txt": "", "tokenizer_config.json": '{"tokenizer_class": "CLIPTokenizer"}'},
     "has vocab.json and merges.txt of a CLIPTokenizer, and without a tokenizer.json only GPT-2's form is read: write"),
    ({"vocab.json": '{"a": 0}', "merges.txt": "#version: 0.2\na b c\n"}, "merges.txt can't be used ('a b c' is not a"),
    ({"vocab.json": '{"a": "0"}', "merges.txt": ""}, "vocab.json can't be used (a is '0': Input should be a valid int"),
    ({"vocab.json": '{"a": 0}', "merges.txt": "a b\n"}, "vocab.json can't be used ("),
    ({"vocab.json": '{"a": 0}', "merges.txt": "", "added_tokens.json": '{"b": -1}'}, "the added tokens of "),
    ({"vocab.json": '{"a": 0}', "merges.txt": "", "tokenizer_config.json": '{"eos_token": {"content": ["a"]}}'}, ""),
    ({}, "")], ids=lambda value: ",".join(value) if isinstance(value, dict) else "")
def test_other_forms_are_refused_and_never_taken_for_gpt2s(tmp_path, files, words):
    folder = tmp_path / "theirs"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_text(content)
    if not words:
        assert (tokenizer_of_folder(folder) is None) is (not files)
        return
    with pytest.raises(UserError) as error:
        tokenizer_of_weights(str(folder), 50257)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_what_a_folder_says_of_its_end_of_text(tmp_path):
    folder = save_tokenizer(tmp_path / "a", byte_level_bpe())
    (folder / "config.json").write_text('{"eos_token_id": 1}')

    def end():
        return tokenizer_of_folder(folder)["tokenizer"]["end_of_text"]

    assert end() == 0  # the tokenizer's own comes before config.json's, which may be GPT-2's default
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<none>"}')
    assert end() == 1
    (folder / "config.json").write_text('{"eos_token_id": [50256, 7]}')
    assert end() == 7
    (folder / "config.json").write_text("{}")
    assert end() is None
    (folder / "meta.json").write_text('{"tokenizer": {"end_of_text": 5}}')  # of a dataset
    assert end() == 5


def test_an_eos_token_that_is_no_token_is_refused_with_the_way(tmp_path):
    """Also if another file has an end of text. The line that the sentence names adds the token, as id 320."""
    folder = save_tokenizer(tmp_path / "a", byte_level_bpe(), end="</s>")
    (folder / "config.json").write_text('{"eos_token_id": 1}')
    line = f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
    with pytest.raises(UserError) as refused:
        tokenizer_meta(str(folder))
    assert str(refused.value) == (
        f"the eos_token '</s>' in {folder}/tokenizer_config.json is none of the tokenizer's tokens: name one of them, "
        f"or add it to its tokenizer.json with transformers, by {line}")
    eval(line)
    meta, vocab_size = tokenizer_meta(str(folder))
    assert (meta["end_of_text"], vocab_size) == (320, 321)


def test_the_tokenizer_option_takes_the_file_in_its_folder(tmp_path, monkeypatch):
    folder = save_tokenizer(tmp_path / "a", byte_level_bpe())
    assert tokenizer_meta(str(folder / "tokenizer.json")) == tokenizer_meta(str(folder))
    monkeypatch.chdir(folder)
    assert tokenizer_meta("tokenizer.json") == tokenizer_meta(str(folder))
    (folder / "other.json").write_text((folder / "tokenizer.json").read_text())
    with pytest.raises(UserError, match="^--tokenizer=other.json is a file: name its folder, in which the tokenizer is "
                                        "a tokenizer.json, or vocab.json with merges.txt$"):
        tokenizer_meta("other.json")
    with pytest.raises(UserError, match="^--tokenizer=nowhere/tokenizer.json does not exist: choose gpt2, char, or the "
                                        "folder of a tokenizer$"):
        tokenizer_meta("nowhere/tokenizer.json")


def test_vocab_merges_and_added_tokens_are_those_of_transformers(tmp_path):
    """A GPT-2 with tokens of its own, as people save them since 2019: OpenAI's tokens were used for them."""
    own = byte_level_bpe()
    own.model.save(str(tmp_path))
    (tmp_path / "added_tokens.json").write_text('{"persona": 320, "[PAD]": 321}')
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "vocab_size": 50257}')
    theirs = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    data = tokenizer_of_weights(str(tmp_path), 50257)
    encode, decode = tokenizer_of(data["tokenizer"])
    for text in (TEXT, "Su wotoni persona fa", "[PAD]persona", " two  spaces\n\n"):
        assert encode(text) == theirs(text, add_special_tokens=False)["input_ids"]
        assert decode(encode(text)) == text
    assert data["vocab_size"] == 322 and 320 in encode("a persona") and 321 in encode("[PAD]")


def test_data_for_weights(tmp_path):
    """Padded weights are fine; tokens without weights, and weights without a tokenizer, get a note."""
    own = str(save_tokenizer(tmp_path / "own", byte_level_bpe()))
    meta, vocab_size = tokenizer_meta(own)
    data = {"tokenizer": meta, "vocab_size": vocab_size}
    assert check_ids("mine", data, own, vocab_size) == check_ids("mine", data, own, 384) == ""
    with pytest.raises(UserError, match="^dataset=mine has 320 tokens, and .*/own has 300: remove those from its tok"):
        check_ids("mine", data, own, 300)
    gpt2 = {"tokenizer": GPT2, "vocab_size": 50257}
    with pytest.raises(UserError) as error:
        check_ids("mine", gpt2, own, 50304)
    assert str(error.value) == (f"dataset=mine has another tokenizer than {own}: prepare its texts with "
                                f"python data/prepare.py PATH --tokenizer={own} --name=NAME")
    with pytest.raises(UserError) as error:
        check_ids("mine", data, "gpt2", 50257)
    assert str(error.value) == ("dataset=mine has another tokenizer than gpt2: prepare its texts with "
                                "python data/prepare.py PATH --name=NAME")
    bare = tmp_path / "bare"
    bare.mkdir()
    assert check_ids("mine", gpt2, "gpt2", 50257) == ""
    assert check_ids("mine", gpt2, str(bare), 50304) == (
        f"{bare} has no tokenizer: its 50,304 tokens are taken for GPT-2's")
    assert check_ids("mine", data, str(bare), 50304) == (
        f"{bare} has no tokenizer to compare with that of dataset=mine: its weights must have been trained on the "
        "same 320 tokens")
    with pytest.raises(UserError, match="has 50,257 tokens, and .*/bare has 320: prepare the data with the weights'"):
        check_ids("mine", gpt2, str(bare), 320)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A folder of weights with an own vocab.json and merges.txt, padded."""
    folder = tmp_path_factory.mktemp("weights")
    random_gpt2(0.1, vocab_size=384, n_positions=32, n_embd=32, bos_token_id=0, eos_token_id=0).save_pretrained(folder)
    byte_level_bpe().model.save(str(folder))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer", "eos_token": "<end>"}')
    return folder


def test_weights_with_vocab_and_merges_are_prepared_for_trained_and_sampled_with_them(weights, train, tmp_path):
    """From their folder to a run's samples: every step uses the 320 tokens of the folder."""
    (tmp_path / "a.txt").write_text(TEXT)
    done(launch(ROOT / "data" / "prepare.py", tmp_path / "a.txt", f"--name={tmp_path}/mine", f"--tokenizer={weights}",
                "--val_fraction=0.2", "--max_document_bytes=512"))
    datasets, meta = open_datasets(str(tmp_path / "mine"), 1)
    own = byte_level_bpe()
    assert (meta["vocab_size"], meta["tokenizer"]["end_of_text"]) == (320, 0)
    ids = [*np.fromfile(tmp_path / "mine" / "train.bin", "<u2"), *np.fromfile(tmp_path / "mine" / "val.bin", "<u2")]
    assert len(ids) > 5000 and sorted(own.decode(ids)) == sorted(own.decode(own.encode(TEXT).ids))
    saved = tokenizer_of(meta["tokenizer"])
    assert saved[0](TEXT) == own.encode(TEXT).ids and saved[1](saved[0](TEXT)) == TEXT

    run = done(train(f"--init_from={weights}", *NO_SHAPE, f"--dataset={tmp_path}/mine", "--max_iters=1"))
    assert "tokenizer" not in run.stdout.split("step 0:")[0] and "words is lost" not in run.stdout
    args = ("--start=The plan", "--json", "--num_samples=1", "--max_new_tokens=8", "--temperature=0")
    sampled = done(launch(ROOT / "sample.py", f"--init_from={weights}", *args))
    assert json.loads(sampled.stdout)["tokens"] == 8 and sampled.stderr == ""
    named = done(launch(ROOT / "sample.py", f"--init_from={weights}", f"--dataset={tmp_path}/mine", *args))
    assert named.stdout == sampled.stdout
    text = json.loads(sampled.stdout)["text"]
    ids = own.encode("The plan").ids
    assert text == greedy(weights, ids, own)


def greedy(folder, ids, tokenizer):
    """The text that transformers generates with these weights after some ids."""
    import torch
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(folder).eval()
    out = list(ids)
    for _ in range(8):
        with torch.no_grad():
            logits = model(torch.tensor([out])).logits[0, -1, :320]  # without the padding
        out.append(int(logits.argmax()))
    return tokenizer.decode(out)[len(tokenizer.decode(ids)):]


@pytest.mark.parametrize("script", ["train_deepspeed.py", "sample.py", "evaluate.py"])
def test_data_in_other_tokens_is_refused_by_each_script(weights, train, tmp_path, script):
    """Data in OpenAI's tokens, in so few that they would fit."""
    write_dataset(tmp_path / "data", range(300), range(100), GPT2, 50257, SOURCE)
    args = (f"--init_from={weights}", f"--dataset={tmp_path}/data")
    if script == "train_deepspeed.py":
        run = train(*args, *NO_SHAPE, "--max_iters=1")
    else:
        run = launch(ROOT / script, *args)
    assert (run.returncode, run.stdout, run.stderr) == (2, "", (
        f"dataset={tmp_path}/data has another tokenizer than {weights}: prepare its texts with "
        f"python data/prepare.py PATH --tokenizer={weights} --name=NAME\n"))


def test_datasets_and_tags_are_compared_by_their_ids(tmp_path):
    """Two files of one tokenizer can be mixed; with another end of text they can't."""
    metas = []
    for name in ("a", "b"):
        folder = save_tokenizer(tmp_path / name, byte_level_bpe())
        if name == "b":
            edit_json(folder / "tokenizer.json", lambda content: content)  # written anew
        tokenizer, vocab_size = tokenizer_meta(str(folder))
        ids = numpy_encoder(tokenizer)(TEXT)
        metas.append(write_dataset(tmp_path / f"data-{name}", ids[:-400], ids[-400:], tokenizer, vocab_size, SOURCE))
    assert metas[0]["tokenizer"]["sha256"] != metas[1]["tokenizer"]["sha256"]
    both = {str(tmp_path / "data-a"): 1, str(tmp_path / "data-b"): 1}
    assert open_datasets(both, 8)[1]["vocab_size"] == 320
    edit_json(tmp_path / "data-b" / "meta.json", lambda meta: meta["tokenizer"].update(end_of_text=1))
    with pytest.raises(UserError, match="different tokenizers"):
        open_datasets(both, 8)
    lost = {"vocab_size": 320, "tokenizer": metas[0]["tokenizer"] | {"sha256": "0" * 64, "file": "gone"}}
    assert not same_tokenizer(lost, open_datasets(str(tmp_path / "data-a"), 8)[1])  # it isn't there to compare


def test_a_tokenizer_that_changes_while_data_is_prepared_is_a_sentence(tmp_path):
    folder = save_tokenizer(tmp_path / "a", byte_level_bpe())
    tokenizer, vocab_size = tokenizer_meta(str(folder))
    Tokenizer.from_file(str(folder / "tokenizer.json")).save(str(folder / "tokenizer.json"), pretty=False)
    with pytest.raises(UserError, match="tokenizer.json can't be used .it is not the one that the data was prepared"):
        write_dataset(tmp_path / "out", range(300), range(100), tokenizer, vocab_size, SOURCE)
