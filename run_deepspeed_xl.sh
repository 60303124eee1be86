#!/usr/bin/env bash
# The headline job, from a fresh clone to a sample: set-up, data, checks, training, text.
# With GPUs: GPT-2 XL on Shakespeare, on all that are visible. With none: a small demonstration on CPU.
set -euo pipefail
caller=$PWD
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")"

usage() {
    cat <<'EOF'
usage: ./run_deepspeed_xl.sh [CONFIG.py] [--key=value ...]

Sets up .venv (PYTHON=/path/to/python takes that one instead), prepares the data, checks everything, trains on all
visible GPUs (CUDA_VISIBLE_DEVICES=0,1 picks) and prints a sample. The configuration is config/xl_shakespeare.py, or
without a GPU config/shakespeare_char_cpu.py; CONFIG.py and --key=value are applied after it. Ctrl-C ends the run in
good order, a second one at once. Exit code: the run's; 2 for a mistake, which is explained; 129, 130, 138 or 143 when
stopped.

EOF
}

# A closed pipe or a full disk under the log costs the lines that cannot be printed, and not the run.
say() { printf '%s\n' "$*" 2>/dev/null || exec >/dev/null; }
fail() { say "run_deepspeed_xl.sh: $*" >&2; exit 2; }

# ---- Steps and signals: whatever takes time runs as a step, and nothing outlives this script --------------------

mark=XL_RUN=$$.$RANDOM  # in the environment of every process of a step
stop_code=0             # what to end with once told to stop
step=''                 # process group of the step at work
told=''                 # set when that group has had its SIGTERM: torchrun must not get a second one
scratch=$(mktemp) && echo >"$scratch" || fail "cannot write to ${TMPDIR:-/tmp}: make room there, or set TMPDIR"

# The processes that carry our mark. torchrun puts each worker in a session of its own, and a killed torchrun leaves
# its workers to init, so neither group nor parent finds them. Without /proc (macOS) we have the step's group only.
marked() { grep -Flsxz "$mark" /proc/[0-9]*/environ | cut -d/ -f3; }

pass_on() { [[ -z $step || -n $told ]] || { told=yes; kill -TERM -- "-$step" 2>/dev/null; } || true; }

kill_all() { kill -KILL ${step:+"-$step"} $(marked) 2>/dev/null || true; }

on_signal() {  # $1: what the script is to end with
    if ((stop_code && $1 == 130)); then kill_all; fi  # Ctrl-C while already stopping
    # runtime/launch.py gives the ranks 300 s to save and end, then kills them.
    if ((stop_code == 0)); then
        stop_code=$1 deadline=$((SECONDS + 315))
        say "Stopping: the processes finish their step, save and end (Ctrl-C: at once)" >&2
    fi
    pass_on
}

clean_up() {
    set +e
    rm -f "$scratch"
    for _ in {1..50}; do  # stragglers get 5 s
        [[ -n $(marked) ]] || return
        kill -TERM $(marked) 2>/dev/null
        sleep 0.1
    done
    kill_all
}

trap 'on_signal 130' INT
trap 'on_signal 143' TERM
trap 'on_signal 129' HUP
trap 'on_signal 138' USR1
trap '' PIPE  # `| tee` dies of the same Ctrl-C; we still have work to do
trap clean_up EXIT

# Run a command in the background and wait, since bash holds traps back while a foreground command runs. Job control
# gives it a process group of its own, so that the terminal's Ctrl-C reaches it through us alone, once.
run_step() {
    local code=0
    told=''
    set -m
    env "$mark" "$@" </dev/null &
    step=$!
    set +m
    ((stop_code == 0)) || pass_on  # told to stop just before
    wait "$step" || code=$?
    if ((stop_code)); then
        while kill -0 "$step" 2>/dev/null && ((SECONDS < deadline)); do sleep 0.1 || true; done
        kill -0 "$step" 2>/dev/null && kill_all
        code=0
        wait "$step" || code=$?
        if ((code > 1 && code < 128)); then stop_code=$code; fi  # 1 is any failure, 128 and up a signal's
        exit "$stop_code"
    fi
    step=''
    return "$code"
}

# ---- Set-up ------------------------------------------------------------------------------------------------------

for argument; do
    case $argument in -h | --help)
        usage || exit 0
        python=${PYTHON:-.venv/bin/python}
        command -v "$python" >/dev/null || python=python3
        "$python" train_deepspeed.py --help || true
        exit 0
    esac
done

theirs=()
for argument; do  # a config file is meant from where the user stands, else from the project's root
    [[ $argument != [!-]*.py || $argument == /* || ! -f $caller/$argument ]] || argument=$caller/$argument
    theirs+=("$argument")
done
set -- ${theirs[@]+"${theirs[@]}"}

run_step bash -c 'source runtime/venv.sh' set-up "$@"  # may take minutes
source runtime/venv.sh                                  # takes what that left

# ---- GPUs --------------------------------------------------------------------------------------------------------

[[ ${DS_ACCELERATOR-} != cpu ]] || export CUDA_VISIBLE_DEVICES=''  # asks for the demonstration
run_step "$PYTHON" -W ignore -c '
import torch
try:
    cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    reason = f"torch {torch.__version__} finds no CUDA device"
except Exception as error:  # a driver too old for this PyTorch: the devices are counted, but none can be used
    cards, reason = [], str(error).splitlines()[0]
print(len(cards))
print(", ".join(f"{c.name} {c.total_memory / 2**30:.0f} GiB" for c in cards) or reason)
' >"$scratch" || fail "PyTorch cannot be imported by $PYTHON: see above; reinstall it (rm -rf .venv for ours)"
{ read -r ranks; read -r cards; } <"$scratch"

if ((ranks)); then
    say "GPUs: $ranks ($cards)"
    ours=(config/xl_shakespeare.py)
else
    if [[ ! ${CUDA_VISIBLE_DEVICES-0} =~ ^(-1)?$ ]] && nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then
        fail "nvidia-smi lists GPUs, but $cards: update the driver or install a PyTorch built for it, check" \
            "CUDA_VISIBLE_DEVICES, or run the demonstration on CPU with DS_ACCELERATOR=cpu"
    fi
    say "No CUDA GPU: a small demonstration on CPU instead of GPT-2 XL, with 2 processes, in out-demo"
    ranks=2
    ours=(config/shakespeare_char_cpu.py --out_dir=out-demo)
    export DS_ACCELERATOR=cpu
fi
# torchrun would set 1, which starves the optimizer when it is offloaded to the CPU.
cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > ranks ? cores / ranks : 1))}

# ---- Settings, data, checks --------------------------------------------------------------------------------------

args=("${ours[@]}" ${theirs[@]+"${theirs[@]}"})  # later ones win
run_step "$PYTHON" train_deepspeed.py "${args[@]}" --print_settings >"$scratch"
{ read -r dataset; read -r out_dir; read -r init_from; read -r eval_only; read -r dry_run; read -r keep_last; } < <("$PYTHON" -c '
import json, sys
settings = json.load(sys.stdin)
names = "dataset", "out_dir", "init_from", "eval_only", "dry_run", "keep_last"
print(*(settings[name] for name in names), sep="\n")' <"$scratch")

# This folder is the demonstration's own. One that the user names is never overwritten without their word.
if [[ ${DS_ACCELERATOR-} == cpu && $out_dir == out-demo && $init_from != resume && $eval_only != True &&
    $dry_run != True ]]; then
    say "out-demo is made anew"
    args=("${ours[@]}" --overwrite=True ${theirs[@]+"${theirs[@]}"})
fi

data=data/$dataset
if [[ $dataset =~ ^[A-Za-z0-9_.-]+$ && -f $data/prepare.py ]] &&
    ! [[ -f $data/train.bin && -f $data/val.bin && -f $data/meta.json ]]; then
    say "Preparing $data"
    run_step "$PYTHON" "$data/prepare.py"
fi

run_step env WORLD_SIZE="$ranks" "$PYTHON" train_deepspeed.py "${args[@]}" --dry_run=True
[[ $dry_run != True ]] || exit 0

# ---- The run -----------------------------------------------------------------------------------------------------

# torchrun (through runtime/launch.py, for its exit code) and not deepspeed's launcher, which leaves its workers behind
# when it is stopped.
code=0
run_step "$PYTHON" -m runtime.launch --standalone --nproc_per_node="$ranks" train_deepspeed.py "${args[@]}" ||
    code=$?

if ((code == 0 && keep_last)) && [[ $eval_only != True ]]; then
    run_step "$PYTHON" sample.py --out_dir="$out_dir" --num_samples=1 --max_new_tokens=200 ||
        say "run_deepspeed_xl.sh: the training succeeded, but sampling failed (exit code $?)" >&2
fi
exit "$code"
