"""Rewards by turn through `RayPPOTrainer`: its dump, and `compare` on it."""

from __future__ import annotations

import numpy as np
import pandas
import pytest
import torch
from verl.trainer.ppo import ray_trainer

from tests.calls import object_array
from tests.integration.configs import compose
from tests.integration.test_turns import MASKS, RIGHT, TOOL, UIDS, padded, texts
from tests.integration.trainers.ray_runs import OwnFit, data_of
from verl_ext.cli import main


class Sessions(OwnFit):
    """Batches of the responses above, the first five tokens of each."""

    def fit(self, steps: int) -> list[torch.Tensor]:
        found = []
        for self.global_steps in range(1, steps + 1):
            tool = np.array(texts([TOOL[0], TOOL[1], TOOL[2][:2], TOOL[3]]))
            data = data_of(UIDS, [5] * 4, RIGHT, {"right": object_array(RIGHT), "tool": tool})
            data.batch["response_mask"] = padded(MASKS)[:, :5]
            data.meta_info["reward_extra_keys"] = ["right", "tool"]
            found.append(self.advantages(data).batch["advantages"])
            ray_trainer.compute_data_metrics(data, use_critic=False)
        return found


@pytest.mark.parametrize("name", ["drgrpo", "hadw", "dgpo"])
def test_a_dump_has_a_row_a_turn_and_compare_computes_the_same_from_it(name, tmp_path, capsys):
    trainer = Sessions(
        compose(
            f"algorithm.adv_estimator={name}",
            "+algorithm.rewards={keys:[right,tool],by_turn:[tool],turn_discount:0.5,accuracy_key:right}",
            f"+algorithm.verl_ext.dump_dir={tmp_path}/dump",
            *(["+algorithm.drgrpo.check_loss=False"] if name == "drgrpo" else []),
        )
    )
    tensors = trainer.fit(3)
    table = pandas.read_parquet(tmp_path / "dump/from-0-0/advantages-00000003-000.parquet")
    assert table["uid"].tolist() == ["p", "p", "p", "q", "q", "q"]
    assert table["turn"].tolist() == [1, 2, 1, 1, 2, 1]
    assert table["raw/tool"].tolist() == [1, 0, 1, 0, 1, 0]
    assert table["reward/tool"].tolist() == [1, 0, 1, 0.5, 1, 0]
    assert table["reward/right"].tolist() == [0.5, 1, 0, 0, 0, 1]
    assert table["tokens"].tolist() == [2, 1, 3, 1, 2, 1]
    first = tensors[2][0]
    assert table["advantage"].tolist()[:2] == pytest.approx([first[0].item(), first[3].item()], abs=1e-6)
    given = [str(tmp_path / "dump"), name, "gdpo algorithm.gdpo.whiten=none", "--output", str(tmp_path / "out.parquet")]
    assert main(["compare", *given]) == 0
    out = capsys.readouterr().out
    assert "equal those that the run recorded" in out
    assert "18 turns of 12 trajectories" in out
    assert pandas.read_parquet(tmp_path / "out.parquet")["turn"].tolist() == table["turn"].tolist() * 3
    assert main(["compare", *given[:2], "algorithm.rewards.by_turn=[]"]) == 1
    assert "by_turn" in "".join(capsys.readouterr())
