#!/usr/bin/env bash
# Train the model of make_real_task.py with the recipe of its task, on the CPU: 4 questions x 8 answers a step.
#
#   scripts/evidence/train_real_task.sh gsm8k grpo 1         # a task, an arm of its recipe and a seed
#   scripts/evidence/train_real_task.sh gsm8k gdpo 1 trainer.val_before_train=False trainer.total_training_steps=50
#   scripts/evidence/train_real_task.sh tools gdpo 1         # goes on from its last checkpoint when called again
#
# Variables: TASK_DIR, the folder of make_real_task.py; OUTPUT_DIR; STEPS; PRESET, for an arm with another estimator;
# PRECISION, bf16 as on a GPU (the default of gsm8k where this processor multiplies it fast) or fp32 (that of tools).
set -euo pipefail
cd "$(dirname "$0")/../.."

[[ $# -ge 3 && $1 =~ ^(gsm8k|tools)$ && $3 =~ ^[0-9]+$ ]] || {
  sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
  exit 2
}
task=$1 arm=$2 seed=$3
shift 3
steps=${STEPS:-}
unset STEPS # run.sh refuses it

if [[ $task == gsm8k ]]; then
  TASK_DIR=$(realpath -m "${TASK_DIR:-outputs/real/gsm8k}") recipe=gsm8k steps=${steps:-30} validation=test200
  PRECISION=${PRECISION:-$("${PYTHON:-python}" -c 'import torch; print("bf16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "fp32")')}
  own=(data.max_prompt_length=320 data.max_response_length=160 trainer.save_freq=-1)
else
  TASK_DIR=$(realpath -m "${TASK_DIR:-outputs/real/tools-mixed}") recipe=tool_calling steps=${steps:-40} validation=test
  PRECISION=${PRECISION:-fp32}
  # No arm has KL in the reward, as gdpo has none.
  own=(data.max_prompt_length=448 data.max_response_length=200 trainer.save_freq=4 algorithm.use_kl_in_reward=False)
  # A prompt is computed once for its 8 answers; one with the longest fits into a micro-batch.
  own+=(++algorithm.verl_ext.share_prompts=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048)
  # Blocks below 32 MB stay in the process: the update takes a quarter less time, and some gigabytes more of memory. So
  # the rollout generates 32 answers at once: with more it grew until Ray ended it in the validation.
  memory=ray_kwargs.ray_init.runtime_env.env_vars.MALLOC
  own+=("++${memory}_MMAP_THRESHOLD_='33554432'" "++${memory}_TRIM_THRESHOLD_='2000000000'")
  own+=(actor_rollout_ref.rollout.max_num_seqs=32)
fi
export OUTPUT_DIR=${OUTPUT_DIR:-$TASK_DIR/runs/$arm-seed-$seed}
preset=${PRESET:-$([[ $arm == grpo* ]] && echo cpu || echo "[cpu,${arm%%-*}]")}
declare -A TORCH=([bf16]=bfloat16 [fp32]=float32)
[[ -n ${TORCH[$PRECISION]:-} ]] || {
  echo "PRECISION=$PRECISION: valid are bf16 and fp32" >&2
  exit 2
}

# Two passes over the answers less: no model of reference, and the log-probabilities of the rollout. One update a step.
exec "recipes/$recipe/run.sh" "$arm" \
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
