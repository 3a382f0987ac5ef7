#!/usr/bin/env bash
# GSM8K with three rewards (correctness, integer, format): GDPO's experiment. See README.md.
#
#   recipes/gsm8k/run.sh                        # gdpo
#   ALGORITHM=grpo recipes/gsm8k/run.sh         # the baseline: the same except for the estimator
#   recipes/gsm8k/run.sh trainer.total_epochs=2 # any setting of verl
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common/launch.sh"

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-1.5B-Instruct}
DATA_DIR=${DATA_DIR:-$ROOT/data/gsm8k}
TRAIN_FILES=${TRAIN_FILES:-$DATA_DIR/train.parquet}
VAL_FILES=${VAL_FILES:-$DATA_DIR/test.parquet}
PROJECT_NAME=${PROJECT_NAME:-gsm8k}
EXPERIMENT_NAME=${EXPERIMENT_NAME:-$ALGORITHM-$(basename "$MODEL_PATH")}
OUTPUT_DIR=${OUTPUT_DIR:-$ROOT/outputs/$PROJECT_NAME/$EXPERIMENT_NAME}

TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-32}
SAMPLES=${SAMPLES:-16}
MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-512}
MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-1024}
LEARNING_RATE=${LEARNING_RATE:-5e-6}
EPOCHS=${EPOCHS:-1}
SAVE_FREQ=${SAVE_FREQ:-20} # the reference keeps only the last checkpoint: trainer.max_actor_ckpt_to_keep=1
TEST_FREQ=${TEST_FREQ:-25} # ours: the reference does not evaluate
# How numbers are read: `corrected`, or `reference` as in the reference code. See verl_ext/rewards/gsm8k.py.
STRICT=${STRICT:-corrected}
# The KL loss of the experiment. DGPO and Dr. GRPO have none.
case $ALGORITHM in
  dgpo | drgrpo) USE_KL_LOSS=${USE_KL_LOSS:-False} ;;
  *) USE_KL_LOSS=${USE_KL_LOSS:-True} ;;
esac
one_of STRICT corrected reference
one_of USE_KL_LOSS True False

data=(
  data.train_batch_size="$TRAIN_BATCH_SIZE"
  data.max_prompt_length="$MAX_PROMPT_LENGTH"
  data.max_response_length="$MAX_RESPONSE_LENGTH"
  data.filter_overlong_prompts=True
)

algorithm=(
  "$(keys correctness integer format)"
  $(accuracy correctness)
)
case $ALGORITHM in
  # As the reference: sequences are whitened, and its TRL code adds 1e-4 to the divisors.
  gdpo) algorithm+=(algorithm.gdpo.whiten=sequence algorithm.gdpo.epsilon=1e-4) ;;
esac

actor=(
  actor_rollout_ref.actor.ppo_mini_batch_size="$TRAIN_BATCH_SIZE" # one update per step
  actor_rollout_ref.actor.optim.lr="$LEARNING_RATE"
  actor_rollout_ref.actor.optim.lr_scheduler_type=cosine
  actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1
  actor_rollout_ref.actor.optim.weight_decay=0
  # verl reads these two, not clip_ratio.
  actor_rollout_ref.actor.clip_ratio_low=0.2
  actor_rollout_ref.actor.clip_ratio_high=0.2
  actor_rollout_ref.actor.clip_ratio_c="$NO_DUAL_CLIP"
  actor_rollout_ref.actor.use_kl_loss="$USE_KL_LOSS"
  actor_rollout_ref.actor.kl_loss_coef=0.04
  actor_rollout_ref.actor.kl_loss_type=low_var_kl
)
# The preset of drgrpo sets its own loss. The reference (TRL's `bnpo`) averages over the tokens of each micro-batch
# of 16 answers and then over micro-batches; verl 0.9 averages over all tokens of the batch.
[[ $ALGORITHM == drgrpo ]] || actor+=(actor_rollout_ref.actor.loss_agg_mode=token-mean)

rollout=(
  actor_rollout_ref.rollout.n="$SAMPLES"
)

reward=(
  reward.custom_reward_function.path=pkg://verl_ext.rewards.gsm8k
  ++reward.custom_reward_function.reward_kwargs.strict="$STRICT"
)

trainer=(
  trainer.total_epochs="$EPOCHS"
  trainer.save_freq="$SAVE_FREQ"
  trainer.test_freq="$TEST_FREQ"
)

launch "${data[@]}" "${algorithm[@]}" "${actor[@]}" "${rollout[@]}" "${reward[@]}" "${trainer[@]}" "$@"
