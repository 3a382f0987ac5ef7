#!/usr/bin/env bash
# Make and try what a release publishes: dist/*.tar.gz, dist/*.whl, and the release's notes in build/notes.md.
#
#   scripts/release.sh [TAG]    TAG is v and the version; .github/workflows/release.yml gives it
#
# PYTHON       the interpreter (default: python3) of a new environment outside the clone, in which the wheel is tried
# TORCH_INDEX  pip's --index-url for torch only; default: pip's configuration
set -euo pipefail
cd "$(dirname "$0")/.."
version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' verl_ext/__init__.py)
[[ ${1:-v$version} == "v$version" ]] || {
  echo "the tag is $1, but verl_ext/__init__.py has the version $version" >&2
  exit 1
}
mkdir -p build
sed -n "/^## $version\b/,/^## /{/^## /!p}" CHANGELOG.md >build/notes.md
[[ -s build/notes.md ]] || {
  echo "CHANGELOG.md has no section ## $version" >&2
  exit 1
}

home=$(mktemp -d)
trap 'rm -rf "$home"' EXIT
"${PYTHON:-python3}" -m venv "$home/env"
unset PYTHON PYTHONDONTWRITEBYTECODE # each of a training's processes would compile everything anew
export PATH=$home/env/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1
pip install --quiet build twine check-wheel-contents
rm -rf dist
python -m build --outdir dist .
twine check --strict dist/*
check-wheel-contents dist/*.whl

echo "== the wheel, outside the clone"
torch=$(grep -o '^torch==[^; ]*' scripts/constraints.txt)
pip install --quiet ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$torch"
pip install --quiet --constraint scripts/constraints.txt "$(echo "$PWD"/dist/*.whl)[cpu]"
cd "$home"
python -m verl_ext doctor
verl-ext show gdpo algorithm.gdpo.scale=mad
verl-ext check +verl_ext=gdpo 'algorithm.rewards.keys=[correctness,format]' actor_rollout_ref.rollout.n=8
python -m verl_ext recipes
python recipes/quickstart/prepare_data.py
recipes/quickstart/run.sh gdpo trainer.total_training_steps=2 trainer.save_freq=2
grep -q '"step":2,' outputs/quickstart/gdpo/metrics.jsonl
echo "verl_ext $version: the wheel has trained two steps"
