#!/usr/bin/env bash
# Start verl with recipes/TASK/CONFIG.yaml. The run.sh of each recipe calls this script with its TASK.
#
# OUTPUT_DIR is the folder for checkpoints and metrics.jsonl (default: outputs/TASK/CONFIG).
set -euo pipefail
recipes=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
task=$1 config=${2:-} usage="recipes/$1/run.sh ${2:-CONFIG}"

fail() {
  echo "$usage: $1" >&2
  exit 2
}

configs() {
  echo "Usage: recipes/$task/run.sh CONFIG [OVERRIDE...]" >&2
  if [[ -n $config ]]; then
    echo "recipes/$task/$config.yaml does not exist. Use one of these configurations:" >&2
  else
    echo "CONFIG is one of:" >&2
  fi
  for file in "$recipes/$task"/[!b]*.yaml; do # all but base*.yaml
    printf '  %-17s %s\n' "$(basename "$file" .yaml)" "$(sed -n '2s/^# //p' "$file")" >&2
  done
  exit 2
}

[[ -f $recipes/$task/$config.yaml ]] || configs
shift 2

output=$(realpath -m "${OUTPUT_DIR:-outputs/$task/$config}")
metrics=$output/metrics.jsonl
if [[ ! " $* " =~ \ (--cfg|-c)[\ =] ]]; then # they only print the configuration
  [[ -f data/$task/train.parquet || $* =~ data.train_files= ]] ||
    fail "data/$task/train.parquet does not exist. Run python $recipes/$task/prepare_data.py, or set data.train_files and data.val_files."
  if [[ -s $metrics ]]; then # verl overwrites the file
    mkdir -p "$output/earlier"
    mv "$metrics" "$output/earlier/metrics-$(date -r "$metrics" +%Y%m%d-%H%M%S).jsonl"
  fi
  mkdir -p "$output"
fi
# The trainer may run on another node, which does not have the environment variables of this shell.
exec "${PYTHON:-python}" -u -m verl.trainer.main_ppo --config-path "$recipes" --config-name "$task/$config" \
  trainer.default_local_dir="$output/checkpoints" \
  ++ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH="$metrics" "$@"
