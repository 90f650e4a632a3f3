#!/usr/bin/env bash
# Prepares everything that `make build` and `make test` need. It can be run repeatedly and keeps what exists.
set -euo pipefail
source "$(dirname "$0")/env.sh"

step() { # name, command...: runs the command and prints its time
    local start=$SECONDS
    echo "== $1"
    "${@:2}"
    echo "   $((SECONDS - start)) s"
}

missing() {
    echo "setup: $1" >&2
    exit 1
}

at_least() { # wanted, found
    [ "$(printf '%s\n' "$1" "$2" | sort -V | head -n 1)" = "$1" ]
}

check_tools() {
    command -v cargo > /dev/null || missing "cargo is missing; install Rust 1.95 or newer: https://rustup.rs"
    rust=$(rustc --version | cut -d ' ' -f 2)
    at_least 1.95 "$rust" || missing "Rust 1.95 or newer is needed, this is $rust; run: rustup update"
    command -v cc > /dev/null && command -v g++ > /dev/null ||
        missing "cc and g++ are missing; on Debian or Ubuntu: apt-get install g++"
    gcc=$(g++ -dumpfullversion -dumpversion)
    at_least 11 "$gcc" || missing "g++ 11 or newer is needed (C++20), this is $gcc"
    python=$(find_python) || missing "Python 3.11 or newer is missing (with venv and pip); or set PYTHON=/path/to/it"
    echo "   Rust $rust, g++ $gcc, $("$python" -V) ($python)"
}

find_python() {
    local wanted='import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))'
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3.14 python3}; do
        if "$candidate" -c "$wanted" 2> /dev/null; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

make_venv() {
    "$TANDEM_VENV/bin/python" -c '' 2> /dev/null || "$python" -m venv --clear "$TANDEM_VENV"
}

install_requirements() {
    # torchvision depends on a particular version of torch, so pip installs a matching one.
    "$TANDEM_VENV/bin/python" -m pip install --quiet --disable-pip-version-check \
        "torch==$TORCH" torchvision -r "$root/requirements-dev.txt"
    echo "$lock" > "$stamp"
}

# Installs a software Vulkan driver for the tests of the wgpu executor, which are skipped without an adapter.
find_adapter() {
    if [ "$(uname)" != Linux ] || ls /usr/share/vulkan/icd.d/*.json /etc/vulkan/icd.d/*.json > /dev/null 2>&1 &&
        ldconfig -p | grep -q libvulkan.so.1; then
        return
    elif [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
        { apt-get update && apt-get install -y --no-install-recommends mesa-vulkan-drivers libvulkan1; } > /dev/null 2>&1 ||
            echo "   mesa-vulkan-drivers cannot be installed; the tests of the wgpu executor will be skipped"
    else
        echo "   no Vulkan driver; for the tests of the wgpu executor: apt-get install mesa-vulkan-drivers libvulkan1"
    fi
}

stamp=$TANDEM_VENV/.tandem-lock
step "tools" check_tools
if [ "$(cat "$stamp" 2> /dev/null)" = "$lock" ] && "$TANDEM_VENV/bin/python" -c '' 2> /dev/null; then
    echo "== $TANDEM_VENV is up to date (torch $TORCH)"
else
    step "virtual environment $TANDEM_VENV" make_venv
    step "torch $TORCH and requirements-dev.txt (5 GB the first time)" install_requirements
fi
step "graphics adapter" find_adapter
step "crates" cargo fetch --locked --quiet --manifest-path "$root/Cargo.toml"
