#!/bin/sh
# recipe.sh OUT_DIR: the clients of the tests in tests/e2b, unmodified from PyPI (OUT_DIR/python, for PYTHONPATH) and from npm
# (OUT_DIR/node_modules). Versions are those of requirements.txt and package-lock.json. Knows no test.
set -eu
here=$(dirname "$(readlink -f "$0")")
out=$1
python3 -m pip install --quiet --disable-pip-version-check --no-compile --target "$out/python" --requirement "$here/requirements.txt"
cp "$here/package.json" "$here/package-lock.json" "$out/"
npm ci --prefix "$out" --no-audit --no-fund --loglevel=error
