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
suite=bookworm
kernel=linux-headers-cloud-amd64

say() { printf '%s\n' "$*"; }
fail() { printf 'headers recipe: %s\n' "$*" >&2; exit 1; }

[ "$(uname -m)" = x86_64 ] || fail "needs an x86-64 machine, this is $(uname -m)"
command -v apt-get >/dev/null || fail "apt-get is missing; kernel headers come as Debian packages"

rm -rf "$out"
mkdir -p "$out"
out=$(cd "$out" && pwd)
work=$out/.work
mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# The mirror: every configured source, whatever the file's format, as apt itself understood it.
mirror() {
    apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(CODENAME) $(COMPONENT)' 'Created-By: Packages' |
        awk -v own="$1" '($2 == own || $3 == own) && $4 == "main" { print $1; exit }'
}
own=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
uri=$(mirror "$own")
if [ -z "$uri" ]; then
    say "package lists are missing: apt-get update"
    apt-get update -qq
    uri=$(mirror "$own")
fi
[ -n "$uri" ] || fail "no apt source for the component main of '$own' is configured on this machine"

keyring=/usr/share/keyrings/debian-archive-keyring.gpg
signed=
[ ! -e "$keyring" ] || signed="[signed-by=$keyring]"
echo "deb $signed $uri $suite-backports main" >"$work/sources.list"
: >"$work/status"
cat >"$work/apt.conf" <<CONF
Dir::Etc::sourcelist "$work/sources.list";
Dir::Etc::sourceparts "/dev/null";
Dir::Etc::preferencesparts "/dev/null";
Dir::State::Lists "$work/lists";
Dir::State::status "$work/status";
Dir::Cache "$work/cache";
APT::Sandbox::User "root";
Acquire::IndexTargets::deb::DEP-11::DefaultEnabled "false";
Acquire::Languages "none";
Acquire::Retries "3";
CONF
export APT_CONFIG="$work/apt.conf"

say "package lists of $suite-backports"
apt-get update -qq
needs() { apt-cache depends --no-recommends --no-suggests "$1" | sed -n "s/^  Depends: \($2.*\)/\1/p"; }
headers=$(needs "$kernel" linux-headers-)
[ -n "$headers" ] || fail "$kernel of $suite-backports depends on no headers"
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
