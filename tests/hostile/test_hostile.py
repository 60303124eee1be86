"""Files of others never run code, hang, fill the memory, print a traceback or escapes, or change
the user's own files: each reader of readers.py with each hostile file of files.py."""

import os
import shutil
import subprocess
import sys
import time
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from conftest import ROOT, ForkedJob, kill, patience, planted
from files import FILES, SECRET, HostileFile, Trap
from places import Places
from readers import READERS, Reader

OWN_WORK_S = 20  # of the processor: a busy machine doesn't change it
STARTED_ANEW_S = 60  # with imports, where the command runs as a process of its own
IDLE_S = 30  # without work, as of one that waits for a pipe
WALL_S = 240
MOST_MEMORY = 3e9
MOST_OUTPUT = 20_000
NO_NETWORK = "http://127.0.0.1:9"  # a proxy that doesn't answer
FIELDS = "letters chats words nanogpt run weights weights_bin weights_shards out tokenizer corpus "
FIELDS += "conversations tokens hub texts pictures animals logs resnet work project"


def folders_in(reader: Reader) -> list[str]:
    """Return the names of the folders in a reader's command, and of the one where it runs."""
    names = [name for name in FIELDS.split() if "{" + name + "}" in reader.command]
    if reader.where and reader.where not in names:
        names.append(reader.where)
    return names


def attacked_folders(reader: Reader) -> set[str]:
    """Return the names of the folders in which a reader meets hostile files."""
    names = {pattern.split("/")[0] for pattern in reader.reads.split()}
    names.update(reader.others.split())
    if reader.where:
        names.add(reader.where)
    return names


def needs(reader: Reader, file: HostileFile) -> bool:
    """Return whether a reader can't do without the file that a hostile one takes the place of."""
    return any(fnmatchcase(file.path, pattern) for pattern in reader.reads.split())


def cases() -> list:
    """Return the parameters of the test: (reader, file, exit code).

    Each file meets all readers that read its folder. Those that can do without it meet only the
    first row of its path. Without --every, each reader, each path and each content are met once.
    """
    found = []
    unneeded = set()  # (reader's name, path)
    met = set()  # names of readers, paths and contents
    for file in FILES:
        for reader in readers_of(file):
            is_needed = needs(reader, file)
            if not is_needed and file.code is None:
                if (reader.name, file.path) in unneeded:
                    continue
                unneeded.add((reader.name, file.path))
            code = file.code
            if code is None:
                code = 2 if is_needed else reader.code
            content = file.what.split(" = ")[-1]
            marks = []
            if {reader.name, file.path, content} <= met:
                marks = [pytest.mark.every]
            elif reader.is_long or file.is_long:
                marks = [pytest.mark.long]
            if not file.is_long:
                met.update((reader.name, file.path, content))
            path = file.path.replace("\x1b", "")
            name = f"{reader.name}-{path}-{file.what}"
            found.append(pytest.param(reader, file, code, marks=marks, id=name))
    return found


def marked_readers() -> list:
    """Return all readers as parameters of a test."""
    found = []
    for reader in READERS:
        marks = [pytest.mark.long] if reader.is_long else []
        found.append(pytest.param(reader, marks=marks, id=reader.name))
    return found


def readers_of(file: HostileFile) -> list[Reader]:
    """Return the readers that a hostile file is for."""
    folder = file.path.split("/")[0]
    patterns = file.readers.split("|")
    found = []
    for reader in READERS:
        if not any(fnmatchcase(reader.name, pattern) for pattern in patterns):
            continue
        looks_there = folder in reader.others.split() or folder == reader.where
        if needs(reader, file) or looks_there or (file.code is not None and file.readers != "*"
                                                  and folder in attacked_folders(reader)):
            found.append(reader)
    return found


@pytest.fixture(scope="session")
def places(tmp_path_factory) -> Places:
    return Places(tmp_path_factory.mktemp("places"))


def run_reader(reader: Reader, folders: dict, folder: Path, trap: Trap) -> SimpleNamespace:
    """Run a reader's command. Return its code, stdout, stderr, and why it was killed, or ""."""
    names = {"root": str(ROOT)}
    for name, path in folders.items():
        names[name] = str(path)
    script, *arguments = [part.format(**names) for part in reader.command.split()]
    path = ROOT / script
    if reader.plant:
        path = planted(folder, reader.plant.replace("{root!r}", repr(str(ROOT))), path)
    outputs = [folder / "stdout", folder / "stderr"]
    env = {"PATH": f"{trap.programs}:{os.environ['PATH']}", "HOME": str(folder / "home"),
           "HF_DATASETS_CACHE": str(folder / "cache"), "PYTHON": sys.executable,
           "MPLCONFIGDIR": str(folder / "cache"), "XDG_CACHE_HOME": str(folder / "cache"),
           "HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
           "http_proxy": NO_NETWORK, "https_proxy": NO_NETWORK}
    if reader.where:
        command = [str(path), *arguments]
        if path.suffix == ".py":
            command = [sys.executable, *command]
        with open(outputs[0], "w") as stdout, open(outputs[1], "w") as stderr:
            job = subprocess.Popen(command, stdout=stdout, stderr=stderr,
                                   cwd=folders[reader.where], env={**os.environ, **env},
                                   start_new_session=True)
        pid = job.pid
    else:
        job = ForkedJob([path, *arguments], 1, *outputs, env)
        pid = job.pids[0]
    try:
        killed = watch(job, pid, STARTED_ANEW_S if reader.where else OWN_WORK_S)
    finally:
        kill(job)
    texts = [output.read_text(errors="replace") for output in outputs]
    return SimpleNamespace(code=job.returncode, stdout=texts[0], stderr=texts[1], killed=killed)


def watch(job, pid: int, own_work_s: float) -> str:
    """Wait for a job. Return why it must be killed, or "" if it ends."""
    began = time.monotonic()
    looked = began  # at its work and memory, for the last time
    progressed = began
    worked = 0.0  # seconds of the processor, when it had progressed
    while job.poll() is None:
        time.sleep(0.02)
        now = time.monotonic()
        if now - looked < 0.1:
            continue
        looked = now
        used, memory = work_and_memory(pid)
        if used > worked + 0.3:
            worked = used
            progressed = now
        if used > own_work_s:
            return f"it still works after {own_work_s} s"
        if memory > MOST_MEMORY:
            return f"it takes {memory / 1e9:.1f} GB"
        if now - progressed > patience(IDLE_S) or now - began > patience(WALL_S):
            return f"it waits for ever ({used:.1f} s of work in {now - began:.0f} s)"
    return ""


def work_and_memory(pid: int) -> tuple[float, int]:
    """Return a process's and its children's seconds of the processor, and the most bytes of one.

    Both are 0 once it has ended.
    """
    seconds = 0.0
    most = 0
    try:
        process = psutil.Process(pid)
        for each in [process, *process.children(recursive=True)]:
            times = each.cpu_times()
            seconds += times.user + times.system + times.children_user + times.children_system
            most = max(most, each.memory_info().rss)
    except psutil.Error:  # one of them has ended meanwhile
        pass
    return seconds, most


def put(file: HostileFile, folders: dict, trap: Trap) -> None:
    """Put a hostile file into its folder."""
    folder, _, inside = file.path.partition("/")
    path = folders[folder] / inside
    path.parent.mkdir(parents=True, exist_ok=True)
    trap.replaced = None
    if path.is_file():
        trap.replaced = path.read_bytes()
        path.unlink()
    file.write(path, trap)


def problems_of(result: SimpleNamespace, reader: Reader, code: int, trap: Trap,
                new: Path) -> list[str]:
    """Return what a reader did wrong, as sentences."""
    problems = trap.problems()
    if result.killed:
        problems.append(result.killed)
    elif result.code != code:
        problems.append(f"exit code {result.code}, not {code}")
    output = result.stdout + result.stderr
    if "Traceback" in output:
        problems.append("a traceback")
    if "\x1b" in output:
        problems.append("an escape sequence")
    if SECRET in output:
        problems.append("the private file is printed")
    if len(output) > MOST_OUTPUT:
        problems.append(f"an output of {len(output):,} characters")
    told = result.stdout if reader.lists else result.stderr
    lines = told.strip().splitlines()
    if code == 2 and reader.code == 0 and not 1 <= len(lines) <= 3:
        problems.append(f"{len(lines)} lines of errors, not 1 to 3")
    for path in new.glob("meta.json"):
        if "~" in path.read_text():
            problems.append("the private file is in the dataset")
    return problems


def prepared_folders(reader: Reader, places: Places, folder: Path) -> dict[str, Path]:
    """Return {name: path} of copies of the folders in a reader's command."""
    attacked = attacked_folders(reader)
    folders = {"new": folder / "new"}
    for name in folders_in(reader):
        if name in attacked or name in ("out", "run"):  # a run may be written to
            folders[name] = places.copy(name, folder / name)
        else:
            folders[name] = places.folder(name)
    return folders


@pytest.mark.parametrize("reader", marked_readers())
def test_a_reader_takes_folders_without_hostile_files(reader, places, tmp_path):
    """So that what is refused below is refused for its hostile file."""
    trap = Trap(tmp_path / "trap")
    folders = prepared_folders(reader, places, tmp_path)
    result = run_reader(reader, folders, tmp_path, trap)
    problems = problems_of(result, reader, reader.code, trap, folders["new"])
    assert not problems, result.stdout + result.stderr


@pytest.mark.parametrize("reader, file, code", cases())
def test_a_hostile_file_does_no_harm(reader, file, code, places, tmp_path):
    trap = Trap(tmp_path / "trap")
    folders = prepared_folders(reader, places, tmp_path)
    put(file, folders, trap)
    result = run_reader(reader, folders, tmp_path, trap)
    problems = problems_of(result, reader, code, trap, folders["new"])
    shown = (result.stdout + result.stderr)[-2000:].replace("\x1b", "ESC")
    assert not problems, f"{'; '.join(problems)}\n{shown}"
    shutil.rmtree(tmp_path)  # all together they would take GBs
