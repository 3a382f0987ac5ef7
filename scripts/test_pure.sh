#!/usr/bin/env bash
# Test the code that does not need verl (core, estimators, settings) with other Pythons, in temporary environments. The
# first environment has the oldest numpy that pyproject.toml allows, the others have the newest numpy.
#
#   scripts/test_pure.sh [PYTHON...]      default: Python 3.10 and 3.12, if they are on PATH or in pyenv
#
# TORCH is the version of torch (default: the oldest supported version). pip's default torch installs gigabytes of CUDA.
# TORCH=none skips torch and the tests that need it.
set -euo pipefail
cd "$(dirname "$0")/.."
TORCH=${TORCH:-2.4.0}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

PACKAGES=(hypothesis pytest)
TESTS=(tests/core tests/test_settings.py tests/estimators/test_balance_and_kl.py)
if [ "$TORCH" = none ]; then
    TESTS+=(--ignore tests/core/test_row_index.py --ignore tests/core/test_metrics.py --ignore tests/core/test_turns.py)
    TESTS+=(--ignore tests/core/test_turn_spans.py)
else
    PACKAGES+=("torch==$TORCH" omegaconf)
    TESTS+=(tests/estimators/test_worked_example.py)
fi

works() { [ "$("$1" -c "print(1)" 2>/dev/null)" = 1 ]; }
PYTHONS=()
for python in "$@"; do
    works "$python" || {
        echo "error: $python does not run as a Python interpreter. Use the path of a Python interpreter." >&2
        exit 2
    }
    PYTHONS+=("$python")
done
if ((!$#)); then
    for version in 3.10 3.12; do
        found=
        for python in "python$version" "${PYENV_ROOT:-${HOME:-}/.pyenv}/versions/$version".*/bin/python; do
            if works "$python"; then
                found=$python
                break
            fi
        done
        if [ -n "$found" ]; then
            PYTHONS+=("$found")
        else
            echo "warning: Python $version was not found, so it is not tested. Install it, or pass its path."
        fi
    done
fi

test_with() { # PYTHON, FOLDER for its environment, numpy
    "$1" -m venv "$2"
    "$2/bin/pip" install --quiet --disable-pip-version-check "${PACKAGES[@]}" "$3"
    "$2/bin/pip" install --quiet --disable-pip-version-check --no-deps -e .
    echo "== $("$1" --version), torch $TORCH, numpy $("$2/bin/python" -c 'import numpy; print(numpy.__version__)')"
    "$2/bin/python" -m pytest -q -p no:cacheprovider -k "not verl_combines" "${TESTS[@]}"
}

# All environments run at the same time. The output of each environment is shown together.
jobs=()
numpy=numpy==1.26.0
for number in "${!PYTHONS[@]}"; do
    (set -e; test_with "${PYTHONS[number]}" "$scratch/$number" "$numpy") >"$scratch/$number.log" 2>&1 &
    numpy=numpy
    jobs+=($!)
done
status=0
for number in "${!jobs[@]}"; do
    wait "${jobs[number]}" || status=1
    cat "$scratch/$number.log"
done
exit $status
