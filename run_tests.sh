#!/usr/bin/env bash
# Run the tests, in .venv or in the environment of PYTHON=/path/to/python.
#     ./run_tests.sh                              every feature, on CPU
#     ./run_tests.sh --all                        also the drills, each launcher and multi-node runs, as CI does
#     ./run_tests.sh --gpu                        only tests/gpu, on one or two GPUs
#     ./run_tests.sh --volta [any of these]       with the PyTorch for V100 and P100, in .venv-volta; alone, a short set
#     ./run_tests.sh tests/test_model.py -k text  other arguments go to pytest, also after --all or --gpu
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")"

if [[ ${1-} == --volta ]]; then
    VENV_REQUIREMENTS=requirements-volta.txt
    shift
    (($#)) || set -- -k "train or resume or float16 or fp16"
fi
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)
((gpus)) || export DS_ACCELERATOR=cpu  # else DeepSpeed mistakes a CUDA toolkit for a GPU
case ${1-} in
'' | --all) set -- -n auto --maxprocesses=4 --dist=loadfile "$@" ;;
--gpu)
    ((gpus)) || { echo "--gpu: nvidia-smi shows no GPU; leave it out to test on CPU" >&2; exit 2; }
    export TEST_GPU=1
    set -- -o testpaths=tests/gpu "${@:2}"
    ;;
esac

# The tests write more than 4 GB of temporary files, and /tmp may be in memory
free_kb=$(df -Pk "${TMPDIR:-/tmp}" | awk 'NR == 2 { print $4 }')
((free_kb >= 12000000)) || export TMPDIR=/var/tmp

source runtime/venv.sh
"$PYTHON" -c "import pytest, pytest_timeout, xdist" &>/dev/null || {
    echo "the tests need pytest, pytest-timeout and pytest-xdist: run $PYTHON -m pip install -r requirements.txt" >&2
    exit 2
}
exec "$PYTHON" -m pytest --durations=10 "$@"
