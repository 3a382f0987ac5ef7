#!/usr/bin/env bash
# Tool calling with two rewards (correctness, format): GDPO's main experiment. See README.md.
#
#   recipes/tool_calling/run.sh                                        # gdpo
#   ALGORITHM=grpo recipes/tool_calling/run.sh                         # the published baseline, with KL in the reward
#   ALGORITHM=grpo KL_IN_REWARD=False recipes/tool_calling/run.sh      # like gdpo, except for the estimator
#   ALGORITHM=grpo NORM_BY_STD=False recipes/tool_calling/run.sh       # grpo without std
#   MODEL_PATH=Qwen/Qwen2.5-3B-Instruct recipes/tool_calling/run.sh    # the larger model
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common/launch.sh"

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-1.5B-Instruct}
DATA_DIR=${DATA_DIR:-$ROOT/data/tool_calling}
TRAIN_FILES=${TRAIN_FILES:-$DATA_DIR/train.parquet}
VAL_FILES=${VAL_FILES:-$DATA_DIR/test.parquet}
# The published GRPO run has KL in the reward, GDPO's has not. With False the estimator is the only difference.
KL_IN_REWARD=${KL_IN_REWARD:-$([[ $ALGORITHM == grpo ]] && echo True || echo False)}
NORM_BY_STD=${NORM_BY_STD:-True}
# `greedy` as in the reference code, `optimal` as in the paper. See verl_ext/rewards/tool_calling.py.
MATCHING=${MATCHING:-greedy}
one_of KL_IN_REWARD True False
one_of NORM_BY_STD True False
one_of MATCHING greedy optimal
arm=$ALGORITHM
[[ $ALGORITHM != grpo || $KL_IN_REWARD == True ]] || arm+=-clean
[[ $NORM_BY_STD == True ]] || arm+=-nostd
PROJECT_NAME=${PROJECT_NAME:-tool_calling}
EXPERIMENT_NAME=${EXPERIMENT_NAME:-$arm-$(basename "$MODEL_PATH")}
OUTPUT_DIR=${OUTPUT_DIR:-$ROOT/outputs/$PROJECT_NAME/$EXPERIMENT_NAME}

TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-512}
MINI_BATCH_SIZE=${MINI_BATCH_SIZE:-128}
SAMPLES=${SAMPLES:-4}
MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-2048}
MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-1024}
LEARNING_RATE=${LEARNING_RATE:-1e-6}
EPOCHS=${EPOCHS:-15}
# null: all epochs, 15 times 7 steps. The reference code stops one step early, after 104 of 105.
STEPS=${STEPS:-null}
SAVE_FREQ=${SAVE_FREQ:-5}
TEST_FREQ=${TEST_FREQ:-10}

data=(
  data.train_batch_size="$TRAIN_BATCH_SIZE"
  data.max_prompt_length="$MAX_PROMPT_LENGTH"
  data.max_response_length="$MAX_RESPONSE_LENGTH"
  data.truncation=left
)

algorithm=(
  "$(keys correctness format)"
  # Correctness is from -3 to 3; only 3 counts as right.
  $(accuracy correctness 2.999)
  algorithm.norm_adv_by_std_in_grpo="$NORM_BY_STD"
  algorithm.use_kl_in_reward="$KL_IN_REWARD"
  algorithm.kl_ctrl.kl_coef=0.001
)
case $ALGORITHM in
  gdpo) algorithm+=(algorithm.gdpo.whiten=token) ;; # like the reference, a fork of verl
esac

actor=(
  actor_rollout_ref.actor.ppo_mini_batch_size="$MINI_BATCH_SIZE"
  actor_rollout_ref.actor.optim.lr="$LEARNING_RATE"
  actor_rollout_ref.actor.optim.lr_scheduler_type=constant
  actor_rollout_ref.actor.optim.weight_decay=0.01
  # verl reads these two, not clip_ratio.
  actor_rollout_ref.actor.clip_ratio_low=0.2
  actor_rollout_ref.actor.clip_ratio_high=0.2
  actor_rollout_ref.actor.clip_ratio_c="$NO_DUAL_CLIP"
  actor_rollout_ref.actor.entropy_coeff=0.001
  actor_rollout_ref.actor.use_kl_loss=False
)
# The preset of drgrpo sets its own loss. The reference averages over the tokens of each micro-batch, adds these up and
# divides by 2, however many micro-batches there are; verl 0.9 averages over all tokens of a mini-batch.
[[ $ALGORITHM == drgrpo ]] || actor+=(actor_rollout_ref.actor.loss_agg_mode=token-mean)

rollout=(
  actor_rollout_ref.rollout.n="$SAMPLES"
)

reward=(
  reward.custom_reward_function.path=pkg://verl_ext.rewards.tool_calling
  ++reward.custom_reward_function.reward_kwargs.matching="$MATCHING"
)

trainer=(
  trainer.total_epochs="$EPOCHS"
  trainer.total_training_steps="$STEPS"
  trainer.save_freq="$SAVE_FREQ"
  trainer.test_freq="$TEST_FREQ"
)

launch "${data[@]}" "${algorithm[@]}" "${actor[@]}" "${rollout[@]}" "${reward[@]}" "${trainer[@]}" "$@"
