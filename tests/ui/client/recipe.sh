#!/bin/sh
# recipe.sh OUT_DIR: what drives the browser of the tests in tests/ui, from npm: OUT_DIR/node_modules, with the Node that runs it as
# OUT_DIR/node, from PyPI. Versions are those of package-lock.json and requirements.txt. Knows no test, and brings no browser: Debian's is
# used.
set -eu
. "$(dirname "$(readlink -f "$0")")/../../clients.sh"

python python requirements.txt
modules
