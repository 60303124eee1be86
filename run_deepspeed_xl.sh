#!/usr/bin/env bash
# The headline job, from a fresh clone to a sample: makes .venv, and leaves the rest to launch_deepspeed.py.
# With GPUs: GPT-2 XL on Shakespeare, on all that are visible. With none: a small demonstration on CPU.
set -euo pipefail
trap '' PIPE  # a closed pipe costs the lines that cannot be printed, and not the run
caller=$PWD
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")"

usage() {
    cat <<'END'
usage: ./run_deepspeed_xl.sh [CONFIG.py] [--key=value ...]

Sets up .venv (PYTHON=/path/to/python takes that one instead), prepares the data, checks everything, trains on all
visible GPUs (CUDA_VISIBLE_DEVICES=0,1 picks) and prints a sample. The configuration is config/xl_shakespeare.py, or
without a GPU config/shakespeare_char_cpu.py; CONFIG.py and --key=value are applied after it. Ctrl-C ends the run in
good order, a second one at once. Exit code: the run's; 2 for a mistake, which is explained; 129, 130, 138 or 143 when
stopped.

END
}

args=()
for argument; do
    case $argument in
    -h | --help)
        usage || exit 0
        python=${PYTHON:-.venv/bin/python}
        command -v "$python" >/dev/null || python=python3
        "$python" train_deepspeed.py --help || true
        exit 0
        ;;
    [!-]*.py)  # a config file: in the user's folder, else in the project's
        [[ $argument == /* || ! -f $caller/$argument ]] || argument=$caller/$argument
        ;;
    esac
    args+=("$argument")
done
set -- ${args[@]+"${args[@]}"}  # "${args[@]}" alone fails on an empty array in macOS's bash 3.2

source runtime/venv.sh
exec "$PYTHON" launch_deepspeed.py --headline "$@"
