#!/usr/bin/env bash
# The tests, with set-up where needed.
#
#     ./run_tests.sh                              every feature, on CPU
#     ./run_tests.sh --all                        also the drills, each launcher, several machines: as CI does
#     ./run_tests.sh --gpu                        the tests of tests/gpu instead, on one GPU or two
#     ./run_tests.sh tests/test_model.py -k gelu  other arguments go to pytest, after --all or --gpu too
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
if [[ ${1-} == --gpu ]]; then
    shift
    [[ $(nvidia-smi -L 2>/dev/null) == "GPU "* ]] || {
        echo "--gpu needs a CUDA GPU, and nvidia-smi lists none" >&2
        exit 2
    }
    export TEST_GPU=1
fi
source runtime/venv.sh

"$PYTHON" -c 'import importlib.util as u, sys; sys.exit(not (u.find_spec("pytest") and u.find_spec("xdist")))' || {
    echo "PYTHON=$PYTHON lacks pytest or pytest-xdist: run '$PYTHON -m pip install pytest pytest-xdist', or unset" \
        "PYTHON to get a .venv" >&2
    exit 2
}

# Without this DeepSpeed guesses, and takes a CUDA toolkit without a GPU for a GPU.
nvidia-smi -L 2>/dev/null | grep -q '^GPU ' || export DS_ACCELERATOR=cpu

if [[ -n ${TEST_GPU-} ]]; then
    exec "$PYTHON" -m pytest -o testpaths=tests/gpu --durations=25 "$@"
fi
workers=()
if [[ $# == 0 || $1 == --all ]]; then
    workers=(-n auto --maxprocesses=4 --dist=loadfile)
fi
exec "$PYTHON" -m pytest "${workers[@]}" --durations=10 "$@"
