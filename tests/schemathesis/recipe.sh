#!/bin/sh
# recipe.sh OUT_DIR: Schemathesis from PyPI in the virtual environment OUT_DIR/python. The version is that of requirements.txt. Knows no API.
set -eu
here=$(dirname "$(readlink -f "$0")")
out=$1

fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

python3 -m venv "$out/python" || fail "python3 makes no virtual environment; install python3-venv"
"$out/python/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile --requirement "$here/requirements.txt"
