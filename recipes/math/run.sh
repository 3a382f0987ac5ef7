#!/usr/bin/env bash
# Mathematics with one reward (accuracy of \boxed{...}): DGPO, HA-DW, Dr. GRPO and their baselines. See README.md.
#
#   ALGORITHM=dgpo recipes/math/run.sh                  # MathForge's DGPO; DGAE, DQW, DQW_TEMP and BALANCE ablate it
#   ALGORITHM=hadw LOSS=gspo recipes/math/run.sh        # HA-DW over grpo (default), gspo or dapo
#   ALGORITHM=drgrpo recipes/math/run.sh
#   ALGORITHM=grpo SETUP=hadw recipes/math/run.sh       # a baseline in the set-up of a paper
set -euo pipefail
export ALGORITHM=${ALGORITHM:-dgpo}
source "$(dirname "${BASH_SOURCE[0]}")/../common/launch.sh"

# The paper whose model, lengths, batch sizes and learning rate are used: mathforge, hadw or drgrpo.
case $ALGORITHM in
  hadw | drgrpo) SETUP=${SETUP:-$ALGORITHM} ;;
  *) SETUP=${SETUP:-mathforge} ;;
esac
one_of SETUP mathforge hadw drgrpo
# The loss beneath the advantages: grpo, gspo or dapo.
LOSS=${LOSS:-grpo}
one_of LOSS grpo gspo dapo
[[ $LOSS == grpo || $ALGORITHM == grpo || $ALGORITHM == hadw ]] ||
  fail "LOSS=$LOSS is for ALGORITHM=grpo and hadw, but ALGORITHM is $ALGORITHM, which has its own loss: remove LOSS"

case $SETUP in
  mathforge) # scripts_mathforge/Qwen2.5-Math-7B_MATH and its config_grpo.yaml
    MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-Math-7B}
    TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-32}
    MINI_BATCH_SIZE=${MINI_BATCH_SIZE:-$TRAIN_BATCH_SIZE}
    MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-512}
    MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-1024}
    LEARNING_RATE=${LEARNING_RATE:-5e-7}
    WEIGHT_DECAY=${WEIGHT_DECAY:-0}
    EPOCHS=${EPOCHS:-1}
    TEST_FREQ=${TEST_FREQ:-10}
    SAVE_FREQ=${SAVE_FREQ:-50} # ours: the script saves only the last model
    ;;
  hadw) # the paper; comments say where gspo_hadw.sh, the only non-empty script of its code, differs
    MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-4B-Base}
    TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-256}
    MINI_BATCH_SIZE=${MINI_BATCH_SIZE:-16}
    MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-1024} # the script: 2048
    MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-4096}
    LEARNING_RATE=${LEARNING_RATE:-1e-6}
    WEIGHT_DECAY=${WEIGHT_DECAY:-0.1} # the script: verl's default, 0.01; and no warm-up, where the paper has 10 steps
    # The script: 3, and at most 200 steps, which 3 epochs of MATH (87 steps) do not reach.
    EPOCHS=${EPOCHS:-$([[ $LOSS == dapo ]] && echo 9 || echo 3)}
    TEST_FREQ=${TEST_FREQ:-20}
    SAVE_FREQ=${SAVE_FREQ:-20}
    ;;
  drgrpo) # examples/qwen2.5-math-7b.sh of understand-r1-zero, with oat's defaults
    MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-Math-7B}
    TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-128}
    MINI_BATCH_SIZE=${MINI_BATCH_SIZE:-16}
    MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-1024}
    MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-3000}
    LEARNING_RATE=${LEARNING_RATE:-1e-6}
    WEIGHT_DECAY=${WEIGHT_DECAY:-0}
    EPOCHS=${EPOCHS:-20}
    TEST_FREQ=${TEST_FREQ:-16}
    SAVE_FREQ=${SAVE_FREQ:-50} # ours: the script saves no intermediate checkpoints
    ;;
esac
SAMPLES=${SAMPLES:-8}
DATA_DIR=${DATA_DIR:-$ROOT/data/math}
TRAIN_FILES=${TRAIN_FILES:-$DATA_DIR/train.parquet}
VAL_FILES=${VAL_FILES:-$DATA_DIR/math500.parquet}
# Ablations of DGPO: the mean absolute deviation, the weights by difficulty and their temperature, the balancing.
DGAE=${DGAE:-True}
DQW=${DQW:-True}
DQW_TEMP=${DQW_TEMP:-2.0}
BALANCE=${BALANCE:-auto}
one_of DGAE True False
one_of DQW True False
one_of BALANCE auto token sequence none
arm=$ALGORITHM
[[ $LOSS == grpo ]] || arm+=-$LOSS
[[ $SETUP == "$ALGORITHM" || $SETUP == mathforge ]] || arm+=-$SETUP
if [[ $ALGORITHM == dgpo ]]; then
  [[ $DGAE == True ]] || arm+=-nodgae
  [[ $DQW == True ]] || arm+=-nodqw
  [[ $DQW_TEMP == 2.0 ]] || arm+=-t$DQW_TEMP
  [[ $BALANCE == auto ]] || arm+=-balance_$BALANCE
else
  [[ $DGAE$DQW$DQW_TEMP$BALANCE == TrueTrue2.0auto ]] ||
    fail "DGAE, DQW, DQW_TEMP and BALANCE are for ALGORITHM=dgpo, but ALGORITHM is $ALGORITHM: remove them"
fi
PROJECT_NAME=${PROJECT_NAME:-math}
EXPERIMENT_NAME=${EXPERIMENT_NAME:-$arm-$(basename "$MODEL_PATH")}
OUTPUT_DIR=${OUTPUT_DIR:-$ROOT/outputs/$PROJECT_NAME/$EXPERIMENT_NAME}

data=(
  data.train_batch_size="$TRAIN_BATCH_SIZE"
  data.max_prompt_length="$MAX_PROMPT_LENGTH"
  data.max_response_length="$MAX_RESPONSE_LENGTH"
  data.filter_overlong_prompts=True
)

algorithm=("$(keys accuracy)")
# DGPO without difficulty weights does not use the accuracy.
[[ $DQW == False ]] || algorithm+=($(accuracy accuracy))
case $ALGORITHM in
  dgpo)
    algorithm+=(
      algorithm.dgpo.dgae="$DGAE"
      algorithm.dgpo.dqw="$DQW"
      algorithm.dgpo.dqw_temp="$DQW_TEMP"
      algorithm.dgpo.balance="$BALANCE"
    )
    ;;
esac

actor=(
  actor_rollout_ref.actor.ppo_mini_batch_size="$MINI_BATCH_SIZE"
  actor_rollout_ref.actor.optim.lr="$LEARNING_RATE"
  actor_rollout_ref.actor.optim.lr_scheduler_type=constant
  actor_rollout_ref.actor.optim.weight_decay="$WEIGHT_DECAY"
  actor_rollout_ref.actor.use_kl_loss=False
)
case $SETUP in
  mathforge)
    actor+=(
      actor_rollout_ref.actor.clip_ratio_c="$NO_DUAL_CLIP"
    )
    ;;
  hadw) # a fork of verl, with its dual clip
    actor+=(
      actor_rollout_ref.actor.optim.lr_warmup_steps=10
      actor_rollout_ref.actor.clip_ratio_c=3.0
    )
    ;;
  drgrpo)
    actor+=(
      "actor_rollout_ref.actor.optim.betas=[0.9,0.95]"
      actor_rollout_ref.actor.clip_ratio_c="$NO_DUAL_CLIP"
    )
    ;;
esac
case $LOSS in
  grpo)
    actor+=(actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.2)
    # DGPO averages over all tokens, HA-DW's GRPO over responses; Dr. GRPO's preset sets its own. MathForge's GRPO (TRL's
    # `bnpo`) averages over the tokens of each GPU's micro-batch; here over all tokens of the batch.
    if [[ $ALGORITHM != drgrpo ]]; then
      [[ $SETUP == hadw ]] && mean=seq-mean-token-mean || mean=token-mean
      [[ $ALGORITHM != dgpo ]] || mean=token-mean
      actor+=(actor_rollout_ref.actor.loss_agg_mode=$mean)
    fi
    ;;
  gspo) # HA-DW's script uses verl's default clip range; otherwise that of verl's GSPO example
    [[ $SETUP == hadw ]] && clip=(0.2 0.2) || clip=(3e-4 4e-4)
    actor+=(
      actor_rollout_ref.actor.policy_loss.loss_mode=gspo
      actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean
      actor_rollout_ref.actor.clip_ratio_low="${clip[0]}"
      actor_rollout_ref.actor.clip_ratio_high="${clip[1]}"
    )
    ;;
  dapo) # clip-higher, mean over tokens, and groups without variance are replaced
    actor+=(
      actor_rollout_ref.actor.loss_agg_mode=token-mean
      actor_rollout_ref.actor.clip_ratio_low=0.2
      actor_rollout_ref.actor.clip_ratio_high=0.28
      actor_rollout_ref.actor.clip_ratio_c=10.0
    )
    algorithm+=(
      algorithm.filter_groups.enable=True
      algorithm.filter_groups.metric=accuracy
    )
    ;;
esac

rollout=(
  actor_rollout_ref.rollout.n="$SAMPLES"
)

# HA-DW's script compares the text of the answers instead.
reward=(
  reward.custom_reward_function.path=pkg://verl_ext.rewards.boxed_math
)

trainer=(
  trainer.total_epochs="$EPOCHS"
  trainer.save_freq="$SAVE_FREQ"
  trainer.test_freq="$TEST_FREQ"
)

launch "${data[@]}" "${algorithm[@]}" "${actor[@]}" "${rollout[@]}" "${reward[@]}" "${trainer[@]}" "$@"
