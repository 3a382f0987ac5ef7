# The other scripts of this folder source this file.
#
#   make_environment FOLDER EXTRAS CONSTRAINTS    create a virtual environment with verl_ext, its extras, and verl
#
# An existing environment is reused while the project's requirements stay the same.
# PYTHON       interpreter for the environment (default: python3); an environment with another version is an error
# TORCH_INDEX  pip's --index-url for torch only (default: pip's configuration)

python_version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }

check_python() {
  command -v "$1" >/dev/null || {
    echo "error: $1 was not found. Install Python 3.10, 3.11 or 3.12, or set PYTHON to its path." >&2
    return 1
  }
  [[ $(python_version "$1") =~ ^3\.1[012]$ ]] || {
    echo "error: $1 has Python $(python_version "$1"). Set PYTHON to a Python of version 3.10, 3.11 or 3.12." >&2
    return 1
  }
}

make_environment() {
  local folder=$1 extras=$2 constraints=$3 wanted torch extra there missing=""
  if [[ -n ${PYTHON:-} ]]; then
    check_python "$PYTHON" || return 1
    if there=$(python_version "$folder/bin/python" 2>/dev/null) && [[ $there != "$(python_version "$PYTHON")" ]]; then
      echo "error: $folder has Python $there, not the version of PYTHON=$PYTHON. Remove $folder, or unset PYTHON." >&2
      return 1
    fi
  fi
  wanted=$(cat "$constraints" pyproject.toml scripts/environment.sh | cksum)
  if [[ -f $folder/installed && $(head -n 1 "$folder/installed") == "$wanted" ]]; then
    for extra in ${extras//,/ }; do
      grep -qx "$extra" "$folder/installed" || missing=yes
    done
    [[ -n $missing ]] || return 0
  fi
  check_python "${PYTHON:-python3}" || return 1
  echo "Installing the packages into $folder"
  # An interrupted venv has Python but no pip.
  "$folder/bin/python" -m pip --version >/dev/null 2>&1 || "${PYTHON:-python3}" -m venv "$folder"
  # torch is installed before the packages that depend on it, because only torch uses TORCH_INDEX.
  torch=$(grep -o '^torch==[^; ]*' "$constraints")
  "$folder/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$torch"
  "$folder/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check --constraint "$constraints" --editable ".[$extras]"
  {
    echo "$wanted"
    { [[ -n $missing ]] && tail -n +2 "$folder/installed"; tr , '\n' <<<"$extras"; } | sort -u
  } >"$folder/installed.new"
  mv "$folder/installed.new" "$folder/installed"
}
