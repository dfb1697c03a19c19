#!/bin/sh
# Recipe `newer-kernel`: a newer kernel for the lab's host, Debian's 6.12 of bookworm-backports, and what modules for it are built with.
#
#   recipe.sh OUT_DIR      fills OUT_DIR with
#       vmlinuz            the kernel, of the flavour that has drivers of real hardware
#       base.cpio          first part of the initramfs: the modules that are needed to reach the root image
#       modules.erofs      lib/modules/VERSION: the modules that a lab needs, read-only and uncompressed; mounted over the root image's
#       kernel-version     what `uname -r` says
#       headers            usr/src/linux-headers-VERSION, with what that refers to
#
# Debian builds no kernel with iommufd. It needs no change of the kernel itself: its module, and those of VFIO with its parts for iommufd
# (functions opened by files of their own), are built here from Debian's source of the same version, unchanged.
#
# The root image is the other kernel's, of lab/host. The mirror is the one that the machine's own apt uses. Nothing is installed.
set -eu

out=${1:?usage: recipe.sh OUT_DIR}
suite=bookworm-backports
kernel=linux-image-amd64
recipe=newer-kernel
. "$(dirname "$0")/../apt.sh"

# Reached before the root image is mounted.
# crc32c_generic is what erofs asks for by an alias, which the init does not follow.
early="virtio_pci virtio_blk crc32c_generic erofs overlay"
# What a lab loads, or has loaded: by name, and whole directories below kernel/.
wanted="$early virtio_net xfs ext4 loop tun veth bridge kvm-amd nvme igb igbvf crc32c_intel vmw_vsock_virtio_transport virtiofs vhost_net"
directories="net/netfilter net/ipv4/netfilter net/ipv6/netfilter"

missing=
for t in mkfs.erofs:erofs-utils cpio:cpio depmod:kmod xz:xz-utils make:make gcc:gcc; do
    command -v "${t%%:*}" >/dev/null || [ -x "/usr/sbin/${t%%:*}" ] || missing="$missing ${t##*:}"
done
[ -z "$missing" ] || fail "these packages are missing:$missing; \`cargo xtask test\` installs them"

packages_of "$out" bookworm "$suite"
needs() { apt-cache depends --no-recommends --no-suggests "$1" | sed -n "s/^  Depends: \($2.*\)/\1/p"; }
# Of the suite's own kernel, which is the last that the list names.
image=$(apt-cache show -t "$suite" "$kernel" | sed -n 's/^Depends: .*\(linux-image-[0-9][^ ,]*\).*/\1/p' | head -n 1)
[ -n "$image" ] || fail "$kernel of $suite depends on no kernel image"
version=${image#linux-image-}
headers=linux-headers-$version
package=$(apt-cache show "$image" | sed -n 's/^Version: //p' | head -n 1)
source=linux-source-$(echo "$version" | cut -d. -f1-2)
say "downloading $image and its source (about 280 MB)"
# shellcheck disable=SC2046
(cd "$work" && apt-get download -qq "$image" "$source=$package" "$headers" $(needs "$headers" linux-headers-) $(needs "$headers" linux-kbuild-))
unset APT_CONFIG

for deb in "$work"/linux-headers-*.deb "$work"/linux-kbuild-*.deb; do
    dpkg-deb --extract "$deb" "$out/headers"
done
rm -rf "$out/headers/usr/share"
kdir=$out/headers/usr/src/$headers
[ -e "$kdir/Makefile" ] || fail "$headers has no Makefile"
# The package names the other's directory from the root of the machine that it would be installed on.
sed -i 's#^include /usr/src/#include $(dir $(lastword $(MAKEFILE_LIST)))../#' "$kdir/Makefile"
dpkg-deb --extract "$work"/linux-image-*.deb "$work/image"
dpkg-deb --fsys-tarfile "$work"/linux-source-*.deb | tar -x -C "$work" --wildcards './usr/src/linux-source-*.tar.xz'
cp "$work/image/boot/vmlinuz-$version" "$out/vmlinuz"
echo "$version" >"$out/kernel-version"

say "iommufd, and VFIO with it"
tree=$work/source
mkdir -p "$tree" "$work/build/iommufd" "$work/build/vfio/pci"
tar -x -f "$work"/usr/src/linux-source-*.tar.xz -C "$tree" --strip-components=1 --wildcards \
    '*/drivers/iommu/*.h' '*/drivers/iommu/iommufd/*' '*/drivers/vfio/*' '*/lib/interval_tree.c'
build=$work/build
cp "$tree"/drivers/iommu/iommu-priv.h "$build/"
cp "$tree"/drivers/iommu/iommufd/*.[ch] "$build/iommufd/"
cp "$tree"/drivers/vfio/*.[ch] "$build/vfio/"
cp "$tree"/drivers/vfio/pci/*.[ch] "$build/vfio/pci/"
# Of the kernel's interval trees the iterator over spans is iommufd's alone, and so in no kernel without it.
{
    printf '#include <linux/interval_tree.h>\n#include <linux/export.h>\n'
    awk '/^#ifdef CONFIG_INTERVAL_TREE_SPAN_ITER/ { on = 1; next } on && /^#endif/ { exit } on' "$tree/lib/interval_tree.c"
} >"$build/iommufd/span.c"
# The file lists are those of the kernel's Makefiles, with the configuration that the words below say.
echo 'obj-m := iommufd/ vfio/' >"$build/Kbuild"
sed -n '/^iommufd-y/,/[^\\]$/p' "$tree/drivers/iommu/iommufd/Makefile" >"$build/iommufd/Kbuild"
printf 'iommufd-y += span.o\nobj-m := iommufd.o\n' >>"$build/iommufd/Kbuild"
cp "$tree/drivers/vfio/Makefile" "$build/vfio/Kbuild"
cp "$tree/drivers/vfio/pci/Makefile" "$build/vfio/pci/Kbuild"
chosen="CONFIG_IOMMUFD=m CONFIG_VFIO_DEVICE_CDEV=y CONFIG_VFIO_MDEV= CONFIG_MLX5_VFIO_PCI= CONFIG_HISI_ACC_VFIO_PCI= CONFIG_PDS_VFIO_PCI=
    CONFIG_VIRTIO_VFIO_PCI= CONFIG_NVGRACE_GPU_VFIO_PCI= CONFIG_QAT_VFIO_PCI="
# shellcheck disable=SC2086
make -C "$kdir" M="$build" $chosen \
    KCFLAGS="-DCONFIG_IOMMUFD_MODULE=1 -DCONFIG_VFIO_DEVICE_CDEV=1 -DCONFIG_INTERVAL_TREE_SPAN_ITER=1" modules >"$work/log" 2>&1 || {
    tail -n 20 "$work/log" >&2
    fail "the modules of iommufd and VFIO cannot be built"
}

say "modules"
all=$work/image
modules=lib/modules/$version
for ko in $(cd "$build" && find . -name '*.ko'); do
    strip --strip-debug "$build/$ko"
    rm -f "$all/$modules/kernel/drivers/${ko#./}.xz"
    mkdir -p "$all/$modules/kernel/drivers/$(dirname "${ko#./}")"
    cp "$build/$ko" "$all/$modules/kernel/drivers/${ko#./}"
done
depmod --basedir "$all" "$version"
# The closure of what is wanted, without a name that the kernel has built in.
closure() {
    for m in "$@"; do
        modprobe --dirname "$all" --set-version "$version" --show-depends "$m" | awk '$1 == "insmod" { print $2 }' ||
            fail "the kernel has no module $m"
    done
}
names=$(for d in $directories; do find "$all/$modules/kernel/$d" -name '*.ko*' -exec basename {} \; | sed 's/\.ko.*//'; done)
# shellcheck disable=SC2086
closure $wanted iommufd vfio-pci vfio_iommu_type1 $names | sort -u >"$work/list"
# shellcheck disable=SC2086
closure $early | sort -u >"$work/list-early"
take() {
    mkdir -p "$2/$modules"
    cp "$all/$modules"/modules.builtin* "$all/$modules/modules.order" "$2/$modules/"
    while read -r path; do
        rel=${path#"$all"/}
        mkdir -p "$2/${rel%/*}"
        case $rel in
        *.xz) xz -dc "$path" >"$2/${rel%.xz}" ;;
        *) cp "$path" "$2/$rel" ;;
        esac
    done <"$1"
    depmod --basedir "$2" "$version"
}
take "$work/list" "$work/modules"
# Cases boot it as a guest's, with these modules.
cp "$out/vmlinuz" "$work/modules/$modules/vmlinuz"
initramfs=$work/initramfs
take "$work/list-early" "$initramfs"
mkdir -p "$initramfs/dev" "$initramfs/proc" "$initramfs/sys" "$initramfs/newroot"
[ -e "$initramfs/dev/console" ] || mknod -m 600 "$initramfs/dev/console" c 5 1
(cd "$initramfs" && find . -mindepth 1 | LC_ALL=C sort | cpio --quiet --create --format=newc) >"$out/base.cpio"
mkfs.erofs --quiet "$out/modules.erofs" "$work/modules/lib/modules" >"$work/log" 2>&1 || {
    tail -n 5 "$work/log" >&2
    fail "mkfs.erofs could not make the image of modules"
}
say "kernel $version, $(wc -l <"$work/list") modules, $(du -sm "$out" --exclude=.work | cut -f1) MB"
