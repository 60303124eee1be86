"""Tell whether a model is the one that this project ships, by the hashes of its functions.

python -m runtime.check.shipped > runtime/check/shipped.json
"""

import json
from pathlib import Path

from torch import nn

from runtime.checkpoint.model_source import hashed_parts, source_of
from runtime.files import ROOT

HASHES = Path(__file__).with_name("shipped.json")


def edited_functions(model: nn.Module) -> list[str]:
    """Return the names of the functions, classes and constants that are not as shipped, in all
    files that have classes of the model. A copy of model.py has none."""
    shipped = json.loads(HASHES.read_text(encoding="utf-8"))
    parts = source_of(model)["parts"]
    names = {**shipped, **parts}
    return [name for name in names if shipped.get(name) != parts.get(name)]


if __name__ == "__main__":
    print(json.dumps(hashed_parts(str(Path(ROOT, "model.py"))), indent=1))
