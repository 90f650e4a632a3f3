#!/usr/bin/env bash
# Builds dist/torch_tandem-*+torchX.Y-*.whl against torch $TORCH. torch's C++ ABI is stable only within a
# minor version, so each minor version has its own wheel, which requires that torch. The wheel works with
# Python 3.11 and newer.
set -euo pipefail
cd "$(dirname "$0")/.."
TORCH=${TORCH:-2.15.0}
minor=${TORCH%.*}
export TANDEM_VENV=$PWD/.venv-wheel-$TORCH
source scripts/env.sh

# The build needs only torch's headers and libraries. It does not import torch, so torch's dependencies (CUDA)
# are not installed.
[ -x "$PYO3_PYTHON" ] || "${PYTHON:-python3}" -m venv "$TANDEM_VENV"
pip install --quiet "$(grep '^maturin==' requirements-dev.txt)" wheel
pip install --quiet --no-deps "torch==$TORCH"

# The build overwrites _built_for.py in the source tree, which belongs to the editable install. Save it, and
# restore it at the end.
work=$(mktemp -d)
built_for=pybridge/python/torch_tandem/_built_for.py
mv "$built_for" "$work" 2> /dev/null || true
trap 'cd "$root"; rm -f "$built_for"; mv "$work/_built_for.py" "$built_for" 2> /dev/null || true; rm -rf "$work"' EXIT

# auditwheel is skipped, because it would bundle libraries that come with torch.
maturin build --profile dist --locked --auditwheel skip --compatibility linux --out "$work"

wheel unpack --dest "$work" "$work"/*.whl > /dev/null
cd "$work"/*/
info=$(echo *.dist-info)
sed -i -E "s/^(Version: .*)/\1+torch$minor/; s/^(Requires-Dist: torch)\W.*/\1==$minor.*/" "$info/METADATA"
mv "$info" "${info%.dist-info}+torch$minor.dist-info"
mkdir -p "$root/dist"
wheel pack --dest-dir "$root/dist" .
