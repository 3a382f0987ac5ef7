"""scripts/evidence/make_real_task.py, with a tiny model and made-up questions in the place of the real ones."""

from __future__ import annotations

import doctest
import shlex
from itertools import chain
from pathlib import Path

import pytest

from recipes.common.data import parser, prepare
from tests.recipes.launchers import RECIPES, composed, run
from tests.recipes.real_task import cold_start, data, rows, write_questions
from verl_ext.cli import main


@pytest.mark.parametrize("module", [data, cold_start], ids=["data", "cold_start"])
def test_the_examples_in_the_docstrings_are_right(module):
    found = doctest.testmod(module)
    assert found.attempted > 0
    assert found.failed == 0


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


@pytest.mark.parametrize(
    ("task", "recipe", "arm"),
    [
        ("gsm8k", "gsm8k", "gdpo"),
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
