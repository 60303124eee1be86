# Sets PYTHON to an interpreter with the packages of requirements.txt. Source this from the project's root.
# If PYTHON is set, use that. Otherwise create, repair or reuse .venv, without nvcc or a compiler (DS_BUILD_OPS=0).
# GPUs below compute capability 7.5 get requirements-volta.txt in .venv-volta. VENV_REQUIREMENTS names another file.
# VENV_TORCH=cpu or cuda chooses the build of PyTorch. See runtime/install.py.

# pyproject.toml: requires-python = ">=3.11,<3.15"
[[ $(<pyproject.toml) =~ 'requires-python = ">=3.'([0-9]+)',<3.'([0-9]+)'"' ]]
venv_first=${BASH_REMATCH[1]} venv_end=${BASH_REMATCH[2]}
venv_versions="3.$venv_first to 3.$((venv_end - 1))"
venv_fits="import sys; sys.exit(not (3, $venv_first) <= sys.version_info < (3, $venv_end))"

venv_fail() { echo "setup: $1" >&2 || true; exit 2; }

venv_requirements() {
    { nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null || true; } |
        awk '/^[0-9.]+$/ && $1 < 7.5 { volta = "-volta" } END { print "requirements" volta ".txt" }'
}

# The first Python of these versions that can create a virtual environment. Debian packages ensurepip separately.
venv_find_base() {
    local minor name names=(python3)
    for ((minor = venv_end - 1; minor >= venv_first; minor--)); do
        names+=("python3.$minor")
    done
    for name in "${names[@]}"; do
        "$name" -I -c "import ensurepip, venv; $venv_fits" 2>/dev/null && { echo "$name"; return; }
    done
    for name in "${names[@]}"; do
        "$name" -I -c "$venv_fits" 2>/dev/null || continue
        venv_fail "$("$name" -V) is here, but can't create a virtual environment: apt install $name-venv, or install uv\
 ($venv_uv); then run this again"
    done
    venv_fail "found no Python $venv_versions$(python3 -V 2>/dev/null | sed 's/^/, only /'): install uv, which brings one\
 ($venv_uv), and run this again; or conda create -n gpt2 python=3.12, conda activate gpt2, and run this again; or set\
 PYTHON to one with requirements.txt installed"
}
venv_uv="curl -LsSf https://astral.sh/uv/install.sh | sh"

# Creates $venv, empty. uv takes any Python of these versions, or fetches one.
venv_create() {
    local base
    mkdir -p "$venv" && find -H "$venv" -mindepth 1 -delete ||
        venv_fail "could not empty $venv: is it yours, and is the disk writable?"
    if command -v uv >/dev/null; then
        uv venv --quiet --no-project --python ">=3.$venv_first,<3.$venv_end" "$venv" && return
        echo "setup: uv could not create $venv: see above; now with python3" >&2
    fi
    base=$(venv_find_base) || exit 2
    "$base" -m venv --clear "$venv" || venv_fail "$base could not create $venv: see above; is the disk full (df -h .)?"
}

# Whether there is an environment to install into, whole or not. -I: not with a module named pip of this folder.
venv_exists() {
    "$venv/bin/python" -I -c "$venv_fits" 2>/dev/null || return
    command -v uv >/dev/null || "$venv/bin/python" -I -m pip --version >/dev/null 2>&1
}

# What .venv/ready must contain. It is written last, so an interrupted setup has none. A PyTorch without CUDA is noted
# there; it isn't what a machine with a GPU needs.
venv_stamp() { echo "$(cksum <"$requirements") $("$venv/bin/python" -V 2>&1)"; }
venv_is_ready() {
    [[ -f $venv/ready ]] || return
    local ready stamp
    ready=$(<"$venv/ready")
    stamp=$(venv_stamp)
    [[ $ready == "$stamp" ]] && return
    [[ $ready == "$stamp cpu" && ${VENV_TORCH-} != cuda ]] && ! nvidia-smi -L 2>/dev/null | grep -q '^GPU '
}

venv_install() {
    local code=0
    # One setup at a time. pip inherits descriptor 9, so the lock lasts until all processes of the setup have exited.
    # Some systems have no flock (macOS), some file systems no locks (Lustre).
    flock -n 9 2>/dev/null || code=$?
    ((code != 1)) || { echo "setup: another setup is running here; waiting for it" >&2; flock 9; }
    venv_is_ready && return  # the other setup has finished

    venv_exists || venv_create
    rm -f "$venv/ready"
    "$venv/bin/python" -I runtime/install.py "$requirements" "$(venv_stamp)"
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
