#!/usr/bin/env bash
# Test this package against a version of verl, and put the results into docs/pages/versions.md.
#
#   scripts/against_verl.sh VERSION|newest|main    leaves a line of the table in build/against/
#   scripts/against_verl.sh table FILE...          writes the table at the end of the page, in place of the last one
set -euo pipefail
cd "$(dirname "$0")/.."
what=${1:?a version of verl, newest, main, or table}

if [[ $what == table ]]; then
  page=docs/pages/versions.md
  {
    sed '/^|/d' "$page"
    printf '\n%s\n' '| verl | version | day | | tests |'
    echo '|---|---|---|---|---|'
    sort -V "${@:2}"
  } | cat -s >"$page.new"
  mv "$page.new" "$page"
  exit
fi

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
version=$(sed -n 's/^Version: //p' "$folder"/verl-*.dist-info/METADATA)
mkdir -p build/against
status=0
scripts/test_against.sh "$folder" --python .venv/bin/python 2>&1 | tee build/against.log || status=$?
passed=$(sed -nE 's/^=+ (.*(passed|failed).*) in .*/\1/p' build/against.log | tail -n 1)
echo "| $what | $version | $(date -u +%F) | $([[ $status == 0 ]] && echo works || echo fails) | ${passed:-no test ended} |" |
  tee "build/against/$what"
exit $status
