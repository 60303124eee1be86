"""The layout: a room imports only from rooms below it, no module imports itself through others, files stay short."""

import ast
import graphlib
import subprocess

import pytest
from conftest import ROOT

LEVELS = (  # a room is a folder, or a file of its own; imports go to lower levels, or stay in the room
    ("runtime/errors.py", "runtime/install.py"),
    ("runtime/untrusted.py", "runtime/torch_files.py"),
    ("runtime/cores.py", "runtime/files.py", "runtime/gpu_problems.py", "runtime/other_guides.py", "runtime/output.py",
     "runtime/paths.py", "runtime/pretrained.py", "runtime/source_hash.py", "runtime/version.py", "config"),
    ("runtime/__init__.py", "runtime/hardware.py", "runtime/weights.py", "runtime/lora.py", "runtime/loss.py",
     "runtime/decoder.py", "runtime/model_parts.py", "configurator.py"),
    ("runtime/data", "runtime/cluster", "runtime/bring.py", "runtime/git.py", "model.py"),
    ("runtime/chosen_model.py", "launch_deepspeed.py"),
    ("runtime/checkpoint", "runtime/kernels", "runtime/monitor", "runtime/prepare", "runtime/export"),
    ("runtime/engine", "runtime/sample", "export_hf.py", "data"),
    ("runtime/plan", "runtime/check", "sample.py", "plot.py"),
    ("train_deepspeed.py", "bench.py", "doctor.py", "evaluate.py"))
LEVEL_OF = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
MOST_LINES_OF_A_FILE = 450  # a file has one subject
MOST_LINES = {"train_deepspeed.py": 630, "model.py": 560, "runtime/engine/layout.py": 760,
              "runtime/kernels/block.py": 480}


def tracked(*patterns):
    """Tracked files outside tests/, examples/ and results/: {path: text}."""
    paths = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {path: (ROOT / path).read_text(encoding="utf-8") for path in paths.splitlines()
            if not path.startswith(("tests/", "examples/", "results/")) and (ROOT / path).exists()}


def room_of(path):
    folders = path.split("/")[:-1]
    return path if folders in ([], ["runtime"]) else "/".join(folders[:2 if folders[0] == "runtime" else 1])


def imports(sources):
    """{path: paths of our files that it imports, anywhere in it} of {path: source}."""
    paths = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in sources}
    found = {}
    for path, source in sources.items():
        names = set()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                package = path.split("/")[:-node.level] if node.level else []
                module = ".".join([*package, *filter(None, [node.module])])
                names.update(name if (name := f"{module}.{alias.name}") in paths else module for alias in node.names)
        found[path] = {paths[name] for name in names if name in paths}
    return found


@pytest.fixture
def sources():
    return tracked("*.py")


def test_every_file_has_a_level(sources):
    assert {room_of(path) for path in sources} == LEVEL_OF.keys()


def test_imports_go_down_and_never_in_a_circle(sources):
    graph = imports(sources)
    assert not {(path, other) for path, others in graph.items() for other in others if room_of(path) != room_of(other)
                and LEVEL_OF[room_of(path)] <= LEVEL_OF[room_of(other)]}
    graphlib.TopologicalSorter(graph).prepare()  # the error names a circle


def test_a_script_makes_its_settings_global_in_one_line(sources):
    for path, source in sources.items():
        assert source.count("globals().update") <= 1, path


def test_sizes():
    lines = {path: len(text.splitlines()) for path, text in tracked("*.py", "*.sh", "*.sbatch").items()}
    assert not {path: n for path, n in lines.items() if n > MOST_LINES.get(path, MOST_LINES_OF_A_FILE)}
    example = ROOT / "examples" / "animals90"
    files = (*example.glob("*.py"), *example.glob("src/*.py"))
    assert sum(len(path.read_text().splitlines()) for path in files) <= 1300


def test_lines_are_short(sources):
    """100 columns, so that two files stand side by side."""
    assert not [f"{path}:{number}" for path, source in sources.items()
                for number, line in enumerate(source.splitlines(), 1) if len(line) > 100]


def test_functions_are_short(sources):
    """60 lines, without the list of arguments, which kernels have one per line."""
    long = {f"{path}:{node.lineno} {node.name}": n for path, source in sources.items()
            for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            if (n := node.end_lineno - node.body[0].lineno + 1) > 60}
    assert not long


def test_data_structures_are_classes(sources):
    assert not [path for path, source in sources.items() if "SimpleNamespace" in source]
