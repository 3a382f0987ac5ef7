#!/usr/bin/env bash
# Set up an environment, generate a tiny model and data, train with grpo and with gdpo, and compare the two in tables
# and two plots. No GPU is needed. Ctrl-C ends all processes that this script started.
set -euo pipefail
here=$PWD
cd "$(dirname "$0")/.."

usage() {
  cat <<'HELP'
Usage: scripts/quickstart.sh [options] [-- OVERRIDE...]

Trains a model of 200 thousand parameters with verl (Ray, FSDP, rollout, reward, checkpoint) on the CPU, once with
grpo and once with gdpo, and writes two plots that compare the runs. After the installation this takes about four
minutes on two cores if 10 GB of memory are free, because both runs then train at the same time. Otherwise it takes
longer. Later calls reuse the environment and the task. For other models and settings see recipes/quickstart/README.md.

  --steps N          number of training steps (default: 15)
  --seed N           seed of the data order and of sampling (default: 1)
  --output DIR       folder for the runs and the plots (default: outputs/quickstart in the project folder)
  --python PATH      Python to use; it must have verl_ext installed, and nothing is installed
  --torch-index URL  pip's --index-url for torch only, for its CPU build (default: pip's configured index, which usually
                     has CUDA builds of several gigabytes)
  --help             show this help and exit
  -- OVERRIDE...     additional settings of verl for both runs, for example: -- actor_rollout_ref.actor.optim.lr=3e-4

The environment variable PYTHON names the Python that creates the environment (default: python3).
HELP
}

steps=15 seed=1 output=outputs/quickstart python="" torch_index=""

fail() {
  echo "error: $1 Use --help to list the options." >&2
  exit 2
}

while (($#)); do
  case $1 in
    --help | -h) usage && exit 0 ;;
    --) shift && break ;;
    --steps | --seed | --output | --python | --torch-index)
      (($# >= 2)) || fail "The option $1 needs a value."
      name=${1#--}
      printf -v "${name//-/_}" '%s' "$2"
      # Paths are relative to the caller's working folder, not to the project's folder.
      [[ $1 != --output || $2 == /* ]] || output=$here/$2
      [[ $1 != --python || $2 != */* || $2 == /* ]] || python=$here/$2
      shift 2
      ;;
    *) fail "The option $1 does not exist." ;;
  esac
done
[[ $steps =~ ^[1-9][0-9]{0,8}$ ]] || fail "--steps must be an integer of at least 1, found '$steps'."
[[ $seed =~ ^(0|[1-9][0-9]{0,8})$ ]] || fail "--seed must be an integer of at least 0, found '$seed'."

say() { printf '\n== %s\n' "$1"; }

# Each command runs as a job in its own process group, so that the shell handles a signal immediately and passes it on.
# Otherwise the shell would first wait for the command to end, and Ctrl-C would reach both.
jobs=()

start() {
  set -m
  "$@" &
  jobs+=($!)
  set +m
}

finish() {
  local job status=0
  for job in ${jobs[@]+"${jobs[@]}"}; do
    wait "$job" || { status=$? && echo "error: a command ended with status $status. See its output above." >&2; }
  done
  jobs=()
  return "$status"
}

supervised() {
  start "$@"
  finish
}

stop() {
  trap '' INT TERM HUP
  for job in ${jobs[@]+"${jobs[@]}"}; do kill -s "$1" -- "-$job" 2>/dev/null || true; done
  wait
  exit "$2"
}

trap 'stop INT 130' INT
trap 'stop TERM 143' TERM
trap 'stop TERM 129' HUP

if [[ -z $python ]]; then
  say "Environment"
  source scripts/environment.sh
  TORCH_INDEX=$torch_index
  supervised make_environment .venv cpu,plot scripts/constraints.txt
  python=$PWD/.venv/bin/python
fi
export PYTHON=$python

say "Task"
mkdir -p "$output"
if [[ ! -d data/quickstart ]]; then
  # Generating the task takes one core. The other core compiles the modules that verl's processes import. Container
  # images often set PYTHONDONTWRITEBYTECODE, but without bytecode files the imports of each process take twice as long.
  start env -u PYTHONDONTWRITEBYTECODE VERL_PLATFORM=cpu "$python" -c \
    "import verl.trainer.main_ppo, verl.workers.engine_workers, verl_ext.cpu.rollout" >"$output/imports.txt" 2>&1
fi
supervised "$python" recipes/quickstart/prepare_data.py

train() { # the output goes to a file, the progress to the terminal
  local run=$output/$1 status=0
  scratch=$(mktemp -d /tmp/ray-XXXXXX) # Ray's sockets need a short path
  trap 'rm -rf "$scratch"' EXIT
  mkdir -p "$run"
  rm -rf "$run/dump" # an earlier call may have run more steps
  OUTPUT_DIR=$run recipes/quickstart/run.sh "$@" +ray_kwargs.ray_init._temp_dir="$scratch" 2>&1 |
    stdbuf -oL tr '\r' '\n' | tee "$run/log.txt" | sed -un "s/^.*\(Training Progress.*\)/$1 \1/p" || status=$?
  ((status == 0)) || tail -n 30 "$run/log.txt" >&2
  return "$status"
}

say "Training with grpo and gdpo"
# The processes of a run start one after the other, so one run alone does not use two cores. Each run needs 4 GB.
free=$("$python" -c "import psutil; print(psutil.virtual_memory().available // 10**9)")
for config in grpo gdpo; do
  echo "$config: verl starts. Its output is written to $output/$config/log.txt."
  start train "$config" trainer.total_training_steps="$steps" data.seed="$seed" "$@"
  ((free >= 10)) || finish
done
finish

runs=("grpo=$output/grpo" "gdpo=$output/gdpo")
say "1. The rewards"
supervised "$python" -m verl_ext report "${runs[@]}" --window 5 --plot "$output/rewards.png" \
  --metrics reward/correctness/mean reward/format/mean
echo "Expected result: grpo learns the large reward (correctness) and neglects format, and gdpo learns both."

say "2. The zero-variance groups"
supervised "$python" -m verl_ext report "${runs[@]}" --window 5 --plot "$output/groups.png" \
  --metrics reward/correctness/zero_variance_group_fraction reward/format/zero_variance_group_fraction
echo "The curves show the fraction of prompts whose responses all get the same reward, which gives no learning signal."

say "3. The advantages of other estimators on the rollouts of the grpo run"
supervised "$python" -m verl_ext compare "$output/grpo/dump" gdpo dgpo drgrpo algorithm.rewards.accuracy_key=correctness \
  algorithm.rewards.accuracy_threshold=2.9
echo "Expected result: format contributes little to the advantages of grpo. In gdpo it contributes as much as correctness."

echo "The checkpoints are in $output/grpo/checkpoints and $output/gdpo/checkpoints."
