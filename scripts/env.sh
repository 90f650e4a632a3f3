# Locations of builds, sourced by the Makefile and the scripts. The environment can override every value.
# CI clones the repository for each run, so it keeps the virtual environment and compiled crates in ~/.cache.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

export TORCH=${TORCH:-2.15.0}
lock=$( (echo "$TORCH" && cat "$root/requirements-dev.txt") | sha256sum | cut -c 1-12)

if [ -n "${CI:-}" ]; then
    cache=${XDG_CACHE_HOME:-$HOME/.cache}/tandem
    export TANDEM_VENV=${TANDEM_VENV:-$cache/venv-$lock}
    export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$cache/target}
fi
export TANDEM_VENV=${TANDEM_VENV:-$root/.venv}
export VIRTUAL_ENV=$TANDEM_VENV PATH=$TANDEM_VENV/bin:$PATH
# The Vulkan loader reads this variable and prints a warning if it is not set.
export XDG_RUNTIME_DIR=${XDG_RUNTIME_DIR:-${TMPDIR:-/tmp}}
# The shim is compiled against the torch of this interpreter.
export PYO3_PYTHON=$TANDEM_VENV/bin/python
