#!/bin/sh
# Recipe `lab-host`: the Debian system that runs inside the lab's emulated machine.
#
#   recipe.sh OUT_DIR      fills OUT_DIR with
#       vmlinuz            Debian's cloud kernel
#       base.cpio          first part of the initramfs: the modules that are needed to reach the root image
#       rootfs.erofs       the root image, read-only and uncompressed (an emulated CPU pays dearly for decompression)
#       kernel-version     what `uname -r` says in the lab
#       headers            what modules for that kernel are built with: usr/src/linux-headers-VERSION
#
# The recipe deliberately does not know the lab's init: `basalt-lab up` appends that to base.cpio at every start, because
# it changes with the tree and this does not. The mirror is the one that the machine's own apt uses.
set -eu

out=${1:?usage: recipe.sh OUT_DIR}
suite=bookworm
kernel=linux-image-cloud-amd64
# What runs in the host: file systems, networking, measuring, Debian's QEMU as the peer of the benchmarks, systemd for the
# case that installs the package (in namespaces of its own; the lab's PID 1 is ours), and OpenCL on its processors for sandboxes with an
# accelerator (of LLVM without its tools and sanitizers).
packages=kmod,iproute2,nftables,procps,util-linux,e2fsprogs,xfsprogs,erofs-utils,fio,strace,socat,pciutils,qemu-system-x86,systemd,pocl-opencl-icd,ocl-icd-libopencl1,clinfo
# Reached before the root image is mounted; the rest is loaded from the root image.
early="virtio_pci virtio_blk erofs overlay"

say() { printf '%s\n' "$*"; }
fail() { printf 'lab-host recipe: %s\n' "$*" >&2; exit 1; }

[ "$(uname -m)" = x86_64 ] || fail "needs an x86-64 machine, this is $(uname -m)"
[ "$(id -u)" = 0 ] || fail "needs root, to create device nodes and files of other owners in the image"
command -v apt-get >/dev/null || fail "apt-get is missing; the lab's host is made of Debian packages"

rm -rf "$out"
mkdir -p "$out"
out=$(cd "$out" && pwd)
work=$out/.work
root=$work/root
mkdir -p "$work"
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# Every configured source, whatever the file's format, as apt itself understood it: "URI SUITE" a line.
sources() {
    apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(CODENAME) $(COMPONENT)' 'Created-By: Packages' |
        awk -v own="$1" '$4 == "main" { s = index($3, own) == 1 ? $3 : $2; if (index(s, own) == 1) print $1, s }'
}
own=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
[ -n "$own" ] || fail "/etc/os-release names no release, so the machine's mirror cannot be told"
if [ -z "$(sources "$own")" ]; then
    say "package lists are missing: apt-get update"
    apt-get update -qq
fi

missing=
for t in mmdebstrap:mmdebstrap mkfs.erofs:erofs-utils cpio:cpio depmod:kmod; do
    command -v "${t%%:*}" >/dev/null || [ -x "/usr/sbin/${t%%:*}" ] || missing="$missing ${t##*:}"
done
if [ -n "$missing" ]; then
    say "installing$missing"
    # shellcheck disable=SC2086
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null || {
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
    }
fi

keyring=/usr/share/keyrings/debian-archive-keyring.gpg
signed=
[ ! -e "$keyring" ] || signed="[signed-by=$keyring] "
# The machine's updates and security sources are used too when the machine is of the lab's release.
sources "$own" | sort -u | while read -r uri s; do
    if [ "$own" = "$suite" ]; then
        case $s in *-backports*) ;; *) echo "deb ${signed}$uri $s main" ;; esac
    elif [ "$s" = "$own" ]; then
        echo "deb ${signed}$uri $suite main"
    fi
done >"$work/sources.list"
[ -s "$work/sources.list" ] || fail "no apt source for the component main of '$own' is configured on this machine"

# Unpacked rather than installed: its post-install script would build an initramfs that nobody boots.
cat >"$work/kernel-hook" <<HOOK
#!/bin/sh
set -eu
export APT_CONFIG="\$MMDEBSTRAP_APT_CONFIG"
image=\$(apt-cache depends $kernel | sed -n 's/.*Depends: \(linux-image-[0-9].*\)/\1/p' | head -n 1)
[ -n "\$image" ] || { echo "$kernel depends on no kernel image" >&2; exit 1; }
headers=linux-headers-\${image#linux-image-}
common=\$(apt-cache depends "\$headers" | sed -n 's/.*Depends: \(linux-\(headers\|kbuild\)-.*\)/\1/p')
cd "$work"
# shellcheck disable=SC2086
apt-get download -qq "\$image" "\$headers" \$common
for package in linux-headers-*.deb linux-kbuild-*.deb; do
    dpkg-deb --extract "\$package" "$out/headers"
done
# Not into the root itself, where the package's directory lib would replace the link to usr/lib.
dpkg-deb --extract linux-image-*.deb kernel
mv kernel/lib/modules "\$1/usr/lib/modules"
HOOK
chmod 755 "$work/kernel-hook"

say "Debian $suite with $packages"
# In a mount namespace of its own, so that even kill -9 leaves no mount behind.
{
    unshare --mount mmdebstrap --mode=root --variant=minbase --format=directory \
        --include="$packages" --aptopt='Acquire::Languages "none"' \
        --aptopt='Acquire::IndexTargets::deb::DEP-11::DefaultEnabled "false"' \
        --aptopt='Acquire::Retries "3"' \
        --dpkgopt=force-unsafe-io \
        --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
        --dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-exclude=/usr/share/info/*' \
        --dpkgopt='path-exclude=/usr/lib/llvm-*/bin/llvm-*' --dpkgopt='path-exclude=/usr/lib/llvm-*/lib/clang/*/lib/*' \
        --customize-hook="$work/kernel-hook" \
        "$suite" "$root" "$work/sources.list" 2>&1 || echo failed >"$work/failed"
} | tee "$work/log" | sed -u -n 's/^I: \(downloading\|extracting\|installing\|cleaning\)/  \1/p'
if [ -e "$work/failed" ]; then
    tail -n 30 "$work/log" >&2
    fail "mmdebstrap could not make the root file system"
fi

say "kernel and early modules"
version=$(ls "$root/lib/modules")
[ "$(echo "$version" | wc -l)" = 1 ] || fail "expected one kernel in the image, found: $version"
# The package names the other's directory from the root of the machine that it would be installed on.
sed -i 's#^include /usr/src/#include $(dir $(lastword $(MAKEFILE_LIST)))../#' "$out/headers/usr/src/linux-headers-$version/Makefile"
depmod --basedir "$root" "$version"
cp "$work/kernel/boot/vmlinuz-$version" "$out/vmlinuz"
echo "$version" >"$out/kernel-version"
# The benchmarks boot Debian's kernel as a guest, beside ours.
cp "$work/kernel/boot/vmlinuz-$version" "$root/boot/vmlinuz"

initramfs=$work/initramfs
modules=lib/modules/$version
mkdir -p "$initramfs/$modules" "$initramfs/dev" "$initramfs/proc" "$initramfs/sys" "$initramfs/newroot"
mknod -m 600 "$initramfs/dev/console" c 5 1
cp "$root/$modules/modules.dep" "$root/$modules/modules.builtin" "$initramfs/$modules/"
for m in $early; do
    modprobe --dirname "$root" --set-version "$version" --show-depends "$m" |
        awk '$1 == "insmod" { print $2 }' >"$work/deps" || fail "the kernel has no module $m"
    while read -r path; do
        rel=${path#"$root"/}
        mkdir -p "$initramfs/${rel%/*}"
        cp "$path" "$initramfs/$rel"
    done <"$work/deps"
done
(cd "$initramfs" && find . -mindepth 1 | LC_ALL=C sort | cpio --quiet --create --format=newc) >"$out/base.cpio"

say "root image"
echo basalt-lab >"$root/etc/hostname"
printf '127.0.0.1 localhost basalt-lab\n' >"$root/etc/hosts"
printf 'nameserver 10.0.2.3\n' >"$root/etc/resolv.conf"
mkdir -p "$root/opt/basalt" "$root/var/lib/basalt" "$root/mnt/xfs" "$root/mnt/ext4"
rm -rf "$root/var/cache/apt"/* "$root/var/lib/apt/lists"/* "$root/var/log"/*
# The emulated host has no sound, graphics or wireless hardware.
rm -rf "$root/$modules/kernel/sound" "$root/$modules/kernel/drivers/gpu" "$root/$modules/kernel/drivers/media"
depmod --basedir "$root" "$version"
mkfs.erofs --quiet "$out/rootfs.erofs" "$root" >"$work/log" 2>&1 || {
    tail -n 5 "$work/log" >&2
    fail "mkfs.erofs could not make the root image"
}
say "kernel $version, root image $(du -m "$out/rootfs.erofs" | cut -f1) MB"
