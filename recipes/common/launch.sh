# Sourced by the recipes' run.sh. A recipe sets its variables and groups of overrides and ends with
#
#   launch "${groups[@]}" "$@"
#
# Variables of every recipe, besides its own:
#
#   ALGORITHM   grpo, or an estimator of this package (default: gdpo)
#   MODEL_PATH  a model on the hub, or a folder
#   DATA_DIR    where prepare_data.py wrote; TRAIN_FILES and VAL_FILES name other files
#   OUTPUT_DIR  checkpoints and metrics.jsonl
#   NNODES, NGPUS_PER_NODE
#   LOGGER      for example [console,file,wandb]
#   DEVICE      gpu, or cpu: verl's real pipeline with the embedded rollout, for tiny models
#   PYTHON      the interpreter (default: python)
#   DRY_RUN=1   print the command and stop

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

fail() {
  echo "$(basename "$(dirname "$0")")/$(basename "$0"): $1" >&2
  exit 2
}

# one_of NAME VALUE...: the variable must hold one of the values.
one_of() {
  local name=$1 value
  shift
  for value in "$@"; do
    [[ ${!name} != "$value" ]] || return 0
  done
  fail "$name is '${!name}', valid: $(printf '%s, ' "$@" | sed 's/, $//')"
}

ALGORITHM=${ALGORITHM:-gdpo}
DEVICE=${DEVICE:-gpu}
PYTHON=${PYTHON:-python}
NNODES=${NNODES:-1}
LOGGER=${LOGGER:-[console,file]}
# The estimators in the package's list; compose has no default steps.
mapfile -t ESTIMATORS < <(sed -n 's/^ *"\([a-z0-9_]*\)": "verl_ext\.estimators\..*/\1/p' "$ROOT/verl_ext/registry.py" | grep -vx compose)
one_of ALGORITHM grpo "${ESTIMATORS[@]}"
one_of DEVICE gpu cpu
NGPUS_PER_NODE=${NGPUS_PER_NODE:-$([[ $DEVICE == cpu ]] && echo 1 || echo 8)}

# The preset of an estimator sets the loss that it needs and adds its settings; verl's own grpo has none.
presets=()
[[ $DEVICE == gpu ]] || presets+=(cpu)
[[ $ALGORITHM == grpo ]] || presets+=("$ALGORITHM")

# verl's default is dual clip (arXiv 1912.09729) at 3. For experiments without it: a bound that no probability ratio
# reaches.
NO_DUAL_CLIP=1e6

# What needs a GPU; +verl_ext=cpu replaces all of it.
gpu=()
if [[ $DEVICE == gpu ]]; then
  gpu=(
    actor_rollout_ref.model.use_remove_padding=True
    actor_rollout_ref.model.enable_gradient_checkpointing=True
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.tensor_model_parallel_size="${ROLLOUT_TP:-1}"
    actor_rollout_ref.rollout.gpu_memory_utilization="${GPU_MEMORY_UTILIZATION:-0.6}"
  )
fi

# keys NAME...: the rewards to use; their curves are logged as well.
keys() {
  local IFS=,
  echo "++algorithm.rewards.keys=[$*]"
}

# accuracy KEY [THRESHOLD]: the reward that dgpo and hadw use as the accuracy; other estimators need none.
accuracy() {
  [[ $ALGORITHM == dgpo || $ALGORITHM == hadw ]] || return 0
  echo "algorithm.rewards.accuracy_key=$1"
  [[ $# -eq 1 ]] || echo "algorithm.rewards.accuracy_threshold=$2"
}

# make_ready: check the data, and move the metrics of an earlier start away, because verl's logger overwrites the file.
make_ready() {
  local file files
  IFS=, read -ra files <<<"$(tr -d '[]' <<<"$TRAIN_FILES,$VAL_FILES")"
  for file in "${files[@]}"; do
    [[ -e $file || $file == *://* ]] ||
      fail "$file does not exist: make it with prepare_data.py next to this script, or name other files with TRAIN_FILES, VAL_FILES"
  done
  mkdir -p "$(dirname "$VERL_FILE_LOGGER_PATH")"
  if [[ -s $VERL_FILE_LOGGER_PATH ]]; then
    mkdir -p "$OUTPUT_DIR/earlier"
    mv "$VERL_FILE_LOGGER_PATH" "$OUTPUT_DIR/earlier/metrics-$(date -r "$VERL_FILE_LOGGER_PATH" +%Y%m%d-%H%M%S).jsonl"
  fi
}

launch() {
  local list
  list=$(IFS=,; echo "${presets[*]}")
  OUTPUT_DIR=$(realpath -m "$OUTPUT_DIR")
  export VERL_FILE_LOGGER_PATH=${VERL_FILE_LOGGER_PATH:-$OUTPUT_DIR/metrics.jsonl}
  local command=("$PYTHON" -u -m verl.trainer.main_ppo)
  [[ -z $list ]] || command+=("+verl_ext=[$list]")
  command+=(
    algorithm.adv_estimator="$ALGORITHM"
    data.train_files="$TRAIN_FILES"
    data.val_files="$VAL_FILES"
    actor_rollout_ref.model.path="$MODEL_PATH"
    # Micro-batches by tokens, so that no size must divide the rows of a rank.
    actor_rollout_ref.actor.use_dynamic_bsz=True
    "${gpu[@]}"
    trainer.nnodes="$NNODES"
    trainer.n_gpus_per_node="$NGPUS_PER_NODE"
    trainer.logger="$LOGGER"
    trainer.project_name="$PROJECT_NAME"
    trainer.experiment_name="$EXPERIMENT_NAME"
    trainer.default_local_dir="$OUTPUT_DIR/checkpoints"
    # The trainer may run on another node, which does not have the environment of this shell.
    ++ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH="$VERL_FILE_LOGGER_PATH"
    "$@"
  )
  if [[ -n ${DRY_RUN:-} ]]; then
    printf '%q ' "${command[@]}"
    echo
    return
  fi
  # `--cfg job` (or -c) only prints the configuration.
  [[ " $* " =~ \ (--cfg|-c)[\ =] ]] || make_ready
  exec "${command[@]}"
}
