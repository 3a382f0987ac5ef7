#!/usr/bin/env bash
# Smoke test of a recipe on one GPU: two steps with vLLM, a checkpoint, and a third step after resuming.
#
#   recipes/gpu_check.sh [OVERRIDE...]                                     # two starts of verl, about six minutes
#   RECIPES="tool_calling gsm8k math" recipes/gpu_check.sh [OVERRIDE...]   # six starts
#
# MODEL is a name on the Hugging Face Hub or a folder (default: Qwen/Qwen2.5-0.5B-Instruct). A card with 24 GB and 12 GB
# of disk space should be enough. tool_calling uses the data of the quickstart, which this script generates. The data of
# the other recipes are downloaded. Without flash-attn, the runs use the settings of the page "On a GPU". Without
# flashinfer, vLLM uses its own sampler.
set -euo pipefail
recipes=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python}
declare -A configs=([tool_calling]=gdpo [gsm8k]=gdpo [math]=hadw) data=([tool_calling]=quickstart)
model=actor_rollout_ref.model
lines=()
"$python" -c "import flash_attn" 2>/dev/null || lines=(
  ++$model.override_config.attn_implementation=sdpa $model.use_remove_padding=False
  ++algorithm.verl_ext.share_prompts=True actor_rollout_ref.actor.use_dynamic_bsz=True
)
"$python" -c "import flashinfer" 2>/dev/null || export VLLM_USE_FLASHINFER_SAMPLER=0

for task in ${RECIPES:-tool_calling}; do
  config=${configs[$task]} source=${data[$task]:-$task} folder=outputs/gpu_check/$task
  echo "== $task $config"
  [[ -d data/$source ]] || "$python" "$recipes/$source/prepare_data.py"
  own=()
  [[ $source == "$task" ]] || own=(data.train_files="data/$source/train.parquet" data.val_files="data/$source/val.parquet")
  rm -rf "$folder"
  for steps in 2 3; do
    OUTPUT_DIR=$folder "$recipes/$task/run.sh" "$config" \
      $model.path="${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}" \
      actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.rollout.n=4 \
      actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048 actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \
      data.train_batch_size=8 data.max_prompt_length=512 data.max_response_length=256 \
      actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.ref.strategy=fsdp2 \
      trainer.n_gpus_per_node=1 trainer.val_before_train=False trainer.test_freq=-1 trainer.save_freq=2 \
      trainer.total_epochs=5 "${own[@]}" "${lines[@]}" "$@" trainer.total_training_steps=$steps
  done
  grep -q '"step":2,' "$folder"/earlier/*.jsonl
  grep -q '"step":3,' "$folder/metrics.jsonl"
  if grep -q '"step":[12],' "$folder/metrics.jsonl"; then
    echo "error: $task $config: the second start did not resume from the checkpoint, but trained from step 1." >&2
    exit 1
  fi
  rm -rf "$folder/checkpoints"
done
echo "Each of these recipes trained, saved and resumed: ${RECIPES:-tool_calling}"
