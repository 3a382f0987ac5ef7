"""scripts/evidence/make_real_task.py, with a tiny model and made-up questions in the place of the real ones."""

from __future__ import annotations

import doctest
import json
import os
import shlex
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from recipes.common.data import parser, prepare
from tests import tiny_model
from tests.facts import says
from tests.recipes.launchers import RECIPES, composed, run
from tests.recipes.real_task import SCRIPTS, cold_start, data, make_real_task, make_tokenizer, rows, write_questions
from tests.recipes.real_task import model as real_model
from verl_ext.cli import main
from verl_ext.errors import ConfigurationError, VerlExtError
from verl_ext.rewards.gsm8k import compute_score


@pytest.mark.parametrize("module", [data, cold_start], ids=["data", "cold_start"])
def test_the_examples_in_the_docstrings_are_right(module):
    found = doctest.testmod(module)
    assert found.attempted > 0
    assert found.failed == 0


# data


def questions(path: Path) -> list[str]:
    return [row["prompt"][-1]["content"] for row in rows(path)]


@pytest.fixture
def prepared(tmp_path):
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
    record = {"question": "train 1007?", "answer": "#### 1,007"}
    assert rows(prepared / "train.parquet")[0] == data.recipe()["make_row"](record, 1007, "train")


def test_every_answer_of_the_cold_start_earns_all_rewards_and_has_no_calculators_mark(prepared):
    for row in rows(prepared / "cold_start.parquet"):
        assert compute_score("gsm8k", row["answer"], row["reward_model"]["ground_truth"])["score"] == 3
        assert "<<" not in row["answer"]
    assert rows(prepared / "cold_start.parquet")[7]["answer"] == "<think>It is 7+0 = 7.</think>\n<answer>7</answer>"


# model


def test_a_saved_model_ends_its_answers_and_pads_with_another_token(tmp_path):
    tokenizer = make_tokenizer()
    model = tiny_model.make_model(tokenizer)
    real_model.set_ends(model, tokenizer)
    real_model.save(model, tokenizer, tmp_path / "model", "made here")
    model, tokenizer = real_model.load(tmp_path / "model")
    assert (tokenizer.eos_token, tokenizer.pad_token) == (real_model.END, real_model.PAD)
    for config in (model.config, model.generation_config):
        assert config.eos_token_id == tokenizer.convert_tokens_to_ids(real_model.END)
        assert config.pad_token_id == tokenizer.convert_tokens_to_ids(real_model.PAD)
    assert tokenizer.chat_template == tiny_model.CHAT_TEMPLATE
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_model_without_the_tokens_or_with_another_vocabulary_is_refused():
    plain = tiny_model.make_tokenizer()
    with pytest.raises(real_model.ModelError, match="im_end"):
        real_model.set_ends(tiny_model.make_model(plain), plain)
    tokenizer = make_tokenizer()
    with pytest.raises(real_model.ModelError, match=str(len(tokenizer) + 8)):
        real_model.set_ends(tiny_model.make_model(tokenizer, padded_vocabulary=8), tokenizer)


def test_a_tokenizer_read_from_gguf_splits_numbers_into_digits():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate(["<|endoftext|>", "1", "2", "12", "\u0120", "a"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[("1", "2")], unk_token="<|endoftext|>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    read = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<|endoftext|>", bos_token="<|endoftext|>", chat_template="x"
    )
    assert read.tokenize("a 12") == ["a", "\u0120", "12"]
    made = real_model.as_published(read)
    assert made.tokenize("a 12") == ["a", "\u0120", "1", "2"]
    assert made.decode(made("a 12")["input_ids"]) == "a 12"
    assert made.chat_template == "x"


def test_a_folder_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(VerlExtError, match="config.json"):
        real_model.fetch(tmp_path / "made", str(tmp_path))
    assert not (tmp_path / "made").exists()


# the whole script


def make(*options, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPTS / "make_real_task.py"), "gsm8k", *map(str, options)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_script_makes_the_task_once_and_refuses_other_options_for_its_folder(tmp_path):
    tokenizer = make_tokenizer()
    tiny_model.make_model(tokenizer).save_pretrained(tmp_path / "tiny")
    tokenizer.save_pretrained(tmp_path / "tiny")
    source = write_questions(tmp_path / "source", train=560, test=210)
    options = ["--model", tmp_path / "tiny", "--local_dataset_path", source, "--steps", 2]
    done = make(*options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Apache-2.0" in done.stdout
    assert "MIT" in done.stdout
    folder = tmp_path / "outputs/real/gsm8k"
    counts = {path.stem: len(rows(path)) for path in folder.glob("*.parquet")}
    assert counts == {"cold_start": 480, "val": 64, "train": 16, "test200": 200, "test": 210}
    before, after = (real_model.load(folder / name)[0].state_dict() for name in ("base", "model"))
    assert any(not torch.equal(before[name], after[name]) for name in before)
    samples = json.loads((folder / "samples.json").read_text())
    assert {temperature: len(found["answers"]) for temperature, found in samples.items()} == {"1.0": 64, "0.7": 64}
    assert 0 < samples["1.0"]["means"]["tokens"] <= 160
    assert not (folder / "cold_start.pt").exists()  # three times the model's size

    times = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    again = make(*options, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == times
    assert done.stdout.splitlines()[-2:] == again.stdout.splitlines()[-2:]

    for key, value in (("--steps", 3), ("--model", "hub"), ("--seed", 1)):
        other = make(*options, key, value, cwd=tmp_path)
        assert other.returncode == 1
        assert "another --folder" in other.stderr
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == times


def test_a_wrong_option_can_be_corrected_if_nothing_was_made_with_it(tmp_path):
    claim = make_real_task.claim
    options = {"task": "gsm8k", "local_dataset_path": "typo", "model": "auto", "steps": "60", "lr": "0.1", "seed": "0"}
    claim(tmp_path / "task", options)
    claim(tmp_path / "task", options | {"local_dataset_path": "right"})
    (tmp_path / "task/prepared.json").write_text("{}")
    claim(tmp_path / "task", options | {"local_dataset_path": "right", "steps": "30"})
    with pytest.raises(ConfigurationError, match="right"):
        claim(tmp_path / "task", options)


def test_two_processes_do_not_make_the_same_folder(tmp_path):
    with FileLock(tmp_path / ".task.lock"):
        done = make("--folder", tmp_path / "task", cwd=tmp_path)
    assert done.returncode == 1
    assert not (tmp_path / "task").exists()


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").write_text("x")
    done = make("--folder", tmp_path / "mine", cwd=tmp_path)
    assert done.returncode == 1
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("task", "recipe", "arm"),
    [
        ("gsm8k", "gsm8k", "grpo"),
        ("gsm8k", "gsm8k", "gdpo"),
        ("tools", "tool_calling", "grpo-clean"),
        ("tools", "tool_calling", "grpo-nostd"),
        ("tools", "tool_calling", "hadw"),
    ],
)
def test_the_training_script_composes_and_passes_the_checks(task, recipe, arm, tmp_path):
    script = "../scripts/evidence/train_real_task.sh"
    variables = {"PYTHON": "echo", "PRECISION": "fp32", "STEPS": "20", "TASK_DIR": str(tmp_path)}
    done = run(script, task, arm, "7", "trainer.nnodes=1", cwd=tmp_path, **variables)
    assert done.returncode == 0, done.stderr
    overrides = shlex.split(done.stdout.partition(f"--config-name {recipe}/{arm} ")[2])
    config = composed(f"{recipe}/{arm}", *overrides)
    assert config.data.seed == config.actor_rollout_ref.rollout.seed == 7
    assert config.trainer.total_training_steps == config.trainer.test_freq == 20
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == config.data.train_batch_size == 4
    assert not config.actor_rollout_ref.actor.use_kl_loss
    assert not config.algorithm.use_kl_in_reward
    assert config.actor_rollout_ref.model.path == f"{tmp_path}/model"
    assert config.algorithm.verl_ext.dump_dir == f"{tmp_path}/runs/{arm}-seed-7/dump"
    assert main(["check", "--config-path", str(RECIPES), "--config-name", f"{recipe}/{arm}", *overrides]) == 0


def test_the_training_script_refuses_another_precision(tmp_path):
    done = run("../scripts/evidence/train_real_task.sh", "tools", "gdpo", "1", cwd=tmp_path, PRECISION="fp8")
    assert done.returncode == 2
    assert says(done.stderr, "PRECISION=fp8", "bf16", "fp32")
