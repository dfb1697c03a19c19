#!/bin/sh
# recipe.sh OUT_DIR: the image `python` (Debian's python3 with pip and venv) as an OCI image layout in OUT_DIR/oci.
# It knows its packages and its configuration; everything else is in ../lib.sh.
set -eu
. "$(dirname "$(readlink -f "$0")")/../lib.sh"

# finish ROOT: what the packages leave undone.
finish() {
    ln -sf python3 "$1/usr/bin/python"
    # pip is for the whole sandbox here: Debian's guard against mixing it with dpkg only gets in the way.
    rm -f "$1"/usr/lib/python3*/EXTERNALLY-MANAGED
    # The test suite and the IDE's icons are not needed to run or install anything.
    rm -rf "$1"/usr/lib/python3*/test "$1"/usr/lib/python3*/idlelib "$1"/usr/lib/python3*/tkinter
}

CONFIG='"Env":["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin","LANG=C.UTF-8"],'
CONFIG=$CONFIG'"Cmd":["python3"],"WorkingDir":"/"'
recipe_main "$0" python:latest "$CONFIG" 'python3 python3-pip python3-venv' -- "$@"
