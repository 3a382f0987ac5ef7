"""The record of a storm: what each attempt logged and saved, and whether it is as in an undisturbed run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from verl_ext.files import replacing

if TYPE_CHECKING:
    from tests.end_to_end.run import Run

STATE = "verl_ext.json"
TRACKER = "latest_checkpointed_iteration.txt"
MISSING = "advantage/missing_responses"
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
    says: str
    """The last line of the log that looks like an exception."""


@dataclass
class Storm:
    """The folder of the two runs, and what was found."""

    folder: Path
    steps: int
    kills: list[Kill] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    logged: dict[int, list[dict[str, float]]] = field(default_factory=dict)
    """What each attempt logged, by step."""
    unlogged: set[int] = field(default_factory=set)
    """Steps that were saved but not logged: verl logs after saving."""

    @property
    def checkpoints(self) -> Path:
        return self.folder / "killed" / "checkpoints"

    def states(self) -> dict[int, Path]:
        """The state files of the killed run, by the step of their checkpoint."""
        return {int(path.parent.name.rpartition("_")[2]): path for path in self.checkpoints.glob(f"*/{STATE}")}

    def latest(self) -> int:
        """The step of the checkpoint that verl would resume."""
        path = self.checkpoints / TRACKER
        text = path.read_text() if path.exists() else "0"
        # Empty: killed between truncating and writing it. The rest of that checkpoint is complete.
        return int(text or max(self.states()))

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
        with replacing(self.folder / "storm.json") as temporary:
            temporary.write_text(json.dumps(known))

    def go_on(self) -> None:
        """Load the saved progress."""
        known = json.loads((self.folder / "storm.json").read_text())
        self.kills = [Kill(**kill) for kill in known["kills"]]
        self.wrong = known["wrong"]
        self.logged = {int(step): attempts for step, attempts in known["logged"].items()}
        # Include the steps saved by the attempt that was interrupted with the storm.
        self.unlogged = {*known["unlogged"], *range(1, self.latest() + 1)} - set(self.logged)

    def note(self, problem: str) -> None:
        print(f"WRONG: {problem}", flush=True)
        self.wrong.append(problem)

    def add(self, run: Run, resumed_at: int) -> None:
        """Collect what an attempt logged, and check it and the state files."""
        for step, values in run.metrics.items():
            self.logged.setdefault(step, []).append(values)
            if values[MISSING] > 0:
                self.note(f"step {step} was trained without {values[MISSING]:.0f} of its responses")
        self.unlogged.update(range(max(self.logged, default=0) + 1, self.latest() + 1))
        self._check_resumption(run, resumed_at)
        self._check_states()

    def _check_resumption(self, run: Run, resumed_at: int) -> None:
        """The attempt went on from the last checkpoint, with its state."""
        if run.metrics and min(run.metrics) != resumed_at + 1:
            self.note(f"resumed at {min(run.metrics)}, the checkpoint was of step {resumed_at}")
        if resumed_at and run.metrics and "read the state of" not in run.log:
            self.note(f"resumed at {resumed_at} without the state:\n{run.tail(30)}")
        if "CheckpointError" in run.log:
            self.note(f"a state was refused:\n{run.tail(30)}")

    def _check_states(self) -> None:
        """Every state file is complete and of its step, and the current checkpoint has one."""
        states = self.states()
        for step, path in sorted(states.items()):
            try:
                data = json.loads(path.read_text())
                ticks = data["state"]["weigh_by_history"]["ticks"]
            except (ValueError, KeyError) as error:
                self.note(f"{path} is damaged: {error!r}")
                continue
            if (data["global_step"], ticks) != (step, step):
                self.note(f"{path} is of step {data['global_step']} and {ticks} ticks")
        if self.latest() and self.latest() not in states:
            self.note(f"the current checkpoint, {self.latest()}, has no state")

    def compare(self, expected: Mapping[int, Mapping[str, float]]) -> None:
        """Compare everything that was logged, and the last state, with the undisturbed run."""
        missing = set(range(1, self.steps + 1)) - set(self.logged) - self.unlogged
        if missing or max(self.logged, default=0) > self.steps:
            self.note(f"steps that were logged: {sorted(self.logged)}, expected 1 to {self.steps}")
        for step, attempts in sorted(self.logged.items()):
            for values in attempts:
                names = {name for name in {*expected[step], *values} if name.startswith(EXACT)}
                different = [
                    f"{name}: {values.get(name)}, undisturbed {expected[step].get(name)}"
                    for name in sorted(names | set(COMPUTED))
                    if not same(name, values.get(name), expected[step].get(name))
                ]
                if different:
                    self.note(f"step {step} differs: {'; '.join(different[:4])} ({len(different)} in all)")
        whole, killed = (self._last_state(name) for name in ("whole", "killed"))
        if whole is None or whole != killed:
            self.note(f"the last states differ: undisturbed {whole}, killed {killed}")

    def _last_state(self, name: str) -> object:
        path = self.folder / name / "checkpoints" / f"global_step_{self.steps}" / STATE
        return json.loads(path.read_text())["state"] if path.exists() else None


def same(name: str, one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return False
    if name in COMPUTED:
        return math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-6)
    return math.isclose(one, other, rel_tol=1e-12, abs_tol=1e-12)
