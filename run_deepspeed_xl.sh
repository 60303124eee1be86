#!/usr/bin/env bash
# usage: ./run_deepspeed_xl.sh [CONFIG.py] [--key=value ...]
#
# Fine-tunes GPT-2 XL on Shakespeare on all visible GPUs (config/xl_shakespeare.py). Without a GPU, it trains a small
# character-level model on the CPU (config/shakespeare_char_cpu.py). See docs/settings.md for --key=value.
# It creates .venv, prepares the data, trains, and prints a sample. Set PYTHON=/path/to/python to use your own
# environment, and CUDA_VISIBLE_DEVICES=0,1 to select GPUs. Ctrl-C saves a checkpoint and exits; a second Ctrl-C kills
# the run. The exit code is the run's: 2 for an error you can fix, 128 + the signal's number if stopped by a signal.

[ -n "${BASH_VERSION-}" ] || exec bash -- "$0" "$@"  # started as `sh run_deepspeed_xl.sh`
set -euo pipefail
trap '' PIPE  # if the reader of our output exits, the run continues
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")"

for argument; do
    [[ $argument == -h || $argument == --help ]] || continue
    sed -n '2,/^$/{s/^# \{0,1\}//;p;}' run_deepspeed_xl.sh || true  # the text above
    exit
done
source runtime/venv.sh
project=$PWD
# Back to where a config file is searched for first
cd - >/dev/null 2>&1 || venv_fail "the working directory was removed: go to another folder"
exec "$PYTHON" "$project/launch_deepspeed.py" --headline "$@"
