#!/bin/sh
# recipe.sh OUT_DIR: the image `node` (Debian's nodejs) as an OCI image layout in OUT_DIR/oci. Debian's npm is left out:
# it depends on some 400 packages, several times the size of the rest.
# It knows its packages and its configuration; everything else is in ../lib.sh.
set -eu
. "$(dirname "$(readlink -f "$0")")/../lib.sh"

# finish ROOT: nothing is left undone by the packages.
finish() { :; }

CONFIG='"Env":["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],'
CONFIG=$CONFIG'"Cmd":["node"],"WorkingDir":"/"'
recipe_main "$0" node:latest "$CONFIG" nodejs -- "$@"
