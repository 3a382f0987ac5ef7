#!/usr/bin/env bash
# Build and test the files of a release: dist/*.tar.gz, dist/*.whl, and the release notes in build/notes.md.
#
#   scripts/release.sh [TAG]    TAG is v and the version; .github/workflows/release.yml passes it
#
# PYTHON       interpreter of a new environment outside the clone, in which the wheel is tested (default: python3)
# TORCH_INDEX  pip's --index-url for torch only (default: pip's configuration)
set -euo pipefail
cd "$(dirname "$0")/.."
version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' verl_ext/__init__.py)
[[ ${1:-v$version} == "v$version" ]] || {
  echo "error: the tag is $1, but verl_ext/__init__.py has version $version. Set the tag to v$version." >&2
  exit 1
}
mkdir -p build
sed -n "/^## $version\b/,/^## /{/^## /!p}" CHANGELOG.md >build/notes.md
[[ -s build/notes.md ]] || {
  echo "error: CHANGELOG.md has no section for $version. Add a section with the heading ## $version." >&2
  exit 1
}

home=$(mktemp -d)
trap 'rm -rf "$home"' EXIT
"${PYTHON:-python3}" -m venv "$home/env"
unset PYTHON PYTHONDONTWRITEBYTECODE # otherwise each process of a run compiles everything again
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
echo "The wheel of verl_ext $version was installed and trained two steps."
