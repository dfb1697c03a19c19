#!/bin/sh
# Recipe `headers`: what modules for a newer kernel than the lab's are built with, from bookworm-backports.
#
#   recipe.sh OUT_DIR      fills OUT_DIR with
#       kernel-version     which kernel, as its `uname -r` says it
#       headers            usr/src/linux-headers-VERSION, with what that refers to
#
# The mirror is the one that the machine's own apt uses. Nothing is installed.
set -eu

out=${1:?usage: recipe.sh OUT_DIR}
suite=bookworm-backports
kernel=linux-headers-cloud-amd64
recipe=headers
. "$(dirname "$0")/../apt.sh"

packages_of "$out" "$suite"
needs() { apt-cache depends --no-recommends --no-suggests "$1" | sed -n "s/^  Depends: \($2.*\)/\1/p"; }
headers=$(needs "$kernel" linux-headers-)
[ -n "$headers" ] || fail "$kernel of $suite depends on no headers"
say "downloading $headers"
# shellcheck disable=SC2046
(cd "$work" && apt-get download -qq "$headers" $(needs "$headers" linux-headers-) $(needs "$headers" linux-kbuild-))
unset APT_CONFIG
for package in "$work"/*.deb; do
    dpkg-deb --extract "$package" "$out/headers"
done
rm -rf "$out/headers/usr/share"

version=${headers#linux-headers-}
makefile=$out/headers/usr/src/$headers/Makefile
[ -e "$makefile" ] || fail "$headers has no Makefile"
# The package names the other's directory from the root of the machine that it would be installed on.
sed -i 's#^include /usr/src/#include $(dir $(lastword $(MAKEFILE_LIST)))../#' "$makefile"
echo "$version" >"$out/kernel-version"
say "headers of $version, $(du -sm "$out/headers" | cut -f1) MB"
