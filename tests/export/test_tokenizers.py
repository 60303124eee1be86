"""export_hf.py with each kind of tokenizer: what transformers makes of the folder is what sample.py prints.

Set TRANSFORMERS_PYTHON to the python of an environment with another transformers, such as 4.57.6, and it is asked, too:

    python -m venv /tmp/four && /tmp/four/bin/pip install torch transformers==4.57.6
    TRANSFORMERS_PYTHON=/tmp/four/bin/python .venv/bin/python -m pytest tests/export/test_tokenizers.py
"""

import json
import os
import subprocess

import pytest
from conftest import CHARS, ROOT, SOURCE, done, launch, random_gpt2
from greedy import generate
from small_tokenizers import MAKERS, TEXT, save_tokenizer
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from runtime.data.dataset import write_dataset
from runtime.data.folder_tokenizer import tokenizer_meta
from runtime.data.tokenizer import end_of_text, numpy_encoder
from runtime.export import hf

PROMPT = "su wotoni, fa"  # before a comma, some decoders drop a space
NEW_TOKENS = 12


def write_text(folder, name):
    """Write the dataset of TEXT with gpt2, char or a tokenizer's folder."""
    if name == "char":
        tokenizer, vocab_size, text = {"kind": "char", "chars": CHARS}, len(CHARS), "the cat sat on a mat\n" * 200
        ids = [CHARS.index(char) for char in text]
    else:
        tokenizer, vocab_size = tokenizer_meta(name)
        ids = [*numpy_encoder(tokenizer)(TEXT).tolist(), end_of_text(tokenizer)]
    write_dataset(folder, ids[:-400], ids[-400:], tokenizer, vocab_size, SOURCE)


@pytest.fixture(scope="module", params=["GPT-2 (index)", "characters", *MAKERS])
def exported(request, train, tmp_path_factory):
    """(the exported folder, the prompt) of a small model that was trained with a kind of tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizers")
    name = {"GPT-2 (index)": "gpt2", "characters": "char"}.get(request.param)
    if name is None:
        name = str(save_tokenizer(folder / "own", MAKERS[request.param]()))
    write_text(folder / "data", name)
    run = done(train(f"--dataset={folder}/data", "--max_iters=6", "--learning_rate=1e-2", "--eval_interval=6"))
    done(launch(ROOT / "export_hf.py", f"--out_dir={run.out_dir}", "--tag=final", f"--to={folder}/exported"))
    return folder / "exported", PROMPT.replace(",", "") if name == "char" else PROMPT


def test_transformers_generates_the_text_of_sample(exported):
    folder, prompt = exported
    sampled = launch(ROOT / "sample.py", f"--init_from={folder}", f"--start={prompt}", "--temperature=0", "--json",
                     "--num_samples=1", f"--max_new_tokens={NEW_TOKENS}")
    assert (sampled.returncode, sampled.stderr) == (0, "")
    wanted = json.loads(sampled.stdout)
    assert wanted["text"]
    assert generate(folder, prompt, NEW_TOKENS)["text"] == wanted["text"]
    python = os.environ.get("TRANSFORMERS_PYTHON")
    if python:
        command = [python, ROOT / "tests" / "export" / "greedy.py", folder, prompt, str(NEW_TOKENS)]
        theirs = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        assert theirs.returncode == 0, theirs.stderr[-1000:]
        assert json.loads(theirs.stdout)["text"] == wanted["text"], theirs.stdout


def test_a_streamed_text_is_the_same(exported):
    """Decoded token by token, a Unigram's words would lose the spaces between them."""
    folder, prompt = exported
    args = (f"--init_from={folder}", f"--start={prompt}", "--temperature=0", "--num_samples=1",
            f"--max_new_tokens={NEW_TOKENS}")
    streamed = launch(ROOT / "sample.py", *args)
    assert (streamed.returncode, streamed.stderr) == (0, "")
    text = json.loads(launch(ROOT / "sample.py", "--json", *args).stdout)["text"]
    assert streamed.stdout.endswith(f"\n\n{prompt}{text}\n")


def test_transformers_reads_the_tokenizer_json_and_not_vocab_and_merges(tmp_path):
    """transformers 5 builds a GPT2Tokenizer of vocab.json and merges.txt, without what tokenizer.json has beside them:
    here digits that stand alone, and a space in front."""
    own = MAKERS["byte-level BPE"]()
    own.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=True)])
    folder = save_tokenizer(tmp_path / "own", own)
    own.model.save(str(folder))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer", "eos_token": "<end>"}')
    random_gpt2(0.1, vocab_size=320, n_positions=32, n_embd=32).save_pretrained(tmp_path)
    hf.write_tokenizer(str(tmp_path), tokenizer_meta(str(folder))[0], 32)
    text = f"{TEXT[:500]} 2026's ?"
    theirs = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert theirs(text)["input_ids"] == own.encode(text).ids
    assert theirs.decode(own.encode(text).ids) == own.decode(own.encode(text).ids)


def test_transformers_4_knows_the_class_and_the_keys(exported):
    """4.57.6 refuses TokenizersBackend, and fails for a list of extra_special_tokens."""
    config = json.loads((exported[0] / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] in ("GPT2Tokenizer", "PreTrainedTokenizerFast")
    assert config["clean_up_tokenization_spaces"] is False
    assert not config.keys() & {"backend", "is_local", "extra_special_tokens"}
