#!/usr/bin/env bash
# Train the model of make_real_task.py on GSM8K, with the recipe's script, on the CPU: 30 steps of 4 questions x 8 answers.
#
#   scripts/evidence/train_real_task.sh grpo 1                       # an estimator and a seed
#   scripts/evidence/train_real_task.sh gdpo 1 trainer.val_before_train=False trainer.total_training_steps=50
#
# Variables: TASK, the folder of make_real_task.py; OUTPUT_DIR; STEPS; PRECISION, bf16 as on a GPU (the default where this
# processor multiplies it fast) or fp32; and those of recipes/gsm8k/run.sh.
set -euo pipefail
cd "$(dirname "$0")/../.."

[[ $# -ge 2 && $2 =~ ^[0-9]+$ ]] || {
  sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
  exit 2
}
export ALGORITHM=$1
seed=$2
shift 2

TASK=$(realpath -m "${TASK:-outputs/real/gsm8k}")
STEPS=${STEPS:-30}
export DEVICE=cpu
export MODEL_PATH=${MODEL_PATH:-$TASK/model} DATA_DIR=${DATA_DIR:-$TASK}
export VAL_FILES=${VAL_FILES:-$TASK/test200.parquet}
export OUTPUT_DIR=${OUTPUT_DIR:-$TASK/runs/$ALGORITHM-seed-$seed}
export TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-4} SAMPLES=${SAMPLES:-8}
export MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-320} MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-160}
export LEARNING_RATE=${LEARNING_RATE:-1e-5}
# Two passes over the answers less: no reference model, and the rollout's own log-probabilities.
export USE_KL_LOSS=${USE_KL_LOSS:-False}
export SAVE_FREQ=${SAVE_FREQ:--1} TEST_FREQ=${TEST_FREQ:-$STEPS}

PRECISION=${PRECISION:-$("${PYTHON:-python}" -c 'from verl_ext.cpu.sizes import is_fast; print("bf16" if is_fast("bf16") else "fp32")')}
declare -A TORCH=([bf16]=bfloat16 [fp32]=float32)
[[ -n ${TORCH[$PRECISION]:-} ]] || {
  echo "PRECISION=$PRECISION: valid are bf16 and fp32" >&2
  exit 2
}

exec recipes/gsm8k/run.sh \
  algorithm.rollout_correction.bypass_mode=True \
  actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype="$PRECISION" \
  actor_rollout_ref.rollout.dtype="${TORCH[$PRECISION]}" \
  actor_rollout_ref.rollout.seed="$seed" \
  data.seed="$seed" \
  trainer.total_training_steps="$STEPS" \
  trainer.rollout_data_dir="$OUTPUT_DIR/rollouts" \
  trainer.validation_data_dir="$OUTPUT_DIR/validation" \
  ++algorithm.verl_ext.dump_dir="$OUTPUT_DIR/dump" \
  "$@"
