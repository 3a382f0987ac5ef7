#!/usr/bin/env bash
# Test verl_ext against another version of verl: doctor, and the tests whose result depends on verl.
#
#   scripts/test_against.sh FOLDER                   FOLDER contains the package `verl`: a clone of verl, or the result
#                                                    of `pip install --no-deps --target FOLDER verl==VERSION`
#   scripts/test_against.sh FOLDER --python PYTHON   use this Python, which must have verl_ext with the extras cpu and
#                                                    dev, and install nothing
#   scripts/test_against.sh FOLDER [...] -- ARGS     pass these arguments to pytest
#
# All other packages, including Ray and torch, are those of the environment. A newer verl may need newer packages.
set -euo pipefail
here=$PWD
cd "$(dirname "$0")/.."

usage() {
  sed -n '2,10s/^# \{0,1\}//p' scripts/test_against.sh >&2
  exit 2
}

(($#)) && [[ $1 != -* ]] || usage
folder=$1
python=""
shift
if [[ ${1:-} == --python ]]; then
  (($# >= 2)) || usage
  python=$2
  shift 2
fi
if (($#)); then
  [[ $1 == -- ]] || usage
  shift
fi
[[ $folder == /* ]] || folder=$here/$folder
[[ $python != */* || $python == /* ]] || python=$here/$python
if [[ ! -f $folder/verl/__init__.py ]]; then
  echo "error: $folder/verl/__init__.py does not exist. Use a folder that contains the package verl." >&2
  exit 2
fi
if [[ -z $python ]]; then
  source scripts/environment.sh
  make_environment .venv cpu,dev scripts/constraints.txt
  python=.venv/bin/python
fi
folder=$(cd "$folder" && pwd)
export PYTHONPATH=$folder${PYTHONPATH:+:$PYTHONPATH}

# test_checkpoints does not use a trainer.
TESTS=(
  tests/integration/trainers --ignore tests/integration/trainers/test_checkpoints.py
  tests/integration/test_{missing_hooks,runs_without_verl_ext}.py
  tests/update/test_{rule,gradients,split,marks}.py
  tests/checks/test_{driver,doctor,loss_normalizers,losses}.py
  tests/cpu/test_plugin.py tests/estimators/test_against_verl.py
  tests/core/test_metrics.py::test_verl_combines_each_metric_by_the_last_word_of_its_name
)
status=0
echo "== doctor, verl $("$python" -W ignore -c 'import verl; print(verl.__version__)' 2>/dev/null | tail -n 1) in $folder"
"$python" -m verl_ext doctor 2>/dev/null || status=1
echo "== tests"
# Keep the tests of a file together, because many of them share one Ray.
"$python" -m pytest -n 2 --dist loadfile -m "not slow and not end_to_end" "${TESTS[@]}" "$@" || status=1
exit $status
