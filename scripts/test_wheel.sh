#!/usr/bin/env bash
# Proves the wheel in dist/ in bare virtual environments, each with a torch and a Python: a program has eager's losses,
# and a sample of PyTorch's operators eager's results. PAIRS="2.15.0:3.13 ..." names the pairs; PAIRS=all is the grid.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh
pairs=${PAIRS:-2.11.0:3.11 2.15.0:3.13}
[ "$pairs" != all ] || pairs=$(echo {2.11.0,2.13.0,2.15.0}:{3.11,3.13,3.14})
wheel=$(ls -t "$PWD"/dist/torch_tandem-*.whl | head -n 1)
tests=(
    tests/python/test_load.py
    "tests/python/test_programs.py::test_losses_are_those_of_eager[digits]"
    tests/python/test_opinfo.py::test_operators[{0,8,16}]
)

find_python() { # version: prints an interpreter, which may be one of pyenv's that is not active
    local python
    for python in "python$1" "$(pyenv prefix "$1" 2> /dev/null)/bin/python"; do
        if "$python" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" 2> /dev/null; then
            echo "$python"
            return
        fi
    done
    return 1
}

prove() { # torch, python: in a virtual environment of its own, which is removed
    local venv status=0
    venv=$(mktemp -d)
    "$2" -m venv "$venv" && install "$venv/bin/python" "torch==$1" "$wheel" \
        numpy scikit-learn tqdm expecttest pytest pytest-timeout &&
        (cd "$venv" && bin/python -c 'import torch_tandem as t; print("torch-tandem", t.__version__, "in", t.__path__[0])') &&
        TANDEM_KERNELS=aten "$venv/bin/python" -m pytest -q "${tests[@]}" &&
        TANDEM_KERNELS=own "$venv/bin/python" -m pytest -q "${tests[@]:2}" || status=$?
    rm -rf "$venv"
    return $status
}

# Two at a time. Threads that wait sleep, because the processes share the cores.
export OMP_WAIT_POLICY=passive
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
declare -A running
for pair in $pairs; do
    [ "$(jobs -rp | wc -l)" -lt 2 ] || wait -n || true
    if python=$(find_python "${pair#*:}"); then
        prove "${pair%:*}" "$python" > "$logs/$pair" 2>&1 &
        running[$pair]=$!
    fi
done

outcomes=() failed=0
for pair in $pairs; do
    name="torch ${pair%:*}, Python ${pair#*:}"
    echo "== $name"
    if [ -z "${running[$pair]:-}" ]; then
        outcomes+=("$name: not run, this Python is missing")
    elif wait "${running[$pair]}"; then
        outcomes+=("$name: passed")
    else
        outcomes+=("$name: FAILED") failed=1
    fi
    [ ! -f "$logs/$pair" ] || cat "$logs/$pair"
done
printf '%s\n' "== $(basename "$wheel")" "${outcomes[@]}"
[ $failed = 0 ] && [[ ${outcomes[*]} = *passed* ]]
