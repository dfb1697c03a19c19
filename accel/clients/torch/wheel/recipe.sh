#!/bin/sh
# Recipe `torch-client`: PyTorch's CUDA wheel as PyPI has it, unpacked, without the libraries of CUDA that it asks for.
#
#   recipe.sh OUT_DIR      fills OUT_DIR with
#       site/              torch, and what Python needs to import it, of the versions in requirements.txt
#
# A wheel has half a gigabyte; no copy of it stays, neither here nor in pip's cache. The recipe knows no server and no model.
set -eu

out=${1:?usage: recipe.sh OUT_DIR}
here=$(cd "$(dirname "$0")" && pwd)

fail() { printf 'torch-client recipe: %s\n' "$*" >&2; exit 1; }

[ "$(uname -m)" = x86_64 ] || fail "needs an x86-64 machine, this is $(uname -m)"
mkdir -p "$out"
out=$(cd "$out" && pwd)
python3 -m venv "$out/.venv" || fail "python3 makes no virtual environment; install python3-venv"
trap 'rm -rf "$out/.venv"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
# Nothing that the wheel needs of CUDA: what it asks for is to be ours.
"$out/.venv/bin/python" -m pip --disable-pip-version-check --quiet install --no-cache-dir --no-deps --no-compile \
    --target "$out/site" --requirement "$here/requirements.txt"
[ -e "$out/site/torch/lib/libtorch_cuda.so" ] || fail "the wheel has no libtorch_cuda.so; it is none of CUDA"
