#!/usr/bin/env bash
# usage: ./run_deepspeed_xl.sh [CONFIG.py] [--key=value ...]
#
# Fine-tunes GPT-2 XL on Shakespeare on all visible GPUs (config/xl_shakespeare.py). Without a GPU, it trains a small
# character-level model on the CPU (config/shakespeare_char_cpu.py). See docs/settings.md for --key=value.
#
# It creates .venv, prepares the data, trains, and prints a sample. Set PYTHON=/path/to/python to use your own
# environment, and CUDA_VISIBLE_DEVICES=0,1 to select GPUs. Ctrl-C saves a checkpoint and exits; a second Ctrl-C kills
# the run. The exit code is the run's: 2 for an error you can fix, 128 + the signal's number if stopped by a signal.

set -euo pipefail
trap '' PIPE  # if the reader of our output exits, the run continues
caller=$PWD
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")"

args=()
for argument; do
    case $argument in
    -h | --help)
        sed -n '2,/^$/{s/^# \{0,1\}//;p;}' run_deepspeed_xl.sh || true  # the text above
        exit
        ;;
    [!-]*.py)  # a config file: in the current folder, else in the project's
        [[ $argument == /* || ! -f $caller/$argument ]] || argument=$caller/$argument
        ;;
    esac
    args+=("$argument")
done
set -- ${args[@]+"${args[@]}"}  # "${args[@]}" alone fails on an empty array in macOS's bash 3.2

source runtime/venv.sh
exec "$PYTHON" launch_deepspeed.py --headline "$@"
