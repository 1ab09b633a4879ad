#!/usr/bin/env bash
# Makes the virtual environment and installs the tested set of packages. Says what it does; needs only Python and make,
# and a C++ compiler for one dependency of ALFWorld, which it installs where it may.
set -euo pipefail
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}

"$PYTHON" - <<'PY' || { echo "setup: Python 3.11 or newer is needed; name it with PYTHON=..." >&2; exit 1; }
import sys
sys.exit(sys.version_info < (3, 11))
PY

missing=()
command -v g++ >/dev/null || missing+=(g++)
command -v make >/dev/null || missing+=(make)
command -v cmake >/dev/null || missing+=(cmake)
if ((${#missing[@]})); then
    if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
        echo "setup: installing system packages (apt-get install ${missing[*]}): the planner inside ALFWorld is compiled"
        apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}" >/dev/null
    else
        echo "setup: ${missing[*]} not found. Install with: sudo apt-get install ${missing[*]}" >&2
        exit 1
    fi
fi

# optional WHY PACKAGE:PROGRAM...: installs system packages where it may, and says what their absence means where not.
optional() {
    local why=$1 missing=() pair
    shift
    for pair in "$@"; do
        command -v "${pair#*:}" >/dev/null || missing+=("${pair%:*}")
    done
    ((${#missing[@]})) || return 0
    if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ] &&
        echo "setup: installing system packages (apt-get install ${missing[*]}): for the tests of $why" &&
        apt-get update -qq &&
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null; then
        return 0
    fi
    echo "setup: no ${missing[*]}; the tests of $why will be skipped (sudo apt-get install ${missing[*]})"
}
# runc, since crun refuses control groups of two versions side by side.
optional "containers" podman:podman runc:runc
optional "the shell sandbox, which runs commands in it" bubblewrap:bwrap
optional "the probe's page in a browser" chromium:chromium

if [ ! -x "$VENV/bin/python" ]; then
    echo "setup: creating $VENV"
    "$PYTHON" -m venv "$VENV" || {
        echo "setup: python3-venv is missing. Install with: sudo apt-get install python3-venv" >&2
        exit 1
    }
fi
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }
echo "setup: installing the tested packages from constraints.txt (a few minutes the first time)"
# torch first and pinned: an open range would take a CUDA build of several GB on some indexes.
pip install -c constraints.txt torch
pip install -c constraints.txt -e '.[train,lora,gguf,grammar,alfworld,gym,minigrid,bfcl,webshop,scienceworld,textworld-express,container,dev]'
# Its many requirements (numpy 1.26, vLLM clients, ...) are not needed for the simulators.
pip install --no-deps bfcl-eval==2026.3.23
echo "setup: done"
