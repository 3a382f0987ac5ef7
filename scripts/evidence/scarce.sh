#!/usr/bin/env bash
# Tool calling from a start in which the recipe's form is rare: grpo, gdpo, and grpo with a weight on format.
#
#   OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive RAY_worker_niceness=0 scripts/evidence/scarce.sh
#
# Call it again after an interrupt: what is finished is skipped, and an interrupted run goes on from its last checkpoint.
#
# Written before the first run:
# - The start: some of the cold answers are in the recipe's form, the rest in the two other forms. Three shares were made:
#   an eighth (`scarce`), a quarter (`scarce-4`) and three eighths (`scarce-3-8`); the third was to be a sixteenth, but the
#   first two had too little format. start.py finds none of them right. An eighth has too little format (.027), and with
#   three eighths the recipe's form is the most likely one (greedy .844). A quarter misses one of the four conditions by
#   one group: format .109, greedy 0, and it varies in 15 of 32 groups where 16 were asked for. The runs begin there.
# - Arms: grpo (`grpo-clean`); gdpo with `whiten=sequence`, the paper's; weighted: grpo on the sum in which format has the
#   weight that gives it, on the start's samples, the share of the advantages' variance that it has under gdpo. It is
#   found once, by start.py, and noted in weight.txt.
# - 30 steps of 4 questions x 8 answers. Seeds 1 to 4, seeds outermost: the three arms of a seed see the same questions in
#   the same order and begin with the same model.
# - Primary measure: the mean of `format` over steps 1 to 30, gdpo minus grpo, by seed. It holds if all four differences
#   have one sign, their mean is at least .05, and its t-interval (95 %, 3 degrees of freedom) lies above 0.
# - Second: steps until the mean of five steps reaches .8. Third: both for gdpo against weighted.
# - Price: `correctness` over the same steps; correctness and BFCL's accuracy on the 200 test entries, greedy.
# - Expected: gdpo raises format in fewer steps than grpo and pays with correctness; weighted does about the same as gdpo,
#   which then has the merit of needing no such choice.
#
# Run: seeds 1 and 2 of all arms, with the test entries; seeds 3 and 4 of grpo and gdpo, from a start that was made anew on
# another processor, without them. real_tools.txt has the details. The rule's answer is no: its interval contains 0.
#
# The runs of two seeds come first, then their validation: the test answers are those of the last checkpoint.
# Variables: OUT (default: outputs/evidence); STARTS (default: outputs/real).
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python}
export PYTHON
OUT=$(realpath -m "${OUT:-outputs/evidence}")
STARTS=$(realpath -m "${STARTS:-outputs/real}")
export RAY_raylet_start_wait_time_s=${RAY_raylet_start_wait_time_s:-120}
export RAY_memory_monitor_refresh_ms=${RAY_memory_monitor_refresh_ms:-0}
mkdir -p "$OUT"

# train NAME ARM SEED [OVERRIDE...]: the command of a run, in its folder.
train() {
  local out=$OUT/$1
  mkdir -p "$out"
  local command=(scripts/evidence/train_real_task.sh tools "${@:2}")
  {
    date -u +%FT%TZ
    git rev-parse HEAD
    lscpu | grep 'Model name'
    echo "PRESET=${PRESET:-} STEPS=$STEPS ${command[*]}"
  } >>"$out/starts.txt"
  OUTPUT_DIR=$out "${command[@]}" >>"$out/log.txt" 2>&1
}

# arm ARM SEED NAME [OVERRIDE...]: train an arm.
arm() {
  case $1 in
    grpo) train "$3" grpo-clean "$2" "${@:4}" ;;
    gdpo) train "$3" gdpo "$2" algorithm.gdpo.whiten=sequence "${@:4}" ;;
    weighted) PRESET='[cpu,compose]' train "$3" grpo-clean "$2" algorithm.adv_estimator=compose \
      'algorithm.compose.steps=[weigh_and_sum,centre,{step:scale_by_std,epsilon:1e-6}]' "algorithm.rewards.weights=[1,$WEIGHT]" "${@:4}" ;;
  esac
}

seed() {
  local name
  for which in grpo gdpo weighted; do
    name=scarce-$which-$1
    [[ ! -e $OUT/$name/finished ]] || continue
    arm "$which" "$1" "$name" trainer.val_before_train=False trainer.test_freq=-1
    date -u +%FT%TZ >"$OUT/$name/finished"
  done
}

# Only the answers to the test entries, by the last checkpoint; without one by the start.
validate() {
  local which=$1 seed=$2 name=$3
  [[ ! -e $OUT/$name/validated ]] || return 0
  arm "$which" "$seed" "$name" trainer.val_only=True
  find "$OUT/$name" -name 'optim_*.pt' -delete
  date -u +%FT%TZ >"$OUT/$name/validated"
}

if [[ ! -s $OUT/tries.txt ]]; then
  for start in scarce scarce-4 scarce-3-8; do
    "$PYTHON" scripts/evidence/make_real_task.py tools --start "$start" --folder "$STARTS/tools-$start" \
      >>"$OUT/starts.log" 2>&1
    "$PYTHON" scripts/evidence/start.py judge "$STARTS/tools-$start" >>"$OUT/tries.new" || true
  done
  mv "$OUT/tries.new" "$OUT/tries.txt"
fi
TASK_DIR=$STARTS/tools-scarce-4
echo "$TASK_DIR" >"$OUT/start.txt"
[[ -s $OUT/weight.txt ]] || "$PYTHON" scripts/evidence/start.py weight "$TASK_DIR" >"$OUT/weight.txt" 2>"$OUT/shares.txt"
WEIGHT=$(cat "$OUT/weight.txt")
export TASK_DIR STEPS=30
"$PYTHON" -m pip freeze --disable-pip-version-check >"$OUT/versions.txt" 2>/dev/null
for pair in '1 2' '3 4'; do
  for number in $pair; do seed "$number"; done
  for number in $pair; do
    for which in grpo gdpo weighted; do validate "$which" "$number" "scarce-$which-$number"; done
  done
  validate grpo 1 scarce-start
  # Three steps once more, to see that a run can be repeated.
  if [[ ! -e $OUT/again-gdpo-1/finished ]]; then
    STEPS=3 arm gdpo 1 again-gdpo-1 trainer.val_before_train=False trainer.test_freq=-1 trainer.save_freq=-1
    date -u +%FT%TZ >"$OUT/again-gdpo-1/finished"
  fi
done
