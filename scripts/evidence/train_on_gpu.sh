#!/usr/bin/env bash
# Train the model of make_real_task.py on tool calling on one GPU with vLLM: 4 prompts x 8 responses per step.
#
#   scripts/evidence/train_on_gpu.sh gdpo 21 algorithm.gdpo.whiten=sequence    # a config of the recipe, and a seed
#   scripts/evidence/train_on_gpu.sh grpo-clean 21
#
# Variables: TASK_DIR, the folder of make_real_task.py (default: outputs/real/tools-scarce-4); OUTPUT_DIR (default:
# TASK_DIR/gpu/CONFIG-SEED); STEPS (default: 30). Relative folders are those in the repository. No checkpoint is saved.
# The test entries are answered after the last step. CUDA graphs are off (enforce_eager), as in the runs of gpu_h200.md.
set -euo pipefail
cd "$(dirname "$0")/../.."

[[ $# -ge 2 && $2 =~ ^[0-9]+$ ]] || {
  sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
  exit 2
}
config=$1 seed=$2
shift 2
steps=${STEPS:-30}
unset STEPS
TASK_DIR=$(realpath -m "${TASK_DIR:-outputs/real/tools-scarce-4}")
OUTPUT_DIR=$(realpath -m "${OUTPUT_DIR:-$TASK_DIR/gpu/$config-$seed}")
export OUTPUT_DIR
actor=actor_rollout_ref.actor rollout=actor_rollout_ref.rollout model=actor_rollout_ref.model

# The settings for runs without flash-attn. verl_ext then computes a prompt once for its 8 responses.
packed=(
  ++$model.override_config.attn_implementation=sdpa
  $model.use_remove_padding=False
  ++algorithm.verl_ext.share_prompts=True
)

exec recipes/tool_calling/run.sh "$config" \
  data.train_files="$TASK_DIR/train.parquet" \
  data.val_files="$TASK_DIR/test.parquet" \
  data.train_batch_size=4 \
  data.seed="$seed" \
  data.max_prompt_length=448 \
  data.max_response_length=200 \
  algorithm.use_kl_in_reward=False \
  $model.path="$TASK_DIR/model" \
  $actor.strategy=fsdp2 \
  $actor.ppo_mini_batch_size=4 \
  $actor.ppo_max_token_len_per_gpu=8192 \
  $actor.optim.lr=1e-5 \
  $actor.use_kl_loss=False \
  $rollout.n=8 \
  $rollout.seed="$seed" \
  $rollout.gpu_memory_utilization=0.4 \
  $rollout.enforce_eager=True \
  trainer.n_gpus_per_node=1 \
  trainer.total_training_steps="$steps" \
  trainer.save_freq=-1 \
  trainer.val_before_train=False \
  trainer.test_freq="$steps" \
  trainer.rollout_data_dir="$OUTPUT_DIR/rollouts" \
  trainer.validation_data_dir="$OUTPUT_DIR/validation" \
  "${packed[@]}" "$@"
