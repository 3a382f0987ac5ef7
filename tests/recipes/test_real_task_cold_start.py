"""The cold start of scripts/evidence/make_real_task.py: a fine-tuning that can be interrupted, and samples after it."""

from __future__ import annotations

import pytest
import torch

from tests import tiny_model
from tests.recipes.real_task import cold_start, make_tokenizer
from verl_ext.errors import CheckpointError

Settings = cold_start.Settings


def make_examples():
    made = [
        {"prompt": [{"role": "user", "content": "x" * (index % 5)}], "answer": f"<think>{index}</think>" * (index % 3)}
        for index in range(24)
    ]
    tokenizer = make_tokenizer()
    return tokenizer, cold_start.examples(tokenizer, made)


def test_the_loss_is_that_of_the_answers_alone():
    tokenizer, data = make_examples()
    model, batch = tiny_model.make_model(tokenizer), [data[1], data[4], data[11]]
    assert len({len(example) for example in batch}) == 3  # so there is padding
    total, count = 0.0, 0
    for example in batch:
        ids = torch.tensor([*example.prompt, *example.answer])
        logits = model(input_ids=ids[None]).logits[0, len(example.prompt) - 1 : -1]
        total += torch.nn.functional.cross_entropy(logits, torch.tensor(example.answer), reduction="sum").item()
        count += len(example.answer)
    assert cold_start.loss_of(model, batch).item() == pytest.approx(total / count, rel=1e-5)


class InterruptedTestError(Exception):
    """As Ctrl-C in the middle."""


def test_an_interrupted_fine_tuning_goes_on_and_ends_as_if_it_had_not_been(tmp_path):
    tokenizer, data = make_examples()
    settings = Settings(steps=7, batch_size=4, lr=1e-2, warm_up=2)
    whole = tiny_model.make_model(tokenizer)
    losses = cold_start.train(whole, data, settings, tmp_path / "whole.pt")
    assert losses[-1] < losses[0]

    def interrupt(step, loss):
        if step == 5:
            raise InterruptedTestError

    state = tmp_path / "state.pt"
    with pytest.raises(InterruptedTestError):
        cold_start.train(tiny_model.make_model(tokenizer), data, settings, state, save_every=3, report=interrupt)
    steps = []
    resumed = tiny_model.make_model(tokenizer, seed=9)  # its weights come from the state
    again = cold_start.train(resumed, data, settings, state, save_every=3, report=lambda step, loss: steps.append(step))
    assert steps == [3, 4, 5, 6, 7]
    assert again == losses
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    with pytest.raises(CheckpointError):
        cold_start.train(resumed, data, Settings(steps=8, batch_size=4), state)
