"""Measure what an edit of model.py costs on this GPU, beside the unedited model.

    python results/edits.py h200_x1_edits_32x1.json config/xl_shakespeare.py \\
        --batch_size=32 --gradient_accumulation_steps=1

All arguments but the first go to bench.py. Each model is trained in a copy of the project, in turn, ROUNDS times. The
JSON has the medians in ms and each model's share over the unedited one. An auxiliary loss keeps the kernels, in blocks
that each take and return a tensor. An edited activation loses them: torch.compile runs its blocks.
"""

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROUNDS = 3
HEAD = "        return self.lm_head("
# {name: edits of model.py, [(old, new)]}
EDITS = {
    "unedited": [],
    "auxiliary loss": [
        (HEAD, "        out = self.lm_head("),
        (
            "\n    @torch.no_grad()\n    def generate(",
            """        if targets is None or reduction != "mean":
            return out
        return out + 1e-4 * x.square().mean()

    @torch.no_grad()
    def generate(""",
        ),
    ],
    "edited activation": [("F.gelu(", "F.relu(F.gelu("), ("approximate=self.gelu)", "approximate=self.gelu))")],
}


def main() -> None:
    """Measure all models and write the JSON."""
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    out = ROOT / "results" / sys.argv[1]
    times: dict[str, list[float]] = {name: [] for name in EDITS}
    with tempfile.TemporaryDirectory(prefix="edits-") as folder:
        copies = {name: edited_copy(Path(folder, name.replace(" ", "_")), name) for name in EDITS}
        for _ in range(ROUNDS):
            for name, copy in copies.items():
                times[name].append(step_ms(copy, sys.argv[2:]))
                print(f"{name}: {times[name][-1]:.1f} ms", flush=True)
    medians = {name: statistics.median(values) for name, values in times.items()}
    over = {name: round(ms / medians["unedited"] - 1, 4) for name, ms in medians.items()}
    content = {"arguments": sys.argv[2:], "ms": times, "medians": medians, "over the unedited model": over}
    out.write_text(json.dumps(content, indent=1))
    print(json.dumps(over))


def edited_copy(folder: Path, name: str) -> Path:
    """Copy the project's files, apply an edit to model.py there, and return the folder."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    for path in listed.stdout.splitlines():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, target)
    shutil.copytree(ROOT / "data", folder / "data", dirs_exist_ok=True)
    model = folder / "model.py"
    text = model.read_text(encoding="utf-8")
    for old, new in EDITS[name]:
        if text.count(old) != 1:
            raise SystemExit(f"model.py has changed: edit {name!r} in results/edits.py")
        text = text.replace(old, new)
    model.write_text(text, encoding="utf-8")
    return folder


def step_ms(folder: Path, arguments: list[str]) -> float:
    """Return the median time of a step that bench.py measures in a copy of the project."""
    subprocess.run([sys.executable, "bench.py", "--json=bench.json", *arguments], cwd=folder, check=True)
    return json.loads((folder / "bench.json").read_text())["ms"]["median"]


if __name__ == "__main__":
    main()
