#!/usr/bin/env bash
# Evaluate a model on the validation set of a configuration, with verl's rollout and the reward of the recipe.
#
#   recipes/evaluate.sh TASK CONFIG MODEL [OVERRIDE...]
#   recipes/evaluate.sh gsm8k gdpo outputs/gsm8k/gdpo/checkpoints/global_step_233   # on as many GPUs as in training
#   recipes/evaluate.sh math hadw merged                                            # a model in Hugging Face's format
#   PASS_SAMPLES=16 recipes/evaluate.sh gsm8k gdpo merged data.val_files=more.parquet
#
# TASK is gsm8k, math or tool_calling. Every prompt gets one greedy response. With PASS_SAMPLES=K it also gets K sampled
# responses for pass@k. Responses and summary.json go to EVALUATION_DIR (default: outputs/evaluation/TASK/CONFIG/MODEL).
set -euo pipefail
recipes=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

case ${1:-} in
  gsm8k) settings=() accuracy=(--accuracy-key correctness) ;;
  math) settings=(data.max_prompt_length=1024) accuracy=(--accuracy-key accuracy) ;; # all problems fit
  tool_calling) settings=() accuracy=(--accuracy-key correctness --accuracy-threshold 2.999) ;;
  *) set -- ;;
esac
if [[ $# -lt 3 ]]; then
  sed -n '2,10s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
task=$1 config=$2 model=$3
shift 3

if [[ $(basename "$model") == global_step_* ]]; then
  settings+=(trainer.resume_mode=resume_path trainer.resume_from_path="$(realpath "$model")")
else
  settings+=(trainer.resume_mode=disable actor_rollout_ref.model.path="$model")
fi
folder=$(realpath -m "${EVALUATION_DIR:-outputs/evaluation/$task/$config/$(basename "$model")}")

validate() { # NAME [OVERRIDE...]: validation only, so no reference model is needed
  dumps+=("$folder/$1")
  OUTPUT_DIR=$folder/$1 "$recipes/$task/run.sh" "$config" trainer.val_only=True trainer.val_before_train=True \
    trainer.validation_data_dir="$folder/$1" actor_rollout_ref.actor.use_kl_loss=False \
    algorithm.use_kl_in_reward=False "${settings[@]}" "${@:2}"
}

dumps=()
validate greedy "$@"
sampled=actor_rollout_ref.rollout.val_kwargs
[[ -z ${PASS_SAMPLES:-} ]] ||
  validate sampled $sampled.do_sample=True $sampled.temperature=1.0 $sampled.top_p=1.0 $sampled.n="$PASS_SAMPLES" "$@"
"${PYTHON:-python}" "$recipes/common/evaluation.py" "${dumps[@]}" "${accuracy[@]}" --json "$folder/summary.json"
