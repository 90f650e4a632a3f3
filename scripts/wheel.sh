#!/usr/bin/env bash
# Builds dist/torch_tandem-*+torchX.Y-*.whl against torch $TORCH: torch's C++ ABI holds for one minor version, so
# each has its wheel, and the wheel asks for that torch. Any Python from 3.11 on can use it.
set -euo pipefail
cd "$(dirname "$0")/.."
TORCH=${TORCH:-2.15.0}
minor=${TORCH%.*}
export TANDEM_VENV=$PWD/.venv-wheel-$TORCH
source scripts/env.sh

# Headers and libraries are all it takes: no CUDA, and torch is never imported.
[ -x "$PYO3_PYTHON" ] || "${PYTHON:-python3}" -m venv "$TANDEM_VENV"
pip install --quiet "$(grep '^maturin==' requirements-dev.txt)" wheel
pip install --quiet --no-deps "torch==$TORCH"

# The build writes _built_for.py into the source tree, where that of the editable install belongs: put it aside.
work=$(mktemp -d)
built_for=pybridge/python/torch_tandem/_built_for.py
mv "$built_for" "$work" 2> /dev/null || true
trap 'cd "$root"; rm -f "$built_for"; mv "$work/_built_for.py" "$built_for" 2> /dev/null || true; rm -rf "$work"' EXIT

# The libraries it needs come with torch; auditwheel would bundle them.
maturin build --profile dist --locked --auditwheel skip --compatibility linux --out "$work"

wheel unpack --dest "$work" "$work"/*.whl > /dev/null
cd "$work"/*/
info=$(echo *.dist-info)
sed -i -E "s/^(Version: .*)/\1+torch$minor/; s/^(Requires-Dist: torch)\W.*/\1==$minor.*/" "$info/METADATA"
mv "$info" "${info%.dist-info}+torch$minor.dist-info"
mkdir -p "$root/dist"
wheel pack --dest-dir "$root/dist" .
