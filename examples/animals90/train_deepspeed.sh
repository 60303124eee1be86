#!/usr/bin/env bash
# From a fresh clone to a trained classifier: create the environment, look at the pictures, train.
#
#     bash train_deepspeed.sh                       all GPUs
#     bash train_deepspeed.sh --fp16 --epochs 10    the options of launch_deepspeed.py
set -euo pipefail
here=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)

cd "$here/../.."
source runtime/venv.sh
cd "$here"

if [[ $* != *_dir* && $* != *-h* && ! -d data/train ]]; then
    echo "data/train does not exist: run $PYTHON prepare.py --from FOLDER --val_share 0.1 for your pictures, or $PYTHON\
 prepare.py --made_up --classes 90 --train 650 --val 139 --size 224 for generated ones" >&2
    exit 2
fi
[[ ! -d data/train ]] || echo "data/train: $(find -H data/train -mindepth 1 -maxdepth 1 -type d | wc -l) classes,\
 $(find -H data/train -type f | wc -l) files"
exec "$PYTHON" launch_deepspeed.py "$@"
