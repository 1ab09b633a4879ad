#!/usr/bin/env bash
# Tests of the adapters whose packages cannot share a virtual environment with the tested set, nor with each other:
# makes one for each, and runs the adapter's tests there against the real package.
set -euo pipefail
PYTHON=${PYTHON:-python3}

for package in openenv==0.10.0 verifiers==0.4.0; do
    name=${package%%=*}
    venv=.venv-$name
    if [ ! -e "$venv/.ready" ] || [ pyproject.toml -nt "$venv/.ready" ] || [ "$0" -nt "$venv/.ready" ]; then
        echo "ecosystem: installing $package into $venv"
        "$PYTHON" -m venv "$venv"
        "$venv/bin/python" -m pip --disable-pip-version-check --quiet install -e . "$package" pytest
        touch "$venv/.ready"
    fi
    "$venv/bin/python" -c "import $name"  # the tests skip without it
    "$venv/bin/python" -m pytest "tests/env/test_$name.py"
done
