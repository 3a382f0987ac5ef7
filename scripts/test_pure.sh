#!/usr/bin/env bash
# Test what does not need verl (core, estimators, settings) on other Pythons, with the oldest torch and numpy that
# pyproject.toml allows, in temporary virtual environments.
#
#   scripts/test_pure.sh [PYTHON...]      default: Python 3.10 and 3.12, if they are on the path or in pyenv
#
# TORCH and NUMPY name other versions. pip's usual torch installs gigabytes of CUDA: TORCH=none skips it and the tests
# that need it. NUMPY=newest takes the newest numpy for that Python.
set -euo pipefail
cd "$(dirname "$0")/.."
TORCH=${TORCH:-2.4.0} NUMPY=${NUMPY:-1.26.0}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

PACKAGES=(hypothesis pytest)
TESTS=(tests/core tests/test_settings.py tests/estimators/test_compositions.py)
if [ "$TORCH" = none ]; then
    TESTS+=(--ignore tests/core/test_rows.py --ignore tests/core/test_observe.py)
else
    PACKAGES+=("torch==$TORCH" omegaconf)
    TESTS+=(tests/estimators/test_worked_example.py)
fi
if [ "$NUMPY" = newest ]; then PACKAGES+=(numpy); else PACKAGES+=("numpy==$NUMPY"); fi

works() { [ "$("$1" -c "print(1)" 2>/dev/null)" = 1 ]; }
PYTHONS=()
for python in "$@"; do
    works "$python" || {
        echo "$python is no Python that works here" >&2
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
        if [ -n "$found" ]; then PYTHONS+=("$found"); else echo "NOT TESTED: Python $version not found"; fi
    done
fi

for python in ${PYTHONS[@]+"${PYTHONS[@]}"}; do
    rm -rf "$scratch/venv"
    "$python" -m venv "$scratch/venv"
    "$scratch/venv/bin/pip" install --quiet --disable-pip-version-check "${PACKAGES[@]}"
    "$scratch/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps -e .
    echo "== $("$python" --version), torch $TORCH, numpy $("$scratch/venv/bin/python" -c 'import numpy; print(numpy.__version__)')"
    "$scratch/venv/bin/python" -m pytest -q -k "not verl_combines" "${TESTS[@]}"
done
