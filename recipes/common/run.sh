#!/usr/bin/env bash
# Start verl with recipes/TASK/ARM.yaml. The run.sh of each recipe calls this script with its TASK.
#
# OUTPUT_DIR is the folder for checkpoints and metrics.jsonl, outputs/TASK/ARM by default.
set -euo pipefail
recipes=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
task=$1 arm=${2:-} usage="recipes/$1/run.sh ${2:-ARM}"

fail() {
  echo "$usage: $1" >&2
  exit 2
}

arms() {
  echo "recipes/$task/run.sh ARM [OVERRIDE...]: ARM is one of" >&2
  for file in "$recipes/$task"/[!b]*.yaml; do # all but base*.yaml
    printf '  %-17s %s\n' "$(basename "$file" .yaml)" "$(sed -n '2s/^# //p' "$file")" >&2
  done
  exit 2
}

# Variables that were read once, and the settings that replace them.
actor=actor_rollout_ref.actor rollout=actor_rollout_ref.rollout reward=reward.custom_reward_function.reward_kwargs
declare -A instead=(
  [MODEL_PATH]=actor_rollout_ref.model.path [TRAIN_FILES]=data.train_files [VAL_FILES]=data.val_files
  [TRAIN_BATCH_SIZE]=data.train_batch_size [MAX_PROMPT_LENGTH]=data.max_prompt_length
  [MAX_RESPONSE_LENGTH]=data.max_response_length [MINI_BATCH_SIZE]=$actor.ppo_mini_batch_size
  [LEARNING_RATE]=$actor.optim.lr [WEIGHT_DECAY]=$actor.optim.weight_decay [USE_KL_LOSS]=$actor.use_kl_loss
  [SAMPLES]=$rollout.n [ROLLOUT_TP]=$rollout.tensor_model_parallel_size
  [GPU_MEMORY_UTILIZATION]=$rollout.gpu_memory_utilization [MATCHING]=$reward.matching [STRICT]=$reward.strict
  [EPOCHS]=trainer.total_epochs [STEPS]=trainer.total_training_steps [SAVE_FREQ]=trainer.save_freq
  [TEST_FREQ]=trainer.test_freq [NNODES]=trainer.nnodes [NGPUS_PER_NODE]=trainer.n_gpus_per_node
  [LOGGER]=trainer.logger [PROJECT_NAME]=trainer.project_name [EXPERIMENT_NAME]=trainer.experiment_name
)
for name in "${!instead[@]}"; do
  [[ ! -v $name ]] || fail "$name is not read: unset it, and write $usage ${instead[$name]}=${!name}"
done
[[ ! -v DEVICE ]] || fail "DEVICE is not read: unset it, and write $usage 'verl_ext=[cpu,ESTIMATOR]'; with grpo verl_ext=cpu"
[[ ! -v DATA_DIR ]] || fail "DATA_DIR is not read: unset it, and write $usage data.train_files=... data.val_files=..."
[[ ! -v DRY_RUN ]] || fail "DRY_RUN is not read: unset it, and write $usage --cfg job"
for name in ALGORITHM SETUP LOSS DGAE DQW DQW_TEMP BALANCE KL_IN_REWARD NORM_BY_STD; do
  [[ ! -v $name ]] || { echo "$name is not read: unset it, and choose an arm" >&2 && arms; }
done
[[ -f $recipes/$task/$arm.yaml ]] || arms
shift 2

output=$(realpath -m "${OUTPUT_DIR:-outputs/$task/$arm}")
metrics=$output/metrics.jsonl
if [[ ! " $* " =~ \ (--cfg|-c)[\ =] ]]; then # they only print the configuration
  [[ -f data/$task/train.parquet || $* =~ data.train_files= ]] ||
    fail "data/$task/train.parquet is missing: run python $recipes/$task/prepare_data.py, or set data.train_files=... data.val_files=..."
  if [[ -s $metrics ]]; then # verl begins the file anew
    mkdir -p "$output/earlier"
    mv "$metrics" "$output/earlier/metrics-$(date -r "$metrics" +%Y%m%d-%H%M%S).jsonl"
  fi
  mkdir -p "$output"
fi
# The trainer may run on another node, which does not have the environment of this shell.
exec "${PYTHON:-python}" -u -m verl.trainer.main_ppo --config-path "$recipes" --config-name "$task/$arm" \
  trainer.default_local_dir="$output/checkpoints" \
  ++ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH="$metrics" "$@"
