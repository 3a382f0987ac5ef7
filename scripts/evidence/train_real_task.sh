#!/usr/bin/env bash
# Train the model of make_real_task.py on GSM8K, with the recipe's script, on the CPU: 30 steps of 4 questions x 8 answers.
#
#   scripts/evidence/train_real_task.sh grpo 1                       # an arm of recipes/gsm8k and a seed
#   scripts/evidence/train_real_task.sh gdpo 1 trainer.val_before_train=False trainer.total_training_steps=50
#
# Variables: TASK, the folder of make_real_task.py; OUTPUT_DIR; STEPS; PRECISION, bf16 as on a GPU (the default where this
# processor multiplies it fast) or fp32.
set -euo pipefail
cd "$(dirname "$0")/../.."

[[ $# -ge 2 && $2 =~ ^[0-9]+$ ]] || {
  sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
  exit 2
}
arm=$1 seed=$2
shift 2

TASK=$(realpath -m "${TASK:-outputs/real/gsm8k}")
steps=${STEPS:-30}
unset STEPS # run.sh refuses it
export OUTPUT_DIR=${OUTPUT_DIR:-$TASK/runs/$arm-seed-$seed}
preset=$([[ $arm == grpo ]] && echo cpu || echo "[cpu,$arm]")

PRECISION=${PRECISION:-$("${PYTHON:-python}" -c 'from verl_ext.cpu.sizes import is_fast; print("bf16" if is_fast("bf16") else "fp32")')}
declare -A TORCH=([bf16]=bfloat16 [fp32]=float32)
[[ -n ${TORCH[$PRECISION]:-} ]] || {
  echo "PRECISION=$PRECISION: valid are bf16 and fp32" >&2
  exit 2
}

# Two passes over the answers less: no model of reference, and the log-probabilities of the rollout.
exec recipes/gsm8k/run.sh "$arm" \
  verl_ext="$preset" \
  data.train_files="$TASK/train.parquet" \
  data.val_files="$TASK/test200.parquet" \
  data.train_batch_size=4 \
  data.max_prompt_length=320 \
  data.max_response_length=160 \
  data.seed="$seed" \
  algorithm.rollout_correction.bypass_mode=True \
  actor_rollout_ref.model.path="$TASK/model" \
  actor_rollout_ref.actor.ppo_mini_batch_size=4 \
  actor_rollout_ref.actor.optim.lr=1e-5 \
  actor_rollout_ref.actor.use_kl_loss=False \
  actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype="$PRECISION" \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.dtype="${TORCH[$PRECISION]}" \
  actor_rollout_ref.rollout.seed="$seed" \
  trainer.total_training_steps="$steps" \
  trainer.save_freq=-1 \
  trainer.test_freq="$steps" \
  trainer.rollout_data_dir="$OUTPUT_DIR/rollouts" \
  trainer.validation_data_dir="$OUTPUT_DIR/validation" \
  ++algorithm.verl_ext.dump_dir="$OUTPUT_DIR/dump" \
  "$@"
