"""Run tests of the copy of the project that this file is in: fault_runner.py TEST...

faults.py starts it, with a fault in the copy.
"""

import os
import sys
from pathlib import Path

# Of the pytest that runs test_faults.py, and of its pytest-xdist
for name in list(os.environ):
    if name.startswith("PYTEST_"):
        del os.environ[name]
# A fault in a kernel must not find what was compiled without it
os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ.pop("INDUCTOR_CACHE")
os.chdir(Path(__file__).resolve().parent.parent)

import pytest

options = ["-o", "addopts=-q -rf", "-x", "-p", "no:cacheprovider"]
sys.exit(pytest.main([*options, *sys.argv[1:]]))
