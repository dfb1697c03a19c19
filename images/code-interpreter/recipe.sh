#!/bin/sh
# recipe.sh OUT_DIR: the image `code-interpreter` (what `base` has, Jupyter's kernels for Python and bash, and the server in
# basalt_interpreter/ that clients of E2B's code interpreter talk to) as an OCI image layout in OUT_DIR/oci. Debian has none of the
# libraries without a development environment and SciPy, 500 MB of them: they are PyPI's wheels, by requirements.txt.
# It knows its packages, its user and its configuration; everything else is in ../lib.sh.
set -eu
here=$(dirname "$(readlink -f "$0")")
. "$here/../lib.sh"

# wheels DIR: what requirements.txt says, by this machine's pip and its configuration; for the image's Python, not this machine's.
wheels() {
    need python3-pip pip3
    for glibc in 2_28 2_27 2_26 2_24 2_17 2_12 2_5; do
        set -- "$@" --platform "manylinux_${glibc}_x86_64"
    done
    directory=$1; shift
    pip3 download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --require-hashes --dest "$directory" \
        --implementation cp --python-version 3.11 --abi cp311 --abi abi3 --abi none --platform manylinux2014_x86_64 \
        "$@" --requirement "$here/requirements.txt"
}

# finish ROOT: what the packages leave undone. Called by base_hook, which sets $epoch.
finish() {
    ln -sf python3 "$1/usr/bin/python"
    # pip is for the whole sandbox here: Debian's guard against mixing it with dpkg only gets in the way.
    rm -f "$1"/usr/lib/python3*/EXTERNALLY-MANAGED
    # The test suite and the IDE's icons are not needed to run or install anything.
    rm -rf "$1"/usr/lib/python3*/test "$1"/usr/lib/python3*/idlelib "$1"/usr/lib/python3*/tkinter
    libraries "$1"
    printf '#!/bin/sh\nexec /usr/bin/python3 -m basalt_interpreter "$@"\n' >"$1/usr/local/bin/code-interpreter"
    chmod 755 "$1/usr/local/bin/code-interpreter"

    chroot "$1" useradd --create-home --uid 1000 --user-group --groups sudo --shell /bin/bash user
    # The virtual machine is the wall: who it is for has all of it.
    printf 'user ALL=(ALL:ALL) NOPASSWD: ALL\n' >"$1/etc/sudoers.d/user"
    chmod 0440 "$1/etc/sudoers.d/user"
    # Python looks for what its user installs only where there was a directory when it started.
    chroot "$1" install -d -o user -g user /home/user/.local /home/user/.local/bin /home/user/.local/lib \
        /home/user/.local/lib/python3.11 /home/user/.local/lib/python3.11/site-packages
}

# libraries ROOT: the wheels and the server, for the image's Python.
libraries() {
    wheels "$1/wheels"
    chroot "$1" python3 -m pip install --quiet --root-user-action=ignore --no-cache-dir --no-compile --no-deps --no-index \
        --find-links /wheels --require-hashes --requirement /dev/stdin <"$here/requirements.txt"
    rm -r "$1/wheels"
    to=$1/usr/local/lib/python3.11/dist-packages
    cp -R "$here/basalt_interpreter" "$to/"
    # Their test suites are a quarter of it all.
    rm -rf "$to/pandas/tests" "$to"/numpy/tests "$to"/numpy/*/tests "$to"/numpy/_core/tests "$to"/matplotlib/tests \
        "$to"/mpl_toolkits/*/tests "$to"/psutil/tests "$to"/tornado/test "$to"/zmq/tests "$to"/ipykernel/tests \
        "$to/basalt_interpreter/__pycache__"
    # Compiled files name the time of their source, which must be the one that it has in the image.
    find "$1/usr/local/lib/python3.11" -newermt "@$epoch" -exec touch -h -d "@$epoch" {} +
    chroot "$1" env PYTHONHASHSEED=0 python3 -m compileall -q /usr/local/lib/python3.11/dist-packages
    # Wheels do not say which of Debian's libraries they need. What importing leaves behind is no part of the image.
    chroot "$1" env MPLCONFIGDIR=/tmp/matplotlib python3 -B -c \
        'import basalt_interpreter.__main__, bash_kernel, e2b_charts, ipykernel, openpyxl, pandas, requests'
}

CONFIG='"Env":["PATH=/home/user/.local/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin","LANG=C.UTF-8"],'
CONFIG=$CONFIG'"Cmd":["code-interpreter"],"User":"user","WorkingDir":"/home/user"'
recipe_main "$0" code-interpreter:latest "$CONFIG" \
    'bash ca-certificates curl git libstdc++6 procps python3 python3-pip python3-venv sudo' -- "$@"
