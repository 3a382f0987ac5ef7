"""scripts/make_real_task.py, with a tiny model and made-up questions in the place of the real ones."""

from __future__ import annotations

import doctest
import json
import os
import shlex
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pyarrow.parquet
import pytest
import torch
from filelock import FileLock

from tests import tiny_model
from verl_ext.errors import CheckpointError, ConfigurationError, DataError, VerlExtError
from verl_ext.recipes.data.command import parser, prepare
from verl_ext.rewards.gsm8k import compute_score

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)


def make_tokenizer():
    from real.model import END, PAD

    tokenizer = tiny_model.make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [END, PAD]})
    return tokenizer


def make_model(tokenizer, seed: int = 0):
    return tiny_model.make_model(tokenizer, seed=seed)


def write_questions(folder: Path, train: int, test: int) -> Path:
    folder.mkdir(parents=True)
    for name, count in (("train", train), ("test", test)):
        lines = [
            json.dumps({"question": f"{name} {n}?", "answer": f"It is {n}+0 = <<{n}+0={n}>>{n}.\n#### {n:,}"})
            for n in range(count)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def rows(path: Path) -> list[dict]:
    return pyarrow.parquet.read_table(path).to_pylist()


def questions(path: Path) -> list[str]:
    return [row["prompt"][-1]["content"] for row in rows(path)]


@pytest.mark.parametrize("name", ["data", "cold_start"])
def test_the_examples_in_the_docstrings_are_right(name):
    module = __import__(f"real.{name}", fromlist=["_"])
    assert doctest.testmod(module).attempted > 0
    assert doctest.testmod(module).failed == 0


# data


@pytest.fixture
def prepared(tmp_path):
    from real import data

    source = write_questions(tmp_path / "source", train=1010, test=7)
    options = parser(None, "unused").parse_args(
        ["--local_dataset_path", str(source), "--local_save_dir", str(tmp_path / "made")]
    )
    prepare(data.plan(cold_start=1005, val=2, quick=3), options)
    return tmp_path / "made"


def test_no_question_of_the_cold_start_is_in_validation_or_in_rl(prepared):
    parts = [questions(prepared / f"{name}.parquet") for name in ("cold_start", "val", "train")]
    assert [len(part) for part in parts] == [1005, 2, 3]
    assert list(chain(*parts)) == [f"train {n}?" for n in range(1010)]
    assert questions(prepared / "test.parquet") == [f"test {n}?" for n in range(7)]
    assert questions(prepared / "test3.parquet") == [f"test {n}?" for n in range(3)]


def test_rows_are_the_recipes_own_with_the_index_of_the_data_set(prepared):
    from real import data

    record = {"question": "train 1007?", "answer": "#### 1,007"}
    assert rows(prepared / "train.parquet")[0] == data.recipe()["make_row"](record, 1007, "train")


def test_every_answer_of_the_cold_start_earns_all_rewards_and_has_no_calculators_mark(prepared):
    for row in rows(prepared / "cold_start.parquet"):
        assert compute_score("gsm8k", row["answer"], row["reward_model"]["ground_truth"])["score"] == 3
        assert "<<" not in row["answer"]
    assert rows(prepared / "cold_start.parquet")[7]["answer"] == "<think>It is 7+0 = 7.</think>\n<answer>7</answer>"


# model


def test_a_saved_model_ends_its_answers_and_pads_with_another_token(tmp_path):
    from real.model import END, PAD, load, save, set_ends

    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    set_ends(model, tokenizer)
    save(model, tokenizer, tmp_path / "model", "made here")
    model, tokenizer = load(tmp_path / "model")
    assert (tokenizer.eos_token, tokenizer.pad_token) == (END, PAD)
    for config in (model.config, model.generation_config):
        assert config.eos_token_id == tokenizer.convert_tokens_to_ids(END)
        assert config.pad_token_id == tokenizer.convert_tokens_to_ids(PAD)
    assert tokenizer.chat_template == tiny_model.CHAT_TEMPLATE
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_model_without_the_tokens_or_with_another_vocabulary_is_refused():
    from real.model import ModelError, set_ends

    plain = tiny_model.make_tokenizer()
    with pytest.raises(ModelError, match="im_end"):
        set_ends(make_model(plain), plain)
    tokenizer = make_tokenizer()
    with pytest.raises(ModelError, match=str(len(tokenizer) + 8)):
        set_ends(tiny_model.make_model(tokenizer, padded_vocabulary=8), tokenizer)


def test_a_tokenizer_read_from_gguf_splits_numbers_into_digits():
    from real.model import as_published
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate(["<|endoftext|>", "1", "2", "12", "\u0120", "a"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[("1", "2")], unk_token="<|endoftext|>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    read = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<|endoftext|>", bos_token="<|endoftext|>", chat_template="x"
    )
    assert read.tokenize("a 12") == ["a", "\u0120", "12"]
    made = as_published(read)
    assert made.tokenize("a 12") == ["a", "\u0120", "1", "2"]
    assert made.decode(made("a 12")["input_ids"]) == "a 12"
    assert made.chat_template == "x"


# cold start


def make_examples(count: int = 24):
    from real.cold_start import examples

    made = [
        {"prompt": [{"role": "user", "content": "x" * (index % 5)}], "answer": f"<think>{index}</think>" * (index % 3)}
        for index in range(count)
    ]
    tokenizer = make_tokenizer()
    return tokenizer, examples(tokenizer, made)


def test_an_example_is_the_prompt_as_rl_shows_it_and_the_answer_with_its_end():
    from real.cold_start import examples

    tokenizer = make_tokenizer()
    (example,) = examples(tokenizer, [{"prompt": [{"role": "user", "content": "2?"}], "answer": "12"}])
    assert tokenizer.decode(example.prompt) == "<s>user\n2?</s><s>assistant\n"
    assert tokenizer.decode(example.answer) == "12<|im_end|>"


def test_the_loss_is_that_of_the_answers_alone():
    from real.cold_start import loss_of

    tokenizer, data = make_examples()
    model, batch = make_model(tokenizer), [data[1], data[4], data[11]]
    assert len({len(example) for example in batch}) == 3  # so there is padding
    total, count = 0.0, 0
    for example in batch:
        ids = torch.tensor([*example.prompt, *example.answer])
        logits = model(input_ids=ids[None]).logits[0, len(example.prompt) - 1 : -1]
        total += torch.nn.functional.cross_entropy(logits, torch.tensor(example.answer), reduction="sum").item()
        count += len(example.answer)
    assert loss_of(model, batch).item() == pytest.approx(total / count, rel=1e-5)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_micro_batches_give_the_gradient_of_the_batch(size):
    from real.cold_start import backward, loss_of

    def gradient(model):
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    tokenizer, data = make_examples()
    batch = [data[1], data[4], data[11]]
    whole = make_model(tokenizer)
    loss = loss_of(whole, batch)
    loss.backward()
    model = make_model(tokenizer)
    assert backward(model, batch, size) == pytest.approx(loss.item(), rel=5e-3)  # in bf16, which has 8 bits
    assert (gradient(model) - gradient(whole)).norm().item() < 0.02 * gradient(whole).norm().item()


def test_batches_hold_every_example_once_an_epoch_and_neighbours_in_length():
    from real.cold_start import Settings, batches

    lengths = [(7 * n) % 32 for n in range(32)]
    chosen = batches(lengths, Settings(steps=8, batch_size=8, seed=1))
    for epoch in (chosen[:4], chosen[4:]):
        assert sorted(chain(*epoch)) == list(range(32))
        assert sorted(sorted(lengths[index] for index in batch) for batch in epoch) == [
            list(range(start, start + 8)) for start in (0, 8, 16, 24)
        ]
    assert chosen == batches(lengths, Settings(steps=8, batch_size=8, seed=1))
    assert chosen != batches(lengths, Settings(steps=8, batch_size=8, seed=2))
    with pytest.raises(DataError):
        batches(lengths, Settings(batch_size=33))


class InterruptedTestError(Exception):
    """As Ctrl-C in the middle."""


def test_an_interrupted_fine_tuning_goes_on_and_ends_as_if_it_had_not_been(tmp_path):
    from real.cold_start import Settings, train

    tokenizer, data = make_examples()
    settings = Settings(steps=7, batch_size=4, lr=1e-2, warm_up=2)
    whole = make_model(tokenizer)
    losses = train(whole, data, settings, tmp_path / "whole.pt")
    assert losses[-1] < losses[0]

    def interrupt(step, loss):
        if step == 5:
            raise InterruptedTestError

    state = tmp_path / "state.pt"
    with pytest.raises(InterruptedTestError):
        train(make_model(tokenizer), data, settings, state, save_every=3, report=interrupt)
    steps = []
    resumed = make_model(tokenizer, seed=9)  # its weights come from the state
    again = train(resumed, data, settings, state, save_every=3, report=lambda step, loss: steps.append(step))
    assert steps == [3, 4, 5, 6, 7]
    assert again == losses
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    with pytest.raises(CheckpointError):
        train(resumed, data, Settings(steps=8, batch_size=4), state)


def test_samples_stop_at_the_first_end_and_are_those_of_their_own_prompt():
    from real.cold_start import sample

    tokenizer = make_tokenizer()
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|endoftext|>"
    model = make_model(tokenizer)
    end = tokenizer.eos_token_id
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = end, tokenizer.pad_token_id
    prompts = [[10, 11, 12, 13], [20]] * 40
    answers = sample(model, tokenizer, prompts, temperature=1.0, max_tokens=60, seed=3)
    assert all(end not in answer[:-1] for answer in answers)
    assert any(answer[-1] == end and len(answer) < 60 for answer in answers)
    assert all(len(answer) == 60 or answer[-1] == end for answer in answers)
    assert answers == sample(model, tokenizer, prompts, temperature=1.0, max_tokens=60, seed=3)
    # So cold that it is greedy: padding on the left changes nothing.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # so that an answer depends on the whole prompt
    pair = [[10, 11] * 60, [20, 21, 22]]
    cold = sample(model, tokenizer, pair, temperature=1e-4, max_tokens=20, seed=0)
    assert cold[1] == sample(model, tokenizer, pair[1:], temperature=1e-4, max_tokens=20, seed=0)[0]


# the whole script


def run(*options, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPTS / "make_real_task.py"), "gsm8k", *map(str, options)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_script_makes_the_task_once_and_refuses_other_options_for_its_folder(tmp_path):
    from real.model import load

    tokenizer = make_tokenizer()
    make_model(tokenizer).save_pretrained(tmp_path / "tiny")
    tokenizer.save_pretrained(tmp_path / "tiny")
    source = write_questions(tmp_path / "source", train=560, test=210)
    options = ["--model", tmp_path / "tiny", "--local_dataset_path", source, "--steps", 2]
    done = run(*options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Apache-2.0" in done.stdout
    assert "MIT" in done.stdout
    folder = tmp_path / "outputs/real/gsm8k"
    counts = {path.stem: len(rows(path)) for path in folder.glob("*.parquet")}
    assert counts == {"cold_start": 480, "val": 64, "train": 16, "test200": 200, "test": 210}
    before, after = (load(folder / name)[0].state_dict() for name in ("base", "model"))
    assert any(not torch.equal(before[name], after[name]) for name in before)
    samples = json.loads((folder / "samples.json").read_text())
    assert {temperature: len(found["answers"]) for temperature, found in samples.items()} == {"1.0": 64, "0.7": 64}
    assert 0 < samples["1.0"]["means"]["tokens"] <= 160
    assert not (folder / "cold_start.pt").exists()  # three times the model's size

    times = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    again = run(*options, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == times
    assert done.stdout.splitlines()[-2:] == again.stdout.splitlines()[-2:]

    for key, value in (("--steps", 3), ("--model", "hub"), ("--seed", 1)):
        other = run(*options, key, value, cwd=tmp_path)
        assert other.returncode == 1
        assert "another --folder" in other.stderr
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == times


def test_a_wrong_option_can_be_corrected_if_nothing_was_made_with_it(tmp_path):
    from make_real_task import claim

    options = {"task": "gsm8k", "local_dataset_path": "typo", "model": "auto", "steps": "60", "lr": "0.1", "seed": "0"}
    claim(tmp_path / "task", options)
    claim(tmp_path / "task", options | {"local_dataset_path": "right"})
    (tmp_path / "task/prepared.json").write_text("{}")
    claim(tmp_path / "task", options | {"local_dataset_path": "right", "steps": "30"})
    with pytest.raises(ConfigurationError, match="right"):
        claim(tmp_path / "task", options)


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"lr": 0.0}, {"lr": float("nan")}])
def test_a_setting_out_of_range_is_refused(wrong):
    from real.cold_start import Settings

    with pytest.raises(ConfigurationError):
        Settings(**wrong)


def test_two_processes_do_not_make_the_same_folder(tmp_path):
    with FileLock(tmp_path / ".task.lock"):
        done = run("--folder", tmp_path / "task", cwd=tmp_path)
    assert done.returncode == 1
    assert not (tmp_path / "task").exists()


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").write_text("x")
    done = run("--folder", tmp_path / "mine", cwd=tmp_path)
    assert done.returncode == 1
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["file"]


def test_a_folder_that_is_no_model_is_refused(tmp_path):
    from real.model import fetch

    with pytest.raises(VerlExtError, match="config.json"):
        fetch(tmp_path / "made", str(tmp_path))
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("algorithm", ["grpo", "gdpo", "dgpo", "hadw", "drgrpo"])
def test_the_training_script_composes_and_passes_the_checks(algorithm, tmp_path):
    from tests.integration.configs import compose
    from tests.recipes.launchers import run_script
    from verl_ext.cpu import sizes
    from verl_ext.integration.config.checks import check_run

    done = run_script(
        "../scripts/train_real_task.sh", algorithm, "7", "trainer.nnodes=1", DRY_RUN="1", TASK=str(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    config = compose(*shlex.split(done.stdout)[4:])
    check_run(config)
    sizes.fill(config)
    assert config.algorithm.adv_estimator == algorithm
    assert config.data.seed == config.actor_rollout_ref.rollout.seed == 7
    assert config.trainer.total_training_steps == config.trainer.test_freq == 30
    assert config.actor_rollout_ref.model.path == f"{tmp_path}/model"
    assert config.algorithm.verl_ext.dump_dir == f"{tmp_path}/runs/{algorithm}-seed-7/dump"


def test_the_training_script_asks_for_an_estimator_and_a_seed():
    from tests.recipes.launchers import run_script

    done = run_script("../scripts/train_real_task.sh", "gdpo", DRY_RUN="1")
    assert done.returncode == 2
    assert "train_real_task.sh grpo 1" in done.stderr
