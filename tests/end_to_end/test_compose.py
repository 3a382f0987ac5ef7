"""Lists of steps in verl's own pipeline, one of them with a step of the user's."""

from __future__ import annotations

import json
import math
import os
import textwrap

import pytest

pytestmark = [pytest.mark.end_to_end, pytest.mark.slow]
TIMEOUT = 1200
KEYS = "+algorithm.rewards.keys=[score,length]"
OWN = """
    from dataclasses import dataclass
    from verl_ext import Step, Update

    @dataclass(frozen=True)
    class Shrink(Step):
        name = "shrink"
        by: float = 2.0

        def init(self):
            return {"batches": 0}

        def update(self, values, batch, state):
            seen = (state or self.init())["batches"] + 1
            return Update(values / self.by, {"batches": seen}, {"batches": seen, "pid": os.getpid()})
"""


def test_a_list_with_a_step_of_one_s_own(start, tmp_path):
    (tmp_path / "shrink_steps.py").write_text("import os\n" + textwrap.dedent(OWN))
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    steps = "centre,scale_by_mad,weigh_and_sum,whiten,weigh_by_difficulty,{step:shrink_steps:Shrink,by:4}"
    arguments = (
        "algorithm.adv_estimator=compose",
        KEYS,
        f"+algorithm.compose.steps=[{steps}]",
        "+algorithm.rewards.accuracy_threshold=0",
        "trainer.save_freq=1",
        "trainer.max_actor_ckpt_to_keep=1",
    )
    run = start("run", *arguments, steps=2, env={"PYTHONPATH": path})
    assert run.wait(TIMEOUT) == 0, run.tail()
    for name in ("advantage/std", "compose/whiten_std", "compose/valid_groups", "reward/length/mean"):
        assert len(run.column(name)) == 2, name
        assert all(map(math.isfinite, run.column(name))), name
    assert run.column("compose/batches") == [1, 2]
    assert run.column("compose/pid")[0] != run.process.pid  # the task runner's, not the driver's
    saved = json.loads((run.folder / "checkpoints/global_step_2/verl_ext.json").read_text())
    assert saved["state"] == {"shrink": {"batches": 2}}
    # verl keeps the actor's last checkpoint only; our small file stays where it was written.
    assert [path.name for path in (run.folder / "checkpoints/global_step_1").iterdir() if path.name != "data.pt"] == [
        "verl_ext.json"
    ]
    resumed = start("run", *arguments, "trainer.resume_mode=auto", steps=3, env={"PYTHONPATH": path})
    assert resumed.wait(TIMEOUT) == 0, resumed.tail()
    assert resumed.column("compose/batches") == [3]
