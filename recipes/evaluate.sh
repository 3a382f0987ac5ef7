#!/usr/bin/env bash
# Evaluate a model on the validation set of an arm, with verl's rollout and the reward of the recipe.
#
#   recipes/evaluate.sh gsm8k gdpo outputs/gsm8k/gdpo/checkpoints/global_step_233   # on as many GPUs as in training
#   recipes/evaluate.sh math hadw merged                                            # a model in Hugging Face's format
#   PASS_SAMPLES=16 recipes/evaluate.sh gsm8k gdpo merged data.val_files=more.parquet
#
# Every question gets one greedy answer, and PASS_SAMPLES sampled ones for pass@k. Answers and summary.json go to
# EVALUATION_DIR, by default outputs/evaluation/TASK/ARM/MODEL.
set -euo pipefail
recipes=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

case ${1:-} in
  gsm8k) settings=() right=(--right correctness) ;;
  math) settings=(data.max_prompt_length=1024) right=(--right accuracy) ;; # no problem is too long
  tool_calling) settings=() right=(--right correctness --above 2.999) ;;
  *) set -- ;;
esac
if [[ $# -lt 3 ]]; then
  sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
task=$1 arm=$2 model=$3
shift 3

if [[ $(basename "$model") == global_step_* ]]; then
  settings+=(trainer.resume_mode=resume_path trainer.resume_from_path="$(realpath "$model")")
else
  settings+=(trainer.resume_mode=disable actor_rollout_ref.model.path="$model")
fi
folder=$(realpath -m "${EVALUATION_DIR:-outputs/evaluation/$task/$arm/$(basename "$model")}")

validate() { # NAME [OVERRIDE...]: nothing is trained, so no model of reference is needed
  dumps+=("$folder/$1")
  OUTPUT_DIR=$folder/$1 "$recipes/$task/run.sh" "$arm" trainer.val_only=True trainer.val_before_train=True \
    trainer.validation_data_dir="$folder/$1" actor_rollout_ref.actor.use_kl_loss=False \
    algorithm.use_kl_in_reward=False "${settings[@]}" "${@:2}"
}

dumps=()
validate greedy "$@"
sampled=actor_rollout_ref.rollout.val_kwargs
[[ -z ${PASS_SAMPLES:-} ]] ||
  validate sampled $sampled.do_sample=True $sampled.temperature=1.0 $sampled.top_p=1.0 $sampled.n="$PASS_SAMPLES" "$@"
"${PYTHON:-python}" "$recipes/common/evaluation.py" "${dumps[@]}" "${right[@]}" --json "$folder/summary.json"
