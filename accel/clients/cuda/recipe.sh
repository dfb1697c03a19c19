#!/bin/sh
# Recipe `cuda-programs`: programs of CUDA (programs/*.cu), built by nvcc for CUDA's libraries as shared ones.
#
#   recipe.sh OUT_DIR      fills OUT_DIR with
#       NAME               a program for each programs/NAME.cu, with PTX for compute_75, for any image with a glibc from 2.34 on
#
# nvcc comes from PyPI (NVIDIA's licence) into a directory that is removed at the end, so that only what it made of our programs stays. The
# libraries that they are linked with are made here, of the names that programs/libraries.h declares: those of the maker's have hundreds of
# megabytes. The recipe knows no server and none of our libraries.
set -eu

out=${1:?usage: recipe.sh OUT_DIR}
here=$(cd "$(dirname "$0")" && pwd)

fail() { printf 'cuda-programs recipe: %s\n' "$*" >&2; exit 1; }

[ "$(uname -m)" = x86_64 ] || fail "needs an x86-64 machine, this is $(uname -m)"
mkdir -p "$out"
out=$(cd "$out" && pwd)
work=$out/.work
mkdir "$work"
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

python3 -m venv "$work/venv" || fail "python3 makes no virtual environment; install python3-venv"
"$work/venv/bin/python" -m pip --disable-pip-version-check --quiet install --no-cache-dir --no-deps --no-compile \
    --requirement "$here/requirements.txt"
toolkit=$(echo "$work"/venv/lib/python3*/site-packages/nvidia/cu13)
ln -s lib "$toolkit/lib64"
ln -s libcudart.so.13 "$toolkit/lib/libcudart.so"

# name_of_functions:file; each file's symbols have its own name as their version, as the maker's have.
for library in cublas:libcublas.so.13 curand:libcurand.so.10 cudnn:libcudnn.so.9; do
    prefix=${library%%:*}
    file=${library#*:}
    sed -n "s/^int \($prefix[A-Za-z0-9_]*\)(.*/int \1(void) { return 1; }/p" "$here/programs/libraries.h" >"$work/$prefix.c"
    [ -s "$work/$prefix.c" ] || fail "programs/libraries.h declares nothing of $prefix"
    printf '%s { global: *; };\n' "$file" >"$work/$prefix.map"
    cc -shared -fPIC -Wl,-soname,"$file" -Wl,--version-script="$work/$prefix.map" -o "$work/$file" "$work/$prefix.c"
done

for source in "$here"/programs/*.cu; do
    name=$(basename "$source" .cu)
    "$toolkit/bin/nvcc" --cudart shared -O2 -std=c++17 -gencode arch=compute_75,code=compute_75 \
        -Xcompiler -static-libstdc++,-static-libgcc -o "$out/$name" "$source" -L"$work" -l:libcublas.so.13 -l:libcurand.so.10 -l:libcudnn.so.9
done
