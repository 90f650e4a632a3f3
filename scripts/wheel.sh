#!/usr/bin/env bash
# Builds the source distribution and the wheel in dist/. The wheel has a shim for each version of torch in $TORCH, and
# works with Python 3.11 and newer.
set -euo pipefail
cd "$(dirname "$0")/.."
versions=${TORCH:-2.11.0 2.12.0 2.13.0 2.14.0 2.15.0}
unset TORCH # For setup.sh and env.sh it is the version that is installed in the environment.
scripts/setup.sh
source scripts/env.sh

# Shims need only torch's headers and two of its libraries. Nothing imports torch, so neither its dependencies nor its
# CUDA libraries are kept.
TANDEM_TORCH=
for version in $versions; do
    dir=$TANDEM_VENV/torch-$version
    if [ "$version" = "$TORCH" ]; then
        dir=$(python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
    elif [ ! -d "$dir" ]; then
        install "$PYO3_PYTHON" --no-deps --target "$dir.new" "torch==$version"
        find "$dir.new/torch/lib" -name '*.so*' ! -name libtorch_cpu.so ! -name libc10.so -delete
        mv "$dir.new" "$dir"
    fi
    TANDEM_TORCH+=${TANDEM_TORCH:+:}$dir/torch
done
export TANDEM_TORCH

# The build writes the shims into the source tree, where the editable install has its own. It is put back at the end.
package=pybridge/python/torch_tandem
work=$(mktemp -d)
mkdir "$work/editable"
mv "$package"/_shim_torch* "$work/editable" 2> /dev/null || true
trap 'rm -f "$package"/_shim_torch*; mv "$work"/editable/* "$package" 2> /dev/null || true; rm -rf "$work"' EXIT

read -ra flags <<< "${CARGO_FLAGS:---locked --profile dist}"
maturin build "${flags[@]}" --auditwheel skip --compatibility linux --out "$work"
# torch's libraries come with torch. The tag is the oldest glibc that has all symbols of the libraries in the wheel.
auditwheel repair --exclude libtorch_cpu.so --exclude libc10.so --wheel-dir dist "$work"/*.whl
maturin sdist --out dist
