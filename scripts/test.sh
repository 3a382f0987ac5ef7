#!/usr/bin/env bash
# Create the environment and run all checks: lint, types, unit tests on both supported versions of verl, with the oldest
# numpy and with other Pythons, and runs of the whole pipeline on the CPU.
#
#   scripts/test.sh                everything except the slow tests, as in CI
#   scripts/test.sh --quick        lint; types and tests of files that changed since the last commit; tests without verl
#   scripts/test.sh --fast         lint, types and unit tests
#   scripts/test.sh --slow         everything including the slow tests
#   scripts/test.sh -- ARGS        only pytest with these arguments, in the environment
set -euo pipefail
cd "$(dirname "$0")/.."

LEVEL=normal
case ${1:-} in
    --quick | --fast | --slow) LEVEL=${1#--} ;;
    --) LEVEL=only && shift ;;
    "") ;;
    *)
        sed -n '2,10s/^# \{0,1\}//p' "$0" >&2
        exit 2
        ;;
esac

# pip leaves compiling to the first import. Without bytecode files, each of the processes below compiles everything.
unset PYTHONDONTWRITEBYTECODE
source scripts/environment.sh
make_environment .venv cpu,dev scripts/constraints.txt
export PATH="$PWD/.venv/bin:$PATH"

if [ "$LEVEL" = only ]; then
    exec python -m pytest "$@"
fi

echo "== lint"
ruff check .
ruff format --check .
lint-imports

changed() { # PATTERN of git: existing files that differ from the last commit
    { git diff --name-only --diff-filter=d HEAD -- "$1" && git ls-files --others --exclude-standard -- "$1"; } | sort -u
}

if [ "$LEVEL" = quick ]; then
    echo "== types of changed files"
    mapfile -t CHANGED < <(changed 'verl_ext/*.py')
    if ((${#CHANGED[@]})); then mypy --follow-imports=silent "${CHANGED[@]}"; fi
    echo "== tests without verl, tests of the documents, and changed tests"
    # tests/core is listed as files, because pytest would run a file twice if its folder is listed as well.
    mapfile -t TESTS < <({
        ls tests/core/test_*.py tests/estimators/test_worked_example.py tests/estimators/test_compos*.py \
            tests/estimators/test_custom_steps.py tests/test_{settings,docs,docs_generated,language,public_api}.py
        changed 'tests/*test_*.py' | grep -E '(^|/)test_[^/]*\.py$' || true
    } | sort -u)
    # The tests that import verl are excluded, because the import takes seconds.
    OMP_NUM_THREADS=1 exec python -m pytest -q -n 2 --dist loadfile -k "not verl_combines and not file_of_the_pages" \
        -m "not slow and not end_to_end" "${TESTS[@]}"
fi
echo "== types and docs"
mypy &
TYPES=$!
# There is no --quiet, because --strict would then count no warnings.
LOG=$(NO_MKDOCS_2_WARNING=1 mkdocs build --strict --config-file docs/mkdocs.yml 2>&1) || {
    echo "$LOG" >&2
    wait "$TYPES" || true
    exit 1
}
wait "$TYPES"

echo "== unit tests, verl $(python -c 'from importlib.metadata import version; print(version("verl"))')"
# Keep the tests of a file together, because many of them share one Ray.
SHARE=(-n 2 --dist loadfile)
# Two processes share the cores, so more threads per process would wait for one another.
export OMP_NUM_THREADS=1
python -m pytest "${SHARE[@]}" -m "not slow and not end_to_end"

OLDEST=$(python -c 'from verl_ext.hooks import TESTED; print(TESTED[0])')
OLD=.venv/verl-$OLDEST
if [ ! -d "$OLD/verl" ]; then
    python -m pip install --quiet --no-deps --target "$OLD" "verl==$OLDEST"
fi
echo "== verl $OLDEST"
scripts/test_against.sh "$OLD" --python .venv/bin/python

OLDEST_NUMPY=1.26.0 # of the requirements in pyproject.toml
OLD=.venv/numpy-$OLDEST_NUMPY
if [ ! -d "$OLD/numpy" ]; then
    python -m pip install --quiet --no-deps --only-binary :all: --target "$OLD" "numpy==$OLDEST_NUMPY"
fi
echo "== tensors, numpy $OLDEST_NUMPY"
# verl is not tested with this numpy, because its pandas needs a newer one. The next stage tests code without torch.
PYTHONPATH=$(cd "$OLD" && pwd) python -m pytest tests/core/test_row_index.py tests/estimators/test_worked_example.py

echo "== core and estimators without torch, with other Pythons and with the oldest and the newest numpy"
TORCH=none scripts/test_pure.sh

if [ "$LEVEL" = fast ]; then
    exit 0
fi
unset OMP_NUM_THREADS
echo "== the whole pipeline on the CPU"
# Two tests run at the same time, because a run mostly waits for its processes to start. The longest tests run first.
python -m pytest -n 2 --dist load --maxschedchunk 1 -m "end_to_end and not slow" --durations=20 tests/end_to_end
if [ "$LEVEL" = slow ]; then
    echo "== slow tests"
    BFCL=.venv/bfcl
    [ -x "$BFCL/bin/pip" ] || python -m venv "$BFCL"
    "$BFCL/bin/pip" install --quiet --disable-pip-version-check -c recipes/tool_calling/bfcl/constraints.txt \
        bfcl-eval soundfile transformers pyarrow
    export BFCL_PYTHON=$BFCL/bin/python
    python -m pytest -k template_is_taken tests/recipes/test_bfcl.py
    python -m pytest -m slow --durations=0
fi
