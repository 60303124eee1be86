#!/usr/bin/env bash
# The tests, with set-up where needed.
#
#     ./run_tests.sh                              every feature, on CPU
#     ./run_tests.sh --all                        also the drills, each launcher, several machines: as CI does
#     ./run_tests.sh --gpu                        the tests of tests/gpu instead, on one GPU or two
#     ./run_tests.sh tests/test_model.py -k gelu  other arguments go to pytest, after --all or --gpu too
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")"

pytest=(--durations=10)
needed=(pytest)
case ${1-} in
'' | --all)
    pytest+=(-n auto --maxprocesses=4 --dist=loadfile "$@")
    needed+=(xdist)
    ;;
--gpu)
    [[ $(nvidia-smi -L 2>/dev/null) == "GPU "* ]] || {
        echo "--gpu needs a CUDA GPU, and nvidia-smi lists none" >&2
        exit 2
    }
    export TEST_GPU=1
    pytest+=(-o testpaths=tests/gpu "${@:2}")
    ;;
*) pytest+=("$@") ;;
esac

source runtime/venv.sh
for module in "${needed[@]}"; do
    "$PYTHON" -c "import importlib.util, sys; sys.exit(not importlib.util.find_spec('$module'))" || {
        echo "PYTHON=$PYTHON has no $module: run '$PYTHON -m pip install -r requirements.txt', or unset PYTHON to get" \
            "a .venv" >&2
        exit 2
    }
done

# Without this DeepSpeed guesses, and takes a CUDA toolkit without a GPU for a GPU.
nvidia-smi -L 2>/dev/null | grep -q '^GPU ' || export DS_ACCELERATOR=cpu

exec "$PYTHON" -m pytest "${pytest[@]}"
