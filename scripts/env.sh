# Where builds live; sourced by the Makefile and the scripts. Every value can be set from outside.
# A clone made by CI is fresh each time, so there the environment and compiled crates are kept in ~/.cache.

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
# Vulkan's loader asks for it, and complains on standard error where it is missing.
export XDG_RUNTIME_DIR=${XDG_RUNTIME_DIR:-${TMPDIR:-/tmp}}
# The shim is compiled against the torch of this interpreter.
export PYO3_PYTHON=$TANDEM_VENV/bin/python
