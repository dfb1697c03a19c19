#!/bin/sh
# Recipe `fast-emulator`: QEMU 10.0 for x86, compiled from Debian's source of bookworm-backports with `tlb.patch`.
#
#   recipe.sh OUT_DIR      fills OUT_DIR with `qemu-system-x86_64` (a wrapper), `bin/` and `share/` (firmware)
#
# What the patch changes, and what it brings, is in docs/lab.md. Compiled is what the lab's machine has and no more; it runs with the libraries
# of this machine. meson comes from PyPI, as bookworm's is too old.
set -eu

out=${1:?usage: recipe.sh OUT_DIR}
recipe=fast-emulator
suite=bookworm
here=$(cd "$(dirname "$0")" && pwd)
. "$here/../apt.sh"

say "packages for the build"
apt-get install -qq --yes --no-install-recommends ninja-build pkg-config libglib2.0-dev libslirp-dev python3-venv patch >/dev/null

packages_of "$out" "$suite" "$suite-backports"
echo "deb-src $signed $uri $suite-backports main" >>"$work/sources.list"
apt-get update -qq
say "downloading QEMU's source and its firmware (about 50 MB)"
(cd "$work" && apt-get source -qq --download-only --tar-only qemu >/dev/null &&
    apt-get download -qq --target-release "$suite-backports" qemu-system-data seabios)
unset APT_CONFIG
mkdir "$work/source" "$work/firmware"
tar -x -f "$work"/qemu_*.orig.tar.xz -C "$work/source" --strip-components=1
for deb in "$work"/*.deb; do
    dpkg-deb --extract "$deb" "$work/firmware"
done
mkdir "$out/bin" "$out/share"
cp "$work/firmware/usr/share/seabios/bios-256k.bin" "$work/firmware/usr/share/qemu/linuxboot_dma.bin" \
    "$work/firmware/usr/share/qemu/kvmvapic.bin" "$out/share/"

version=$(cat "$work/source/VERSION")
say "patching and configuring QEMU $version"
cd "$work/source"
patch --quiet --strip=1 <"$here/tlb.patch" || fail "the patch is not for QEMU $version"
cp "$here/devices.mak" configs/devices/x86_64-softmmu/lab.mak
# Debian's source has no firmware, and a build that installs none needs none.
sed -i 's/^    unpack_edk2_blobs = .*/    unpack_edk2_blobs = false/' meson.build
python3 -m venv "$work/python"
"$work/python/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes --requirement "$here/requirements.txt"
mkdir build
cd build
PATH="$work/python/bin:$PATH"
../configure --python="$work/python/bin/python" --target-list=x86_64-softmmu --without-default-features --without-default-devices \
    --with-devices-x86_64=lab --enable-tcg --enable-slirp --disable-install-blobs -Dfdt=disabled -Ddebug=false >configured 2>&1 || {
    tail -20 configured >&2
    fail "QEMU cannot be configured"
}
say "compiling"
ninja qemu-system-x86_64 >compiled 2>&1 || {
    tail -20 compiled >&2
    fail "QEMU does not compile"
}
strip -o "$out/bin/qemu-system-x86_64" qemu-system-x86_64
cd "$out"

cat >"$out/qemu-system-x86_64" <<'WRAPPER'
#!/bin/sh
# Runs the QEMU beside this file with its firmware. Made by lab/fast-emulator/recipe.sh.
root=$(dirname "$(readlink -f "$0")")
exec "$root/bin/qemu-system-x86_64" -L "$root/share" "$@"
WRAPPER
chmod 755 "$out/qemu-system-x86_64"

say "checking that it runs"
echo quit | timeout -k 5 30 "$out/qemu-system-x86_64" -M q35 -accel tcg -cpu EPYC-Rome,+svm,+npt,+x2apic,+vgif \
    -nodefaults -display none -serial none -monitor stdio -S >"$work/check" 2>&1 || {
    cat "$work/check" >&2
    fail "QEMU $version starts but cannot build the lab's machine"
}
echo "$version" >"$out/version"
say "QEMU $version"
