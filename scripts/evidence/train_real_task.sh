#!/usr/bin/env bash
# Train the model of make_real_task.py with the recipe of its task on the CPU: 4 prompts x 8 responses per step.
#
#   scripts/evidence/train_real_task.sh gsm8k grpo 1         # a task, a config of its recipe and a seed
#   scripts/evidence/train_real_task.sh gsm8k gdpo 1 trainer.val_before_train=False trainer.total_training_steps=50
#   scripts/evidence/train_real_task.sh tools gdpo 1         # a second call resumes from the last checkpoint
#
# Variables: TASK_DIR, the folder of make_real_task.py; OUTPUT_DIR; STEPS; PRESET, for a config with another estimator;
# PRECISION, bf16 (default of gsm8k if this processor supports fast bf16) or fp32 (default of tools).
set -euo pipefail
cd "$(dirname "$0")/../.."

[[ $# -ge 3 && $1 =~ ^(gsm8k|tools)$ && $3 =~ ^[0-9]+$ ]] || {
  sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
  exit 2
}
task=$1 config=$2 seed=$3
shift 3
steps=${STEPS:-}
unset STEPS

if [[ $task == gsm8k ]]; then
  TASK_DIR=$(realpath -m "${TASK_DIR:-outputs/real/gsm8k}") recipe=gsm8k steps=${steps:-30} validation=test200
  PRECISION=${PRECISION:-$("${PYTHON:-python}" -c 'import torch; print("bf16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "fp32")')}
  own=(data.max_prompt_length=320 data.max_response_length=160 trainer.save_freq=-1)
else
  TASK_DIR=$(realpath -m "${TASK_DIR:-outputs/real/tools-mixed}") recipe=tool_calling steps=${steps:-40} validation=test
  PRECISION=${PRECISION:-fp32}
  # No config has KL in the reward, because gdpo has none.
  own=(data.max_prompt_length=448 data.max_response_length=200 trainer.save_freq=4 algorithm.use_kl_in_reward=False)
  # A prompt is computed once for its 8 responses. The longest prompt with its responses fits into a micro-batch.
  own+=(++algorithm.verl_ext.share_prompts=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048)
  # Blocks below 32 MB stay in the process, so that the update takes a quarter less time and some gigabytes more memory.
  # The rollout generates 32 responses at once, because with more its memory grew until Ray ended it in the validation.
  memory=ray_kwargs.ray_init.runtime_env.env_vars.MALLOC
  own+=("++${memory}_MMAP_THRESHOLD_='33554432'" "++${memory}_TRIM_THRESHOLD_='2000000000'")
  own+=(actor_rollout_ref.rollout.max_num_seqs=32)
fi
export OUTPUT_DIR=${OUTPUT_DIR:-$TASK_DIR/runs/$config-seed-$seed}
preset=${PRESET:-$([[ $config == grpo* ]] && echo cpu || echo "[cpu,${config%%-*}]")}
declare -A TORCH=([bf16]=bfloat16 [fp32]=float32)
[[ -n ${TORCH[$PRECISION]:-} ]] || {
  echo "error: PRECISION=$PRECISION is not valid. Set PRECISION=bf16 or PRECISION=fp32." >&2
  exit 2
}

# There is no reference model, and the log-probabilities of the rollout are used as the old ones, which saves two passes
# over the responses. There is one update per step.
exec "recipes/$recipe/run.sh" "$config" \
  verl_ext="$preset" \
  data.train_files="$TASK_DIR/train.parquet" \
  data.val_files="$TASK_DIR/$validation.parquet" \
  data.train_batch_size=4 \
  data.seed="$seed" \
  algorithm.rollout_correction.bypass_mode=True \
  actor_rollout_ref.model.path="$TASK_DIR/model" \
  actor_rollout_ref.actor.ppo_mini_batch_size=4 \
  actor_rollout_ref.actor.optim.lr=1e-5 \
  actor_rollout_ref.actor.use_kl_loss=False \
  actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype="$PRECISION" \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.dtype="${TORCH[$PRECISION]}" \
  actor_rollout_ref.rollout.seed="$seed" \
  trainer.total_training_steps="$steps" \
  trainer.max_actor_ckpt_to_keep=1 \
  trainer.test_freq="$steps" \
  trainer.rollout_data_dir="$OUTPUT_DIR/rollouts" \
  trainer.validation_data_dir="$OUTPUT_DIR/validation" \
  ++algorithm.verl_ext.dump_dir="$OUTPUT_DIR/dump" \
  "${own[@]}" "$@"
