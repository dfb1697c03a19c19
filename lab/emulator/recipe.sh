#!/bin/sh
# Recipe `emulator`: a private QEMU 10 for x86, from bookworm-backports, with every library it needs.
#
#   recipe.sh OUT_DIR      fills OUT_DIR with `qemu-system-x86_64` (a wrapper) and `root/` (the unpacked packages)
#
# The packages are downloaded as if for an empty machine and only unpacked, never installed: the tree brings its own
# C library and dynamic loader, the machine's packages stay as they are, and any x86-64 Linux can run the result.
# The mirror is the one the machine's apt uses for its own release, with the suite changed. What this recipe
# deliberately does not know: how the lab uses the emulator (that is lab/ctl).
set -eu

out=${1:?usage: recipe.sh OUT_DIR}
recipe=emulator
suite=bookworm
lowest=10
mends="injection flags virtual"
. "$(dirname "$0")/../apt.sh"
. "$(dirname "$0")/qemu.sh"
