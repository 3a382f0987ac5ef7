#!/usr/bin/env bash
# Compare the estimators on tool calling: the cold starts and all runs, one after the other.
#
#   OMP_NUM_THREADS=2 RAY_worker_niceness=0 scripts/evidence/tools.sh   # as many threads as cores
#
# Call it again after an interrupt: what is finished is skipped, and an interrupted run goes on from its last checkpoint.
# It takes many hours. Everything is fp32; the code must be that of one commit.
#
# - The mixed start is the first of at most three whose format is within .15 of .5 (32 questions x 4, temperature 1), else
#   the nearest. It is noted in mixed.txt.
# - The learning rate is that with which this model learnt GSM8K; it was not tuned here.
# - The primary measure is the mean of `format` over steps 11 to 40, per seed.
# - Entropy 0.001 and whitening over tokens (gdpo) are the recipe's. No run has a KL term. One update a step.
# - Greedy validation before RL is that of the first run from each start: the others begin with the same weights.
#
# Variables: OUT (default: outputs/evidence); STARTS (default: outputs/real), where make_real_task.py writes; MAKE,
# options for it.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python}
export PYTHON
OUT=$(realpath -m "${OUT:-outputs/evidence}")
STARTS=$(realpath -m "${STARTS:-outputs/real}")
PURE=$STARTS/tools-pure
RATE=1e-5
# A busy machine needs longer than Ray's 30 s.
export RAY_raylet_start_wait_time_s=${RAY_raylet_start_wait_time_s:-120}
mkdir -p "$OUT"

# run NAME FOLDER ARM SEED [OVERRIDE...]: train unless that is finished.
run() {
  local name=$1 folder=$2 arm=$3 seed=$4 more=() before
  shift 4
  local out=$OUT/$name
  [[ ! -e $out/finished ]] || return 0
  mkdir -p "$out"
  before=$(compgen -G "$OUT/${name%%-*}-*/validation/0.jsonl" || true)
  [[ -z $before ]] || more=(trainer.val_before_train=False)
  export TASK_DIR=$folder OUTPUT_DIR=$out
  local command=(scripts/evidence/train_real_task.sh tools "$arm" "$seed" actor_rollout_ref.actor.optim.lr="$RATE"
    "${more[@]}" "$@")
  {
    date -u +%FT%TZ
    git rev-parse HEAD
    lscpu | grep 'Model name'
    echo "${command[@]}"
  } >>"$out/starts.txt"
  "$PYTHON" -m pip freeze --disable-pip-version-check >"$out/versions.txt" 2>/dev/null
  "${command[@]}" --cfg job >"$out/config.yaml" 2>/dev/null
  "${command[@]}" >>"$out/log.txt" 2>&1
  # Weights stay; the rest of a checkpoint is only needed to go on.
  find "$out" -name 'optim_*.pt' -delete
  date -u +%FT%TZ >"$out/finished"
}

# start KIND FOLDER SEED: make a cold start unless it is there.
start() {
  # shellcheck disable=SC2086
  "$PYTHON" scripts/evidence/make_real_task.py tools --start "$1" --folder "$2" --seed "$3" ${MAKE:-} >>"$OUT/starts.log" 2>&1
}

# distance FOLDER: of the format at temperature 1 from .5.
distance() {
  "$PYTHON" -c 'import json, sys
print(abs(json.load(open(sys.argv[1] + "/samples.json"))["1.0"]["means"]["format"] - 0.5))' "$1"
}

if [[ ! -s $OUT/mixed.txt ]]; then
  for seed in 0 1 2; do
    folder=$STARTS/tools-mixed
    [[ $seed == 0 ]] || folder+=-$seed
    start mixed "$folder" "$seed"
    found=$(distance "$folder")
    echo "$found $folder"
    ! awk "BEGIN { exit !($found <= 0.15) }" || break
  done | sort -g >"$OUT/mixed_starts.txt"
  head -n 1 "$OUT/mixed_starts.txt" | cut -d ' ' -f 2 >"$OUT/mixed.txt"
fi
MIXED=$(cat "$OUT/mixed.txt")
for seed in 1 2 3; do
  run "mixed-grpo-$seed" "$MIXED" grpo-clean "$seed"
  run "mixed-gdpo-$seed" "$MIXED" gdpo "$seed"
done
start pure "$PURE" 0
run pure-grpo-1 "$PURE" grpo-clean 1
run pure-gdpo-1 "$PURE" gdpo 1
run mixed-dgpo-1 "$MIXED" dgpo 1
run mixed-hadw-1 "$MIXED" hadw 1
run mixed-drgrpo-1 "$MIXED" drgrpo 1
run mixed-grpo_nostd-1 "$MIXED" grpo-nostd 1
