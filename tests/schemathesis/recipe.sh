#!/bin/sh
# recipe.sh OUT_DIR: Schemathesis from PyPI in the virtual environment OUT_DIR/python. Versions are those of requirements.txt. Knows no API.
set -eu
. "$(dirname "$(readlink -f "$0")")/../clients.sh"

python python requirements.txt
