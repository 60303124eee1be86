#!/usr/bin/env bash
# The tests, with set-up where needed. Arguments go to pytest: ./run_tests.sh tests/test_model.py -k gelu
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
source runtime/venv.sh

"$PYTHON" -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("pytest"))' || {
    echo "PYTHON=$PYTHON lacks pytest: run '$PYTHON -m pip install pytest', or unset PYTHON to get a .venv" >&2
    exit 2
}

# Without this DeepSpeed guesses, and takes a CUDA toolkit without a GPU for a GPU.
nvidia-smi -L 2>/dev/null | grep -q '^GPU ' || export DS_ACCELERATOR=cpu

exec "$PYTHON" -m pytest --durations=10 "$@"
