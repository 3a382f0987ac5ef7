#!/usr/bin/env bash
# Train the model of make_real_task.py with the recipe's script, on the CPU: 4 questions x 8 answers a step.
#
#   scripts/train_real_task.sh gsm8k grpo 1                 # a task, an estimator and a seed
#   scripts/train_real_task.sh gsm8k gdpo 1 trainer.val_before_train=False trainer.total_training_steps=50
#   scripts/train_real_task.sh tools gdpo 1                 # goes on from its last checkpoint when called again
#
# Variables: TASK_DIR, the folder of make_real_task.py; OUTPUT_DIR; STEPS; PRECISION, bf16 as on a GPU (the default of
# gsm8k where this processor multiplies it fast) or fp32 (the default of tools); and those of the recipe's run.sh.
set -euo pipefail
cd "$(dirname "$0")/.."

[[ $# -ge 3 && $1 =~ ^(gsm8k|tools)$ && $3 =~ ^[0-9]+$ ]] || {
  sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
  exit 2
}
task=$1
export ALGORITHM=$2
seed=$3
shift 3

export DEVICE=cpu
export TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-4} SAMPLES=${SAMPLES:-8}
export LEARNING_RATE=${LEARNING_RATE:-1e-5}
case $task in
  gsm8k)
    recipe=gsm8k
    TASK_DIR=$(realpath -m "${TASK_DIR:-outputs/real/gsm8k}")
    STEPS=${STEPS:-30}
    export VAL_FILES=${VAL_FILES:-$TASK_DIR/test200.parquet}
    export MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-320} MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-160}
    # With the rollout's own log-probabilities below, two passes over the answers less: no reference model.
    export USE_KL_LOSS=${USE_KL_LOSS:-False}
    export SAVE_FREQ=${SAVE_FREQ:--1}
    PRECISION=${PRECISION:-$("${PYTHON:-python}" -c 'from verl_ext.cpu.precision import is_fast; print("bf16" if is_fast("bf16") else "fp32")')}
    ;;
  tools)
    recipe=tool_calling
    TASK_DIR=$(realpath -m "${TASK_DIR:-outputs/real/tools-mixed}")
    export STEPS=${STEPS:-40}
    export MINI_BATCH_SIZE=${MINI_BATCH_SIZE:-$TRAIN_BATCH_SIZE} # one update a step
    export MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-448} MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-200}
    export KL_IN_REWARD=${KL_IN_REWARD:-False} # as gdpo has none
    export SAVE_FREQ=${SAVE_FREQ:-4}
    PRECISION=${PRECISION:-fp32}
    ;;
esac
export MODEL_PATH=${MODEL_PATH:-$TASK_DIR/model} DATA_DIR=${DATA_DIR:-$TASK_DIR}
export OUTPUT_DIR=${OUTPUT_DIR:-$TASK_DIR/runs/$ALGORITHM-seed-$seed}
export TEST_FREQ=${TEST_FREQ:-$STEPS}

declare -A TORCH=([bf16]=bfloat16 [fp32]=float32)
[[ -n ${TORCH[$PRECISION]:-} ]] || {
  echo "PRECISION=$PRECISION: valid are bf16 and fp32" >&2
  exit 2
}

exec "recipes/$recipe/run.sh" \
  algorithm.rollout_correction.bypass_mode=True \
  actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype="$PRECISION" \
  actor_rollout_ref.rollout.dtype="${TORCH[$PRECISION]}" \
  actor_rollout_ref.rollout.seed="$seed" \
  data.seed="$seed" \
  trainer.total_training_steps="$STEPS" \
  trainer.max_actor_ckpt_to_keep=1 \
  trainer.rollout_data_dir="$OUTPUT_DIR/rollouts" \
  trainer.validation_data_dir="$OUTPUT_DIR/validation" \
  ++algorithm.verl_ext.dump_dir="$OUTPUT_DIR/dump" \
  "$@"
