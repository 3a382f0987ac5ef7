#!/usr/bin/env bash
# Set up an environment, make a tiny model and data, train with grpo and with gdpo, and compare the two in tables and
# two pictures. Needs no GPU. Ctrl-C ends everything that it started.
set -euo pipefail
here=$PWD
cd "$(dirname "$0")/.."

usage() {
  cat <<'HELP'
Usage: scripts/quickstart.sh [options] [-- OVERRIDE...]

Trains a model of 200 thousand parameters with verl (Ray, FSDP, rollout, reward, checkpoint) on the CPU, once with grpo
and once with gdpo, and draws two pictures of the two. About four minutes on two cores, after the installation, if
10 GB of memory are free: then both trainings run at once. Otherwise longer. The environment and the task are reused.
For other arms, models and settings see recipes/quickstart/README.md.

  --steps N          training steps (default: 15)
  --seed N           seed of data order and sampling (default: 1)
  --output DIR       folder for the runs and the picture (default: outputs/quickstart in the project's folder)
  --python PATH      use this Python, which has the package installed, and install nothing
  --torch-index URL  pip's --index-url for torch only, to get its CPU build. Without it pip uses its configured index;
                     the usual one has CUDA builds, of several gigabytes.
  --help
  -- OVERRIDE...     more settings of verl for both runs, for example: -- actor_rollout_ref.actor.optim.lr=3e-4

The environment variable PYTHON names the Python that the environment is made with (default: python3).
HELP
}

steps=15 seed=1 output=outputs/quickstart python="" torch_index=""

fail() {
  echo "quickstart: $1; see --help" >&2
  exit 2
}

while (($#)); do
  case $1 in
    --help | -h) usage && exit 0 ;;
    --) shift && break ;;
    --steps | --seed | --output | --python | --torch-index)
      (($# >= 2)) || fail "$1 needs a value"
      name=${1#--}
      printf -v "${name//-/_}" '%s' "$2"
      # Paths are relative to the caller's working folder, not to the project's folder.
      [[ $1 != --output || $2 == /* ]] || output=$here/$2
      [[ $1 != --python || $2 != */* || $2 == /* ]] || python=$here/$2
      shift 2
      ;;
    *) fail "unknown option $1" ;;
  esac
done
[[ $steps =~ ^[1-9][0-9]{0,8}$ ]] || fail "--steps is '$steps', expected an integer from 1"
[[ $seed =~ ^(0|[1-9][0-9]{0,8})$ ]] || fail "--seed is '$seed', expected an integer from 0"

say() { printf '\n== %s\n' "$1"; }

# Each part runs as a job in its own process group, so that the shell handles a signal at once and passes it on. With a
# plain command the shell would wait for its end first, and Ctrl-C would reach both.
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
    wait "$job" || { status=$? && echo "a part ended with status $status" >&2; }
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
  # Making it takes one core. The other compiles what each of verl's processes imports. Images of containers often set
  # PYTHONDONTWRITEBYTECODE, but without the compiled code each process takes twice as long to import it.
  start env -u PYTHONDONTWRITEBYTECODE VERL_PLATFORM=cpu "$python" -c \
    "import verl.trainer.main_ppo, verl.workers.engine_workers, verl_ext.cpu.server" >"$output/imports.txt" 2>&1
fi
supervised "$python" recipes/quickstart/prepare_data.py

train() { # its output goes to a file, its progress to the terminal
  local run=$output/$1 status=0
  scratch=$(mktemp -d /tmp/ray-XXXXXX) # Ray's sockets need a short path
  trap 'rm -rf "$scratch"' EXIT
  mkdir -p "$run"
  rm -rf "$run/dump" # of an earlier call, perhaps of more steps
  OUTPUT_DIR=$run recipes/quickstart/run.sh "$@" +ray_kwargs.ray_init._temp_dir="$scratch" 2>&1 |
    stdbuf -oL tr '\r' '\n' | tee "$run/log.txt" | sed -un "s/^.*\(Training Progress.*\)/$1 \1/p" || status=$?
  ((status == 0)) || tail -n 30 "$run/log.txt" >&2
  return "$status"
}

say "Training with grpo and gdpo"
# A run's processes start one after the other, so one run alone does not use two cores. Each run needs 4 GB.
free=$("$python" -c "import psutil; print(psutil.virtual_memory().available // 10**9)")
for arm in grpo gdpo; do
  echo "$arm: verl starts, its output is in $output/$arm/log.txt"
  start train "$arm" trainer.total_training_steps="$steps" data.seed="$seed" "$@"
  ((free >= 10)) || finish
done
finish

runs=("grpo=$output/grpo" "gdpo=$output/gdpo")
say "1. The rewards"
supervised "$python" -m verl_ext report "${runs[@]}" --window 5 --plot "$output/rewards.png" \
  --metrics reward/correctness/mean reward/format/mean
echo "What to see: grpo learns the large reward, correctness, and neglects format; gdpo learns both."

say "2. The groups"
supervised "$python" -m verl_ext report "${runs[@]}" --window 5 --plot "$output/groups.png" \
  --metrics reward/correctness/zero_variance_group_fraction reward/format/zero_variance_group_fraction
echo "What to see: the share of prompts from which a reward teaches nothing, because all answers earn the same."

say "3. What other estimators would have done with the answers of the grpo run"
supervised "$python" -m verl_ext compare "$output/grpo/dump" gdpo dgpo drgrpo algorithm.rewards.accuracy_key=correctness \
  algorithm.rewards.accuracy_threshold=2.9
echo "What to see: the share of the advantage that each reward decides. Under grpo format has little, under gdpo as much."

echo "checkpoints: $output/grpo/checkpoints, $output/gdpo/checkpoints"
