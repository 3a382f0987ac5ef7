"""Kill a training many times, and check that it ends like an undisturbed one.

    python scripts/storm.py --kills 30 --seed 0

Trains hadw on a tiny model through verl's own pipeline on the CPU, once undisturbed, and once killed with SIGKILL at
random moments (starting, in a step, while a checkpoint is saved; the driver, the task runner, the FSDP worker, the
rollout server or the reward worker) and restarted with `resume_mode=auto` until it reaches the last step. Every attempt
must log the same values for a step as the undisturbed run. After each kill, every state file must be complete and
belong to its step. The last states must be equal. Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests import tiny_model  # noqa: E402
from tests.end_to_end import run as runs  # noqa: E402

STATE = "verl_ext.json"
MISSING = "advantage/missing_responses"
TRACKER = "latest_checkpointed_iteration.txt"
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
# Equal up to rounding: the trainer adds up float32 numbers in the order in which answers finish.
COMPUTED = ("critic/score/mean", "critic/advantages/max", "actor/pg_loss", "actor/grad_norm", "response_length/mean")
EXACT = ("hadw/", "advantage/", "reward/")


@dataclass
class Kill:
    """What was killed, when, and how the run ended."""

    kind: str
    phase: str
    step: int
    """Step of the last checkpoint before the kill."""
    seconds: float
    """From the kill to the end of the driver."""
    fate: str
    """`ended`, or `hung` if the driver had to be killed as well."""
    left: int
    """Number of processes left after the driver ended."""
    later: int
    """Number of steps logged after the kill."""
    says: str = ""


@dataclass
class Storm:
    """The two runs, and the problems found."""

    folder: Path
    steps: int
    patience: float
    rng: random.Random = field(default_factory=random.Random)
    kills: list[Kill] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    logged: dict[int, list[dict[str, float]]] = field(default_factory=dict)
    unlogged: set[int] = field(default_factory=set)
    """Steps that were saved but not logged: verl logs after saving."""

    @property
    def checkpoints(self) -> Path:
        return self.folder / "killed" / "checkpoints"

    def latest(self) -> int:
        """The step of the checkpoint that verl would resume."""
        path = self.checkpoints / TRACKER
        text = path.read_text() if path.exists() else "0"
        # Empty: killed between truncating and writing it. The rest of that checkpoint is complete.
        return int(
            text or max(int(state.parent.name.rpartition("_")[2]) for state in self.checkpoints.glob(f"*/{STATE}"))
        )

    def saving(self) -> bool:
        """Whether a checkpoint is being written: the folder of the next step is not empty."""
        return any(self.checkpoints.glob(f"global_step_{self.latest() + 1}/*"))

    def keep(self) -> None:
        """Save the progress, so that an interrupted storm can continue."""
        known = {
            "kills": [asdict(kill) for kill in self.kills],
            "wrong": self.wrong,
            "logged": self.logged,
            "unlogged": sorted(self.unlogged),
        }
        temporary = self.folder / "storm.json.tmp"
        temporary.write_text(json.dumps(known))
        temporary.replace(self.folder / "storm.json")

    def go_on(self) -> None:
        """Load the saved progress."""
        known = json.loads((self.folder / "storm.json").read_text())
        self.kills = [Kill(**kill) for kill in known["kills"]]
        self.wrong = known["wrong"]
        self.logged = {int(step): attempts for step, attempts in known["logged"].items()}
        # Include the steps saved by the attempt that was interrupted with the storm.
        self.unlogged = {*known.get("unlogged", ()), *range(1, self.latest() + 1)} - set(self.logged)

    def note(self, problem: str) -> None:
        print(f"WRONG: {problem}", flush=True)
        self.wrong.append(problem)


def begin(folder: Path, data: Path, steps: int) -> runs.Run:
    """Start a run, which resumes from the folder. Keep the logs of earlier attempts."""
    for name in ("log.txt", "metrics.jsonl"):
        path = folder / name
        if path.exists():
            path.rename(folder / f"{len(list(folder.glob(f'*-{name}'))):03d}-{name}")
    return runs.start(folder, data, *HADW, steps=steps, configuration="[cpu,hadw]")


def undisturbed(folder: Path, data: Path, steps: int, limit: float) -> runs.Run:
    run = begin(folder, data, steps)
    try:
        code = run.wait(limit)
    finally:
        run.clear()
    if code != 0:
        raise SystemExit(f"the undisturbed run ended with {code}:\n{run.tail()}")
    return run


def read(folder: Path) -> dict[int, dict[str, float]]:
    """The metrics of a finished run."""
    with (folder / "metrics.jsonl").open() as lines:
        records = [json.loads(line) for line in lines]
    return {record["step"]: record["data"] for record in records}


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


def attempt(storm: Storm, data: Path, kind: str, phase: str, limit: float) -> None:
    """Start the run, kill one process at about that phase, and wait for the end of the run."""
    resumed_at = storm.latest()
    run = begin(storm.folder / "killed", data, storm.steps)
    try:
        if phase == "starting":
            time.sleep(storm.rng.uniform(0, 25))
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
            time.sleep(storm.rng.uniform(0, SAVE))
        elif phase == "step":
            time.sleep(storm.rng.uniform(0, 1.5))
        actual = "saving" if storm.saving() else "step" if run.metrics else "starting"
        at, before = storm.latest(), max(run.metrics, default=resumed_at)
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        try:
            run.process.wait(storm.patience)
            fate = "ended"
        except Exception:  # noqa: BLE001 - subprocess.TimeoutExpired: verl hangs
            fate = "hung"
        seconds = time.monotonic() - killed
        left = len(run.left_behind(patience=10 if fate == "ended" else 0))
        later = max(run.metrics, default=resumed_at) - before
        kill = Kill(kind, actual, at, seconds, fate, left, later, last_error(run.log))
        storm.kills.append(kill)
        print(f"{len(storm.kills)}: {kill}", flush=True)
    finally:
        run.clear()
    gather(storm, run)
    check_attempt(storm, run, resumed_at)


def gather(storm: Storm, run: runs.Run) -> None:
    """Collect what the attempt logged, and note steps that were trained on too few responses."""
    for step, values in run.metrics.items():
        storm.logged.setdefault(step, []).append(values)
        if values[MISSING] > 0:
            storm.note(f"step {step} was trained without {values[MISSING]:.0f} of its responses")
    storm.unlogged.update(range(max(storm.logged, default=0) + 1, storm.latest() + 1))


def last_error(log: str) -> str:
    """The last line that looks like an exception."""
    errors = [line for line in log.splitlines() if "Error" in line and "Error in _run_prompt" not in line]
    return errors[-1].strip()[-160:] if errors else ""


def check_attempt(storm: Storm, run: runs.Run, resumed_at: int) -> None:
    """Check that the attempt resumed at the last checkpoint, and that all state files are complete."""
    if run.metrics and min(run.metrics) != resumed_at + 1:
        storm.note(f"resumed at {min(run.metrics)}, the checkpoint was of step {resumed_at}")
    if resumed_at and run.metrics and "read the estimators' state from" not in run.log:
        storm.note(f"resumed at {resumed_at} without the state:\n{run.tail(30)}")
    if "CheckpointError" in run.log:
        storm.note(f"a state was refused:\n{run.tail(30)}")
    for path in sorted(storm.checkpoints.glob(f"*/{STATE}")):
        step = int(path.parent.name.rpartition("_")[2])
        try:
            data = json.loads(path.read_text())
            ticks = data["estimators"]["hadw"]["weigh_by_history"]["ticks"]
        except (ValueError, KeyError) as error:
            storm.note(f"{path} is damaged: {error!r}")
            continue
        if (data["global_step"], ticks) != (step, step):
            storm.note(f"{path} is of step {data['global_step']} and {ticks} ticks")
    if storm.latest() and not (storm.checkpoints / f"global_step_{storm.latest()}" / STATE).exists():
        storm.note(f"the current checkpoint, {storm.latest()}, has no state")


def compare(storm: Storm, expected: dict[int, dict[str, float]]) -> None:
    """Compare everything that was logged, and the last state, with the undisturbed run."""
    missing = set(range(1, storm.steps + 1)) - set(storm.logged) - storm.unlogged
    if missing or max(storm.logged, default=0) > storm.steps:
        storm.note(f"steps that were logged: {sorted(storm.logged)}, expected 1 to {storm.steps}")
    for step, attempts in sorted(storm.logged.items()):
        for values in attempts:
            names = {name for name in {*expected[step], *values} if name.startswith(EXACT)}
            different = [
                f"{name}: {values.get(name)}, undisturbed {expected[step].get(name)}"
                for name in sorted(names | set(COMPUTED))
                if not same(name, values.get(name), expected[step].get(name))
            ]
            if different:
                storm.note(f"step {step} differs: {'; '.join(different[:4])} ({len(different)} in all)")
    states = []
    for name in ("whole", "killed"):
        path = storm.folder / name / "checkpoints" / f"global_step_{storm.steps}" / STATE
        states.append(json.loads(path.read_text())["estimators"] if path.exists() else None)
    if states[0] is None or states[0] != states[1]:
        storm.note(f"the last states differ: undisturbed {states[0]}, killed {states[1]}")


def same(name: str, one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return False
    if name in COMPUTED:
        return math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-6)
    return math.isclose(one, other, rel_tol=1e-12, abs_tol=1e-12)


def show(storm: Storm) -> None:
    """Print the kills by kind and phase, and how the runs ended."""
    counts = Counter((kill.kind, kill.phase) for kill in storm.kills)
    print(f"\n{'killed':<15}" + "".join(f"{phase:>10}" for phase in PHASES) + f"{'all':>6}{'hung':>6}  end after")
    for kind in KINDS:
        of_kind = [kill for kill in storm.kills if kill.kind == kind]
        ended = [kill.seconds for kill in of_kind if kill.fate == "ended"]
        span = f"{min(ended):.1f} to {max(ended):.1f} s" if ended else "-"
        row = "".join(f"{counts[kind, phase]:>10}" for phase in PHASES)
        print(f"{kind:<15}{row}{len(of_kind):>6}{sum(kill.fate == 'hung' for kill in of_kind):>6}  {span}")
    row = "".join(f"{sum(kill.phase == phase for kill in storm.kills):>10}" for phase in PHASES)
    print(f"{'all':<15}{row}{len(storm.kills):>6}{sum(kill.fate == 'hung' for kill in storm.kills):>6}")
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
    storm = Storm(folder, steps, options.patience)
    if options.go_on and (folder / "storm.json").exists():
        storm.go_on()
        data, whole = folder / "data", read(folder / "whole")
    else:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        data = tiny_model.write(folder / "data", rows=8 * steps)
        began = time.monotonic()
        whole = undisturbed(folder / "whole", data, steps, options.limit + 10 * steps).metrics
        print(f"undisturbed: {steps} steps in {time.monotonic() - began:.0f} s", flush=True)
        storm.keep()
    # Every kind and phase about as often, in a random order.
    plan = [(kind, phase) for kind in KINDS for phase in PHASES] * math.ceil(options.kills / (len(KINDS) * len(PHASES)))
    random.Random(options.seed).shuffle(plan)
    for number, (kind, phase) in enumerate(plan[: options.kills]):
        if number >= len(storm.kills):
            storm.rng = random.Random(f"{options.seed} {number}")
            attempt(storm, data, kind, phase, options.limit)
            storm.keep()
    resumed_at = storm.latest()
    last = undisturbed(folder / "killed", data, steps, options.limit + 10 * steps)
    for step, values in last.metrics.items():
        storm.logged.setdefault(step, []).append(values)
    check_attempt(storm, last, resumed_at)
    compare(storm, whole)
    show(storm)
    if storm.wrong:
        print(f"\n{len(storm.wrong)} problems:\n" + "\n".join(storm.wrong))
        return 1
    print("everything that was logged, and the last state, equal those of the undisturbed run")
    return 0


if __name__ == "__main__":
    sys.exit(main())
