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

# The tests of containers run on Podman, with runc since crun refuses control groups of two versions side by side.
missing=()
command -v podman >/dev/null || missing+=(podman)
command -v runc >/dev/null || missing+=(runc)
if ((${#missing[@]})); then
    if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ] &&
        echo "setup: installing system packages (apt-get install ${missing[*]}): the tests of containers run on them" &&
        apt-get update -qq &&
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null; then
        :
    else
        echo "setup: no ${missing[*]}; the tests of containers will be skipped (sudo apt-get install ${missing[*]})"
    fi
fi

if ! command -v bwrap >/dev/null; then
    if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ] &&
        echo "setup: installing system packages (apt-get install bubblewrap): the shell sandbox runs commands in it" &&
        apt-get update -qq &&
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends bubblewrap >/dev/null; then
        :
    else
        echo "setup: no bubblewrap; the tests of the shell sandbox will be skipped (sudo apt-get install bubblewrap)"
    fi
fi

if ! command -v chromium >/dev/null; then
    if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ] &&
        echo "setup: installing system packages (apt-get install chromium): the probe's page is tested in it" &&
        apt-get update -qq &&
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; then
        :
    else
        echo "setup: no chromium; the test of the probe's page in a browser will be skipped (sudo apt-get install chromium)"
    fi
fi

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
