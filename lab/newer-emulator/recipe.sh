#!/bin/sh
# Recipe `newer-emulator`: a private QEMU 11 for x86, from trixie-backports, for the lab whose host has a newer kernel.
#
#   recipe.sh OUT_DIR      fills OUT_DIR with what lab/emulator/recipe.sh does
#
# Its AMD IOMMU remaps DMA, and the virtual functions of its `igb` have registers: those of QEMU 10.0 have none (a guest's driver says
# "PF still in reset state").
set -eu

out=${1:?usage: recipe.sh OUT_DIR}
recipe=newer-emulator
suite=trixie
lowest=11
mends="injection flags"
. "$(dirname "$0")/../apt.sh"
. "$(dirname "$0")/../emulator/qemu.sh"
