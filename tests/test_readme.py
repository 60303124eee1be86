"""The pages in Markdown: their links, their commands, and the page of settings."""

import fnmatch
import functools
import re
import shlex
import subprocess
import sys

import pytest
from conftest import ROOT

import configurator

PAGES = [ROOT / name for name in subprocess.run(  # an example has its own test
    ["git", "ls-files", "*.md", ":!examples"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    if (ROOT / name).exists()]
TAKE_SETTINGS = {"train_deepspeed.py": "train_deepspeed.py", "sample.py": "sample.py", "export_hf.py": "export_hf.py",
                 "evaluate.py": "evaluate.py",
                 "run_deepspeed_xl.sh": "train_deepspeed.py", "doctor.py": "train_deepspeed.py",
                 "bench.py": "train_deepspeed.py",
                 "examples/instructions/score.py": "sample.py"}  # a script: whose settings
ELSEWHERE = ("*zero_to_fp32.py", "*zero_to_torch.py", "convert_hf_to_gguf.py")  # in a run's folder; llama.cpp's


@functools.cache
def read(page):
    return page.read_text(encoding="utf-8")


def blocks(page):
    """The lines of the fenced code blocks; those ended by a backslash are joined with the next."""
    fenced = re.findall(r"^ *```[^\n]*\n(.*?)^ *```", read(page), re.M | re.S)
    return [line.strip() for block in fenced for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def prose(page):
    text = re.sub(r"^ *```.*?^ *```", "", read(page), flags=re.M | re.S)
    return re.sub(r"^\| .+? \|", "|", text, flags=re.M) if page.name == "guides.md" else text  # what other guides say


def inline(page):
    """What stands between single backticks outside of the fenced blocks."""
    return re.findall(r"`([^`\n]+)`", prose(page))


def commands(page):
    """[words] of each command, in blocks and between backticks: `NAME=value python X.py ...`, `./x.sh ...`."""
    found = []
    for line in [*blocks(page), *inline(page)]:
        try:
            words = shlex.split(line.removeprefix("$ "), comments=True)
        except ValueError:  # output with an apostrophe
            continue
        while words and (re.fullmatch(r"[A-Z_]+=.*", words[0]) or words[0] == "nohup"):
            words.pop(0)
        end = next((i for i, word in enumerate(words) if word in (">", "|", "&", "&&", "2>&1", "||")), len(words))
        if len(words) > 1 and words[0].split("/")[-1] in ("python", "torchrun", "deepspeed") or (
                words and words[0].startswith("./") and words[0].endswith(".sh")):
            found.append(words[:end])
    return found


def is_there(path):
    """Whether a script or a JSON of a command is in the repository, or is one that the page says how to get."""
    if any(fnmatch.fnmatch(path, pattern) for pattern in ELSEWHERE) or re.search(r"^\.\./|NAME|FILE|PATH|X\.py", path):
        return True
    return (ROOT / path).exists()


@functools.cache
def own_options(script):
    """The options of a script that are no settings, as its source writes them."""
    quoted = not script.endswith(".sh") and not script.startswith("tests/")
    return set(re.findall(r'"(--\w+)"' if quoted else r"--\w+", read(ROOT / script)))


def wrong(words):
    """What is wrong with a command: a script that does not exist, or an argument that it would refuse; or None."""
    place = next((i for i, word in enumerate(words) if word.endswith((".py", ".sh")) and (i == 0 or word[0] != "-")
                  and not word.startswith("config/")), None)
    if place is None:  # python -m MODULE, or a part of a command
        return None
    script, arguments = words[place].removeprefix("./"), [word for word in words[place + 1:] if word != "..."]
    if not is_there(script):
        return f"there is no {script}"
    if not (ROOT / script).exists():
        return None
    if script == "launch_deepspeed.py":  # torchrun's options, and a script
        return wrong(arguments)
    own = own_options(script) | {"--help"}
    rest = [word for word in arguments if word.split("=")[0] not in own]
    if script not in TAKE_SETTINGS:
        unknown = [word for word in rest if word.startswith("--")]
        return f"{script} has no {unknown}" if unknown else None
    for word in rest:
        if word.startswith("--deepspeed_config=") and not is_there(word.partition("=")[2]):
            return f"there is no {word.partition('=')[2]}"
    rest = [word for word in rest if not re.match(r"\.\./|[A-Z]+(\.py)?$", word)]
    try:
        configurator.settings_of_script(str(ROOT / TAKE_SETTINGS[script]), rest)
    except SystemExit:
        return f"{script} refuses {rest}"


def heading_anchors(page):
    headings = re.findall(r"^#+ (.+)$", prose(page), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_to_files_and_headings():
    broken, links = [], 0
    for page in PAGES:
        for file, anchor in re.findall(r"\]\(([^)\s#:]*)(?:#([^)\s]+))?\)", prose(page)):
            target = (page.parent / file).resolve() if file else page
            links += 1
            if not target.exists() or (anchor and anchor not in heading_anchors(target)):
                broken.append(f"{page.relative_to(ROOT)}: {file}#{anchor}")
    assert links > 40 and broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_possible(page, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    problems = {shlex.join(words): problem for words in commands(page) if (problem := wrong(words))}
    assert problems == {}, capsys.readouterr().err


def test_the_page_of_settings_is_the_scripts_help(tmp_path):
    command = [sys.executable, ROOT / "train_deepspeed.py", "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (ROOT / "docs" / "settings.md").read_text(encoding="utf-8") == done.stdout
    commented = re.findall(r"^    --(\w+)=(?:'[^']*'|\S+) +[^\s[]", done.stdout.replace("\n" + " " * 45, " "), re.M)
    assert commented == [*vars(configurator.settings_of_script(command[1], []))]
    assert max(map(len, done.stdout.splitlines())) <= 120
