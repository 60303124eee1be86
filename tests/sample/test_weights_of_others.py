"""Folders of weights and tokenizers of others: nothing hangs, nothing is allocated for them, each gets one sentence."""

import json
import os
import shutil
import struct
import zipfile

import pytest
import torch
from conftest import CHARS, ROOT, launch, random_gpt2
from torch.torch_version import TorchVersion

from model import GPT
from runtime import weights
from runtime.data.tokenizer import hf_tokenizer, tokenizer_file_meta, tokenizer_of
from runtime.errors import UserError
from runtime.export.hf import char_tokenizer
from runtime.sample.benchmarks import read_rows
from runtime.sample.generate import read_prompts
from runtime.sample.source import find_model

pytestmark = pytest.mark.timeout(60)  # what is refused is refused at once, and the fault is mostly a hang
SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 24, "vocab_size": 28, "bias": True}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder as transformers saves it, of characters."""
    folder = tmp_path_factory.mktemp("saved")
    random_gpt2(0.1, vocab_size=28, n_positions=24, n_embd=32, bos_token_id=0, eos_token_id=0).save_pretrained(folder)
    char_tokenizer(CHARS).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("x")
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "theirs")


def load(folder):
    """Load a folder as sample.py does."""
    _, _, data, load_model = find_model(str(folder), None, None, None)
    tokenizer_of(data["tokenizer"])
    return load_model("cpu", torch.float32)


def sentence(function, *args):
    """The UserError of a call, which is one line."""
    with pytest.raises(UserError) as error:
        function(*args)
    assert "\n" not in str(error.value)
    return str(error.value)


def make_fifo(path):
    os.mkfifo(path)


def make_link_to_zeros(path):
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [make_fifo, make_link_to_zeros])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json",
                                  "tokenizer_config.json", "chat_template.jinja", "pytorch_model.bin"])
def test_a_pipe_or_a_device_among_the_weights_is_refused(folder, make, name):
    assert load(folder).config.n_layer == 2
    if name == "pytorch_model.bin":
        (folder / "model.safetensors").unlink()
    if name == "tokenizer_config.json":
        (folder / "chat_template.jinja").unlink()
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    assert f"{name} is a pipe or a device, not a file: replace it with a file" in sentence(load, folder)


def test_links_to_files_are_read(folder, saved):
    """The cache of the hub is made of them."""
    for path in folder.iterdir():
        path.unlink()
        path.symlink_to(saved / path.name)
    assert torch.equal(load(folder).lm_head.weight, load(saved).lm_head.weight)


@pytest.mark.parametrize("changed, words", [
    ({"n_layer": 10**9}, "config.json cannot be read (ValueError: n_layer is 1000000000: Input should be less than or"),
    ({"n_embd": 10**9}, "n_embd is 1000000000: Input should be less than or equal to 16777216"),
    ({"n_head": 10**400}, "it holds a number of 401 digits"),
    ({"n_layer": [2]}, "n_layer is [2]: Input should be a valid integer"),
    ({"vocab_size": True}, "vocab_size is True: Input should be a valid integer"),
    ({"n_embd": 2**24}, "cannot be read (its configuration has 6,755,400,313,470,976 parameters, and its weights have"),
    ({"n_positions": 2**24}, "its configuration has 536,896,384 parameters, and its weights have"),
    ({"vocab_size": 2**24}, "its configuration has 536,896,256 parameters, and its weights have"),
    ({"n_layer": 1000}, "its configuration has 12,289,664 parameters, and its weights have")])
def test_sizes_that_the_weights_do_not_have_are_refused_before_anything_is_allocated(folder, changed, words):
    config = json.loads((folder / "config.json").read_text()) | changed
    (folder / "config.json").write_text(json.dumps(config))
    assert words in sentence(load, folder)


@pytest.mark.parametrize("index, words", [
    ({"weight_map": {"a": "../model.safetensors"}}, "names the file '../model.safetensors', which is no .safe"),
    ({"weight_map": {"a": "/etc/passwd"}}, "names the file '/etc/passwd', which is no .safetensors file of its folder"),
    ({"weight_map": {"a": "config.json"}}, "names the file 'config.json', which is no .safetensors file of its folder"),
    ({"weight_map": {"a": 5}}, "weight_map.a is 5: Input should be a valid string"),
    ({"weight_map": ["a"]}, "weight_map is ['a']: Input should be a valid dictionary"),
    ({"weight_map": {"a": "fifo.safetensors"}}, "fifo.safetensors is a pipe or a device, not a file"),
    ([], "its content is []: Input should be a valid dictionary")])
def test_an_index_that_names_what_is_no_shard_is_refused(folder, index, words):
    os.mkfifo(folder / "fifo.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert words in sentence(load, folder)


def safetensors(header, data=b"", length=None):
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(content) if length is None else length) + content + data


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize("content, words", [
    (safetensors({}, length=2**63), "its header has 9,223,372,036,854,775,808 bytes, and at most 20,000,000 are"),
    (safetensors(b"{" + b" " * 21_000_000 + b"}"), "its header has 21,000,002 bytes, and at most 20,000,000 are"),
    (safetensors({"a": ENTRY, "b": ENTRY | {"data_offsets": [4, 12]}}, bytes(12)), "SafetensorError: "),
    (safetensors({"a": ENTRY | {"shape": [2**62, 2**62]}}, bytes(8)), "SafetensorError: "),
    (safetensors(b"[" * 10_000), "SafetensorError: "), (b"", "SafetensorError: ")],
    ids=["length", "header", "overlap", "shape", "nested", "empty"])
def test_a_safetensors_file_that_is_a_bomb_is_refused(folder, content, words):
    (folder / "model.safetensors").write_bytes(content)
    assert words in sentence(load, folder)


def checkpoint(**changed):
    tensors = {name: torch.zeros(size) for name, size in {
        "transformer.wte.weight": (28, 32), "transformer.wpe.weight": (24, 32)}.items()}
    return {"model_args": SHAPE, "model": tensors} | changed


@pytest.mark.parametrize("content, words", [
    (checkpoint(model_args=[1]), "is not a nanoGPT ckpt.pt (TypeError: 'list' object is not a mapping)"),
    (checkpoint(model_args=SHAPE | {"n_layer": "2"}), "n_layer is '2': Input should be a valid integer"),
    (checkpoint(model_args=SHAPE | {"n_layer": 10**9}), "n_layer is 1000000000: Input should be less than or equal to"),
    (checkpoint(model_args=SHAPE | {"n_embd": torch.ones(3)}), "n_embd is tensor([1., 1., 1.]): Input should be a"),
    (checkpoint(model_args=SHAPE | {"bias": 1}), "bias is 1: Input should be a valid boolean"),
    (checkpoint(model_args=SHAPE | {"n_embd": 2**20}), "its configuration has 26,388,333,592,576 parameters, and its"),
    (checkpoint(model=[1]), "is not a nanoGPT ckpt.pt (AttributeError: 'list' object has no attribute 'items')"),
    (checkpoint(model={5: 1}), "is not a nanoGPT ckpt.pt (AttributeError: 'int' object has no attribute 'removepref"),
    (checkpoint(model={"lm_head.weight": 5}), "its configuration has 26,240 parameters, and its weights have 1,"),
    ([1], "is not a nanoGPT ckpt.pt (TypeError: list indices must be integers or slices, not str)"),
    (checkpoint(model={"transformer.wte.weight": torch.zeros(1).expand(2**20, 2**20)},  # of 4 bytes
                model_args=SHAPE | {"n_embd": 2**20, "vocab_size": 2**20}), "parameters, and its weights have")])
def test_a_checkpoint_of_nanogpt_of_other_types_is_refused(tmp_path, content, words):
    torch.save(content, tmp_path / "ckpt.pt")
    assert words in sentence(GPT.from_pretrained, str(tmp_path / "ckpt.pt"))


def test_a_compressed_checkpoint_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "ckpt.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("ckpt/data.pkl", bytes(50_000_000))
    assert "it is compressed, which torch.save doesn't do" in sentence(GPT.from_pretrained, str(tmp_path / "ckpt.pt"))


WORDS = {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}
TOKENIZERS = {  # a change of WORDS, and the sentence
    "a panic at loading": ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}},
                           "can't be used (Precompiled: Error(\"Cannot parse precompiled_charsmap\""),
    "a panic at encoding": ({"pre_tokenizer": {"type": "FixedLength", "length": 0}},
                            "can't be used (chunk size must be non-zero): restore it"),
    "a panic at decoding": ({"decoder": {"type": "Strip", "content": "a", "start": 5, "stop": 5}},
                            "can't be used (index out of bounds: "),
    "no tokens": ({"model": {"type": "BPE", "vocab": {}, "merges": []}}, "has no tokens: choose another"),
    "a large id": ({"model": {"type": "WordLevel", "vocab": {"a": 2**24}, "unk_token": "a"}},
                   "has token 16,777,216, and at most 16,777,216 tokens are plausible: choose another"),
    "no tokenizer": ({"model": 5}, "can't be used (data did not match any variant of untagged enum ModelUntagged")}


@pytest.mark.parametrize("changed, words", TOKENIZERS.values(), ids=TOKENIZERS)
def test_a_tokenizer_that_panics_or_has_no_plausible_vocabulary_is_refused(folder, capfd, changed, words):
    (folder / "tokenizer.json").write_text(json.dumps(WORDS | changed))
    assert words in sentence(load, folder)
    assert capfd.readouterr().err == ""  # no stack of Rust's


def test_a_panic_later_is_a_sentence_and_ctrl_c_stays_what_it_is(tmp_path):
    pattern = {"type": "Split", "pattern": {"Regex": "(a|aa)+$"}, "behavior": "Isolated", "invert": False}
    (tmp_path / "tokenizer.json").write_text(json.dumps(WORDS | {"pre_tokenizer": pattern}))
    encode, decode = tokenizer_of(tokenizer_file_meta(tmp_path / "tokenizer.json"))
    assert encode("a") == [0] and decode([0]) == "a"
    assert "the tokenizer knows no tokens for 'aaaa" in sentence(encode, "a" * 40 + "b")
    with pytest.raises(KeyboardInterrupt):
        with weights.weights_errors("x"):
            raise KeyboardInterrupt


def test_a_tokenizer_json_of_an_implausible_size_is_refused(folder):
    os.truncate(folder / "tokenizer.json", 10**12)
    assert "tokenizer.json has 1,000,000,000,000 bytes, and at most 200,000,000 are plausible" in sentence(load, folder)
    with pytest.raises(UserError, match="are plausible"):
        hf_tokenizer({"kind": "hf", "file": str(folder / "tokenizer.json"), "sha256": "0" * 64})


@pytest.mark.parametrize("eos", [10**9, -1, 28, True, "a", [10**30, {}], {"a": 1}])
def test_an_end_of_text_that_is_no_token_is_left_out(folder, eos):
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": eos}
    (folder / "config.json").write_text(json.dumps(config))
    assert find_model(str(folder), None, None, None)[2]["tokenizer"]["end_of_text"] is None


def test_an_old_pytorch_and_an_http_mirror_are_told_once(tmp_path, monkeypatch, capsys):
    torch.save(checkpoint(), tmp_path / "ckpt.pt")
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.7.1+cu126"))
    weights.print_note.cache_clear()
    for _ in range(2):
        weights.load_untrusted(str(tmp_path / "ckpt.pt"))
    assert capsys.readouterr().err == (
        f"note: PyTorch 2.7.1+cu126 may run code that is hidden in {tmp_path}/ckpt.pt (CVE-2026-24747): read only "
        "files that you trust, use model.safetensors, or install PyTorch 2.10 or newer\n")
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.10.0"))
    weights.print_note.cache_clear()
    weights.load_untrusted(str(tmp_path / "ckpt.pt"))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("address, is_told", [
    ("http://mirror.example", True), ("http://10.0.0.1:8000/hub", True), ("http://localhost.example", True),
    ("https://mirror.example", False), ("http://127.0.0.1:9", False), ("http://localhost:80", False),
    ("http://[::1]:80", False)])
def test_a_mirror_without_https_is_told(monkeypatch, capsys, address, is_told):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: None)  # the network
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: None)
    weights.print_note.cache_clear()
    weights.fetch_from_hub("gpt2", download=False)
    wanted = (f"note: HF_ENDPOINT={address} is not https: weights from it can be changed on the way, and are not "
              "checked by a hash\n")
    assert capsys.readouterr().err == (wanted if is_told else "")


def test_a_prompt_of_tokens_outside_the_vocabulary_is_a_sentence(folder):
    """People add tokens to a tokenizer, and not to its model: the rest can be used."""
    char_tokenizer(CHARS + "é").save(str(folder / "tokenizer.json"))
    args = (f"--init_from={folder}", "--device=cpu", "--max_new_tokens=1", "--num_samples=1")
    run = launch(ROOT / "sample.py", *args, "--start=é")
    assert (run.returncode, run.stdout, run.stderr) == (
        2, "", "the tokenizer made token 28, which is outside the model's vocabulary of 28: choose another prompt, or "
               "name the right --dataset\n")
    assert launch(ROOT / "sample.py", *args, "--start=a").returncode == 0


@pytest.mark.parametrize("make", [make_fifo, make_link_to_zeros])
def test_a_pipe_or_a_device_as_a_text_is_refused_but_not_that_of_the_users_shell(tmp_path, make):
    path = tmp_path / "prompts.txt"
    make(path)
    words = f"{path} is a pipe or a device, not a file: replace it with a file"
    assert sentence(read_prompts, "", str(path)) == words
    assert sentence(read_prompts, f"FILE:{path}", None) == words
    assert sentence(read_rows, "lambada", str(path), list, 8) == words
    reader, writer = os.pipe()
    os.write(writer, b"one\ntwo\n")
    os.close(writer)
    assert read_prompts("", f"/dev/fd/{reader}") == ["one", "two"]
    os.close(reader)


@pytest.mark.parametrize("line, words", [
    ("[" * 100_000, "it is nested more than 50 deep"), ('{"text": 1' + "0" * 400 + "}", "a number of 401 digits"),
    ('{"text": "a b", "text": "a c"}', "the field 'text' twice in an object: keep one of the two"),
    ('{"text": 5}', "'int' object has no attribute 'rstrip'"), ("[1]", "list indices must be integers or slices")])
def test_a_line_of_a_benchmark_that_is_no_row_is_a_sentence(tmp_path, line, words):
    (tmp_path / "a.jsonl").write_text(line)
    message = sentence(read_rows, "lambada", str(tmp_path / "a.jsonl"), list, 8)
    assert message.startswith(f"{tmp_path}/a.jsonl, line 1 can't be scored (") and words in message
