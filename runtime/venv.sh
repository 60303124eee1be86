# Sets PYTHON to an interpreter that has the packages of requirements.txt. To be sourced from the project's root.
#
# A PYTHON that the user set is taken as it is, after a quick look at what it holds. Otherwise it is .venv's, which
# is made, repaired or reused. Needs no compiler, nvcc or CUDA_HOME: DS_BUILD_OPS=0 keeps DeepSpeed from building.

venv_fail() { echo "set-up: $1" >&2 || true; exit 2; }

# A signal ends the set-up with all its processes. bash holds traps back while a foreground command runs, so what takes
# long runs in the background, in a process group of its own.
venv_group=''
venv_stop() { kill -TERM -- ${venv_group:+"-$venv_group"} 2>/dev/null || true; wait; exit "$1"; }
for venv_signal in INT:130 TERM:143 HUP:129 USR1:138; do
    trap "venv_stop ${venv_signal#*:}" "${venv_signal%:*}"
done

# find_spec, because importing torch and deepspeed takes many seconds. Old Pythons must be able to read this.
venv_check_users_python() {
    "$PYTHON" -c '
import sys
if sys.version_info < (3, 11):
    sys.exit("is Python %d.%d: set it to 3.11 or newer" % sys.version_info[:2])
from importlib.util import find_spec
needed = "torch", "deepspeed", "numpy", "tiktoken", "transformers", "safetensors"
missing = [name for name in needed if not find_spec(name)]
if missing:
    sys.exit("has no %s: run %r -m pip install -r requirements.txt" % (", ".join(missing), sys.executable))' 2>&1
}

# The first Python 3.11 or 3.12 that can make a virtual environment (Debian splits ensurepip off).
venv_find_base() {
    local candidate
    for candidate in python3 python3.12 python3.11; do
        "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' \
            2>/dev/null && { echo "$candidate"; return; }
    done
    venv_fail "no Python 3.11 or 3.12 found that can make a virtual environment: install one (conda create -n py312\
 python=3.12) or its venv package (apt install python3-venv), or set PYTHON to one that has requirements.txt installed"
}

# What .venv/ready must hold. The file is written last, so a set-up that was cut short has none.
venv_stamp() { echo "$(cksum <requirements.txt) $(.venv/bin/python -V 2>&1)"; }
venv_is_ready() { [[ -f .venv/ready && $(<.venv/ready) == "$(venv_stamp)" ]]; }

# One set-up at a time: flock on descriptor 9, which pip inherits. So the lock falls when the last of the set-up's
# processes is gone, however they end. File systems without locks (some Lustre) go without.
venv_lock() {
    "$1" -c '
import fcntl, sys
try:
    fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("set-up: another set-up is running here; waiting for it", file=sys.stderr)
    fcntl.flock(9, fcntl.LOCK_EX)
except OSError:
    pass'
}

venv_install() {
    local base info log=.venv/pip.log
    base=$(venv_find_base) || exit 2
    venv_lock "$base" || exit 2
    venv_is_ready && return  # the other set-up has done it

    echo "set-up: installing requirements.txt into .venv (once; PyTorch with CUDA is some 3 GB to download)" || true
    .venv/bin/python -m pip --version >/dev/null 2>&1 || "$base" -m venv --clear .venv ||
        venv_fail "$base could not make .venv: see above; is the disk full (df -h .)?"
    rm -f .venv/ready
    # pip takes a package that it was killed in the middle of for installed. INSTALLER comes after its last file.
    for info in .venv/lib/python*/site-packages/*.dist-info; do
        [[ -e $info/INSTALLER ]] || rm -rf "$info"
    done
    if ! DS_BUILD_OPS=0 PIP_USER=0 .venv/bin/python -m pip install --quiet --no-input --disable-pip-version-check \
            -r requirements.txt >"$log" 2>&1; then
        { grep '^ERROR' "$log" || tail -n 5 "$log"; } >&2
        case $(<"$log") in
            *"No space left"*) venv_fail "the disk is full: free 10 GB here and in ${TMPDIR:-/tmp}, then run again" ;;
            *"No matching distribution"* | *"Could not fetch"* | *[Cc]onnection*) venv_fail "pip found no package index\
 with these versions: set PIP_INDEX_URL to a mirror that you reach, then run again" ;;
            *) venv_fail "pip failed (all it said: $log): fix that and run again, or start anew with rm -rf .venv" ;;
        esac
    fi
    venv_stamp >.venv/ready || venv_fail "cannot write .venv/ready: is the disk full (df -h .)?"
}

if [[ -n ${PYTHON-} ]]; then
    [[ $PYTHON != */* || $PYTHON == /* ]] || PYTHON=$OLDPWD/$PYTHON  # a path is meant from where the user stands
    command -v "$PYTHON" >/dev/null || venv_fail "PYTHON=$PYTHON is not there: correct it, or unset it to get a .venv"
    venv_problem=$(venv_check_users_python) || venv_fail "PYTHON=$PYTHON ${venv_problem##*$'\n'}, or\
 unset PYTHON to get a .venv"
else
    if ! venv_is_ready; then
        [[ -w . ]] || venv_fail "cannot write to $PWD: make it writable, or set PYTHON"
        set -m
        (venv_install) 9>>.venv.lock </dev/null &
        venv_group=$!
        set +m
        wait "$venv_group" || exit 2
    fi
    PYTHON=$PWD/.venv/bin/python
fi
trap - INT TERM HUP USR1
