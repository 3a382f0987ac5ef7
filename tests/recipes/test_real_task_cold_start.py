"""The cold start of scripts/evidence/make_real_task.py: a fine-tuning that can be interrupted, and samples after it."""

from __future__ import annotations

from itertools import chain

import pytest
import torch

from tests import tiny_model
from tests.recipes.real_task import cold_start, make_tokenizer
from verl_ext.errors import CheckpointError, ConfigurationError, DataError

Settings = cold_start.Settings


def make_examples():
    made = [
        {"prompt": [{"role": "user", "content": "x" * (index % 5)}], "answer": f"<think>{index}</think>" * (index % 3)}
        for index in range(24)
    ]
    tokenizer = make_tokenizer()
    return tokenizer, cold_start.examples(tokenizer, made)


def test_an_example_is_the_prompt_as_rl_shows_it_and_the_answer_with_its_end():
    tokenizer = make_tokenizer()
    (example,) = cold_start.examples(tokenizer, [{"prompt": [{"role": "user", "content": "2?"}], "answer": "12"}])
    assert tokenizer.decode(example.prompt) == "<s>user\n2?</s><s>assistant\n"
    assert tokenizer.decode(example.answer) == "12<|im_end|>"


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


@pytest.mark.parametrize("size", [1, 2, 3])
def test_micro_batches_give_the_gradient_of_the_batch(size):
    def gradient(model):
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    tokenizer, data = make_examples()
    batch = [data[1], data[4], data[11]]
    whole = tiny_model.make_model(tokenizer)
    loss = cold_start.loss_of(whole, batch)
    loss.backward()
    model = tiny_model.make_model(tokenizer)
    assert cold_start.backward(model, batch, size) == pytest.approx(loss.item(), rel=5e-3)  # in bf16, which has 8 bits
    assert (gradient(model) - gradient(whole)).norm().item() < 0.02 * gradient(whole).norm().item()


def test_batches_hold_every_example_once_an_epoch_and_neighbours_in_length():
    lengths = [(7 * n) % 32 for n in range(32)]
    chosen = cold_start.batches(lengths, Settings(steps=8, batch_size=8, seed=1))
    for epoch in (chosen[:4], chosen[4:]):
        assert sorted(chain(*epoch)) == list(range(32))
        assert sorted(sorted(lengths[index] for index in batch) for batch in epoch) == [
            list(range(start, start + 8)) for start in (0, 8, 16, 24)
        ]
    assert chosen == cold_start.batches(lengths, Settings(steps=8, batch_size=8, seed=1))
    assert chosen != cold_start.batches(lengths, Settings(steps=8, batch_size=8, seed=2))
    with pytest.raises(DataError):
        cold_start.batches(lengths, Settings(batch_size=33))


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


def test_samples_stop_at_the_first_end_and_are_those_of_their_own_prompt():
    tokenizer = make_tokenizer()
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|endoftext|>"
    model = tiny_model.make_model(tokenizer)
    end = tokenizer.eos_token_id
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = end, tokenizer.pad_token_id
    prompts = [[10, 11, 12, 13], [20]] * 40
    answers = cold_start.sample(model, tokenizer, prompts, temperature=1.0, max_tokens=60, seed=3)
    assert all(end not in answer[:-1] for answer in answers)
    assert any(answer[-1] == end and len(answer) < 60 for answer in answers)
    assert all(len(answer) == 60 or answer[-1] == end for answer in answers)
    assert answers == cold_start.sample(model, tokenizer, prompts, temperature=1.0, max_tokens=60, seed=3)
    # So cold that it is greedy: padding on the left changes nothing.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # so that an answer depends on the whole prompt
    pair = [[10, 11] * 60, [20, 21, 22]]
    cold = cold_start.sample(model, tokenizer, pair, temperature=1e-4, max_tokens=20, seed=0)
    assert cold[1] == cold_start.sample(model, tokenizer, pair[1:], temperature=1e-4, max_tokens=20, seed=0)[0]


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"lr": 0.0}, {"lr": float("nan")}])
def test_a_setting_out_of_range_is_refused(wrong):
    with pytest.raises(ConfigurationError):
        Settings(**wrong)
