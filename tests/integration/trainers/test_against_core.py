"""`RayPPOTrainer` gives what the core gives, on drawn batches; here every row that is no padding is a trajectory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from verl import DataProto

from tests.integration.trainers.drawn import (
    CASES,
    Drawn,
    assert_same,
    batches,
    by_core,
    config_for,
    mask_first_prompt,
    masked,
)
from tests.integration.trainers.ray_runs import OwnFit


def data_of(drawn: Drawn) -> DataProto:
    size, width = drawn.mask.shape
    present = (torch.arange(width) < torch.from_numpy(drawn.length)[:, None]).long()
    scores = drawn.ends(drawn.score)
    return DataProto.from_dict(
        tensors={
            "response_mask": drawn.mask.clone(),
            "token_level_scores": scores,
            "token_level_rewards": scores - torch.from_numpy(drawn.kl).float()[:, None] * drawn.mask,
            "token_level_scores_process": drawn.process_field,
            "prompts": torch.ones(size, 2, dtype=torch.long),
            "responses": torch.ones(size, width, dtype=torch.long),
            "attention_mask": torch.cat([torch.ones(size, 2, dtype=torch.long), present], dim=1),
        },
        non_tensors={
            name: np.array(values, dtype=object)
            for name, values in {"uid": drawn.uids, "data_source": drawn.source, **drawn.columns}.items()
        },
    )


RUNS = st.lists(batches(sessions=False), min_size=2, max_size=2)


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=10)
@given(run=RUNS)
def test_the_trainer_gives_what_the_core_gives(case: str, run: list[Drawn]) -> None:
    check(case, run, hooked=False)


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=5)
@given(run=RUNS)
def test_a_group_that_a_hook_masks_counts_as_rejected(case: str, run: list[Drawn]) -> None:
    check(case, run, hooked=True)


def check(case: str, run: list[Drawn], *, hooked: bool) -> None:
    name, algorithm = CASES[case]
    trainer, state = OwnFit(config_for(name, algorithm)), None
    for drawn in run:
        data = data_of(drawn)
        if not algorithm.get("use_kl_in_reward"):
            data.batch["token_level_rewards"] = data.batch["token_level_scores"]
        if hooked:
            data, drawn = mask_first_prompt(data), masked(drawn)
        [(data, metrics)] = trainer.fit(data=data)
        wanted = by_core(name, algorithm, drawn, state)
        state = state if wanted[1] is None else wanted[1].state
        assert_same(name, drawn, data.batch["advantages"], metrics, wanted)
        assert trainer._verl_ext.state == state
