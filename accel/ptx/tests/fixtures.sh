#!/bin/sh
# Makes the fixtures of these tests anew: PTX and fat binaries, by nvcc from kernels/*.cu.
#
#   fixtures.sh            writes tests/ptx and tests/fatbin
#   fixtures.sh --check    writes nothing, and fails where what is made differs from what is there
#
# nvcc comes from PyPI (105 MB, NVIDIA's licence) into a directory that is removed at the end; with NVCC=PATH that one is used. What it
# makes of our kernels is ours; of NVIDIA's own text nothing is in it, as the kernels call no function of NVIDIA's that has a body.
# Needs python3 with venv, g++ and objcopy. Knows no test.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
check=
case ${1:-} in
--check) check=1 ;;
'') ;;
*) printf 'usage: fixtures.sh [--check]\n' >&2; exit 2 ;;
esac
fail() { printf 'fixtures: %s\n' "$*" >&2; exit 1; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

if [ -z "${NVCC:-}" ]; then
    python3 -m venv "$work/venv"
    "$work/venv/bin/pip" install -q --no-deps nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 \
        nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85
    toolkit=$(echo "$work"/venv/lib/python3*/site-packages/nvidia/cu13)
    ln -s lib "$toolkit/lib64"
    ln -s libcudart.so.13 "$toolkit/lib/libcudart.so"
    NVCC=$toolkit/bin/nvcc
fi
"$NVCC" --version >/dev/null || fail "$NVCC does not run; install the packages by hand and set NVCC"

mkdir "$work/ptx" "$work/fatbin"
# Old and new targets: PTX of two generations of NVIDIA's compiler.
for pair in basics:80 language:75 lenet:120; do
    name=${pair%:*}
    "$NVCC" -ptx -arch=compute_"${pair#*:}" "$here/kernels/$name.cu" -o "$work/$name.ptx"
    # Blanks at the ends of lines are nobody's but nvcc's, and this tree has none.
    sed 's/[[:blank:]]*$//' "$work/$name.ptx" >"$work/ptx/$name.ptx"
done
for mode in none speed default; do
    "$NVCC" --cudart shared -gencode arch=compute_75,code=compute_75 --compress-mode=$mode "$here/kernels/program.cu" \
        -o "$work/program"
    objcopy -O binary -j .nv_fatbin "$work/program" "$work/fatbin/$mode.bin"
done

for file in ptx/basics.ptx ptx/language.ptx ptx/lenet.ptx fatbin/none.bin fatbin/speed.bin fatbin/default.bin; do
    if [ -n "$check" ]; then
        cmp "$work/$file" "$here/$file" || fail "$file is not what nvcc makes of the kernels; run this without --check"
    else
        cp "$work/$file" "$here/$file"
    fi
done
