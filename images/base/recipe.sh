#!/bin/sh
# recipe.sh OUT_DIR: the image `base` (a shell, Python, git and curl, for a user called `user` who may become root) as an OCI image
# layout in OUT_DIR/oci. It knows its packages, that user and its configuration; everything else is in ../lib.sh.
set -eu
. "$(dirname "$(readlink -f "$0")")/../lib.sh"

# finish ROOT: what the packages leave undone.
finish() {
    ln -sf python3 "$1/usr/bin/python"
    # pip is for the whole sandbox here: Debian's guard against mixing it with dpkg only gets in the way.
    rm -f "$1"/usr/lib/python3*/EXTERNALLY-MANAGED
    # The test suite and the IDE's icons are not needed to run or install anything.
    rm -rf "$1"/usr/lib/python3*/test "$1"/usr/lib/python3*/idlelib "$1"/usr/lib/python3*/tkinter
    chroot "$1" useradd --create-home --uid 1000 --user-group --groups sudo --shell /bin/bash user
    # The virtual machine is the wall: who it is for has all of it.
    printf 'user ALL=(ALL:ALL) NOPASSWD: ALL\n' >"$1/etc/sudoers.d/user"
    chmod 0440 "$1/etc/sudoers.d/user"
}

CONFIG='"Env":["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin","LANG=C.UTF-8"],'
CONFIG=$CONFIG'"Cmd":["bash"],"User":"user","WorkingDir":"/home/user"'
recipe_main "$0" base:latest "$CONFIG" \
    'bash ca-certificates curl git iproute2 mount procps python3 python3-pip python3-venv sudo' -- "$@"
