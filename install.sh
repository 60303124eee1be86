#!/usr/bin/env bash
# usage: ./install.sh
#
# Installs the environment of requirements.txt into .venv, or repairs it, and does nothing else. Then run
# `source .venv/bin/activate`. docs/install.md has mirrors, uv, login nodes, and what to do if it fails.

[ -n "${BASH_VERSION-}" ] || exec bash -- "$0" "$@"  # started as `sh install.sh`
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")"

case ${1-} in
'') ;;
-h | --help)
    sed -n '2,/^$/{s/^# \{0,1\}//;p;}' install.sh || true  # the text above
    exit
    ;;
*)
    echo "install.sh takes no argument: run ./install.sh" >&2
    exit 2
    ;;
esac
source runtime/venv.sh
if [[ -f ${PYTHON%/*}/activate ]]; then
    echo "setup: ready: source ${PYTHON%/*}/activate"
else
    echo "setup: ready: $PYTHON"
fi
