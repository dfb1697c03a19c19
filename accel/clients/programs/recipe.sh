#!/bin/sh
# Recipe `accel-clients`: unmodified programs that use OpenCL, and oclgrind, which is an OpenCL driver by itself.
#
#   recipe.sh OUT_DIR      fills OUT_DIR with
#       root/              Debian packages, unpacked and not installed; of piglit, which has 2 GB, its programs for OpenCL
#       hashcat/           hashcat with its kernels and modules beside it, where it looks for them
#       python/            a virtual environment with PyOpenCL, of the versions in requirements.txt
#       pyopencl/          PyOpenCL's own test files, from its source archive
#
# The loader, PoCL and clinfo are the machine's (step `apt-packages`). The recipe knows no server and no comparison: that is
# xtask/src/clients.
set -eu

out=${1:?usage: recipe.sh OUT_DIR}
here=$(cd "$(dirname "$0")" && pwd)
packages='clpeak hashcat hashcat-data libminizip1 libxxhash0 clblast-tests libclblast1 libblas3 hcxkeys
    clfft-client libclfft2 libboost-program-options1.74.0 oclgrind liboclgrind-21.10 libllvm14
    piglit libegl1 libglvnd0'

say() { printf '%s\n' "$*"; }
fail() { printf 'accel-clients recipe: %s\n' "$*" >&2; exit 1; }

[ "$(uname -m)" = x86_64 ] || fail "needs an x86-64 machine, this is $(uname -m)"
mkdir -p "$out"
out=$(cd "$out" && pwd)
work=$out/.work
mkdir "$work"
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

say "packages:" $packages
cd "$work"
# shellcheck disable=SC2086
apt-get download -q -o APT::Sandbox::User=root $packages || {
    apt-get update -qq
    apt-get download -q -o APT::Sandbox::User=root $packages
}
libraries=$out/root/usr/lib/x86_64-linux-gnu
mkdir -p "$out/root"
for package in *.deb; do
    case $package in
    piglit_*) dpkg-deb --fsys-tarfile "$package" |
        tar -C "$out/root" -x --wildcards './usr/lib/*/piglit/bin/cl-*' './usr/lib/*/piglit/lib/*' ;;
    *) dpkg-deb --extract "$package" "$out/root" ;;
    esac
done
bin=$out/root/usr/bin
for program in "$bin/clpeak" "$bin/hashcat" "$bin/clblast_test_xaxpy" "$bin/wlangenpmkocl" "$bin/clFFT-client" \
    "$bin/oclgrind-kernel" "$libraries/piglit/bin/cl-api-set-kernel-arg"; do
    lacks=$(LD_LIBRARY_PATH=$libraries:$libraries/blas:$libraries/piglit/lib ldd "$program" | grep 'not found' || true)
    [ -z "$lacks" ] || fail "$program lacks libraries: $lacks; add their packages to this recipe"
done

mkdir "$out/hashcat"
cp "$out/root/usr/bin/hashcat" "$out/hashcat/"
for part in "$out"/root/usr/share/hashcat/* "$out"/root/usr/lib/hashcat/modules; do
    [ "${part##*/share/hashcat/}" = modules ] || ln -s "../${part#"$out"/}" "$out/hashcat/"
done

say "PyOpenCL"
python3 -m venv "$out/python" || fail "python3 makes no virtual environment; install python3-venv"
pip="$out/python/bin/python -m pip --disable-pip-version-check --quiet"
$pip install --requirement "$here/requirements.txt"
version=$(sed -n 's/^pyopencl==//p' "$here/requirements.txt")
# Its tests are in the source archive alone. pip asks the archive's build system for its name; nothing is compiled.
$pip download --no-deps --no-build-isolation --no-binary pyopencl "pyopencl==$version"
tar -xzf "pyopencl-$version.tar.gz"
cp -R "pyopencl-$version/test" "$out/pyopencl"
