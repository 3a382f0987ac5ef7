#!/usr/bin/env bash
# Evaluate a model on a recipe's validation set with verl's own rollout and the recipe's reward.
#
#   CHECKPOINT=outputs/gsm8k/.../checkpoints/global_step_233 recipes/evaluate.sh gsm8k   # on as many GPUs as in training
#   MODEL_PATH=merged recipes/evaluate.sh math                                          # a model in Hugging Face format
#   MODEL_PATH=merged ALGORITHM=hadw recipes/evaluate.sh math                           # response length as in training
#   MODEL_PATH=merged PASS_SAMPLES=16 recipes/evaluate.sh gsm8k                         # pass@k as well
#
# One greedy answer per question, and PASS_SAMPLES sampled ones at TEMPERATURE for pass@k. Answers and summary go below
# EVALUATION_DIR. All variables of the recipe's run.sh apply; overrides of verl follow the name of the recipe.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

recipe=${1:-}
case $recipe in
  gsm8k) right=(--right correctness) ;;
  math) right=(--right accuracy) ;;
  tool_calling) right=(--right correctness --above 2.999) ;;
  *)
    echo "evaluate.sh: '$recipe' is not a recipe, valid: gsm8k, math, tool_calling" >&2
    exit 2
    ;;
esac
shift

PYTHON=${PYTHON:-python}
PASS_SAMPLES=${PASS_SAMPLES:-0}
TEMPERATURE=${TEMPERATURE:-1.0}
CHECKPOINT=${CHECKPOINT:-}
if [[ -n $CHECKPOINT ]]; then
  CHECKPOINT=$(realpath "$CHECKPOINT")
  [[ $(basename "$CHECKPOINT") == global_step_* && -d $CHECKPOINT/actor ]] || {
    echo "evaluate.sh: CHECKPOINT=$CHECKPOINT is not a folder global_step_N that contains actor/" >&2
    exit 2
  }
  start=(trainer.resume_mode=resume_path trainer.resume_from_path="$CHECKPOINT")
  EVALUATION_DIR=${EVALUATION_DIR:-$(dirname "$CHECKPOINT")/../evaluation/$(basename "$CHECKPOINT")}
else
  start=(trainer.resume_mode=disable)
  EVALUATION_DIR=${EVALUATION_DIR:-outputs/evaluation/$recipe/$(basename "${MODEL_PATH:-base}")}
fi
EVALUATION_DIR=$(realpath -m "$EVALUATION_DIR")

if [[ $recipe == math ]]; then
  # Use the lengths of the set-up that trained the model, and drop no problem for its length.
  case ${ALGORITHM:-} in
    hadw | drgrpo) export SETUP=${SETUP:-$ALGORITHM} ;;
  esac
  export MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-1024}
  unset LOSS DGAE DQW DQW_TEMP BALANCE
fi
# Nothing is trained, so no advantages and no reference model.
export ALGORITHM=grpo KL_IN_REWARD=False USE_KL_LOSS=False

validate() {
  local name=$1
  shift
  OUTPUT_DIR=$EVALUATION_DIR/$name "$here/$recipe/run.sh" "${start[@]}" trainer.val_only=True \
    trainer.val_before_train=True trainer.validation_data_dir="$EVALUATION_DIR/$name" "$@"
  dumps+=("$EVALUATION_DIR/$name")
}

dumps=()
validate greedy "$@"
if ((PASS_SAMPLES > 0)); then
  validate sampled actor_rollout_ref.rollout.val_kwargs.do_sample=True \
    actor_rollout_ref.rollout.val_kwargs.temperature="$TEMPERATURE" \
    actor_rollout_ref.rollout.val_kwargs.top_p=1.0 actor_rollout_ref.rollout.val_kwargs.n="$PASS_SAMPLES" "$@"
fi
[[ -z ${DRY_RUN:-} ]] || exit 0
"$PYTHON" -m verl_ext.recipes.evaluation "${dumps[@]}" "${right[@]}" --json "$EVALUATION_DIR/summary.json"
