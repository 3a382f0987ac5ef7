#!/usr/bin/env bash
# Test what needs no verl (core, estimators, settings) on another Python, with the oldest torch and numpy that
# pyproject.toml allows, in a virtual environment that is made for it and removed.
#
#   scripts/test_pure.sh [PYTHON...]      default: python3.10 python3.12
#
# TORCH and NUMPY name other versions. pip's usual torch brings gigabytes of CUDA along.
set -euo pipefail
cd "$(dirname "$0")/.."
TORCH=${TORCH:-2.4.0} NUMPY=${NUMPY:-1.26.0}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

(($#)) || set -- python3.10 python3.12
for python in "$@"; do
    echo "== $("$python" --version), torch $TORCH, numpy $NUMPY"
    "$python" -m venv "$scratch/venv"
    "$scratch/venv/bin/pip" install --quiet "torch==$TORCH" "numpy==$NUMPY" omegaconf hypothesis pytest
    "$scratch/venv/bin/pip" install --quiet --no-deps -e .
    "$scratch/venv/bin/python" -m pytest -q -k "not verl_combines" tests/core tests/test_settings.py \
        tests/estimators/test_worked_example.py tests/estimators/test_compositions.py
    rm -rf "$scratch/venv"
done
