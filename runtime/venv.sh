# Sets PYTHON to an interpreter with the packages of requirements.txt. Source this from the project's root.
# If PYTHON is set, use that. Otherwise create, repair or reuse .venv, without nvcc or a compiler (DS_BUILD_OPS=0).
# GPUs below compute capability 7.5 get requirements-volta.txt in .venv-volta. VENV_REQUIREMENTS names another file.

# pyproject.toml: requires-python = ">=3.11,<3.15"
[[ $(<pyproject.toml) =~ 'requires-python = ">=3.'([0-9]+)',<3.'([0-9]+)'"' ]]
venv_first=${BASH_REMATCH[1]} venv_end=${BASH_REMATCH[2]}

venv_fail() { echo "setup: $1" >&2 || true; exit 2; }

venv_requirements() {
    { nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null || true; } |
        awk '/^[0-9.]+$/ && $1 < 7.5 { volta = "-volta" } END { print "requirements" volta ".txt" }'
}

# The first Python of pyproject.toml's versions that can create a virtual environment. Debian packages ensurepip
# separately.
venv_find_base() {
    local minor names=(python3)
    for ((minor = venv_end - 1; minor >= venv_first; minor--)); do
        names+=("python3.$minor")
    done
    local name
    for name in "${names[@]}"; do
        "$name" -I -c "import ensurepip, sys, venv; sys.exit(not (3, $venv_first) <= sys.version_info < (3, $venv_end))" \
            2>/dev/null && { echo "$name"; return; }
    done
    venv_fail "found no Python 3.$venv_first to 3.$((venv_end - 1)) that can create a virtual environment: install one (conda create -n py312\
 python=3.12) or its venv package (apt install python3-venv), or set PYTHON to one with requirements.txt installed"
}

# What .venv/ready must contain. It is written last, so an interrupted setup has none.
venv_stamp() { echo "$(cksum <"$requirements") $("$venv/bin/python" -V 2>&1)"; }
venv_is_ready() { [[ -f $venv/ready && $(<"$venv/ready") == "$(venv_stamp)" ]]; }

venv_install() {
    local base info code=0 log=$venv/pip.log
    base=$(venv_find_base) || exit 2
    # One setup at a time. pip inherits descriptor 9, so the lock lasts until all processes of the setup have exited.
    # Some systems have no flock (macOS), some file systems no locks (Lustre).
    flock -n 9 2>/dev/null || code=$?
    ((code != 1)) || { echo "setup: another setup is running here; waiting for it" >&2; flock 9; }
    venv_is_ready && return  # the other setup has finished

    echo "setup: installing $requirements into $venv (once; about 3 GB to download for PyTorch with CUDA)" || true
    # -I: not with a module named pip of this folder
    "$venv/bin/python" -I -m pip --version >/dev/null 2>&1 || "$base" -m venv --clear "$venv" ||
        venv_fail "$base could not create $venv: see above; is the disk full (df -h .)?"
    rm -f "$venv/ready"
    # If pip was killed while installing a package, it would consider it installed. INSTALLER is written last.
    for info in "$venv"/lib/python*/site-packages/*.dist-info; do
        [[ -e $info/INSTALLER ]] || rm -rf "$info"
    done
    if ! DS_BUILD_OPS=0 PIP_USER=0 "$venv/bin/python" -I -m pip install --quiet --no-input --disable-pip-version-check \
            -r "$requirements" >"$log" 2>&1; then
        { grep '^ERROR' "$log" || tail -n 5 "$log"; } >&2
        venv_fail "pip failed (log: $log): for a full disk, free 10 GB here and in ${TMPDIR:-/tmp}; without a package\
 index, set PIP_INDEX_URL to a mirror; then run this again, or start over with rm -rf $venv"
    fi
    venv_stamp >"$venv/ready"
}

if [[ -n ${PYTHON-} ]]; then
    [[ $PYTHON != */* || $PYTHON == /* ]] || PYTHON=$OLDPWD/$PYTHON  # relative to the user's folder
    "$PYTHON" -I -c "import sys; sys.exit(sys.version_info < (3, $venv_first))" ||
        venv_fail "PYTHON=$PYTHON is not Python 3.$venv_first or newer: change it, or unset it to create .venv"
else
    requirements=${VENV_REQUIREMENTS:-$(venv_requirements)}
    [[ -f $requirements && $requirements =~ ^requirements(.*)\.txt$ ]] ||
        venv_fail "VENV_REQUIREMENTS=$requirements doesn't exist: set it to requirements-volta.txt, or unset it"
    venv=.venv${BASH_REMATCH[1]}
    venv_is_ready || (venv_install) 9>>"$venv.lock" </dev/null || exit 2
    PYTHON=$PWD/$venv/bin/python
fi
