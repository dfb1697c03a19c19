#!/bin/sh
# Recipe `bochs`: a private Bochs, which emulates an Intel processor with VMX, EPT and VMFUNC, with every library it needs.
#
#   recipe.sh OUT_DIR      fills OUT_DIR with `bochs` (a wrapper), what that needs beside itself, and `vgabios`, without which Bochs runs no machine
#
# The packages are downloaded as if for an empty machine and only unpacked, never installed. What this recipe deliberately does not
# know: which machine is emulated (xtask/src/steps/vmfunc.rs) and what runs on it (lab/vmfunc).
set -eu

out=${1:?usage: recipe.sh OUT_DIR}
recipe=bochs
. "$(dirname "$0")/../../apt.sh"

packages_of "$out" bookworm
say "downloading Bochs and its libraries"
# bochs-term only because the others of its kind, of which it wants one, are larger.
apt-get install -qq --yes --download-only --no-install-recommends bochs bochs-term bochsbios vgabios >/dev/null
unset APT_CONFIG

set -- "$work"/cache/archives/*.deb
[ -e "$1" ] || fail "apt downloaded no package"
say "unpacking $# packages"
root=$work/root
mkdir "$root"
for deb in "$@"; do
    dpkg-deb --extract "$deb" "$root"
done
# Most of these packages are for windows and sound, which a machine here has not: what stays is the program, what of it can be loaded, but for
# other screens than the one over the network, and the libraries that these are linked with.
lib=x86_64-linux-gnu
mkdir "$out/plugins" "$out/lib"
cp "$root/usr/bin/bochs-bin" "$out/"
cp "$root/usr/share/vgabios/vgabios.bin" "$out/vgabios"
cp -a "$root/usr/lib/$lib/bochs/plugins/." "$out/plugins/"
for screen in "$out"/plugins/libbx_*_gui.so* "$out"/plugins/libbx_wx.so*; do
    case ${screen##*/} in
    libbx_rfb_gui.so*) ;;
    *) rm -f "$screen" ;;
    esac
done
loader=$root/lib/$lib/ld-linux-x86-64.so.2
for program in "$out/bochs-bin" "$out"/plugins/*.so; do
    "$loader" --library-path "$root/lib/$lib:$root/usr/lib/$lib" --list "$program"
done | sed -n 's/.* => \(\/[^ ]*\) .*/\1/p' | sort -u >"$work/libraries"
while read -r library; do
    cp -L "$library" "$out/lib/"
done <"$work/libraries"
cp -L "$loader" "$out/lib/"

cat >"$out/bochs" <<'WRAPPER'
#!/bin/sh
# Runs the private Bochs beside this file with its own loader and libraries. Made by lab/vmfunc/bochs/recipe.sh.
here=$(dirname "$(readlink -f "$0")")
export LTDL_LIBRARY_PATH="$here/plugins" BXSHARE="$here"
exec "$here/lib/ld-linux-x86-64.so.2" --library-path "$here/lib" "$here/bochs-bin" "$@"
WRAPPER
chmod 755 "$out/bochs"

say "checking that it runs"
# Its help leaves with an error; what counts is what it prints.
"$out/bochs" --help cpu >"$work/check" 2>&1 || true
grep -q corei7_skylake_x "$work/check" || fail "this Bochs has no processor model corei7_skylake_x: $(tail -n 5 "$work/check")"
say "Bochs $("$out/bochs" --help 2>&1 | sed -n 's/.*Bochs x86 Emulator \([0-9.]*\).*/\1/p' | head -n 1)"
