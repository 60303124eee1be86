"""README.md speaks of files, settings and commands that there are."""

import ast
import fnmatch
import re
import shlex
import subprocess
import sys

import pytest
from conftest import ROOT

README = ROOT / "README.md"
LAUNCHERS = {"python", "torchrun", "deepspeed", "bash"}
OTHERS = {  # --options of torchrun, deepspeed, pip and the scripts that are not settings of ours
    "--nproc_per_node", "--nnodes", "--node_rank", "--rdzv_backend", "--rdzv_endpoint", "--rdzv_id", "--master_addr",
    "--master_port", "--standalone", "--num_gpus", "--num_nodes", "--hostfile", "--include", "--exclude", "--tag",
    "--name", "--tokenizer", "--help", "--print_settings", "--local_rank", "--key", "--install",
    "--headline"}
MADE = [  # by runs, by set-up, by transformers
    "out", "out-*", "data/*/*.bin", "data/*/meta.*", "*input.txt", "data/gpt2.tiktoken", "config.json",
    "*history.jsonl", "*settings.json", "*manifest.json", "*iter_*", "*.safetensors", "*zero_to_fp32.py", "*.pt",
    "*train.bin", "*val.bin", "*meta.json", "*meta.pkl", "best*", "final*", "latest", ".venv*", "wandb*"]
PATH = re.compile(r"(?:\./)?[\w.-]+(?:/[\w.*-]+)*/?")
SUFFIXES = (".py", ".sh", ".json", ".md", ".txt", ".toml", ".bin", ".pkl", ".jsonl", ".safetensors", ".pt")


def text():
    return README.read_text(encoding="utf-8")


def blocks():
    """The lines of the fenced code blocks; those ended by a backslash are joined with the next."""
    fenced = re.findall(r"^```[^\n]*\n(.*?)^```", text(), re.M | re.S)
    return [line.strip() for block in fenced for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def inline():
    """What stands between single backticks outside of the fenced blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text(), flags=re.M | re.S))


def names_of(script):
    """The settings of a script: the plain names that it gives values to, before it reads the command line."""
    tree = ast.parse((ROOT / script).read_text().split("\nsettings = ")[0])
    targets = [node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
               for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)]
    return {target.id for target in targets if target.id[0] != "_"}


def commands():
    """(program, its words) of each command in the blocks: `NAME=value python X.py ...`, `./x.sh ...`, `$ ...`."""
    found = []
    for line in blocks():
        try:
            words = shlex.split(line.removeprefix("$ "), comments=True)
        except ValueError:  # output with an apostrophe
            continue
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        if words and (words[0] in LAUNCHERS or words[0].startswith("./")):
            found.append((words[0], words[1:]))
    return found


def is_there(path):
    """Whether a path of README's is in the repository, or one that a run or the set-up makes."""
    path = path.removeprefix("./").rstrip("/")
    if any(fnmatch.fnmatch(path, pattern) for pattern in MADE) or "NAME" in path or "FILE" in path or "DIR" in path:
        return True
    return bool(list(ROOT.glob(path)) or ("/" not in path and list(ROOT.glob(f"*/{path}"))))


@pytest.fixture(scope="module", autouse=True)
def readme():
    assert README.exists(), "there is no README.md"


def test_the_two_commands_are_told():
    programs = [program for program, _ in commands()]
    assert "./run_deepspeed_xl.sh" in programs and "./run_tests.sh" in programs
    assert len(commands()) >= 8  # the seven ways of use, and the tests


def test_every_way_of_use_is_told():
    lines = "\n".join(" ".join([program, *words]) for program, words in commands())
    for way in (r"deepspeed --num_gpus=4 train_deepspeed\.py config/xl_shakespeare\.py",
                r"deepspeed --num_gpus=2 train_deepspeed\.py",
                r"torchrun --nproc_per_node=4 train_deepspeed\.py config/xl_shakespeare\.py",
                r"python train_deepspeed\.py config/",
                r"python sample\.py --out_dir[= ]out-shakespeare-xl-deepspeed",
                r"python data/shakespeare/prepare\.py"):
        assert re.search(way, lines), way


def test_the_files_of_all_commands_exist():
    paths = []
    for program, words in commands():
        paths += [program] if program.startswith("./") else []
        paths += [word for word in words if word.endswith((".py", ".sh", ".json", ".txt")) and word[0] != "-"]
        paths += [word.split("=", 1)[1] for word in words if word.startswith("--deepspeed_config=")]
    assert paths and [path for path in paths if not is_there(path)] == []


def test_the_files_that_the_text_names_exist():
    paths = [code for code in inline() if PATH.fullmatch(code)
             and (code.endswith(SUFFIXES) or code.startswith(("config/", "data/", "runtime/", "tests/", "results/")))]
    paths += [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text()) if "://" not in link]
    assert paths and [path for path in paths if path and not is_there(path)] == []


def test_the_settings_of_all_commands_exist():
    settings = {"train_deepspeed.py": names_of("train_deepspeed.py"), "sample.py": names_of("sample.py"),
                "export_hf.py": names_of("export_hf.py"), "run_deepspeed_xl.sh": names_of("train_deepspeed.py")}
    assert "learning_rate" in settings["train_deepspeed.py"] and "top_p" in settings["sample.py"]
    unknown = []
    for program, words in commands():
        script = next((name for name in settings for word in (program, *words) if word.endswith(name)), None)
        options = [word.split("=")[0] for word in words if word.startswith("--")]
        unknown += [(script, option) for option in options
                    if script and option not in OTHERS and option[2:] not in settings[script]]
    assert unknown == []


def test_the_settings_that_the_text_names_exist():
    known = names_of("train_deepspeed.py") | names_of("sample.py") | names_of("export_hf.py")
    options = [option for code in inline() for option in re.findall(r"(?<!\S)--[a-z0-9_]+", code)]
    assert [option for option in options if option not in OTHERS and option[2:] not in known] == []
    assigned = [name for code in inline() for name in re.findall(r"^([a-z]\w*)=\S+$", code)]
    assert [name for name in assigned if name not in known] == []


def test_the_table_of_settings_is_the_scripts():
    command = [sys.executable, ROOT / "train_deepspeed.py", "--settings_table"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (ROOT / "docs" / "settings.md").read_text(encoding="utf-8") == done.stdout
    assert done.stdout.count("\n| `") > 60
