#!/usr/bin/env bash
# Try every recipe on one GPU, in about ten minutes: two steps with vLLM, a checkpoint, and a third step after a resume.
#
#   recipes/gpu_check.sh [OVERRIDE...]
#
# MODEL is Qwen/Qwen2.5-0.5B-Instruct by default, for which a card of 24 GB and 12 GB of disk should do. Data that are not
# in this folder's data/ are made or downloaded. Without flash-attn add the two settings of the page On a GPU.
set -euo pipefail
recipes=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python}

for task in quickstart gsm8k math; do # the quickstart's data stand in for those of tool calling
  [[ -d data/$task ]] || "$python" "$recipes/$task/prepare_data.py"
done

check() { # TASK ARM [OVERRIDE...]
  local task=$1 arm=$2 folder=outputs/gpu_check/$1-$2 steps
  echo "== $task $arm"
  rm -rf "$folder"
  for steps in 2 3; do
    OUTPUT_DIR=$folder "$recipes/$task/run.sh" "$arm" \
      actor_rollout_ref.model.path="${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}" \
      actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.rollout.n=4 \
      actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048 actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \
      data.train_batch_size=8 data.max_prompt_length=512 data.max_response_length=256 \
      trainer.n_gpus_per_node=1 trainer.val_before_train=False trainer.test_freq=-1 trainer.save_freq=2 \
      trainer.total_epochs=5 "${@:3}" trainer.total_training_steps=$steps
  done
  grep -q '"step":2,' "$folder"/earlier/*.jsonl
  grep -q '"step":3,' "$folder/metrics.jsonl"
  if grep -q '"step":[12],' "$folder/metrics.jsonl"; then
    echo "$task $arm: the second start trained from the beginning, not from the checkpoint" >&2
    exit 1
  fi
  rm -rf "$folder/checkpoints"
}

check gsm8k gdpo "$@"
check math hadw "$@"
check tool_calling gdpo data.train_files=data/quickstart/train.parquet data.val_files=data/quickstart/val.parquet "$@"
echo "every recipe has trained, saved and resumed"
