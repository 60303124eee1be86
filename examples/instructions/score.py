"""Print how many held-out prompts of examples/instructions/generate.py a model answers exactly, greedily.

    python examples/instructions/score.py --out_dir=out-sft-cpu

All arguments go to sample.py.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SAMPLE = FOLDER.parent.parent / "sample.py"


def main():
    if not (heldout := FOLDER / "heldout.jsonl").exists():
        print(f"{heldout} does not exist: run python {FOLDER}/generate.py", file=sys.stderr)
        raise SystemExit(2)
    lines = heldout.read_text(encoding="utf-8").splitlines()
    pairs = [(pair["prompt"], pair["completion"]) for pair in map(json.loads, lines)]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("".join(prompt + "\n" for prompt, _ in pairs))
        file.flush()
        done = subprocess.run([sys.executable, SAMPLE, "--chat", "--json", "--temperature=0", "--max_new_tokens=10",
                               f"--prompts_file={file.name}", *sys.argv[1:]], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(done.returncode)
    found = [(prompt.split()[0], json.loads(line)["text"] == answer)
             for (prompt, answer), line in zip(pairs, done.stdout.splitlines(), strict=True)]
    for task in dict.fromkeys(task for task, _ in found):
        exact = [right for name, right in found if name == task]
        print(f"{task}: {sum(exact)} of {len(exact)} answers exact")
    print(f"accuracy on held-out prompts: {100 * sum(right for _, right in found) / len(found):.1f}%")


if __name__ == "__main__":
    main()
