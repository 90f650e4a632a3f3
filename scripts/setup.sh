#!/usr/bin/env bash
# Prepares everything that `make build` and `make test` need. It can be run repeatedly and keeps what exists.
set -euo pipefail
source "$(dirname "$0")/env.sh"
unset TANDEM_OUTCOMES # Its time is not one of the tests'.

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
    local python=$TANDEM_VENV/bin/python
    "$python" -m pip install --quiet --disable-pip-version-check "$(grep '^uv==' "$root/requirements-dev.txt")"
    # torchvision depends on a particular version of torch, so a matching one is installed.
    install "$python" "torch==$TORCH" torchvision -r "$root/requirements-dev.txt"
    echo "$lock" > "$stamp"
}

# Installs Debian's packages, where that is possible. The tests that need them are skipped without them.
install_packages() { # purpose, package...
    if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
        { apt-get update && apt-get install -y --no-install-recommends "${@:2}"; } > /dev/null 2>&1 ||
            echo "   ${*:2} cannot be installed; the tests of $1 will be skipped"
    else
        echo "   for the tests of $1: apt-get install ${*:2}"
    fi
}

find_adapter() {
    local drivers
    drivers=$(compgen -G '/usr/share/vulkan/icd.d/*.json' || compgen -G '/etc/vulkan/icd.d/*.json') || true
    if [ "$(uname)" = Linux ] && { [ -z "$drivers" ] || [[ $(ldconfig -p) != *libvulkan.so.1* ]]; }; then
        install_packages "the wgpu executor" mesa-vulkan-drivers libvulkan1 # a software adapter
    fi
}

find_browser() {
    command -v chromium chromium-headless-shell chromium-browser google-chrome google-chrome-stable > /dev/null ||
        install_packages "the report's page" chromium-headless-shell
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
step "browser" find_browser
step "crates" cargo fetch --locked --quiet --manifest-path "$root/Cargo.toml"
