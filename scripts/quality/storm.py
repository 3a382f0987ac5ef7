"""Kill a training many times, and check that it ends like an undisturbed one.

    python scripts/quality/storm.py --kills 30 --seed 0

Trains hadw on a tiny model through verl's own pipeline on the CPU, once undisturbed, and once killed with SIGKILL at
random moments (starting, in a step, while a checkpoint is saved; the driver, the task runner, the FSDP worker, the
rollout server or the reward worker) and restarted with `resume_mode=auto` until it reaches the last step. Every attempt
must log the same values for a step as the undisturbed run. After each kill, every state file must be complete and
belong to its step. The last states must be equal. Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts/quality")]

from storm_record import Kill, Storm  # noqa: E402

from tests import tiny_model  # noqa: E402
from tests.end_to_end import run as runs  # noqa: E402

# Kind of process to the start of its title; the driver is the process that this script starts.
KINDS = {
    "driver": None,
    "task runner": "ray::TaskRunnerV1",
    "FSDP worker": "ray::WorkerDict",
    "rollout server": "ray::EmbeddedServer",
    "reward worker": "ray::RewardLoopWorker",
}
# About the seconds that saving the tiny model takes.
SAVE = 0.03
PHASES = ("starting", "step", "saving")
HADW = (
    "algorithm.adv_estimator=hadw",
    # An answer with an "a" is right: about one in six answers of an untrained model.
    "algorithm.rewards.accuracy_threshold=0",
    # Small, so that rounding, which depends on the order of summation, does not lead to other answers.
    "actor_rollout_ref.actor.optim.lr=1e-4",
    "trainer.save_freq=1",
    "trainer.resume_mode=auto",
)


def begin(storm: Storm, name: str) -> runs.Run:
    """Start a run, which resumes from its folder. Keep the logs of earlier attempts."""
    folder = storm.folder / name
    for log in ("log.txt", "metrics.jsonl"):
        path = folder / log
        if path.exists():
            path.rename(folder / f"{len(list(folder.glob(f'*-{log}'))):03d}-{log}")
    return runs.start(folder, storm.folder / "data", *HADW, steps=storm.steps, configuration="[cpu,hadw]")


def undisturbed(storm: Storm, name: str, limit: float) -> runs.Run:
    run = begin(storm, name)
    try:
        code = run.wait(limit + 10 * storm.steps)
    finally:
        run.clear()
    if code != 0:
        raise SystemExit(f"the undisturbed run ended with {code}:\n{run.tail()}")
    return run


def target(run: runs.Run, kind: str) -> int | None:
    """The process id of a kind, None if there is no such process."""
    title = KINDS[kind]
    if title is None:
        return run.process.pid
    for pid in runs.processes_of(run.mark):
        try:
            if Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").startswith(title):
                return pid
        except OSError:
            continue
    return None


def wait_until(run: runs.Run, holds: Callable[[], object], limit: float, pause: float = 0.05) -> bool:
    """Wait for a condition; return False if the run ends or the time is over first."""
    deadline = time.monotonic() + limit
    while not holds():
        if run.process.poll() is not None or time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return True


def attempt(storm: Storm, kind: str, phase: str, rng: random.Random, *, limit: float, patience: float) -> None:
    """Start the run, kill one process at about that phase, and wait for the end of the run."""
    resumed_at = storm.latest()
    run = begin(storm, "killed")
    try:
        if phase == "starting":
            time.sleep(rng.uniform(0, 25))
        else:
            # Wait for at least one step per attempt, so that the storm makes progress.
            wait_until(run, lambda: run.metrics, limit)
        # If the process does not exist yet, kill it as soon as it does.
        if not wait_until(run, lambda: target(run, kind), limit):
            storm.note(f"no {kind} to kill at {phase}, the run ended with {run.process.poll()}:\n{run.tail(30)}")
            return
        pid = target(run, kind)
        if phase == "saving":
            wait_until(run, storm.saving, limit, pause=0.001)
            time.sleep(rng.uniform(0, SAVE))
        elif phase == "step":
            time.sleep(rng.uniform(0, 1.5))
        actual = "saving" if storm.saving() else "step" if run.metrics else "starting"
        at, before = storm.latest(), max(run.metrics, default=resumed_at)
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        try:
            run.process.wait(patience)
            fate = "ended"
        except subprocess.TimeoutExpired:
            fate = "hung"
        seconds = time.monotonic() - killed
        left = len(run.left_behind(patience=10 if fate == "ended" else 0))
        later = max(run.metrics, default=resumed_at) - before
        kill = Kill(kind, actual, at, seconds, fate, left, later, last_error(run.log))
        storm.kills.append(kill)
        print(f"{len(storm.kills)}: {kill}", flush=True)
    finally:
        run.clear()
    storm.add(run, resumed_at)


def last_error(log: str) -> str:
    """The last line that looks like an exception."""
    errors = [line for line in log.splitlines() if "Error" in line and "Error in _run_prompt" not in line]
    return errors[-1].strip()[-160:] if errors else ""


def show(storm: Storm) -> None:
    """Print the kills by kind and phase, and how the runs ended."""
    print(f"\n{'killed':<15}" + "".join(f"{phase:>10}" for phase in PHASES) + f"{'all':>6}{'hung':>6}  end after")
    for kind in (*KINDS, "all"):
        kills = [kill for kill in storm.kills if kind in (kill.kind, "all")]
        ended = [kill.seconds for kill in kills if kill.fate == "ended"]
        span = f"{min(ended):.1f} to {max(ended):.1f} s" if ended else "-"
        row = "".join(f"{sum(kill.phase == phase for kill in kills):>10}" for phase in PHASES)
        print(f"{kind:<15}{row}{len(kills):>6}{len(kills) - len(ended):>6}  {span}")
    repeated = sum(len(attempts) - 1 for attempts in storm.logged.values())
    later = sum(kill.later for kill in storm.kills)
    print(
        f"\n{storm.steps} steps; repeated: {repeated}; logged after a kill: {later}; "
        f"saved but not logged: {len(storm.unlogged - set(storm.logged))}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="steps of the run; default: 3 per kill")
    parser.add_argument("--patience", type=float, default=60, help="seconds after which a killed run counts as hung")
    parser.add_argument("--limit", type=float, default=300, help="seconds for any other wait")
    parser.add_argument("--go-on", action="store_true", help="continue an interrupted storm")
    parser.add_argument("--folder", type=Path, default=Path("outputs/storm"))
    options = parser.parse_args()
    steps = options.steps or 3 * options.kills
    folder = options.folder.resolve()
    storm = Storm(folder, steps)
    if options.go_on and (folder / "storm.json").exists():
        storm.go_on()
        whole = runs.metrics_of(folder / "whole/metrics.jsonl")
    else:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        tiny_model.write(folder / "data", rows=8 * steps)
        began = time.monotonic()
        whole = undisturbed(storm, "whole", options.limit).metrics
        print(f"undisturbed: {steps} steps in {time.monotonic() - began:.0f} s", flush=True)
        storm.keep()
    # Every kind and phase about as often, in a random order.
    plan = [(kind, phase) for kind in KINDS for phase in PHASES] * math.ceil(options.kills / (len(KINDS) * len(PHASES)))
    random.Random(options.seed).shuffle(plan)
    for number, (kind, phase) in enumerate(plan[: options.kills]):
        if number >= len(storm.kills):
            rng = random.Random(f"{options.seed} {number}")
            attempt(storm, kind, phase, rng, limit=options.limit, patience=options.patience)
            storm.keep()
    resumed_at = storm.latest()
    storm.add(undisturbed(storm, "killed", options.limit), resumed_at)
    storm.compare(whole)
    show(storm)
    if storm.wrong:
        print(f"\n{len(storm.wrong)} problems:\n" + "\n".join(storm.wrong))
        return 1
    print("everything that was logged, and the last state, equal those of the undisturbed run")
    return 0


if __name__ == "__main__":
    sys.exit(main())
