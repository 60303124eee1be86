"""examples/finetune.ipynb: its cells run in a copy of the project, with a small model, offline."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from conftest import ROOT, done, launch, nvidia_smi, patience, read_history, wait_until
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient

import configurator
from runtime.cluster.ranks import Ranks
from runtime.plan.report import memory_report
from runtime.plan.run_plan import Problems, make_plan

NOTEBOOK = ROOT / "examples" / "finetune.ipynb"
SMALL_MODEL = (
    "--n_layer=2 --n_head=2 --n_embd=32 --eval_interval=20 --log_interval=10 --warmup_iters=0"
)
# In the place of the cell that chooses
SMALL_CHOICE = f"""
prepare = "data/prepare.py lines.txt --name=lines --tokenizer=char"
config = "config/shakespeare_char_cpu.py --dataset=lines {SMALL_MODEL}"
steps = 60
"""


def read_notebook() -> nbformat.NotebookNode:
    """Return the notebook as it is in the repository."""
    return nbformat.read(NOTEBOOK, as_version=4)


def code_cells(notebook: nbformat.NotebookNode) -> dict[str, nbformat.NotebookNode]:
    """Return the cells with code by their names, in their order."""
    return {cell.id: cell for cell in notebook.cells if cell.cell_type == "code"}


def printed(cell: nbformat.NotebookNode) -> str:
    """Return what a cell has printed."""
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A copy of the programs with a text of 400 lines, and an environment for a kernel."""
    copy = tmp_path / "project"
    for name in ("runtime", "config"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("data", "examples"):
        (copy / name).mkdir()
    shutil.copy2(NOTEBOOK, copy / "examples")
    shutil.copy2(ROOT / "data" / "prepare.py", copy / "data")
    files = [ROOT / "install.sh", ROOT / "pyproject.toml"]
    for path in [*files, *ROOT.glob("*.py"), *ROOT.glob("*.json")]:
        shutil.copy2(path, copy)
    lines = [
        f"ROMEO: the cat sat on mat {number}, and saw {number + 7} foxes." for number in range(400)
    ]
    (copy / "lines.txt").write_text("\n\n".join(lines))

    # The environment of the tests, for install.sh and for `python`. Nothing of the user's Jupyter
    monkeypatch.setenv("PYTHON", sys.executable)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    monkeypatch.setenv("PATH", path)
    for name in ("JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    return copy


def test_the_file_has_no_output():
    """A notebook in a repository holds what somebody wrote, not what a machine answered."""
    notebook = read_notebook()
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert len(cells) == 9
    for name, cell in cells.items():
        assert (cell.outputs, cell.execution_count) == ([], None), name
        assert cell.metadata == ({"tags": ["parameters"]} if name == "choose" else {}), name
    assert notebook.metadata.keys() == {"kernelspec", "language_info"}
    # As Jupyter writes it, but for the version of Python
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert text == json.dumps(json.loads(text), indent=1, ensure_ascii=False) + "\n"


def test_links_lead_to_files():
    text = "".join(cell.source for cell in read_notebook().cells)
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) == 6
    assert [link for link in links if not (NOTEBOOK.parent / link).exists()] == []


@pytest.mark.parametrize("gpu", [False, True], ids=["on a CPU", "on a T4"])
def test_its_own_choice_can_be_trained(gpu, tmp_path, monkeypatch):
    """A dry run of what the notebook chooses finds nothing wrong but data to be prepared."""
    nvidia_smi(tmp_path, *["7.5"] * gpu)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    chosen = {"subprocess": subprocess}
    exec(code_cells(read_notebook())["choose"].source, chosen)
    assert (ROOT / chosen["prepare"]).exists()

    monkeypatch.chdir(ROOT)
    problems = Problems()
    arguments = [chosen["config"], "--dry_run=True", "--out_dir=out-notebook"]
    arguments += ["--target_gpu=T4"] * gpu
    ranks = Ranks(0, 0, 1, 1)
    settings = configurator.settings_of_script("train_deepspeed.py", arguments)
    plan = make_plan(settings, ranks, problems, [])
    assert [problem for problem in problems if "train.bin does not exist" not in problem] == []
    assert settings.max_iters == chosen["steps"]
    assert settings.device == ("auto" if gpu else "cpu")
    if gpu:
        assert memory_report(plan, ranks).startswith("each GPU   7.06 GB of 16.00 GB\n")
        about = next(cell.source for cell in read_notebook().cells if cell.id == "title")
        assert "estimates 7.06 GB of GPU memory" in about


def test_all_cells_run(project):
    """The loss falls, the run resumes halfway, and transformers writes what sample.py does."""
    notebook = read_notebook()
    cells = code_cells(notebook)
    cells["choose"].source = SMALL_CHOICE
    client = NotebookClient(
        notebook,
        timeout=int(patience(120)),
        kernel_name="python3",
        resources={"metadata": {"path": str(project / "examples")}},
    )
    client.execute()

    assert printed(cells["install"]).startswith("setup: ready: ")
    out_dir = project / "out-notebook"
    trained = [record["iter"] for record in read_history(out_dir) if "loss" in record]
    assert trained == [1, 10, 20, 30, 31, 40, 50, 60]
    resumed = "resuming from out-notebook/iter_30, iteration 30"
    assert resumed in printed(cells["resume"]) and resumed not in printed(cells["train"])
    losses = {
        record["iter"]: record["val_loss"]
        for record in read_history(out_dir)
        if "val_loss" in record
    }
    assert [*losses] == [0, 20, 30, 40, 60]
    assert losses[0] == pytest.approx(3.5, abs=0.2) and losses[60] < 1.5

    picture = cells["plot"].outputs[-1].data["image/png"]
    assert len(picture) > 10_000
    assert "\n\nROMEO:" in printed(cells["sample"])
    greedy = ("--start=ROMEO:", "--temperature=0", "--num_samples=1", "--max_new_tokens=40")
    sampled = done(launch(ROOT / "sample.py", f"--out_dir={out_dir}", *greedy)).stdout
    text = "ROMEO:" + sampled.partition("\n\nROMEO:")[2]
    written = [output.text for output in cells["load"].outputs if output.name == "stdout"]
    assert "".join(written) == text.rstrip("\n") + "\n" and len(text) > 40


def test_the_stop_button_saves(project):
    """It ends the command as Ctrl-C does, and the cell when the command has ended."""
    cells = code_cells(read_notebook())
    out_dir = project / "out-notebook"
    kernel, client = start_new_kernel(cwd=str(project / "examples"))
    try:
        for name in ("install", "choose", "prepare"):
            source = (
                SMALL_CHOICE.replace("60", "1_000_000") if name == "choose" else cells[name].source
            )
            answer = client.execute_interactive(
                source, timeout=patience(60), output_hook=lambda message: None
            )
            assert answer["content"]["status"] == "ok"
        client.execute(cells["train"].source)
        assert wait_until(lambda: (out_dir / "best").exists())
        kernel.interrupt_kernel()
        answer = client.get_shell_msg(timeout=patience(60))["content"]
        failure = (answer["ename"], answer["evalue"].partition(":")[0])
        assert failure == ("RuntimeError", f"exit code -{signal.SIGINT}")
        newest = read_history(out_dir)[-1]["iter"]
        assert newest > 20 and (out_dir / "latest").read_text() == f"iter_{newest}"
    finally:
        # A command that was not stopped would go on without the kernel
        if out_dir.exists():
            (out_dir / "STOP").touch()
        kernel.shutdown_kernel(now=True)
        client.stop_channels()
