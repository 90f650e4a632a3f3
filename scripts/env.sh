# Locations of builds, sourced by the Makefile and the scripts. The environment can override every value.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/tandem

export TORCH=${TORCH:-2.15.0}
lock=$( (echo "$TORCH" && cat "$root/requirements-dev.txt") | sha256sum | cut -c 1-12)

# CI has an environment for each list of requirements, so that none is there by chance.
export TANDEM_VENV=${TANDEM_VENV:-$root/.venv${CI:+-$lock}}
export VIRTUAL_ENV=$TANDEM_VENV PATH=$TANDEM_VENV/bin:$PATH
# Hundreds of tests start a process that imports torch and other libraries: from source, that takes several times as long.
unset PYTHONDONTWRITEBYTECODE
# The Vulkan loader reads this variable and prints a warning if it is not set.
export XDG_RUNTIME_DIR=${XDG_RUNTIME_DIR:-${TMPDIR:-/tmp}}
# The shim is compiled against the torch of this interpreter.
export PYO3_PYTHON=$TANDEM_VENV/bin/python
# All clones share compiled C++ files.
export TANDEM_OBJECTS=${TANDEM_OBJECTS:-$cache/objects}

# Installs packages for an interpreter. uv makes hard links from its cache; it doesn't read pip's settings, so pip is asked
# where it fails.
install() { # interpreter, arguments of pip install...
    uv pip install --quiet --python "$1" "${@:2}" ||
        "$1" -m pip install --quiet --disable-pip-version-check "${@:2}"
}

step() { # name, command...: runs the command, prints its time and adds it to those of `make test`
    local start=$SECONDS
    echo "== $1"
    "${@:2}"
    echo "   $((SECONDS - start)) s"
    [ -z "${TANDEM_OUTCOMES:-}" ] || echo "$1: $((SECONDS - start)) s" >> "$TANDEM_OUTCOMES/times"
}
