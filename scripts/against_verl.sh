#!/usr/bin/env bash
# Test verl_ext against a version of verl: a release, the newest release, or main.
#
#   scripts/against_verl.sh VERSION|newest|main
set -euo pipefail
cd "$(dirname "$0")/.."
what=${1:?Usage: scripts/against_verl.sh VERSION|newest|main}

source scripts/environment.sh
make_environment .venv cpu,dev scripts/constraints.txt
folder=.venv/verl-$what
rm -rf "$folder"
case $what in
  main) package=git+https://github.com/verl-project/verl ;;
  newest) package=verl ;;
  *) package=verl==$what ;;
esac
.venv/bin/python -m pip install --quiet --no-deps --target "$folder" "$package"
sed -n 's/^Version: /verl /p' "$folder"/verl-*.dist-info/METADATA
exec scripts/test_against.sh "$folder" --python .venv/bin/python
