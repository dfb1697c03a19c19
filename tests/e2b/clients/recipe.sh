#!/bin/sh
# recipe.sh OUT_DIR: the clients of the tests in tests/e2b, unmodified: from PyPI in the virtual environments OUT_DIR/python and, the first
# generation, OUT_DIR/python-1, and from npm in OUT_DIR/node_modules (the first generation as `e2b-1`), with the Node that runs them as
# OUT_DIR/node. Versions are those of requirements.txt, requirements-1.txt and package-lock.json. Knows no test.
set -eu
. "$(dirname "$(readlink -f "$0")")/../../clients.sh"

python python requirements.txt
python python-1 requirements-1.txt
modules
